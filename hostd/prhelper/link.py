"""The daemon's end of the agent: one request at a time, none of which can hold the daemon up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import Any, Final

import hostd
from hostd.errors import HelperFailed
from hostd.prhelper.agent import PATIENCE

#: s: what the agent may take: it waits for a unit or two itself. And how long it is kept when it has nothing to do.
_TIMEOUT: Final = 3 * PATIENCE
_IDLE: Final = 20.0
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from hostd.prhelper.agent import main; main(int(sys.argv[2]))"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(hostd.__file__)))


class Agent:
    """Starts the agent's process when it is needed, and ends it when it is not."""

    def __init__(self, program: str = _PROGRAM, timeout: float = _TIMEOUT) -> None:
        """`program`: what the process runs; tests have their own systemd there."""
        self._program = program
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def ask(self, what: str, **arguments: int) -> dict[str, Any]:
        """Lets the agent do something. Raises HelperFailed with what systemd says, or that it says nothing."""
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(self._timeout):
                    reply = await self._exchange({"do": what, "with": arguments})
            except TimeoutError:
                self.close()
                raise HelperFailed(f"systemd did not {what} the helper's units within {self._timeout:g} s") from None
            except BaseException:
                self.close()
                raise
            self._idle = asyncio.get_running_loop().call_later(_IDLE, self.close)
        if "error" in reply:
            raise HelperFailed(f"systemd cannot {what} the helper's units: {reply['error']}")
        found: dict[str, Any] = reply["found"]
        return found

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        sock = self._socket or self._start()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, json.dumps(request).encode())
        data = await loop.sock_recv(sock, 1 << 18)
        if not data:
            raise HelperFailed("the process that speaks to systemd ended; the log of hostd says why")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._socket = ours
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", self._program, _PACKAGES, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        return ours

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        if self._idle is not None:
            self._idle.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            # It holds nothing that has to be put in order, and waits for nothing but PID 1, so it dies at once.
            self._process.kill()
            self._process.wait()
        self._socket = self._process = self._idle = None
