"""Device nodes of block PVCs: layers that are no mounts, so that no mount table tells of them.

A worker looks for them in the pod's hotplug-disks, and has the kernel tell when something comes there, or goes where
there are any: once, until somebody has looked again. So its owner, who may make and remove files as fast as he likes,
costs one look in a while, and a directory in which nothing happens costs nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hostd.core import transitions
from hostd.linux import libc
from hostd.linux.clock import boottime_usec

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.core.model import VM
    from hostd.core.survey import Survey
    from hostd.linux.inotify import Inotify

#: How long after a change it is looked (µs), and which part of the time looks may take, however full the directory is.
_AFTER, _SHARE = 500_000, 50
#: The same where it could not be looked (µs).
_AGAIN = 5_000_000
#: How long changes are gathered before they are read (seconds): what mounts for many VMs makes a burst of them.
_GATHER = 0.1


class BlockNodes:
    """Keeps VMs' device nodes up to date. `changed` is called some time after one of their directories has changed."""

    def __init__(self, survey: Survey, inotify: Inotify | None, changed: Callable[[str], None]) -> None:
        """`inotify`: the one that the workers add watches to; None where there is none: then only looks tell."""
        self._survey = survey
        self._inotify = inotify
        self._changed = changed
        self._watched: dict[int, str] = {}
        self._watches: dict[str, set[int]] = {}
        #: Watches that ended before it was known whose they are, while so many look.
        self._ended: set[int] = set()
        self._looking = 0
        #: VMs that were looked at and not forgotten since.
        self._vms: dict[str, VM] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: How long the last look at each pod took (µs).
        self._took: dict[str, int] = {}
        self._reading: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        if self._inotify is not None:
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._gather, self._inotify)

    def _gather(self, inotify: Inotify) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(inotify.fileno())
        self._reading = loop.call_later(_GATHER, self._on_events, inotify)

    async def look(self, vm: VM) -> bool:
        """Brings the VM's device nodes up to date; False where they cannot be looked at now."""
        begun, self._vms[vm.pod_uid] = boottime_usec(), vm
        if timer := self._timers.pop(vm.pod_uid, None):
            timer.cancel()  # what it was to look for is seen now
        self._looking += 1
        try:
            found = await self._survey.block_nodes(vm.pod_uid)
            if self._vms.get(vm.pod_uid) is not vm:
                self._end_if_new(found[1] if found else -1)
                return found is not None
            if found is None:
                self._on_change(vm.pod_uid, _AGAIN)
                return False
            nodes, watch = found
            self._took[vm.pod_uid] = boottime_usec() - begun
            transitions.see_block_nodes(vm, nodes, boottime_usec())
            self._keep(watch, vm.pod_uid)
            return True
        finally:
            self._looking -= 1
            if not self._looking:
                self._ended.clear()  # whose they were, nobody will say any more

    def _keep(self, watch: int, pod_uid: str) -> None:
        if watch in self._ended:
            self._on_change(pod_uid)
        elif watch >= 0:
            self._watched[watch] = pod_uid
            self._watches.setdefault(pod_uid, set()).add(watch)

    def _end_if_new(self, watch: int) -> None:
        """Its VM was forgotten meanwhile; that of a VM that was met again since it may be all the same."""
        if watch >= 0 and watch not in self._watched:
            self._end(watch)

    def _end(self, watch: int) -> None:
        self._watched[watch] = ""  # its end is told still
        if self._inotify is not None:
            self._inotify.remove(watch)

    def forget(self, pod_uid: str) -> None:
        """Ends the watch of a pod."""
        self._vms.pop(pod_uid, None)
        self._took.pop(pod_uid, None)
        if timer := self._timers.pop(pod_uid, None):
            timer.cancel()
        for watch in self._watches.pop(pod_uid, ()):
            self._end(watch)

    def close(self) -> None:
        """Ends all of them."""
        for timer in (*self._timers.values(), self._reading):
            if timer:
                timer.cancel()
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())

    def _on_events(self, inotify: Inotify) -> None:
        self._listen()
        for event in inotify.read():
            if event.mask & libc.IN_Q_OVERFLOW:
                for pod_uid in set(self._watched.values()):
                    self._on_change(pod_uid)
            elif event.mask & libc.IN_IGNORED:
                # The end of a watch comes after the one event that it tells, and alone when the directory is deleted.
                self._on_end(event.wd)

    def _on_end(self, watch: int) -> None:
        pod_uid = self._watched.pop(watch, None)
        if pod_uid is None:
            self._ended.add(watch)
        elif pod_uid:
            self._watches[pod_uid].discard(watch)
            self._on_change(pod_uid)

    def _on_change(self, pod_uid: str, after: int = 0) -> None:
        if pod_uid not in self._timers:
            delay = max(after or _AFTER, self._took.get(pod_uid, 0) * _SHARE) / 1e6
            self._timers[pod_uid] = asyncio.get_running_loop().call_later(delay, self._tell, pod_uid)

    def _tell(self, pod_uid: str) -> None:
        del self._timers[pod_uid]
        self._changed(pod_uid)
