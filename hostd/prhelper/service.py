"""The main process of hostd-pr-helper.service: a shell that starts one helper after the other; or the helper itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Final

from hostd.linux.pidfd import Process
from hostd.linux.process import children, read_comm

if TYPE_CHECKING:
    from collections.abc import Callable

#: s: how long a shell may be without a helper, which takes milliseconds; and how often is looked: no event tells.
_RESPAWN_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.002
#: What the kernel keeps of a process's name.
_COMM_SIZE: Final = 15


class Service:
    """Watches that process; `ended` is called at its death, with words where they are news."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._main: Process | None = None

    async def helper(self, main_pid: int, program: str) -> int:
        """The helper that the main process runs now, perhaps not quite up; 0 = none. `program`: the helper's name.

        A shell that starts none, for it is stopped itself, is killed: systemd starts the service anew.
        """
        main = self._watch(main_pid)
        if main is None:
            return 0
        deadline = asyncio.get_running_loop().time() + _RESPAWN_SECONDS
        while main is self._main:
            with contextlib.suppress(ProcessLookupError):
                found = [main.pid] if read_comm(main.pid) == program.encode()[:_COMM_SIZE] else children(main.pid)
                if any(_lives(pid) for pid in found):
                    return found[0]
            if asyncio.get_running_loop().time() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(main.fd, signal.SIGKILL)
                return 0
            await asyncio.sleep(_LOOK_SECONDS)
        return 0

    def _watch(self, pid: int) -> Process | None:
        if self._main is not None and (self._main.pid != pid or not self._main.alive()):
            self.forget()
        if pid and self._main is None:
            try:
                self._main = Process.open(pid)
            except ProcessLookupError:
                self._ended(f"qemu-pr-helper {pid} ended as soon as it was started")
                return None
            asyncio.get_running_loop().add_reader(self._main.fd, self._on_death)
        return self._main

    def _on_death(self) -> None:
        self.forget()
        self._ended("")

    def forget(self) -> None:
        """Watches nothing; a second time does nothing."""
        if self._main is not None:
            asyncio.get_running_loop().remove_reader(self._main.fd)
            self._main.close()
            self._main = None


def _lives(pid: int) -> bool:
    try:
        Process.open(pid).close()
    except ProcessLookupError:
        return False
    return True
