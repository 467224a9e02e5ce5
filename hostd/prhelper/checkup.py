"""Asking a running helper how it is, beside everything else: one question at a time.

A new helper is asked for the handshake until it answers. A ready one gets the deep probe now and then; silence is asked
about once more at once, for a helper that is killed takes requests of guests with it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from hostd.linux.clock import boottime_usec
from hostd.prhelper import protocol
from hostd.prhelper.decision import Health

if TYPE_CHECKING:
    from collections.abc import Callable

#: s: how often a ready helper is asked; what it has to answer in, twice; and how long a new one may take to come up.
INTERVAL: Final = 10.0
TIMEOUT: Final = 1.0
START_TIMEOUT: Final = 5.0
_AGAIN_SECONDS: Final = 0.05


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

    def ask(self) -> None:
        """Asks, unless that is under way."""
        if self._task is None:
            self._task = asyncio.create_task(self._ask(), name="qemu-pr-helper checkup")

    async def _ask(self) -> None:
        try:
            if self.ready_at:
                await protocol.ask(self._path, deep=True, timeout=TIMEOUT)
            else:
                await self._until_up()
        except protocol.NoAnswer as error:
            self.trouble = str(error)
            self._on_probe(False)
            again = self.health is Health.ANSWERS
            self.health = Health.SILENT if again else Health.HUNG
        else:
            self._on_probe(True)
            self.health = Health.ANSWERS
            now = boottime_usec()
            self.ready_at = self.ready_at or now
            self.due_at = now + self._interval_usec
        self._task = None
        self._changed()

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
