"""systemd's descriptor store, played by a test: what hostd hands over is kept, and given back at its next start.

    hostd = StoringDaemon(node)
    hostd.start(); hostd.kill(); hostd.start()      # the second one gets the first one's pidfds as LISTEN_FDS
    hostd.stored                                     # FDNAME → descriptors of the test's own

As PID 1 does, a descriptor that was stored without FDPOLL=0 is dropped as soon as it shows HUP.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from typing import Self

from tests.support.daemon import Daemon, _NotifySocket
from tests.support.node import Node

#: Puts the descriptors where systemd has them, says so, and becomes hostd; keeps its pid all along.
_HAND_OVER = """
import fcntl, os, sys
given = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in given]
for fd in given:
    os.close(fd)
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(given)), LISTEN_FDNAMES=sys.argv[2])
os.execvp(sys.argv[3], sys.argv[3:])
"""


class StoringDaemon(Daemon):
    """hostd under a service manager that keeps descriptors for it."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.configuration, node.bus.address, mount_namespace=node.namespace.path)
        self._notify.close()
        self._store = _Store()
        self._notify = self._store
        self._plain = self._command

    @property
    def stored(self) -> dict[str, list[int]]:
        """What is kept, by name."""
        self._store.lines()
        return self._store.kept

    def put(self, name: str, fd: int) -> None:
        """Something that hostd never stored is in the store all the same. Takes the descriptor over."""
        self._store.kept.setdefault(name, []).append(fd)

    def start(self, *, ready: bool = True) -> Self:
        """Starts it with all that is stored."""
        pairs = [(name, fd) for name, fds in self.stored.items() for fd in fds]
        numbers, names = ",".join(str(fd) for _, fd in pairs), ":".join(name for name, _ in pairs)
        self._pass_fds = tuple(fd for _, fd in pairs)
        self._command = [sys.executable, "-I", "-S", "-c", _HAND_OVER, numbers, names, *self._plain]
        return super().start(ready=ready)


class _Store(_NotifySocket):
    """Takes descriptors over where the other one closes them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[int]] = {}
        self._polled: set[int] = set()

    def lines(self) -> list[str]:
        """All lines since `forget`; keeps and drops descriptors as they say."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 65536, 64)
            except BlockingIOError:
                self._drop_hung_up()
                return self._lines
            lines = data.decode(errors="replace").splitlines()
            self._lines += lines
            self._obey(lines, fds)

    def _obey(self, lines: list[str], fds: list[int]) -> None:
        name = next((line.removeprefix("FDNAME=") for line in lines if line.startswith("FDNAME=")), "stored")
        if "FDSTOREREMOVE=1" in lines:
            for fd in self.kept.pop(name, []):
                os.close(fd)
        if "FDSTORE=1" not in lines:
            for fd in fds:
                os.close(fd)
            return
        self.kept.setdefault(name, []).extend(fds)
        if "FDPOLL=0" not in lines:
            self._polled |= set(fds)

    def _drop_hung_up(self) -> None:
        poll = select.poll()
        for fd in self._polled:
            poll.register(fd, 0)
        for fd, _ in poll.poll(0):
            self._polled.discard(fd)
            for fds in self.kept.values():
                if fd in fds:
                    fds.remove(fd)
                    os.close(fd)

    def close(self) -> None:
        """Closes all that is kept, too."""
        for fds in self.kept.values():
            for fd in fds:
                os.close(fd)
        self.kept.clear()
        super().close()
