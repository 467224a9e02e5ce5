"""What /proc says of a process.

It says it of whoever has the pid at the moment of reading. What must not be mixed up with a later process of the
same pid is read while a pidfd is held (see `hostd.linux.pidfd`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

#: More than any command line of use; the kernel's own bound is 6 MiB.
_COMMAND_LINE_MAX = 2 << 20
_CHUNK = 1 << 16

# Places after the last parenthesis of /proc/PID/stat, where field 3 of proc_pid_stat(5) is number 0.
_STATE, _PPID, _START_TIME, _EXIT_CODE = 0, 1, 19, 49
_DELETED = b" (deleted)"


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that hostd needs.

    `start_time` is in clock ticks since boot. `exit_code` is as wait(2) gives it, and means something for a zombie
    only; the kernel shows 0 instead to those who may not trace the process.
    """

    pid: int
    comm: bytes
    state: str
    ppid: int
    start_time: int
    exit_code: int


def parse_stat(pid: int, data: bytes) -> Stat:
    """Parses /proc/PID/stat; raises ValueError for what is none.

    A comm may hold any byte but NUL, parentheses and newlines too: the fields are counted from the last parenthesis.
    """
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 1 :].split()
    if not 0 <= opening < closing or len(fields) <= _EXIT_CODE:
        raise ValueError(f"/proc/{pid}/stat is not as the kernel writes it: {data[:80]!r}")
    comm, state = data[opening + 1 : closing], fields[_STATE].decode("ascii", "replace")
    return Stat(pid, comm, state, int(fields[_PPID]), int(fields[_START_TIME]), int(fields[_EXIT_CODE]))


def parse_cgroup(data: bytes) -> list[tuple[str, bytes]]:
    """Parses /proc/PID/cgroup: (controllers, path) of each hierarchy; the unified one has controllers "".

    A named hierarchy reads `name=systemd`. Paths may begin with `/..`, as seen from a cgroup namespace. The mark of
    a cgroup that was removed (unified hierarchy only) is taken off. On the other hierarchies a zombie reads `/`.
    """
    rows = []
    for line in data.split(b"\n"):
        parts = line.split(b":", 2)
        if len(parts) != 3:
            continue
        controllers, path = parts[1].decode("ascii", "replace"), parts[2]
        rows.append((controllers, path if controllers else path.removesuffix(_DELETED)))
    return rows


def _read(pid: int, name: str, limit: int = 1 << 20) -> bytes:
    """A file of /proc/PID; ProcessLookupError when the process is gone, or goes meanwhile."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ProcessLookupError(error.errno, f"no process has the pid {pid}", error.filename) from error
    try:
        data = bytearray()
        while len(data) < limit and (chunk := os.read(fd, min(_CHUNK, limit - len(data)))):
            data += chunk
        return bytes(data)
    finally:
        os.close(fd)


def read_stat(pid: int) -> Stat:
    """Parsed /proc/PID/stat; raises ProcessLookupError when there is no such process."""
    return parse_stat(pid, _read(pid, "stat"))


def read_comm(pid: int) -> bytes:
    """The process's name, at most 15 bytes (kernel threads: 63); raises ProcessLookupError."""
    return _read(pid, "comm").removesuffix(b"\n")


def command_line(pid: int) -> list[bytes]:
    """The arguments, cut at 2 MiB; [] for kernel threads, zombies and in the middle of an execve(2).

    Raises ProcessLookupError.

    Takes the process's mmap lock: it may hang on a process in state D that holds it. So for workers only.
    """
    data = _read(pid, "cmdline", _COMMAND_LINE_MAX)
    return data.removesuffix(b"\0").split(b"\0") if data else []


def cgroup_paths(pid: int) -> list[tuple[str, bytes]]:
    """(controllers, path) of the process in each cgroup hierarchy, see `parse_cgroup`; raises ProcessLookupError."""
    return parse_cgroup(_read(pid, "cgroup"))


def children(pid: int) -> list[int]:
    """The children of the process's first thread, zombies too; raises ProcessLookupError."""
    return [int(number) for number in _read(pid, f"task/{pid}/children").split()]


def pids() -> list[int]:
    """All processes that /proc shows, zombies too; in no order."""
    return [int(name) for name in os.listdir(b"/proc") if name.isdigit()]
