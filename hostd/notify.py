"""What hostd tells systemd: readiness, a status line, the watchdog, and descriptors to keep over a restart.

Over sdnotify; where there is no NOTIFY_SOCKET everything here does nothing. The descriptors go by `send_fds`, which
sdnotify has not, with FDPOLL=0: PID 1 drops a stored descriptor on HUP otherwise, and a reaped pidfd shows HUP, so just
the deaths that matter would be lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import OrderedDict
from itertools import count

import sdnotify

log = logging.getLogger(__name__)

_FIRST_FD = 3


class Notifier:
    """The service manager's ear.

    It may be slow to listen (PID 1 while it re-executes itself), and hostd never waits for it: what it does not take at
    once is kept in order and sent when it does, of the status lines only the last.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = sdnotify.SystemdNotifier().socket
        self._status = ""
        #: What waits, in its order: a message, and a descriptor of our own to go with it and its name, or -1.
        self._waiting: OrderedDict[int, tuple[str, int, str]] = OrderedDict()
        self._numbers = count()
        #: Which of them have a descriptor kept, by its name.
        self._stores: dict[str, int] = {}
        if self._socket is not None:
            self._socket.setblocking(False)

    def ready(self) -> None:
        """READY=1: every VM was looked at and what was due is under way."""
        self._send("READY=1")

    def status(self, line: str) -> None:
        """The line in `systemctl status`; sent only when it changes."""
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def reloading(self) -> None:
        """RELOADING=1; `ready` ends it."""
        self._send("RELOADING=1")

    def stopping(self) -> None:
        """STOPPING=1."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """WATCHDOG=1, from the loop that does the work."""
        self._send("WATCHDOG=1")

    def store(self, name: str, fd: int) -> None:
        """Keeps a descriptor over restarts under a name of its own (at most 255 ASCII characters, no colon)."""
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd, name)

    def drop(self, name: str) -> None:
        """Lets systemd close what it keeps under that name."""
        if (unheard := self._stores.pop(name, None)) is None:
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        else:  # however many come and go while it does not listen, they cost nothing
            os.close(self._waiting.pop(unheard)[1])

    def _send(self, message: str, fd: int = -1, name: str = "") -> None:
        if self._socket is None:
            return
        if not self._waiting and self._send_now(self._socket, message, fd):
            return
        own = os.dup(fd) if fd >= 0 else -1
        if not self._waiting:
            asyncio.get_running_loop().add_writer(self._socket, self._flush, self._socket)
        elif message.startswith("STATUS=") and self._last().startswith("STATUS="):
            self._waiting.popitem()
        number = next(self._numbers)
        self._waiting[number] = message, own, name
        if name:
            self._stores[name] = number

    def _last(self) -> str:
        return self._waiting[next(reversed(self._waiting))][0]

    def _flush(self, sock: socket.socket) -> None:
        while self._waiting:
            number, (message, fd, name) = next(iter(self._waiting.items()))
            if not self._send_now(sock, message, fd):
                return
            del self._waiting[number]
            if fd >= 0:
                os.close(fd)
                self._stores.pop(name, None)
        asyncio.get_running_loop().remove_writer(sock)

    @staticmethod
    def _send_now(sock: socket.socket, message: str, fd: int) -> bool:
        """False = it does not listen just now. One that will never listen is told of in the log, and that is all."""
        try:
            socket.send_fds(sock, [message.encode("utf-8", "backslashreplace")], [fd] if fd >= 0 else [])
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("systemd was not told %r: %s", message.partition("\n")[0], error)
        return True


def watchdog_usec() -> int | None:
    """How often systemd wants to hear (µs), None where it does not ask this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        return int(os.environ["WATCHDOG_USEC"]) or None
    except (KeyError, ValueError):
        return None


def stored_fds() -> list[tuple[str, int]]:
    """What systemd kept for us: (name, descriptor), each set close-on-exec. To be called once: it forgets them."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "0")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    fds = range(_FIRST_FD, _FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    names += ["unknown"] * (len(fds) - len(names))
    return list(zip(names, fds, strict=False))
