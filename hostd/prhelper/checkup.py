"""Asking a running helper how it is, beside everything else: one question at a time.

A new helper is asked for the handshake until it answers. A ready one gets the deep probe now and then. It takes well
below a millisecond, and the time-out is long enough for a helper that is merely slow, for one that is killed takes
requests of guests with it. One that was stopped (SIGSTOP) need not be waited for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from hostd.linux.clock import boottime_usec
from hostd.linux.process import read_stat
from hostd.prhelper import protocol
from hostd.prhelper.decision import Health

if TYPE_CHECKING:
    from collections.abc import Callable

#: s: how often a ready helper is asked; what it has to answer in; and how long a new one may take to come up.
INTERVAL: Final = 10.0
TIMEOUT: Final = 2.0
START_TIMEOUT: Final = 5.0
_AGAIN_SECONDS: Final = 0.05
#: What it takes to replace a helper: asked that much earlier, one that hangs is cured within interval and time-out.
_REPLACING_USEC: Final = 250_000
#: s: a time-out that comes later than this says that hostd itself stood still, and nothing of the helper.
_LATE: Final = 0.5
#: /proc's letter for a process that was sent SIGSTOP; one that a debugger holds has another.
_STOPPED: Final = "T"


class Checkup:
    """The health of the helper at `path`; `changed` is called when an answer, or none, has come."""

    def __init__(
        self,
        path: bytes,
        changed: Callable[[], None],
        interval: float = INTERVAL,
        on_probe: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._changed = changed
        self._on_probe = on_probe
        self._interval_usec = int(interval * 1e6)
        self._task: asyncio.Task[None] | None = None
        self.health = Health.UNKNOWN
        self.trouble = ""
        #: CLOCK_BOOTTIME µs: since when it is ready (0 = it is not), and when it is to be asked next.
        self.ready_at = 0
        self.due_at = 0

    def forget(self) -> None:
        """Another helper than the one that was asked, or none."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.health, self.trouble, self.ready_at = Health.UNKNOWN, "", 0

    def ask(self, pid: int) -> None:
        """Asks that helper, unless that is under way."""
        if self._task is None:
            self._task = asyncio.create_task(self._ask(pid), name="qemu-pr-helper checkup")

    async def _ask(self, pid: int) -> None:
        asked_at = boottime_usec()
        try:
            await (self._probe(pid) if self.ready_at else self._until_up())
        except protocol.NoAnswer as error:
            self.trouble = str(error)
            self.health = Health.HUNG
        else:
            self.health = Health.ANSWERS
            self.ready_at = self.ready_at or boottime_usec()
            self.due_at = asked_at + self._interval_usec - _REPLACING_USEC
        self._on_probe(self.health is Health.ANSWERS)
        self._task = None
        self._changed()

    async def _probe(self, pid: int) -> None:
        if _is_stopped(pid):
            raise protocol.NoAnswer(f"qemu-pr-helper {pid} was stopped (SIGSTOP)")
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            try:
                await protocol.ask(self._path, deep=True, timeout=TIMEOUT)
            except protocol.NoAnswer:
                if loop.time() - asked_at < TIMEOUT + _LATE:
                    raise
            else:
                return

    async def _until_up(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await protocol.ask(self._path, deep=False, timeout=max(left, _AGAIN_SECONDS))
            except protocol.NoAnswer:
                if left <= _AGAIN_SECONDS:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return


def _is_stopped(pid: int) -> bool:
    try:
        return read_stat(pid).state == _STOPPED
    except ProcessLookupError:
        return False
