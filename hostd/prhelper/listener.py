"""The listening socket, which outlives the helper, and in the child back end hostd too.

The helper holds the listener as its descriptor 3, so it stays open when hostd dies. The next hostd finds the helper by
that (the socket's own inode number is remembered before the helper is started), and takes a copy back with
pidfd_getfd(2).
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from hostd.linux import libc
from hostd.linux.process import pids

if TYPE_CHECKING:
    from hostd.prhelper.path import Inode

#: As many as systemd's unit has. QEMUs connect now and then, one helper takes them in milliseconds.
BACKLOG: Final = 128
#: Where socket activation puts the listener.
HELPER_FD: Final = 3


class Listener:
    """Our own listener: the socket, and the inode it has at its path."""

    def __init__(self, sock: socket.socket, inode: Inode) -> None:
        self.socket = sock
        self.inode = inode

    @classmethod
    def create(cls, path: bytes) -> Listener:
        """Binds and listens; nobody but root gets in before the mode is set. Raises OSError: EADDRINUSE if not free."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # bind(2) gives the file the socket's own mode: no change of the umask, which all threads share.
            os.fchmod(sock.fileno(), 0)
            sock.bind(path)
            # Two helpers on one listener, an old one that still stops, need it non-blocking.
            sock.setblocking(False)
            sock.listen(BACKLOG)
            found = os.lstat(path)
        except BaseException:
            sock.close()
            raise
        return cls(sock, (found.st_dev, found.st_ino))

    @property
    def number(self) -> int:
        """The socket's inode number, as the links in /proc/PID/fd show it: one for all its copies."""
        return os.fstat(self.socket.fileno()).st_ino

    def close(self) -> None:
        """Closes our copy."""
        self.socket.close()


def holders(number: int) -> list[int]:
    """The processes that hold this socket where helpers have their listener."""
    wanted = f"socket:[{number}]"
    return [pid for pid in pids() if pid != os.getpid() and _link(pid, HELPER_FD) == wanted]


def number_of(pid: int) -> int:
    """The inode number of the listener that a helper holds; 0 when it is gone."""
    link = _link(pid, HELPER_FD) or ""
    return int(link[len("socket:[") : -1]) if link.startswith("socket:[") else 0


def recover(pidfd: int, inode: Inode, number: int) -> Listener:
    """Our copy of the listener that a helper holds. Raises OSError: not permitted, not there, or another socket."""
    fd = libc.pidfd_getfd(pidfd, HELPER_FD)
    try:
        if os.fstat(fd).st_ino != number:
            raise FileNotFoundError("the helper holds another socket")
    except OSError:
        os.close(fd)
        raise
    return Listener(socket.socket(fileno=fd), inode)


def clients(pid: int) -> int | None:
    """How many are connected to a helper: its sockets above the listener. 0 when it is gone, None where that cannot be
    told: no descriptor is left to look with, say.

    A connection's helper end belongs to the network namespace of its client, so /proc/net/unix would miss pods.
    """
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return None
    return sum(int(fd) > HELPER_FD and (_link(pid, int(fd)) or "").startswith("socket:") for fd in fds)


def _link(pid: int, fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return None
