"""Somebody else's live helper at our path: who it is, and the moment when it is gone."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from hostd.linux.pidfd import Process
from hostd.linux.process import read_comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.prhelper.path import Inode, Sight

#: The name that the kernel has of a helper's process.
_HELPER = "qemu-pr-helper"
#: Enough to empty what a greeting leaves.
_BUFFER = 256


class Rival:
    """Watches the owner of one socket. `gone` is called once.

    Its process's pidfd tells, where the process that listens is the helper itself. A listener that was handed on (by a
    service manager, or by a hostd that is dead) lives apart from the process that made it: then a connection is held,
    which ends with the helper.
    """

    def __init__(self, path: bytes, sight: Sight, gone: Callable[[], None]) -> None:
        self.inode: Inode | None = sight.inode
        self.pid = sight.pid
        self._gone = gone
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        if not self._watch_process():
            self._hold_connection(path)

    @property
    def watched(self) -> bool:
        """Whether its end will be told; else somebody has to look."""
        return self._process is not None or self._connection is not None

    @property
    def name(self) -> str:
        """What it calls itself."""
        try:
            return read_comm(self.pid).decode("utf-8", "backslashreplace") if self.pid > 0 else "unknown"
        except OSError:
            return "unknown"

    def _watch_process(self) -> bool:
        # The number may be of a process that is dead, and another's by now.
        if self.name != _HELPER or self.pid == os.getpid():
            return False
        try:
            self._process = Process.open(self.pid)
        except OSError:
            return False
        asyncio.get_running_loop().add_reader(self._process.fd, self._on_end)
        return True

    def _hold_connection(self, path: bytes) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            return
        self._connection = sock
        asyncio.get_running_loop().add_reader(sock, self._on_readable, sock)

    def _on_readable(self, sock: socket.socket) -> None:
        try:
            greeting = sock.recv(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            greeting = b""
        if not greeting:
            self._on_end()

    def _on_end(self) -> None:
        self.close()
        self._gone()

    def close(self) -> None:
        """Watches no longer; a second time does nothing."""
        loop = asyncio.get_running_loop()
        if self._process is not None:
            loop.remove_reader(self._process.fd)
            self._process.close()
        if self._connection is not None:
            loop.remove_reader(self._connection)
            self._connection.close()
        self._process = self._connection = None
