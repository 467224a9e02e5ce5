"""A witness of its own: sees a process die and mounts go, by pidfd and mount table, without asking hostd."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_LONGEST = 30.0


@dataclass(slots=True)
class Timeline:
    """What was seen, in milliseconds since the signal was sent."""

    died: float | None = None
    gone: dict[bytes, float] = field(default_factory=dict)
    left: set[bytes] = field(default_factory=set)

    @property
    def took(self) -> float:
        """From the signal to the last mount's end."""
        return max(self.gone.values(), default=0.0)


class Witness:
    """Watches the mounts below a prefix. It looks before it acts, so that it misses nothing."""

    def __init__(self, mountinfo: str, prefix: bytes) -> None:
        self._prefix = prefix
        self._table = open(mountinfo, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI | select.POLLERR)
        self.there()

    def there(self) -> set[bytes]:
        """The mountpoints that are there now."""
        self._table.seek(0)
        rows = b"".join(iter(lambda: self._table.read(1 << 20), b"")).splitlines()
        points = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), row.split(b" ")[4]) for row in rows)
        return {point for point in points if point.startswith(self._prefix)}

    def kill(self, pidfd: int) -> Timeline:
        """SIGKILL, and then what happens until nothing is left (or for half a minute)."""
        seen = Timeline(left=self.there())
        self._poll.register(pidfd, select.POLLIN)
        start = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        while (seen.left or seen.died is None) and time.monotonic() - start < _LONGEST:
            events = self._poll.poll(1000)
            now = (time.monotonic() - start) * 1000
            if any(fd == pidfd for fd, _ in events):
                seen.died = now
                self._poll.unregister(pidfd)
            there = self.there()
            seen.gone |= dict.fromkeys(seen.left - there, now)
            seen.left &= there
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.close()


@dataclass(frozen=True, slots=True)
class Machine:
    """What the demo could leave behind on a machine, as it is now."""

    mount_table: str
    processes: frozenset[tuple[int, str]]
    loop_devices: frozenset[str]

    @classmethod
    def look(cls) -> Machine:
        """Looks: PID 1's mount table, this process's descendants, loop devices on files of the demo's."""
        with open("/proc/1/mountinfo") as file:
            return cls(file.read(), frozenset(_descendants(os.getpid())), frozenset(_loops()))


def _descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, start time) of all children, their children and so on."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
        found = [(child, start_time(child)) for child in children]
    except FileNotFoundError:
        return []
    return found + [below for child in children for below in _descendants(child)]


def start_time(pid: int) -> str:
    """What tells a process from a later one with its pid; empty when there is none (or only its exit status)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _loops() -> list[str]:
    found = []
    for name in os.listdir("/sys/block"):
        try:
            with open(f"/sys/block/{name}/loop/backing_file") as file:
                found.append(f"{name} on {file.read().strip()}")
        except OSError:  # no loop device, or one that is free
            continue
    return found
