"""Which device files a process has open, without ever waiting for a file system.

A stat through /proc/PID/fd asks the file's own file system, which may hang (a dead NFS or FUSE server), and what stands
there is the process's choice. So a file is looked at only when its link looks like a device file's, its mount is a
tmpfs or devtmpfs, as /dev is everywhere, and both are still so of the very file that was opened with O_PATH. Such an
fd of ours holds no device open. What a file is, its number says, not its name.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostd.linux import process as proc
from hostd.linux.mount_table import parse

if TYPE_CHECKING:
    from collections.abc import Collection

Number = tuple[int, int]

#: Links that may lead to /dev/vfio/N, /dev/vfio/devices/vfioN, /dev/bus/usb/BBB/DDD, wherever they are mounted.
_LIKELY = re.compile(rb"/(?:vfio|usb)/")
_HARMLESS = frozenset({b"tmpfs", b"devtmpfs"})
#: Processes that are looked at before the event loop gets its turn.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a device open."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}[{self.pid}]"


def device_numbers(pid: int) -> frozenset[Number]:
    """(major, minor) of the character devices below a vfio or usb directory that the process has open.

    Empty for one that is dead. Raises ProcessLookupError if there is none, OSError where it may not be looked at.
    """
    found: set[Number] = set()
    harmless: Collection[int] | None = None
    for name in _descriptors(pid):
        if not _looks_likely(pid, name):
            continue
        if harmless is None:
            harmless = _harmless_mounts(pid)
        number = _number(pid, name, harmless)
        if number is not None:
            found.add(number)
    return frozenset(found)


def _descriptors(pid: int) -> list[bytes]:
    try:
        return os.listdir(b"/proc/%d/fd" % pid)
    except FileNotFoundError as error:
        raise ProcessLookupError(error.errno, f"no process has the pid {pid}") from error


def _looks_likely(pid: int, name: bytes) -> bool:
    try:
        # readlink asks no file system: the kernel puts the path together from what it has in memory.
        return _LIKELY.search(os.readlink(b"/proc/%d/fd/%s" % (pid, name))) is not None
    except (FileNotFoundError, ProcessLookupError):
        return False


def _harmless_mounts(pid: int) -> set[int]:
    """The ids of mounts that never hang: of the process's namespace, and of ours, for files that were handed over."""
    found: set[int] = set()
    for whose in (b"%d" % pid, b"self"):
        try:
            with open(b"/proc/%s/mountinfo" % whose, "rb") as file:
                found |= {mount.mount_id for mount in parse(file.read()) if mount.fstype in _HARMLESS}
        except OSError:
            continue  # it has ended
    return found


def _number(pid: int, name: bytes, harmless: Collection[int]) -> Number | None:
    if _mount_id(b"%d" % pid, name) not in harmless:
        return None
    try:
        fd = os.open(b"/proc/%d/fd/%s" % (pid, name), os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The process may have put another file there meanwhile; ours stays what it is.
        if _mount_id(b"self", b"%d" % fd) not in harmless:
            return None
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISCHR(status.st_mode):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def _mount_id(whose: bytes, name: bytes) -> int:
    """The mount that a descriptor's file is on; -1 if there is no such descriptor."""
    try:
        with open(b"/proc/%s/fdinfo/%s" % (whose, name), "rb") as file:
            for line in file:
                if line.startswith(b"mnt_id:"):
                    return int(line[7:])
    except OSError:
        pass  # closed meanwhile
    return -1


async def holders(numbers: Collection[Number]) -> list[Holder]:
    """Every process of the host that has one of these devices open. Lets the event loop run meanwhile."""
    found = []
    for count, pid in enumerate(sorted(proc.pids())):
        if count % _AT_ONCE == 0:
            await asyncio.sleep(0)
        try:
            if not device_numbers(pid).isdisjoint(numbers):
                found.append(Holder(pid, os.fsdecode(proc.read_comm(pid))))
        except OSError:
            continue  # it has ended, or is out of reach: what cannot be seen cannot be named
    return found
