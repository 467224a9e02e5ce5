"""One qemu-pr-helper process: started as a child of hostd, or found running.

It is to outlive hostd: a session of its own (no terminal's Ctrl-C reaches it), SIGPIPE ignored and a stderr that never
blocks, so that it does not matter whether anybody reads. It is reaped if it is our child, by its pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from hostd.linux import pidfd
from hostd.linux.pidfd import Process
from hostd.prhelper.backend import End

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

# The listener comes as stdin, for only a shell can put it on fd 3 and know the pid that LISTEN_PID must name: with
# another pid the helper would silently listen on its default path.
_ENTER = b'umask 077; ulimit -c 0; exec 3<&0 </dev/null; LISTEN_PID=$$; export LISTEN_PID; exec "$0"'
_ENVIRONMENT = {"LISTEN_FDS": "1", "PATH": os.defpath, "LC_ALL": "C"}
#: s: what a helper has to end in when it is asked.
PATIENCE: Final = 2.0
#: What is kept of what it says (bytes).
_TAIL = 2048


class Helper:
    """Owns the pidfd, and the child where it is one. `died` is called once, from the event loop."""

    def __init__(self, process: Process, child: subprocess.Popen[bytes] | None, died: Callable[[Helper], None]) -> None:
        self.process = process
        self._child = child
        self._died = died
        self._said = b""
        #: Why it is killed, in words; "" where it is not. `asked`: it was told to end, which is no failure.
        self.why = ""
        self.asked = False
        #: How it ended, once it has.
        self.end = End("")
        self.over = asyncio.Event()
        self._killing: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        loop.add_reader(process.fd, self._on_death)
        if child is not None and child.stderr is not None:
            loop.add_reader(child.stderr, self._on_words)

    @classmethod
    def spawn(cls, program: bytes, listener: socket.socket, died: Callable[[Helper], None]) -> Helper:
        """A new helper on that listener. Raises OSError."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            child = subprocess.Popen(
                [b"/bin/sh", b"-c", _ENTER, program],
                stdin=listener.fileno(), stdout=writer, stderr=writer, cwd="/", env=_ENVIRONMENT,
                start_new_session=True, restore_signals=False,
            )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        child.stderr = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed with the helper
        # Not `Process.open`: a child that died already is a zombie of ours, and no surprise.
        return cls(Process.adopt(os.pidfd_open(child.pid)), child, died)

    @classmethod
    def find(cls, pid: int, died: Callable[[Helper], None]) -> Helper:
        """A helper that runs already. Raises ProcessLookupError, OSError."""
        return cls(Process.open(pid), None, died)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._child.pid if self._child is not None else self.process.pid

    def ask_to_end(self) -> None:
        """SIGTERM: it ends in milliseconds, and its clients see the connection close.

        One that is stopped does not, nor one that is not quite up: it forgets a SIGTERM that comes before its main
        loop. Both are killed a little later.
        """
        if not self.asked:
            self.asked = True
            self._signal(signal.SIGTERM)
            self._killing = asyncio.get_running_loop().call_later(PATIENCE, self.kill)

    def kill(self, why: str = "") -> None:
        """SIGKILL, which a stopped one obeys too."""
        self.why = self.why or why
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self.over.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process.fd, number)

    def _on_words(self) -> None:
        assert self._child is not None
        assert self._child.stderr is not None
        piece = self._child.stderr.read(_TAIL)
        if piece == b"":
            asyncio.get_running_loop().remove_reader(self._child.stderr)
        self._said = (self._said + (piece or b""))[-_TAIL:]

    def _on_death(self) -> None:
        try:
            end = self.process.end()
        except OSError:  # no descriptor is left to look with: dead it is all the same
            end = None
        if self._child is not None:
            self._on_words()
            self._child.wait()
        else:
            with contextlib.suppress(ChildProcessError):  # found, and a child of ours all the same
                os.waitpid(self.process.pid, os.WNOHANG)
        killed = end is None or end.signal == signal.SIGKILL or end == pidfd.End()
        self.end = End(self.why or f"qemu-pr-helper {self.pid} {self._how(end)}", killed and not self.why)
        self.release()
        self.over.set()
        self._died(self)

    def _how(self, end: pidfd.End | None) -> str:
        if end is not None and end.signal > 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(end.signal).name}"
            return f"was killed by signal {end.signal}"
        words = self._said.decode("utf-8", "backslashreplace").strip().rpartition("\n")[2]
        how = f"ended with status {end.status}" if end is not None and end.status >= 0 else "ended"
        return f"{how}: {words}" if words else how

    def release(self) -> None:
        """Lets go of it; if it lives it goes on. A second time does nothing."""
        if self.process.fd < 0:
            return
        if self._killing is not None:
            self._killing.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.fd)
        self.process.close()
        if self._child is not None and self._child.stderr is not None:
            loop.remove_reader(self._child.stderr)
            self._child.stderr.close()
        if self._child is not None and self._child.returncode is None:
            # It outlives us: `subprocess` shall neither wait for it nor warn.
            self._child.returncode = 0
