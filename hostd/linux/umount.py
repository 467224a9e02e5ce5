"""One target unmounted, whatever its owner does beside it. Runs in a worker: every call here may hang.

All calls are relative to the target's parent directory, entered with fchdir (this needs no /proc, unlike
/proc/self/fd/N/name, which would read as "gone" where another PID namespace's /proc is mounted). The target itself is
never opened: even an O_PATH fd of it pins the mount, and the answer would be EBUSY for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final, NamedTuple

from hostd.linux import libc, walk

#: Mounts taken off one target in one go; what is left of a deeper stack is the next pass's.
STACK_BOUND: Final = 64
#: The last guard: the agent needs these directories for the pod's whole life, so they are never removed.
KEPT: Final = frozenset({b"kernel-boot", b"container-disks", b"hotplug-disks"})


class Outcome(NamedTuple):
    """What became of one target.

    `errno` 0: it is no mountpoint (any more), also when it was none before. Else what failed, and `error` in words.
    With errno 0 a non-empty `error` says why the empty mountpoint was left where it is.
    """

    relative: bytes
    #: Successful umounts; in a shared peer group one of them may remove several mounts.
    done: int
    errno: int
    error: str
    #: The mountpoint (an empty file or directory, a block node) was deleted.
    removed: bool
    #: False only where it is known to be no mountpoint.
    mounted: bool
    #: A plain umount was refused as busy and MNT_DETACH did it: something may pin the file system still.
    detached: bool = False


class Neighbours:
    """Targets below `root_fd`, unmounted one after the other: those that lie beside each other share one walk to their
    directory. `leave` before anything else is done, and after anything that took long: it may lie elsewhere by then."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._parent = b""

    def unmount(self, relative: bytes, *, lazy: bool, block_node: bool) -> Outcome:
        """Unmounts the whole stack on `relative`, then deletes the mountpoint when it is empty.

        Plain umounts first; with `lazy` a busy one is detached (with all that is mounted below it). A block device's
        node is deleted only with `block_node`. Leaves the process in the target's directory, until `leave`.
        """
        try:
            parent, name = walk.split(relative)
            if parent != self._parent:
                self._enter(parent)
        except OSError as error:
            return _no_way(relative, error)
        try:
            return _unmount_here(relative, name, lazy=lazy, block_node=block_node)
        except OSError as error:
            reason = error.strerror or str(error)
            return Outcome(relative, 0, error.errno or errno.EIO, reason, removed=False, mounted=True)

    def _enter(self, parent: bytes) -> None:
        self.leave()
        fd = walk.open_beneath(self._root_fd, parent, os.O_PATH | os.O_DIRECTORY)
        try:
            os.fchdir(fd)
        finally:
            os.close(fd)
        self._parent = parent

    def leave(self) -> None:
        """Back to "/": the current directory pins its mount, which must never be a pod's while idle."""
        if self._parent:
            self._parent = b""
            os.chdir(b"/")


def _no_way(relative: bytes, error: OSError) -> Outcome:
    if error.errno == errno.ENOENT:
        return Outcome(relative, 0, 0, "", removed=False, mounted=False)
    reason = error.strerror or str(error)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        reason = f"refused: a symlink or a file stands where a directory of the path should be ({reason})"
    return Outcome(relative, 0, error.errno or errno.EIO, reason, removed=False, mounted=True)


def _unmount_here(relative: bytes, name: bytes, *, lazy: bool, block_node: bool) -> Outcome:
    done, detached = 0, False
    while done < STACK_BOUND:
        number, lazily = _umount_one(name, lazy=lazy)
        detached |= lazily
        if number == errno.ENOENT:
            return Outcome(relative, done, 0, "", removed=False, mounted=False, detached=detached)
        if number == errno.EINVAL:
            return _remove(relative, name, done, detached=detached, block_node=block_node)
        if number:
            return Outcome(relative, done, number, _why(number), removed=False, mounted=True, detached=detached)
        done += 1
    reason = f"more than {STACK_BOUND} mounts are stacked here: the rest is left to the next pass"
    return Outcome(relative, done, errno.EAGAIN, reason, removed=False, mounted=True, detached=detached)


def _umount_one(name: bytes, *, lazy: bool) -> tuple[int, bool]:
    """Takes the topmost mount off: the errno, and whether it had to be detached."""
    number = libc.umount2(name, libc.UMOUNT_NOFOLLOW)
    if number != errno.EBUSY or not lazy:
        return number, False
    number = libc.umount2(name, libc.UMOUNT_NOFOLLOW | libc.MNT_DETACH)
    return number, not number


def _why(number: int) -> str:
    if number == errno.EBUSY:
        return "busy: a process, a loop device or a mount below uses it"
    return os.strerror(number)


def _remove(relative: bytes, name: bytes, done: int, *, detached: bool, block_node: bool) -> Outcome:
    """Deletes the mountpoint if nothing is lost with it. Private copies in other namespaces go with a file."""
    number, left, mounted = 0, "", False
    try:
        left = _delete(name, os.lstat(name), block_node=block_node)
    except FileNotFoundError:
        return Outcome(relative, done, 0, "", removed=False, mounted=False, detached=detached)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            left = "the directory is not empty and stays"
        elif error.errno == errno.EBUSY:
            number, mounted = errno.EBUSY, True
            left = "mounted again by somebody else meanwhile, or a mount that may not be taken off"
        else:
            number = error.errno or errno.EIO
            left = f"unmounted, but the mountpoint cannot be deleted: {error.strerror}"
    if left == _SYMLINK:
        number = errno.ELOOP
    return Outcome(relative, done, number, left, removed=not left, mounted=mounted, detached=detached)


_SYMLINK = "refused: a symlink stands where the target should be"


def _delete(name: bytes, found: os.stat_result, *, block_node: bool) -> str:
    """Why it was left; empty when it was deleted."""
    if stat.S_ISLNK(found.st_mode):
        return _SYMLINK
    if name in KEPT:
        return "the agent needs this directory: it stays"
    if stat.S_ISDIR(found.st_mode):
        os.rmdir(name)
    elif (stat.S_ISREG(found.st_mode) and not found.st_size) or (stat.S_ISBLK(found.st_mode) and block_node):
        os.unlink(name)
    else:
        return "not an empty file, so it stays"
    return ""
