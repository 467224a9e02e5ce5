"""System calls that Python's own modules lack, over ctypes.

Each wrapper raises OSError with the errno that the call left (an embedded NUL in a path is a ValueError, as in `os`).
Only plain calls are made: no callback into Python, whose executable stubs `MemoryDenyWriteExecute=` forbids.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

#: umount2(2): take the mount away from all eyes now, let go of it when its last user is gone.
MNT_DETACH: Final = 0x2
#: umount2(2): the last component is not followed when it is a symlink.
UMOUNT_NOFOLLOW: Final = 0x8

#: setns(2): the fd is a mount namespace.
CLONE_NEWNS: Final = 0x20000

#: openat2(2): no step may cross a mount point.
RESOLVE_NO_XDEV: Final = 0x01
#: openat2(2): refuse links like /proc/PID/fd/N.
RESOLVE_NO_MAGICLINKS: Final = 0x02
#: openat2(2): refuse every symlink, magic ones too.
RESOLVE_NO_SYMLINKS: Final = 0x04
#: openat2(2): never leave the directory that `dir_fd` names.
RESOLVE_BENEATH: Final = 0x08

IN_MODIFY: Final = 0x0002
IN_ATTRIB: Final = 0x0004
IN_CLOSE_WRITE: Final = 0x0008
IN_MOVED_FROM: Final = 0x0040
IN_MOVED_TO: Final = 0x0080
IN_CREATE: Final = 0x0100
IN_DELETE: Final = 0x0200
IN_DELETE_SELF: Final = 0x0400
IN_MOVE_SELF: Final = 0x0800
IN_UNMOUNT: Final = 0x2000
IN_Q_OVERFLOW: Final = 0x4000
IN_IGNORED: Final = 0x8000
IN_ONLYDIR: Final = 0x0100_0000
IN_DONT_FOLLOW: Final = 0x0200_0000
IN_MASK_ADD: Final = 0x2000_0000
IN_ONESHOT: Final = 0x8000_0000
IN_ISDIR: Final = 0x4000_0000
#: inotify_init1(2) takes the flags of open(2).
IN_CLOEXEC: Final = os.O_CLOEXEC
IN_NONBLOCK: Final = os.O_NONBLOCK

#: fanotify_init(2): events that name mounts (Linux 6.15).
FAN_REPORT_MNT: Final = 0x4000
FAN_CLOEXEC: Final = 0x01
FAN_NONBLOCK: Final = 0x02
#: fanotify_mark(2): the fd is a mount namespace.
FAN_MARK_MNTNS: Final = 0x0110
FAN_MARK_ADD: Final = 0x01
#: Events: a mount came into the namespace, or left it; both for one that was moved within it.
FAN_MNT_ATTACH: Final = 0x0100_0000
FAN_MNT_DETACH: Final = 0x0200_0000
FAN_Q_OVERFLOW: Final = 0x4000
#: The kind of an event's record that names a mount.
FAN_EVENT_INFO_TYPE_MNT: Final = 7

#: statmount(2): what is asked for, and whether it was told.
STATMOUNT_SB_BASIC: Final = 0x0001
STATMOUNT_MNT_BASIC: Final = 0x0002
STATMOUNT_MNT_ROOT: Final = 0x0008
STATMOUNT_MNT_POINT: Final = 0x0010
STATMOUNT_FS_TYPE: Final = 0x0020
STATMOUNT_FS_SUBTYPE: Final = 0x0100
STATMOUNT_SB_SOURCE: Final = 0x0200
#: listmount(2): everything below the namespace's root.
LSMT_ROOT: Final = 0xFFFF_FFFF_FFFF_FFFF

#: statfs(2) `f_type` of the two kinds of cgroup hierarchies and of pidfs.
CGROUP_SUPER_MAGIC: Final = 0x0027_E0EB
CGROUP2_SUPER_MAGIC: Final = 0x6367_7270
PIDFS_MAGIC: Final = 0x5049_4446

#: prctl(2): the calling thread's name, as /proc/PID/comm shows it.
_PR_SET_NAME: Final = 15
#: The same number on every architecture (all calls since 5.1 have one).
_SYS_OPENAT2: Final = 437
_SYS_PIDFD_GETFD: Final = 438
_SYS_STATMOUNT: Final = 457
_SYS_LISTMOUNT: Final = 458


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _Statfs(ctypes.Structure):
    # Only the first field is read; the rest is room. Its width is a long, but on s390x an unsigned int.
    _fields_ = (
        ("f_type", ctypes.c_uint if os.uname().machine == "s390x" else ctypes.c_long),
        ("rest", ctypes.c_char * 512),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.inotify_init1.argtypes = (ctypes.c_int,)
_libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
_libc.inotify_rm_watch.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.POINTER(_Statfs))
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.POINTER(_Statfs))
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)
_libc.fanotify_init.argtypes = (ctypes.c_uint, ctypes.c_uint)
_libc.fanotify_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)
# Function objects of their own, for other arguments.
_pidfd_syscall = _libc["syscall"]
_pidfd_syscall.restype = ctypes.c_long
_pidfd_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint)
_mount_syscall = _libc["syscall"]
_mount_syscall.restype = ctypes.c_long
_mount_syscall.argtypes = (ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)


def _checked(result: int, path: bytes | None = None) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


def _c_path(path: bytes) -> bytes:
    # c_char_p would end at the NUL without a word, and act on another path.
    if b"\0" in path:
        raise ValueError(f"a path cannot hold a NUL byte: {path!r}")
    return path


def umount2(path: bytes, flags: int) -> int:
    """Unmounts what is mounted on top at `path`; the errno, for most of them say what is to be done next. May hang for
    as long as the file system does."""
    return ctypes.get_errno() if _libc.umount2(_c_path(path), flags) < 0 else 0


def setns(fd: int, nstype: int) -> None:
    """Moves the calling thread into the namespace that `fd` names."""
    _checked(_libc.setns(fd, nstype))


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int) -> int:
    """A new close-on-exec fd, opened under the rules of `resolve`; ENOSYS where a seccomp filter hides the call."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    while True:
        fd: int = _libc.syscall(_SYS_OPENAT2, dir_fd, _c_path(path), ctypes.byref(how), ctypes.sizeof(how))
        # As `os.open` does: Python's own signal handlers have run by then.
        if fd < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        return _checked(fd, path)


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A close-on-exec copy of another process's descriptor (Linux 5.6). EPERM: it may not be traced; EBADF: none."""
    return _checked(_pidfd_syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))


def inotify_init1(flags: int) -> int:
    """A new inotify fd; `flags` of IN_CLOEXEC, IN_NONBLOCK. EMFILE: fs.inotify.max_user_instances is reached."""
    return _checked(_libc.inotify_init1(flags))


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    """The watch's number; the same again for the same inode. ENOSPC: fs.inotify.max_user_watches is reached."""
    return _checked(_libc.inotify_add_watch(fd, _c_path(path), mask), path)


def inotify_rm_watch(fd: int, watch: int) -> None:
    """Ends a watch; EINVAL when it has ended by itself, as it does with its file."""
    _checked(_libc.inotify_rm_watch(fd, watch))


def fanotify_init(flags: int) -> int:
    """A new fanotify group; `flags` of FAN_…. EINVAL: this kernel does not know them. EMFILE: too many groups."""
    return _checked(_libc.fanotify_init(flags, os.O_RDONLY))


def fanotify_mark(fd: int, flags: int, mask: int, what: int) -> None:
    """Asks the group for these events of the object that the fd `what` names."""
    _checked(_libc.fanotify_mark(fd, flags, mask, what, None))


def statmount(request: bytes, buffer: ctypes.Array[ctypes.c_char]) -> None:
    """Fills in `struct statmount` for a `struct mnt_id_req`. ENOENT: no such mount; EOVERFLOW: the buffer is small."""
    _checked(_mount_syscall(_SYS_STATMOUNT, request, buffer, len(buffer), 0))


def listmount(request: bytes, buffer: ctypes.Array[ctypes.c_uint64]) -> int:
    """Fills in ids of mounts for a `struct mnt_id_req`; how many."""
    return _checked(_mount_syscall(_SYS_LISTMOUNT, request, buffer, len(buffer), 0))


def filesystem_type(file: bytes | int) -> int:
    """`f_type` (…_MAGIC) of the file system that holds a path or an open file. May hang where that does."""
    buffer = _Statfs()
    if isinstance(file, int):
        _checked(_libc.fstatfs(file, ctypes.byref(buffer)))
    else:
        _checked(_libc.statfs(_c_path(file), ctypes.byref(buffer)), file)
    return int(buffer.f_type)


def set_process_name(name: bytes) -> None:
    """Names the calling thread (the process, when it is its first one); the kernel keeps 15 bytes."""
    _checked(_libc.prctl(_PR_SET_NAME, _c_path(name), 0, 0, 0))
