"""Pods whose VM was acknowledged while their containers still run: a new QEMU may start in one, and where nothing is
mounted for it nothing else would tell of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hostd.core.decision import LINGER_LAST, LOOK_FIRST

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.core.qemus import Qemus


class Lingering:
    """Looks at such pods, less and less often, until they have ended. `found` is called for one with a QEMU in it."""

    def __init__(self, qemus: Qemus, found: Callable[[str], None]) -> None:
        self._qemus = qemus
        self._found = found
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, pod_uid: str, delay: int = LOOK_FIRST) -> None:
        """Looks at a pod after `delay` (µs), and then again and again."""
        loop = asyncio.get_running_loop()
        if earlier := self._timers.get(pod_uid):
            earlier.cancel()
        self._timers[pod_uid] = loop.call_later(delay / 1e6, self._look, pod_uid, delay)

    def close(self) -> None:
        """Looks no more."""
        for timer in self._timers.values():
            timer.cancel()

    def _look(self, pod_uid: str, delay: int) -> None:
        del self._timers[pod_uid]
        try:
            living = self._qemus.cgroups.processes(pod_uid)
            candidates = self._qemus.unidentified(pod_uid, living)
        except OSError:  # it cannot be looked at now, and may run all the same
            living, candidates = [-1], []
        for process in candidates:
            process.close()
        if candidates:
            self._found(pod_uid)
        elif living:
            self.watch(pod_uid, min(2 * delay, LINGER_LAST))
