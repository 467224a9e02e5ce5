"""The socket's path: what is there, and whose; its directory; owner, mode and label.

The directory belongs to an unprivileged user (QEMU's) and is mounted into pods, so nothing in it is trusted: the path
is never followed as a link, and only the very inode that hostd made is changed.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: (device, inode) of a socket file.
Inode = tuple[int, int]

_UCRED = struct.Struct("=iII")
_SELINUX_XATTR = "security.selinux"
#: Every user may pass through the directory; its owner may write to it, as KubeVirt has it.
_DIRECTORY_MODE: Final = 0o755
#: /run, /tmp and the like have fewer parts, and are nobody's own.
_FEWEST_PARTS: Final = 2


class Kind(StrEnum):
    """What is at the path."""

    MISSING = "missing"
    STALE = "stale"  # a socket that nobody listens on
    LIVE = "live"
    OBSTACLE = "obstacle"  # something that hostd neither connects to nor removes


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen at the path. `pid` called listen(2) on a live socket, 0 where that is not known."""

    kind: Kind
    inode: Inode | None = None
    pid: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ownership:
    """How socket and directory are to be: (uid, gid), the socket's mode, and a label or "" to leave it alone."""

    owner: tuple[int, int]
    mode: int
    label: str = ""


def inode_at(path: bytes) -> Inode | None:
    """The inode at the path, links not followed; None where nothing is."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def look(path: bytes) -> Sight:
    """What is at the path now. A live listener sees a connection that closes at once."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Sight(Kind.MISSING)
    inode = (found.st_dev, found.st_ino)
    if not stat.S_ISSOCK(found.st_mode):
        return Sight(Kind.OBSTACLE, inode, why=f"{os.fsdecode(path)} is no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError as error:
            return _refused(path, inode, error)
        return Sight(Kind.LIVE, inode, peer_pid(sock))


def _refused(path: bytes, inode: Inode, error: OSError) -> Sight:
    match error.errno:
        case errno.ECONNREFUSED:
            return Sight(Kind.STALE, inode)
        case errno.ENOENT:
            return Sight(Kind.MISSING)
        case errno.EAGAIN:  # its queue is full: it listens, whether it works or not
            return Sight(Kind.LIVE, inode)
        case _:
            why = f"{os.fsdecode(path)} cannot be connected to ({error.strerror}); remove what is there"
            return Sight(Kind.OBSTACLE, inode, why=why)


def peer_pid(sock: socket.socket) -> int:
    """The process that called listen(2) on what this socket is connected to; 0 out of our sight."""
    pid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid


def remove(path: bytes, inode: Inode) -> None:
    """Removes our own socket, if it is what is at the path still."""
    if inode_at(path) == inode:
        with suppress(FileNotFoundError):
            os.unlink(path)


def clear_stale(path: bytes, inode: Inode) -> bool:
    """Takes a dead socket away; False when a live one took its place meanwhile, which then stays.

    Another helper may bind between our look and our unlink. So what is there is moved aside, looked at once more, and
    put back if it is not what was meant.
    """
    aside = b"%s.stale-%d" % (path, os.getpid())
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    try:
        seen = look(aside)
        if seen.inode == inode and seen.kind is Kind.STALE:
            return True
        with suppress(FileExistsError):
            os.link(aside, path)
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


def prepare_directory(path: bytes, want: Ownership, label: str) -> list[str]:
    """Makes the socket's directory where it is missing, and its owner, mode and label right; what it changed.

    A directory that exists is never made anew: it is mounted into pods. One that others use too (/run itself) is left
    as it is. Raises OSError.
    """
    directory = os.path.dirname(path)
    made = not os.path.isdir(directory)
    if made:
        os.makedirs(directory, mode=_DIRECTORY_MODE, exist_ok=True)
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if _is_shared(directory, found.st_mode):
            return []
        return _correct(fd, found, want.owner, stat.S_IMODE(found.st_mode) | _DIRECTORY_MODE, label)
    finally:
        os.close(fd)


def _is_shared(directory: bytes, mode: int) -> bool:
    parts = [part for part in os.path.realpath(directory).split(b"/") if part]
    return len(parts) < _FEWEST_PARTS or bool(mode & stat.S_ISVTX)


def correct_socket(path: bytes, inode: Inode, want: Ownership, label: str) -> list[str]:
    """Makes owner, mode and label of our socket right; what it changed. Raises OSError, ENOENT when it is not ours."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != inode:
            raise FileNotFoundError(errno.ENOENT, "another socket took our path over", path)
        return _correct(fd, found, want.owner, want.mode, label)
    finally:
        os.close(fd)


def _correct(fd: int, found: os.stat_result, owner: tuple[int, int], mode: int, label: str) -> list[str]:
    # An O_PATH descriptor takes no fchmod; its link in /proc leads to the inode and to nothing else.
    link = f"/proc/self/fd/{fd}"
    changed = []
    # The label and the owner first: until the mode is right, nobody but root gets in.
    if label and _label(link) != label:
        os.setxattr(link, _SELINUX_XATTR, label.encode() + b"\0")
        changed.append("label")
    if (found.st_uid, found.st_gid) != owner:
        os.chown(link, *owner)
        changed.append("owner")
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.chmod(link, mode)
        changed.append("mode")
    return changed


def _label(link: str) -> str:
    try:
        return os.getxattr(link, _SELINUX_XATTR).rstrip(b"\0").decode("ascii", "replace")
    except OSError as error:
        # No label yet, or a file system without labels: setting it tells which.
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return ""
        raise
