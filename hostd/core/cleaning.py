"""Clean-up under way: which VMs are being unmounted, by which worker, and which wait for one.

    start ─▶ (wait for a turn ─▶ look again) ─▶ a worker has the job, and ends it ─▶ find out what came of it ─▶ end

Where many VMs die at once, a worker gets several in one job, of which it takes one after the other. As long as it is
quick, no other worker is at umounts: they would only wait for each other in the kernel, which has one lock for all
mounts of a namespace. Once it is slow, for it may hang, the others have their turn, and what it has not come to is
taken back.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from hostd.core import passes, transitions
from hostd.core.model import LayerState
from hostd.core.teller import title
from hostd.core.turns import Turns
from hostd.linux.clock import boottime_usec
from hostd.log import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Protocol

    from hostd.core.model import VM, Layer
    from hostd.core.passes import Due, Sent
    from hostd.linux.pool import Worker, WorkerPool
    from hostd.linux.umount import Outcome

    class Owner(Protocol):
        """Who decides what is to be done, and finds out what came of it."""

        def see_due(self, vm: VM, now: int) -> Due | None:
            """Looks at the VM now (CLOCK_BOOTTIME, µs); what is to be unmounted, if anything."""

        def find_out(self, vm: VM, tried: Due | None) -> None:
            """Begins to find out what came of it; `end` once that is known."""

        def on_end(self, vm: VM, *, failed: bool) -> None:
            """It is over."""


log = logging.getLogger(__name__)

#: How long a worker is taken for quick (seconds).
_QUICK = 0.02
#: How long looks at the VMs of one job may take (µs): what was seen of the first is to be true still for the last.
_LOOK = 100_000
#: How long a VM is left alone when no worker is to be had (µs).
_STARVED = 5_000_000


class Cleaning:
    """The VMs of one keeper that are being unmounted, each once at a time."""

    def __init__(self, pool: WorkerPool, owner: Owner) -> None:
        self._pool = pool
        self._owner = owner
        self._turns = Turns(self._take, self._hopeless, self._begin, self._starve)
        pool.on_free = self._turns.serve
        #: By pod; done when its layers were tried and it is known what came of that.
        self._under_way: dict[str, asyncio.Future[None]] = {}
        #: By worker.
        self._sent: dict[int, Sent] = {}
        self._quick: Sent | None = None
        #: No worker was to be had, which was said.
        self._starved = False
        self._closed = False

    @property
    def crowded(self) -> bool:
        """VMs wait for a worker."""
        return self._turns.crowded

    @property
    def busy(self) -> bool:
        """Umounts wait, or a worker is at them that is quick: others are not to wait for one that is slow."""
        return self._quick is not None or self.crowded

    def of(self, pod_uid: str) -> asyncio.Future[None] | None:
        """What is under way for a VM, for those who want to wait for its end."""
        return self._under_way.get(pod_uid)

    def start(self, vm: VM, due: Due | None, looked_at: int) -> None:
        """Has this unmounted, as it was seen just now (CLOCK_BOOTTIME, µs), if a worker is free; else, and where
        nothing is known to be due, the VM is looked at when its turn comes."""
        if self._closed:
            return
        self._under_way[vm.pod_uid] = asyncio.get_running_loop().create_future()
        if due and (worker := self._take()):
            self._send(worker, [due], looked_at)
        else:
            self._turns.add(vm)

    def _take(self) -> Worker | None:
        return None if self._quick else self._pool.take()

    def _hopeless(self) -> Exception | None:
        return None if self._quick else self._pool.hopeless

    def _begin(self, vms: Sequence[VM], worker: Worker) -> None:
        """A worker is free for VMs that waited for one."""
        self._starved = False
        now, dues = boottime_usec(), []
        for number, vm in enumerate(vms):
            if boottime_usec() - now > _LOOK:
                self._turns.take_back(vms[number:])
                break
            try:
                due = self._owner.see_due(vm, now)
            except Exception:
                log.exception("%s: a look at it failed and is tried again", title(vm))
                self.end(vm, failed=True)
                continue
            if due:
                dues.append(due)
            else:
                self._owner.find_out(vm, None)
        if dues:
            self._send(worker, dues, now)
        else:
            self._pool.give_back(worker)

    def _send(self, worker: Worker, dues: Sequence[Due], looked_at: int) -> None:
        try:
            sent = self._sent[worker.pid] = passes.send(worker, dues, looked_at)
        except Exception:
            log.exception("%s: an umount could not be begun, and is tried again", [title(due.vm) for due in dues])
            self._pool.give_back(worker)
            for due in dues:
                self.end(due.vm, failed=True)
            return
        self._quick = sent
        sent.timer = asyncio.get_running_loop().call_later(_QUICK, self._on_slow, sent)
        sent.job.on_end(partial(self._on_outcomes, sent))

    def _on_slow(self, sent: Sent) -> None:
        self._quick = None
        done, rest = sent.take_back()
        self._turns.take_back([due.vm for due in rest])
        for due in done:
            self._owner.find_out(due.vm, due)

    def _on_outcomes(self, sent: Sent, outcomes: Sequence[Outcome], error: Exception | None) -> None:
        del self._sent[sent.worker.pid]
        if self._quick is sent:
            self._quick = None
        _stop(sent.timer)
        passes.finish(sent, outcomes, error)
        for due in sent.dues:
            self._owner.find_out(due.vm, due)
        self._pool.give_back(sent.worker)  # to the next VMs that wait
        self._turns.serve()

    def _starve(self, vm: VM, error: Exception) -> None:
        """No worker is left, or comes up."""
        if not self._starved:  # all VMs that wait would say the same
            log.error("%s: no worker is left to unmount with: %s", title(vm), error)
        self._starved = True
        for layer in vm.layers.values():
            layer.retry_at = max(layer.retry_at, boottime_usec() + _STARVED)
            if layer.state is LayerState.MOUNTED:
                layer.error = str(error)
        # A VM without layers would ask for the next one at once.
        asyncio.get_running_loop().call_later(_STARVED / 1e6, partial(self.end, vm, failed=False))

    def end(self, vm: VM, *, failed: bool) -> None:
        """It is known what came of it, or that cannot be found out."""
        future = self._under_way.pop(vm.pod_uid, None)
        if future is None:  # hostd ends
            return
        future.set_result(None)
        self._owner.on_end(vm, failed=failed)

    def close(self) -> None:
        """Workers end after the target that they are at."""
        self._closed = True
        self._turns.close()
        self._pool.on_free = lambda: None
        for sent in self._sent.values():
            _stop(sent.timer)
            self._pool.give_back(sent.worker)
        for future in self._under_way.values():
            future.cancel()
        self._under_way.clear()


def worth_trying(due: list[Layer], pool: WorkerPool, vms: Iterable[VM], now: int) -> list[Layer]:
    """Without those of a kind of file system of which as many umounts hang as workers are left: the volumes of servers
    that are gone must not stop those of all others."""
    left = pool.left
    if len(pool.hung) < left:
        return due
    hung = Counter(layer.fstype for vm in vms for layer in vm.layers.values() if hangs(layer))
    for layer in due:
        if hung[layer.fstype] >= left:
            words = f"not tried yet: {hung[layer.fstype]} umounts of {plain(layer.fstype)} file systems hang"
            transitions.see_busy(layer, errno.EAGAIN, words, now)
    return [layer for layer in due if hung[layer.fstype] < left]


def hangs(layer: Layer) -> bool:
    """Its umount does not come back."""
    return layer.state is LayerState.HUNG


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
