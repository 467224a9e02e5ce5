"""The node's mounts as hostd sees them: for each pod, which targets are mounted, read from PID 1's table.

The kernel says that the table changed, not what. One read answers all changes up to it, and reads are spaced so that
a storm of other people's mounts costs a bounded share of a core; after the storm one more read sees the end of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostd.kubevirt.targets import CONTAINER_DISKS, EMPTY_DIRS, HOTPLUG_DISKS, Foreign, Target, classify
from hostd.linux.clock import boottime_usec
from hostd.linux.mount_table import Mount, MountTable, rows_naming
from hostd.linux.mount_watch import MountWatch

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

#: What a row that matters contains.
_NEEDLES = tuple(b"/".join((b"", EMPTY_DIRS, directory, b"")) for directory in (CONTAINER_DISKS, HOTPLUG_DISKS))
#: Reading may take one part in so many of the time.
_SHARE = 20
#: Two reads are never closer than this (seconds): a VM's umounts come as a burst.
_SPACING = 0.02
#: How soon it is read again where that failed (seconds).
_AGAIN = 1.0


@dataclass(slots=True)
class PodMounts:
    """What is mounted in one pod's two directories."""

    #: Each target with the mounts stacked on it, bottom first.
    targets: dict[bytes, tuple[Target, list[Mount]]] = field(default_factory=dict)
    #: Mounts that are nobody's layer.
    foreign: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class KubeletRoot:
    """The kubelet's directory, symlinks resolved: found once, for all who need it. `found` is False while it does not
    exist; the path is then the configured one."""

    path: bytes
    found: bool = False


class NodeMounts:
    """Keeps up with the table. `changed` is called with the pods whose mounts differ from the read before."""

    def __init__(self, table: MountTable, root: KubeletRoot, changed: Callable[[set[str]], None]) -> None:
        self._table = table
        self._root = root
        self._changed = changed
        self._watch = MountWatch(table)
        self._pods: dict[str, PodMounts] = {}
        self._rows: list[Mount] = []
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._started = False
        #: Reads so far; one read serves any number of changes.
        self.reads = 0
        #: When the last one began (CLOCK_BOOTTIME, µs).
        self.read_at = 0

    def start(self) -> None:
        """Reads from now on whenever the table changes."""
        self._started = True
        self._listen()

    def _listen(self) -> None:
        if self._started:
            asyncio.get_running_loop().add_reader(self._watch.fileno(), self._on_change)

    def close(self) -> None:
        """Stops reading."""
        asyncio.get_running_loop().remove_reader(self._watch.fileno())
        if self._timer:
            self._timer.cancel()
        for waiting in self._waiting:
            waiting.cancel()
        self._watch.close()
        self._table.close()

    def of(self, pod_uid: str) -> PodMounts:
        """What the last read showed of a pod."""
        return self._pods.get(pod_uid) or PodMounts()

    def pods(self) -> set[str]:
        """The pods that have any mount in their two directories."""
        return set(self._pods)

    def read(self) -> set[str]:
        """Reads the table now, and gives the pods whose mounts differ from the read before."""
        begun = time.monotonic()
        self.reads += 1
        self.read_at = boottime_usec()
        self._watch.drain()
        rows = rows_naming(self._table.read(), *_NEEDLES)
        changed = self._sort_in(rows) if rows != self._rows else set()
        ended = time.monotonic()
        self._not_before = ended + max(_SPACING, (ended - begun) * _SHARE)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return changed

    def sort_again(self) -> None:
        """The kubelet's root was found: what was read means something else now."""
        self._sort_in(self._rows)

    async def fresh(self) -> None:
        """Returns when the table has been read after this call; many callers share one read."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._on_change()
        await waiting

    def _sort_in(self, rows: list[Mount]) -> set[str]:
        pods: dict[str, PodMounts] = {}
        for row in rows:
            match classify(self._root.path, row.target):
                case Target() as target:
                    mounted = pods.setdefault(target.pod_uid, PodMounts()).targets
                    mounted.setdefault(target.path, (target, []))[1].append(row)
                case Foreign(pod_uid=uid, path=path):
                    pods.setdefault(uid, PodMounts()).foreign.append(path)
        before, self._pods, self._rows = self._pods, pods, rows
        return {uid for uid in before.keys() | pods.keys() if before.get(uid) != pods.get(uid)}

    def _on_change(self) -> None:
        self._watch.drain()
        if self._timer is None:
            delay = max(0.0, self._not_before - time.monotonic())
            if delay:
                # Until then each of a storm's changes would wake us for nothing.
                asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._timer = asyncio.get_running_loop().call_later(delay, self._read_and_tell)

    def _read_and_tell(self) -> None:
        self._timer = None
        # Before the read: what changes from here on is told.
        self._listen()
        try:
            changed = self.read()
        except OSError as error:  # the kernel has no memory for it, say; there are those who wait for a read
            log.warning("the mount table cannot be read, which is tried again: %s", error)
            self._timer = asyncio.get_running_loop().call_later(_AGAIN, self._read_and_tell)
            return
        if changed:
            self._changed(changed)
