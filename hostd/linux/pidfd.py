"""A process that cannot be mistaken for another: its pidfd, its identity, its end.

What the kernel tells of an end, found by trying (Linux 6.18; older ones by their sources):

    ========  ===============  ============================  ====================
    process   poll             PIDFD_GET_INFO's exit code    /proc/PID/stat
    ========  ===============  ============================  ====================
    alive     nothing          absent                        0
    zombie    EPOLLIN          absent                        the exit code
    reaped    EPOLLIN (|HUP)   there (since 6.15)            gone
    ========  ===============  ============================  ====================

A thread group whose leader has exited is alive: poll says nothing, though /proc/PID/stat reads Z and shows the
exit code of the leader's thread. Without pidfs (before 6.9) a pidfd's inode says nothing of the process, and before
6.15 the end of a reaped process is unknown. All this is found out by asking, never by the kernel's version.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Self

from hostd.linux import libc
from hostd.linux.clock import boot_id
from hostd.linux.descriptor import Descriptor
from hostd.linux.process import read_stat

if TYPE_CHECKING:
    from collections.abc import Mapping

#: _IOWR(0xFF, 11, struct pidfd_info) of linux/pidfd.h, with the structure's first published size.
_PIDFD_GET_INFO = 0xC040_FF0B
_INFO_SIZE = 64
#: Bits of `mask` (u64 at 0): the pid (u32 at 16) is there, asked for or not; the exit code (i32 at 60) is asked for,
#: and is there.
_PIDFD_INFO_PID, _PIDFD_INFO_EXIT = 1 << 0, 1 << 3
_MASK = struct.Struct("=Q")
_PID = struct.Struct("=16xI")
_EXIT_CODE = struct.Struct("=60xi")

_ENDS_AT_ONCE = "/bin/true"
#: PIDFD_THREAD of linux/pidfd.h: the pidfd is of one thread, whose end is not its process's.
_PIDFD_THREAD = os.O_EXCL


class NotAPidfd(OSError):
    """An fd that was handed over is no pidfd of a process (errno EBADF, or EINVAL)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process it is, over pid reuse, clock steps and restarts of hostd.

    `start_time` is in clock ticks since boot, `inode` that of the pidfd on pidfs, or 0 where there is none. A process
    whose pidfd was adopted after it was reaped has pid -1 and start time 0: it is known by its inode only.
    """

    pid: int
    start_time: int
    boot_id: str
    inode: int = 0

    def same_as(self, other: Identity) -> bool:
        """Whether both are one process. The inode decides where both have one, else pid and start time."""
        if self.boot_id != other.boot_id:
            return False
        if self.inode and other.inode:
            return self.inode == other.inode
        return self.pid > 0 and (self.pid, self.start_time) == (other.pid, other.start_time)

    def to_dict(self) -> dict[str, int | str]:
        """As plain data, for JSON."""
        return {"pid": self.pid, "start_time": self.start_time, "boot_id": self.boot_id, "inode": self.inode}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The inverse of `to_dict`; raises ValueError that names the key. Unknown keys are passed over."""
        return cls(
            _integer(data, "pid"), _integer(data, "start_time"), _text(data, "boot_id"), _integer(data, "inode", 0)
        )


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended: its exit status, or the signal that killed it; -1 what is unknown or not so."""

    status: int = -1
    signal: int = -1


class Process(Descriptor):
    """Owns a pidfd, close-on-exec. Made by `open` or `adopt`; closed by `close` or at the end of a `with`."""

    def __init__(self, fd: int, identity: Identity) -> None:
        super().__init__(fd)
        self._identity = identity
        self._end: End | None = None

    @classmethod
    def open(cls, pid: int) -> Self:
        """The living process that has this pid; raises ProcessLookupError when there is none, or only a zombie."""
        process = cls._owning(_open_pidfd(pid))
        if process.pid != pid or not process.alive():
            process.close()
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
        return process

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """The process of a pidfd that was received or stored; it may be dead.

        Takes the fd over even when it fails, and closes it then. Raises NotAPidfd, for a pidfd of a thread too.
        """
        try:
            _refuse_other_than_pidfd(fd)
            os.set_inheritable(fd, False)
        except OSError as error:
            # EBADF: there is nothing to close.
            if error.errno != errno.EBADF:
                os.close(fd)
            raise
        return cls._owning(fd)

    @classmethod
    def _owning(cls, fd: int) -> Self:
        try:
            return cls(fd, _identity(fd))
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The pidfd; readable once the process is dead."""
        return self._fd

    @property
    def identity(self) -> Identity:
        """As it was found when this object was made."""
        return self._identity

    @property
    def pid(self) -> int:
        """The pid that the process has or had; -1 if it was reaped before it was adopted, or lives out of sight."""
        return self._identity.pid

    def alive(self) -> bool:
        """Whether any of its threads lives; a zombie is dead."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def end(self) -> End | None:
        """How it ended; None while it lives. What was known once stays known after the process is reaped."""
        if self._end is None and not self.alive():
            self._end = self._find_end()
            return self._end or End()
        return self._end

    @property
    def end_is_kept(self) -> bool:
        """Whether `end` can be asked for at any time after the death, whoever reaps it meanwhile."""
        return self._end is not None or kernel_keeps_ends()

    def _find_end(self) -> End | None:
        # The second question is for the process that was reaped after the first one.
        for tell in (_reaped_exit_code, _zombie_exit_code, _reaped_exit_code):
            code = tell(self._fd)
            if code is not None:
                return _end(code)
        return None


def identify(pid: int) -> Identity:
    """The identity of a living process; raises ProcessLookupError."""
    with Process.open(pid) as process:
        return process.identity


@cache
def kernel_keeps_ends() -> bool:
    """Whether the kernel tells those who hold a pidfd of a reaped process's end; False where that cannot be found out.

    Found out once, by a child of ours, which takes a millisecond.
    """
    with suppress(OSError):  # no such program, no descriptor left, or who started us has our children reaped unseen
        child = os.posix_spawn(_ENDS_AT_ONCE, [_ENDS_AT_ONCE], {})
        try:
            process = Descriptor(os.pidfd_open(child))
        except OSError:
            os.waitpid(child, 0)
            raise
        with process:
            os.waitpid(child, 0)
            return _reaped_exit_code(process.fileno()) is not None
    return False


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OverflowError as error:
        raise ProcessLookupError(errno.ESRCH, f"no process can have the pid {pid}") from error
    except OSError as error:
        # EINVAL, on newer kernels ENOENT: the number is a thread's, or no pid at all.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise ProcessLookupError(errno.ESRCH, f"no process has the pid {pid}") from error
        raise


def _identity(fd: int) -> Identity:
    """Who the pidfd's process is. What /proc said is taken only if the pid was still the process's own afterwards."""
    pid, start_time = _pid_of(fd), 0
    if pid > 0:
        with suppress(ProcessLookupError):
            start_time = read_stat(pid).start_time
        if _pid_of(fd) != pid:
            pid, start_time = -1, 0
    return Identity(pid, start_time, boot_id(), _inode_of(fd))


def _inode_of(fd: int) -> int:
    # Elsewhere all pidfds are one anonymous inode.
    return os.fstat(fd).st_ino if libc.filesystem_type(fd) == libc.PIDFS_MAGIC else 0


def _fdinfo_pid(fd: int) -> int | None:
    """The `Pid:` of the fd's fdinfo: -1 once reaped, 0 for a process out of our pid namespace; None for no pidfd."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"Pid:"):
                return int(line[4:])
    return None


def _pid_of(fd: int) -> int:
    info = _info(fd)
    if info is None:
        return _fdinfo_pid(fd) or -1
    told = _MASK.unpack_from(info)[0] & _PIDFD_INFO_PID
    return (int(_PID.unpack_from(info)[0]) or -1) if told else -1


def _info(fd: int) -> bytearray | None:
    """What the kernel says of the process in one answer (since 6.13, of a reaped one since 6.15); None where it says
    nothing."""
    info = bytearray(_INFO_SIZE)
    _MASK.pack_into(info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError as error:
        # ENOTTY, EINVAL: the kernel does not know the question; ESRCH: it does, but not about the reaped.
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    return info


def _refuse_other_than_pidfd(fd: int) -> None:
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, ValueError, OverflowError) as error:
        raise NotAPidfd(errno.EBADF, f"fd {fd} is not open") from error
    if _fdinfo_pid(fd) is None:
        raise NotAPidfd(errno.EINVAL, f"fd {fd} is not a pidfd; open one with pidfd_open(2)")
    if flags & _PIDFD_THREAD:
        raise NotAPidfd(errno.EINVAL, f"fd {fd} is the pidfd of a thread; open one without PIDFD_THREAD")


def _reaped_exit_code(fd: int) -> int | None:
    """What the kernel keeps of a reaped process for those who hold its pidfd (since 6.15)."""
    info = _info(fd)
    told = info is not None and _MASK.unpack_from(info)[0] & _PIDFD_INFO_EXIT
    return int(_EXIT_CODE.unpack_from(info)[0]) if info is not None and told else None


def _zombie_exit_code(fd: int) -> int | None:
    """What /proc/PID/stat says of a dead process that was not reaped while we read it."""
    pid = _pid_of(fd)
    if pid <= 0:
        return None
    try:
        code = read_stat(pid).exit_code
    except ProcessLookupError:
        return None
    # Where it may be that we are refused the truth, it is 0.
    return code if (code or _may_trace(pid)) and _pid_of(fd) == pid else None


def _may_trace(pid: int) -> bool:
    """Whether /proc shows us the true exit code: it shows 0 to those whom it refuses this link, by the same check."""
    try:
        os.readlink(f"/proc/{pid}/ns/mnt")
    except PermissionError:
        return False
    except FileNotFoundError:
        pass  # a zombie has no mount namespace any more; that we are told so is the answer
    return True


def _end(code: int) -> End:
    if os.WIFSIGNALED(code):
        return End(signal=os.WTERMSIG(code))
    return End(status=os.WEXITSTATUS(code))


def _integer(data: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"a process's identity needs the key {key!r} with an integer, not {value!r}")


def _text(data: Mapping[str, object], key: str) -> str:
    value = data.get(key)
    if isinstance(value, str):
        return value
    raise ValueError(f"a process's identity needs the key {key!r} with a string, not {value!r}")
