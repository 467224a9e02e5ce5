"""What is done for VMs once nothing waits to be unmounted: saving and telling what became of them.

When many die at once, all of them have their umounts sent before anything is said of the first: what is said may be as
late as a blink, a mount may not. What becomes of a VM meanwhile is saved and told as one. Nor is Python's garbage
collected meanwhile, which would stop everything for tens of milliseconds among many VMs.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.core.model import VM
    from hostd.core.teller import Before

#: While umounts are busy: how long they are let have their way before this is done all the same, and how far apart its
#: slices are (seconds).
_PATIENCE, _PAUSE = 0.5, 0.002
#: The same where umounts leave off for moments in between: what has waited so long is done in any case (seconds).
_LONGEST = 2.0
#: How long it may keep all else waiting at a time (seconds).
_SLICE = 0.001


class Afterwards:
    """VMs of which something is to be saved and told. `busy`: umounts wait or are under way; `work` does it for one VM,
    and gets how it was when it was told of last."""

    def __init__(self, busy: Callable[[], bool], work: Callable[[VM, Before], None]) -> None:
        self._busy = busy
        self._work = work
        #: Each with the time since when it waits.
        self._waiting: dict[str, tuple[float, VM, Before]] = {}
        self._callbacks: deque[tuple[float, Callable[[], None]]] = deque()
        self._turn: asyncio.Handle | None = None
        self._late_at = 0.0

    def add(self, vm: VM, before: Before) -> None:
        """Soon. `before`: how it was, unless that was said already."""
        self._waiting.setdefault(vm.pod_uid, (asyncio.get_running_loop().time(), vm, before))
        self._begin()

    def before(self, vm: VM, now: Before) -> Before:
        """How it was when it was told of last: as it is now, if there is nothing to be done for it."""
        return self._waiting.get(vm.pod_uid, (0.0, vm, now))[2]

    def do(self, pod_uid: str) -> None:
        """Now, if there is anything to be done for this VM."""
        if waiting := self._waiting.pop(pod_uid, None):
            self._work(*waiting[1:])

    def drop(self, pod_uid: str) -> None:
        """There is nothing more to be done for this VM."""
        self._waiting.pop(pod_uid, None)

    def then(self, callback: Callable[[], None]) -> None:
        """Calls it when it is quiet, or has not been for long; now if it is. It does not raise."""
        if self._busy():
            self._callbacks.append((asyncio.get_running_loop().time(), callback))
            self._begin()
        else:
            callback()

    async def quiet(self) -> None:
        """Returns when it is quiet, or has not been for long."""
        called = asyncio.Event()
        self.then(called.set)
        await called.wait()

    def close(self) -> None:
        """Does all that is left, now."""
        if self._turn:
            self._turn.cancel()
        self._callbacks.clear()
        gc.enable()
        for pod_uid in list(self._waiting):
            self.do(pod_uid)

    def _begin(self) -> None:
        if self._turn is None:
            gc.disable()
            loop = asyncio.get_running_loop()
            self._late_at = loop.time() + _PATIENCE
            self._turn = loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        loop = asyncio.get_running_loop()
        now, busy = loop.time(), self._busy()
        if not busy:
            self._late_at = now + _PATIENCE
        late = now >= min(self._late_at, self._since(now) + _LONGEST)
        try:
            if late:
                gc.enable()
            if late or not busy:
                self._work_until(now + _SLICE)
        finally:
            if self._waiting or self._callbacks:
                self._turn = loop.call_later(_PAUSE, self._take_turn) if busy else loop.call_soon(self._take_turn)
            else:
                self._turn = None
                gc.enable()

    def _since(self, now: float) -> float:
        """Since when the first of all waits."""
        vms = next((since for since, *_ in self._waiting.values()), now)
        return min(vms, self._callbacks[0][0] if self._callbacks else now)

    def _work_until(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._callbacks:
            if self._waiting:
                self.do(next(iter(self._waiting)))
            if self._callbacks:
                self._callbacks.popleft()[1]()
            if loop.time() >= end:
                return
