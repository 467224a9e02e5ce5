"""The node's mounts as hostd sees them: for each pod, which targets are mounted, in PID 1's mount namespace.

One look answers all changes up to it, and looks are spaced so that a storm of other people's mounts costs a bounded
share of a core; after the storm one more look sees the end of it.

Where the kernel tells which rows changed (see `hostd.core.mount_source`), only these are looked at. The whole table is
looked at at the start, on `read`, when the kernel lost events, when a tree of mounts was moved, and some time after
changes: of a renamed directory above a mount, which changes its path, no kernel tells.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from hostd.core.pod_mounts import KubeletRoot, PodMounts, SortedMounts
from hostd.linux.clock import boottime_usec

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.core.mount_source import MountSource

log = logging.getLogger(__name__)

#: Looking may take one part in so many of the time.
_SHARE = 20
#: Two looks are never closer than this (seconds): a VM's umounts come as a burst.
_SPACING = 0.02
#: How soon it is tried again where a look failed (seconds).
_AGAIN = 1.0
#: How long after the first look at changed rows only the whole table is looked at (seconds).
_WHOLE_AFTER = 60.0


class NodeMounts:
    """Keeps up with the table. `changed` is called with the pods whose mounts differ from the look before."""

    def __init__(self, source: MountSource, root: KubeletRoot, changed: Callable[[set[str]], None]) -> None:
        self._source = source
        self._changed = changed
        self._mounts = SortedMounts(root)
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._whole_timer: asyncio.TimerHandle | None = None
        self._whole_due = True
        self._waiting: list[asyncio.Future[None]] = []
        #: Pods whose rows are looked at next time though nothing is told of them.
        self._doubted: set[str] = set()
        self._started = False
        #: Calls a look that is due once no umounts wait for the same processors.
        self.when_quiet: Callable[[Callable[[], None]], None] = lambda look: look()
        #: Looks so far, and those of them at the whole table; one serves any number of changes.
        self.reads = self.whole_reads = 0
        #: When the last one began (CLOCK_BOOTTIME, µs): all that had happened until then is known.
        self.read_at = 0

    def start(self) -> None:
        """Looks from now on whenever the table changes."""
        self._started = True
        self._listen()

    def _listen(self) -> None:
        if self._started:
            asyncio.get_running_loop().add_reader(self._source.fileno(), self._look_soon)

    def close(self) -> None:
        """Stops looking."""
        asyncio.get_running_loop().remove_reader(self._source.fileno())
        for timer in (self._timer, self._whole_timer):
            if timer:
                timer.cancel()
        for waiting in self._waiting:
            waiting.cancel()
        self._source.close()

    def of(self, pod_uid: str) -> PodMounts:
        """What the last look showed of a pod."""
        return self._mounts.pods.get(pod_uid) or PodMounts()

    def pods(self) -> set[str]:
        """The pods that have any mount in their two directories."""
        return set(self._mounts.pods)

    def sort_again(self) -> None:
        """The kubelet's root was found: what was read means something else now."""
        self._mounts.sort_again()

    async def fresh(self, pod_uid: str) -> None:
        """Returns when all is known that had happened before this call, of this pod also what no event tells. Many
        callers share one look."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._doubted.add(pod_uid)
        self._look_soon()
        await waiting

    def read(self) -> set[str]:
        """Looks at the whole table now, and gives the pods whose mounts differ from the look before."""
        self._whole_due = True
        return self._look()

    def _look(self) -> set[str]:
        begun, read_at = time.monotonic(), boottime_usec()
        self.reads += 1
        changed = self._take_in()
        self.read_at = read_at
        ended = time.monotonic()
        self._not_before = ended + max(_SPACING, (ended - begun) * _SHARE)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return changed

    def _take_in(self) -> set[str]:
        # What is told is told once: if the look fails, only the whole table makes up for it.
        whole_due, self._whole_due = self._whole_due, True
        changes = None
        if not whole_due:
            again = {number for pod_uid in self._doubted for number in self._mounts.numbers_of(pod_uid)}
            changes = self._source.changes(self._mounts.rows.keys(), again)
        if changes is None:
            self.whole_reads += 1
            changed = self._mounts.replace(self._source.whole())
        else:
            changed = self._mounts.update(changes)
        self._doubted.clear()
        self._whole_due = False
        self._set_whole_timer(wanted=changes is not None)
        return changed

    def _set_whole_timer(self, *, wanted: bool) -> None:
        if self._whole_timer and not wanted:
            self._whole_timer.cancel()
            self._whole_timer = None
        elif wanted and self._whole_timer is None:
            self._whole_timer = asyncio.get_running_loop().call_later(_WHOLE_AFTER, self._look_at_all)

    def _look_at_all(self) -> None:
        self._whole_timer = None
        self._whole_due = True
        self._look_soon()

    def _look_soon(self) -> None:
        loop = asyncio.get_running_loop()
        # Until then each of a storm's changes would wake us for nothing.
        loop.remove_reader(self._source.fileno())
        if self._timer is None:
            self._look_in(max(0.0, self._not_before - time.monotonic()))

    def _look_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, lambda: self.when_quiet(self._look_and_tell))

    def _look_and_tell(self) -> None:
        self._timer = None
        # Before the look: what changes from here on is told.
        self._listen()
        try:
            changed = self._look()
        except OSError as error:  # the kernel has no memory for it, say; there are those who wait for a look
            log.warning("the mount table cannot be read, which is tried again: %s", error)
            self._look_in(_AGAIN)
            return
        if changed:
            self._changed(changed)
