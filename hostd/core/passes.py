"""Passes: what was decided for a VM, carried out by a worker, and what came of it.

All that can hang happens in the worker. A pass never decides: it gets what is due, does it, and notes the outcome in
the model; the keeper decides again afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hostd.core import transitions
from hostd.core.model import Holder, Layer, LayerState
from hostd.kubevirt.pod_cgroup import pod_uids
from hostd.kubevirt.targets import Kind
from hostd.linux.clock import boottime_usec
from hostd.linux.holders import Held, Wanted
from hostd.linux.pidfd import Identity, identify
from hostd.linux.pool import Item, PoolExhausted, Worker, WorkerDied, WorkerError, WorkerHung, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from hostd.core.model import VM
    from hostd.linux.jobs import Umounts
    from hostd.linux.umount import Outcome

log = logging.getLogger(__name__)

#: Questions about holders that come within this time (seconds) share one look at all processes.
_GATHER = 0.02
#: How long a look at a pod holds (µs). No umount is begun later, however long the ones before it took and however late
#: the worker was: a QEMU may have started meanwhile.
_FRESH = 1_000_000
#: How often, and how far apart (µs), it is asked who pins a layer before one that left the table counts as gone
#: without an answer: one process that cannot be looked at must not keep all VMs.
_QUESTIONS, _QUESTION_EVERY = 3, 5_000_000
#: Looks that may hang at a time: whatever they hang in, the next one would too, and they are not to use up the workers.
_MOST_HUNG = 3
_UNANSWERED = "who pins it cannot be told: the look at all processes did not come back"


def is_at_work(layer: Layer) -> bool:
    """Whether the worker that was noted for it lives, perhaps one of an earlier hostd."""
    found = layer.worker and _identity(layer.worker.pid)
    return found is not None and layer.worker is not None and found.same_as(layer.worker)


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be unmounted of one VM now."""

    vm: VM
    layers: Sequence[Layer]
    #: The targets that may be detached.
    lazy: AbstractSet[bytes]


@dataclass(slots=True)
class Sent:
    """A job that a worker has: VMs, of which it takes one after the other."""

    worker: Worker
    dues: Sequence[Due]
    job: Umounts
    #: Until then it is quick.
    timer: asyncio.TimerHandle | None = None

    def take_back(self) -> tuple[list[Due], list[Due]]:
        """Leaves the worker with the VM that it is at. Gives those that it is done with, of which the mount table tells
        what became, and those that it has not come to."""
        ends = list(accumulate(len(due.layers) for due in self.dues))
        self.job.take_back(_end_of_one_at(ends, self.job.at))
        # Between the two, a system call: the worker sees the bound, or is seen beyond it.
        os.sched_yield()
        at = self.job.at
        self.job.take_back(end := _end_of_one_at(ends, at))
        done = [due for due, its_end in zip(self.dues, ends, strict=True) if its_end <= at]
        rest = [due for due, its_end in zip(self.dues, ends, strict=True) if its_end > end]
        self.dues = self.dues[len(done) : len(self.dues) - len(rest)]
        for due in (*done, *rest):
            _unsend(due)
        return done, rest


def _end_of_one_at(ends: Sequence[int], at: int) -> int:
    return next(end for end in ends if end > at)


def send(worker: Worker, dues: Sequence[Due], looked_at: int) -> Sent:
    """Has the layers unmounted; on return the worker has the job.

    Those that the worker does not come to soon after the look at the pods (CLOCK_BOOTTIME, µs) are left as they are:
    before they are tried, somebody has to look again.
    """
    items: list[Item] = []
    for due in dues:
        for layer in due.layers:
            target = layer.target
            items.append((target.relative, target.path in due.lazy, target.kind is Kind.HOTPLUG_BLOCK))
            layer.worker = worker.identity
    return Sent(worker, dues, worker.unmount(items, not_after=looked_at + _FRESH))


def finish(sent: Sent, outcomes: Iterable[Outcome], error: Exception | None) -> None:
    """The end of a job: every layer was tried, whatever became of the others, and its state says what came of it.

    Layers that the worker had not come to when it hung or died, and those of which it had not told, are as they were:
    the mount table says what became of them.
    """
    by_path = {outcome.relative: outcome for outcome in outcomes}
    for due in sent.dues:
        _finish(due, by_path, error, sent.worker)


def _finish(due: Due, outcomes: Mapping[bytes, Outcome], error: Exception | None, worker: Worker) -> None:
    if isinstance(error, WorkerHung | WorkerDied) and all(
        layer.target.relative != error.relative for layer in due.layers
    ):
        error = None  # that was at another VM
    for layer in due.layers:
        outcome = outcomes.get(layer.target.relative)
        if outcome:
            note(layer, outcome)
        elif isinstance(error, WorkerHung):
            if layer.target.relative == error.relative:
                sentence = f"the umount does not come back (worker {error.pid} waits for the file system below it)"
                transitions.see_hung(layer, worker.identity, sentence)
        elif error is not None:
            transitions.see_busy(layer, errno.EAGAIN, str(error), boottime_usec())
    if error is not None and not isinstance(error, WorkerHung):
        log.warning("a pass of pod %s was cut off and is tried again: %s", due.vm.pod_uid, error)
    _unsend(due)


def _unsend(due: Due) -> None:
    for layer in due.layers:
        if layer.state is not LayerState.HUNG:
            layer.worker = None


def _identity(pid: int) -> Identity | None:
    try:
        return identify(pid)
    except OSError:  # it is gone, or no descriptor is left to look with: no reason not to unmount
        return None


def note(layer: Layer, outcome: Outcome) -> None:
    """What the worker says of one target. Whether it is really gone is for the mount table to say."""
    if outcome.mounted or (outcome.errno and layer.target.kind is Kind.HOTPLUG_BLOCK):
        transitions.see_busy(layer, outcome.errno, outcome.error, boottime_usec())
    elif layer.source[0]:
        transitions.see_unmounted(layer, boottime_usec())
        layer.error = outcome.error
    else:
        transitions.see_gone(layer, boottime_usec())
        layer.error = outcome.error


class Inspector:
    """Who holds what: one look at all processes, by a worker, for all who ask at about the same time. `quiet` returns
    when no umounts wait, for such a look takes all of a processor."""

    def __init__(self, pool: WorkerPool, quiet: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._quiet = quiet
        self._asked: list[Layer] = []
        self._look: asyncio.Task[dict[bytes, list[Holder]] | None] | None = None
        #: One look at a time: whoever asks meanwhile shares the next one, and umounts have the other workers.
        self._turn = asyncio.Lock()
        #: Workers that hung in a look.
        self._hung: set[int] = set()
        #: By path: questions that were not answered.
        self._unanswered: dict[bytes, int] = {}

    async def holders(self, layers: Iterable[Layer]) -> dict[bytes, list[Holder]] | None:
        """Holders by target path; None where it cannot be told now."""
        wanted = [layer for layer in layers if layer.source[0]]
        if not wanted:
            return {}
        self._asked += wanted
        if self._look is None:
            self._look = asyncio.create_task(self._gather_and_look())
        return await asyncio.shield(self._look)

    def close(self) -> None:
        """Nobody is told any more."""
        if self._look:
            self._look.cancel()

    async def _gather_and_look(self) -> dict[bytes, list[Holder]] | None:
        await asyncio.sleep(_GATHER)
        async with self._turn:
            await self._quiet()
            self._look = None
            asked, self._asked = self._asked, []
            wanted = {layer.target.path: _wanted(layer) for layer in asked}
            held = await self._held(list(wanted.values()))
        if held is None:
            return None
        found: dict[bytes, list[Holder]] = {path: [] for path in wanted}
        for row in held:
            found[row.target].append(holder_of(row))
        return found

    async def _held(self, wanted: list[Wanted]) -> list[Held] | None:
        self._hung &= {hung.pid for hung in self._pool.hung}
        if len(self._hung) >= _MOST_HUNG:
            return None
        try:
            return list(await self._pool.run("holders", wanted))
        except (WorkerError, PoolExhausted, OSError) as error:
            if isinstance(error, WorkerHung):
                self._hung.add(error.pid)
            log.warning("who holds %d layers cannot be told: %s", len(wanted), error)
            return None

    def _ask_again(self, layer: Layer) -> bool:
        """Nobody could tell who pins this layer: whether it is worth asking again."""
        times = self._unanswered.pop(layer.target.path, 0) + 1
        if times < _QUESTIONS:
            self._unanswered[layer.target.path] = times
        return times < _QUESTIONS

    async def settle(self, layers: Iterable[Layer]) -> None:
        """Names the holders of busy layers; those that left the table and that nobody pins are gone."""
        unsettled = [layer for layer in layers if layer.state in {LayerState.BUSY, LayerState.DETACHED}]
        # A first refusal is not worth a look: what a dying process still holds is free in milliseconds.
        unsettled = [layer for layer in unsettled if layer.state is LayerState.DETACHED or layer.attempts > 1]
        holders = await self.holders(unsettled)
        for layer in unsettled:
            found = None if holders is None else holders.get(layer.target.path, [])
            if layer.state is LayerState.BUSY:
                transitions.see_holders(layer, found or (), boottime_usec())
            elif found:
                transitions.see_pinned(layer, found, boottime_usec())
            elif layer.state is LayerState.DETACHED and holders is None and self._ask_again(layer):
                layer.error, layer.retry_at = _UNANSWERED, boottime_usec() + _QUESTION_EVERY
            elif layer.state is LayerState.DETACHED:
                transitions.see_gone(layer, boottime_usec())
                layer.error = _UNANSWERED if holders is None else ""


def _wanted(layer: Layer) -> Wanted:
    return Wanted(layer.target.path, *layer.source, layer.mount_ids + layer.pinned_ids)


def holder_of(row: Held) -> Holder:
    """A holder as the bus tells it, with the pod that its cgroup names."""
    return Holder(row.pid, row.name, row.how, next(iter(sorted(pod_uids(row.cgroups))), ""))
