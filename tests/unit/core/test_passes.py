"""What came of a job: of each VM that was in it."""

from __future__ import annotations

import errno
from typing import Any, cast

import pytest

from hostd.core import passes
from hostd.core.model import VM, Layer, LayerState
from hostd.core.passes import Due, Sent
from hostd.kubevirt.targets import Kind, Target
from hostd.linux.pidfd import Identity
from hostd.linux.pool import WorkerDied, WorkerHung
from hostd.linux.umount import Outcome
from tests.support.core import OTHER, POD

IDENTITY = Identity(7, 8, "boot")
LAST = "00000000-0000-4000-8000-00000000000f"


class Job:
    """What an umount job of three VMs of two layers has to say of itself."""

    identity = IDENTITY

    def __init__(self, *at: int) -> None:
        self._at = list(at)
        self.bounds: list[int] = []

    @property
    def at(self) -> int:
        """Each time that it is asked the worker has gone on."""
        return self._at.pop(0) if len(self._at) > 1 else self._at[0]

    def take_back(self, number: int) -> None:
        self.bounds.append(number)


def due(pod_uid: str) -> Due:
    layers = [
        Layer(
            Target(
                pod_uid,
                Kind.HOTPLUG_FILE,
                str(number),
                b"/k/%s/%d" % (pod_uid.encode(), number),
                relative(pod_uid, number),
            ),
            source=("0:1", b"/"),
            worker=IDENTITY,
        )
        for number in range(2)
    ]
    return Due(VM(pod_uid, layers={layer.target.path: layer for layer in layers}), layers, set())


def relative(pod_uid: str, number: int) -> bytes:
    return b"%s/%d" % (pod_uid.encode(), number)


def sent(*at: int) -> Sent:
    job = Job(*at or (0,))
    return Sent(cast("Any", job), [due(uid) for uid in (POD, OTHER, LAST)], cast("Any", job))


def states(found: Sent) -> list[list[LayerState]]:
    return [[layer.state for layer in each.layers] for each in found.dues]


M, B, H, D = LayerState.MOUNTED, LayerState.BUSY, LayerState.HUNG, LayerState.DETACHED


def test_a_worker_that_hangs_says_nothing_of_those_that_it_had_not_come_to() -> None:
    job = sent()
    passes.finish(job, [Outcome(relative(POD, 0), 1, 0, "", True, False)], WorkerHung(relative(OTHER, 0), 7, 2.0))
    assert states(job) == [[D, M], [H, M], [M, M]]
    assert [layer.worker for each in job.dues for layer in each.layers] == [None, None, IDENTITY, None, None, None]


def test_a_worker_that_dies_is_an_attempt_at_the_vm_that_it_was_at_alone() -> None:
    job = sent()
    passes.finish(job, [], WorkerDied(relative(OTHER, 1), 7, "signal 9"))
    assert states(job) == [[M, M], [B, B], [M, M]]
    assert [layer.attempts for each in job.dues for layer in each.layers] == [0, 0, 1, 1, 0, 0]


def test_what_failed_as_a_whole_is_an_attempt_at_all() -> None:
    job = sent()
    passes.finish(job, [], OSError(errno.EIO, "the root cannot be opened"))
    assert states(job) == [[B, B], [B, B], [B, B]]


@pytest.mark.parametrize(
    ("at", "done", "kept", "rest"), [(0, 0, POD, 2), (1, 0, POD, 2), (2, 1, OTHER, 1), (5, 2, LAST, 0)]
)
def test_a_slow_worker_keeps_the_vm_that_it_is_at(at: int, done: int, kept: str, rest: int) -> None:
    job = sent(at)
    finished, untouched = job.take_back()
    assert ([len(finished), len(untouched)], [each.vm.pod_uid for each in job.dues]) == ([done, rest], [kept])
    assert all(layer.worker is None for each in (*finished, *untouched) for layer in each.layers)
    assert all(layer.worker == IDENTITY for each in job.dues for layer in each.layers)
    assert cast("Job", job.job).bounds[-1] == 2 * (done + 1)


def test_a_worker_that_had_just_gone_on_keeps_what_it_has_begun() -> None:
    """It is at the first VM when it is asked, and has begun the second before the bound was there to be seen."""
    job = sent(1, 2)
    finished, untouched = job.take_back()
    assert [each.vm.pod_uid for each in (*finished, *job.dues, *untouched)] == [POD, OTHER, LAST]
    assert [each.vm.pod_uid for each in job.dues] == [OTHER]
    assert cast("Job", job.job).bounds == [2, 4]
