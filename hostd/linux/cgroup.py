"""Control groups, read only: which hierarchies there are, who lives in one, whether anyone does.

Nothing is ever written to a cgroup. Groups come and go while they are walked; that is no error.
"""

from __future__ import annotations

import errno
import os
import select
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hostd.linux import libc
from hostd.linux.descriptor import Descriptor
from hostd.linux.process import cgroup_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What reading a group that was removed gives: before it is opened, and after.
_VANISHED = (errno.ENOENT, errno.ENODEV)
_CHUNK = 1 << 16


class Population(StrEnum):
    """Whether processes live in a cgroup or below it."""

    POPULATED = "populated"
    EMPTY = "empty"
    GONE = "gone"
    #: It cannot be told: no cgroup, or it may not be read. Never to be taken for death.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A cgroup file system; `controllers` as in /proc/PID/cgroup: "" for the unified one, `name=…` for a named one."""

    path: bytes
    unified: bool
    controllers: str


def hierarchies(root: bytes) -> list[Hierarchy]:
    """The hierarchies at `root`: itself, where it is one, else those of its directories that are.

    Told by the kind of file system, so names and numbers of the mounts do not matter. Raises OSError for a root that
    cannot be read.
    """
    own = _hierarchy(root)
    if own is not None:
        return [own]
    with os.scandir(root) as entries:
        directories = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    return [found for path in directories if (found := _hierarchy(path)) is not None]


def _hierarchy(path: bytes) -> Hierarchy | None:
    kind = libc.filesystem_type(path)
    if kind == libc.CGROUP2_SUPER_MAGIC:
        return Hierarchy(path, True, "")
    if kind == libc.CGROUP_SUPER_MAGIC:
        return Hierarchy(path, False, _controllers(path))
    return None


def _controllers(path: bytes) -> str:
    """The controllers of a v1 hierarchy: those of our own cgroups that its mount's options name."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}".encode()
    with open("/proc/self/mountinfo", "rb") as table:
        rows = [row.rstrip(b"\n").split(b" ") for row in table]
    options = {option for row in rows if row[2] == wanted for option in row[-1].decode("ascii", "replace").split(",")}
    mine = (controllers for controllers, _ in cgroup_paths(os.getpid()) if controllers)
    return next((controllers for controllers in mine if options.issuperset(controllers.split(","))), "")


def processes(path: bytes) -> list[int]:
    """The processes in a cgroup and below it, in ascending order; [] for a group that is gone.

    Those out of our pid namespace are not among them. Raises OSError for what may not be read.
    """
    return sorted(set(_raw_processes(path)) - {0})


def _raw_processes(path: bytes) -> Iterator[int]:
    """As `cgroup.procs` tells them: 0 for a process out of our pid namespace."""
    for directory in _tree(path):
        try:
            yield from map(int, _read(directory + b"/cgroup.procs").split())
        except OSError as error:
            # EOPNOTSUPP: a threaded group; its processes are told by the domain above it.
            if error.errno not in (*_VANISHED, errno.EOPNOTSUPP):
                raise


def _tree(path: bytes) -> Iterator[bytes]:
    """The group and all below it, parents first."""
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        yield directory
        try:
            with os.scandir(directory) as entries:
                waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in _VANISHED:
                raise


def population(path: bytes) -> Population:
    """Whether anyone lives in a cgroup or below it; a zombie does not."""
    try:
        os.stat(path)
        events = _keyed(path + b"/cgroup.events")
        return _told_by_events(events) if events else _told_by_processes(path)
    except OSError as error:
        return Population.GONE if error.errno in _VANISHED else Population.UNREADABLE


def census(path: bytes) -> tuple[Population, list[int]]:
    """`population` and `processes` by one look: where the kernel counts nobody, it is not asked who.

    Raises OSError for what may not be read.
    """
    try:
        events = _keyed(path + b"/cgroup.events")
        if events.get(b"populated") == 0:
            return Population.EMPTY, []
        if found := set(_raw_processes(path)):
            return Population.POPULATED, sorted(found - {0})
        return _told_by_events(events) if events else _without_processes(path), []
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
        return Population.GONE, []


class Group(Descriptor):
    """A cgroup of which `census` is asked often: its cgroup.events stays open, where it has one and that can be had.

    To open it anew each time takes ten times as long, and longest while many processes end.
    """

    def __init__(self, path: bytes) -> None:
        super().__init__(-1)
        self.path = path
        with suppress(OSError):
            self._fd = os.open(path + b"/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)

    def census(self) -> tuple[Population, list[int]]:
        """As the function of that name, of the cgroup that has its path now."""
        if self._fd >= 0:
            try:
                if _pairs(os.pread(self._fd, _CHUNK, 0)).get(b"populated") == 0:
                    return Population.EMPTY, []
            except OSError as error:
                if error.errno not in _VANISHED:
                    raise
                self.close()
        return census(self.path)


def _told_by_events(events: dict[bytes, int]) -> Population:
    if b"populated" not in events:
        return Population.UNREADABLE
    return Population.POPULATED if events[b"populated"] else Population.EMPTY


def _told_by_processes(path: bytes) -> Population:
    """For v1 and for the unified root, which have no cgroup.events."""
    for _ in _raw_processes(path):
        return Population.POPULATED
    return _without_processes(path)


def _without_processes(path: bytes) -> Population:
    os.stat(path)
    # Of a directory that is no cgroup nothing is known.
    return Population.EMPTY if os.path.exists(path + b"/cgroup.procs") else Population.UNREADABLE


def oom_kills(path: bytes) -> int | None:
    """Processes that the kernel's OOM killer ended in a cgroup or below it; None where that is not told."""
    # No more than the words for an exit hang on this: a group that cannot be read is one that does not tell.
    with suppress(OSError):
        unified = _keyed(path + b"/memory.events").get(b"oom_kill")
        if unified is not None:
            return unified
        # v1 counts a kill in the victim's own group only.
        counts = [_keyed(directory + b"/memory.oom_control").get(b"oom_kill") for directory in _tree(path)]
        told = [count for count in counts if count is not None]
        return sum(told) if told else None
    return None


def _keyed(path: bytes) -> dict[bytes, int]:
    """A file of lines `key number`; {} when there is none."""
    try:
        return _pairs(_read(path))
    except FileNotFoundError:
        return {}


def _pairs(content: bytes) -> dict[bytes, int]:
    pairs = (line.partition(b" ")[::2] for line in content.splitlines())
    return {key: int(value) for key, value in pairs if value.isdigit()}


def _read(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))
    finally:
        os.close(fd)


class PopulationWatch:
    """Readable when the first process enters one of its unified cgroups or the last one leaves it, and after `add`.

    Of a removal the kernel says nothing here: that is for an inotify watch on the parent. The kernel's notice is
    EPOLLPRI on cgroup.events, turned into EPOLLIN by an epoll, as `hostd.linux.mount_watch` explains.
    """

    def __init__(self, *paths: bytes) -> None:
        self._epoll = select.epoll()
        self._files: dict[bytes, int] = {}
        self._paths: dict[int, bytes] = {}
        try:
            for path in paths:
                self.add(path)
        except BaseException:
            self.close()
            raise

    def add(self, path: bytes) -> None:
        """Watches a cgroup; again is no error. Raises OSError: ENOENT for one that is gone, for v1 and the root."""
        if path in self._files:
            return
        fd = os.open(path + b"/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._epoll.register(fd, select.EPOLLPRI | select.EPOLLERR)
        except BaseException:
            os.close(fd)
            raise
        self._files[path], self._paths[fd] = fd, path

    def remove(self, path: bytes) -> None:
        """Ends the watch of a cgroup; one that is not watched is no error."""
        fd = self._files.pop(path, None)
        if fd is not None:
            del self._paths[fd]
            os.close(fd)

    def fileno(self) -> int:
        """For `add_reader`."""
        return self._epoll.fileno()

    def drain(self) -> list[bytes]:
        """Takes the notices away: the cgroups to look at now. One that was removed is not watched any more after it."""
        changed = [self._paths[fd] for fd, _ in self._epoll.poll(0)]
        for path in changed:
            self._rearm(path)
        return changed

    def _rearm(self, path: bytes) -> None:
        # Reading it is what makes the kernel wait for the next change.
        try:
            os.pread(self._files[path], _CHUNK, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            self.remove(path)

    def close(self) -> None:
        """Ends all watches; a second time does nothing."""
        for path in list(self._files):
            self.remove(path)
        self._epoll.close()
