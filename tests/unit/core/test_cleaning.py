"""Many VMs at once, on a simulated kernel: each has its turn, is told of once, and waits for no bad one."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostd.config import Config
from hostd.core import passes, turns
from hostd.core.keeper import Keeper
from hostd.core.model import VM, LayerState, State
from hostd.core.mounts import NodeMounts
from hostd.core.service import VMExited, VMReleased
from hostd.linux.pidfd import End
from tests.support.simulation import Hostd, Kernel, Task, target_of

NAMES = [b"hotplug-disks/%d.img" % number for number in range(3)]
#: More than a worker gets at a time.
MANY = turns._TOGETHER + 8


class Crowd:
    """VMs of three layers, all running, and their hostd."""

    def __init__(self, kernel: Kernel, directory: str) -> None:
        self.kernel = kernel
        self.pods = [str(uuid.UUID(int=number + 1)) for number in range(MANY)]
        self.qemus = [self._vm(pod_uid) for pod_uid in self.pods]
        kernel.directories.discard("")
        self.hostd = Hostd(kernel, directory, Config())
        self.hostd.until_ready()
        self.hostd.advance(5)
        self.hostd.events.clear()

    def _vm(self, pod_uid: str) -> Task:
        for name in NAMES:
            self.kernel.mount(target_of(pod_uid, name))
        return self.kernel.qemu(pod_uid)

    def die(self) -> None:
        for qemu in self.qemus:
            self.kernel.die(qemu, End(signal=9))

    def known(self, pod_uid: str) -> VM:
        return self.hostd.keeper.registry[pod_uid]

    def told(self, kind: type[VMExited | VMReleased]) -> Counter[str]:
        return Counter(event.vm.pod_uid for event in self.hostd.events if isinstance(event, kind))


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with Kernel() as kernel:
        made = Crowd(kernel, str(tmp_path))
        yield made
        assert kernel.violations == []
        made.hostd.kill()


def test_each_is_told_of_once_and_saved_a_few_times(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: Counter[str] = Counter()
    save = crowd.hostd.store.save

    def counted(vm: VM, plain: dict[str, Any] | None = None) -> None:
        saves[vm.pod_uid] += 1
        save(vm, plain)

    monkeypatch.setattr(crowd.hostd.store, "save", counted)
    crowd.die()
    crowd.hostd.advance(5)
    assert crowd.kernel.mounts == []
    once = dict.fromkeys(crowd.pods, 1)
    assert crowd.told(VMExited) == once
    assert crowd.told(VMReleased) == once
    assert max(saves.values()) <= 3
    assert all(crowd.known(pod).exit.signal == 9 for pod in crowd.pods)


def test_nothing_is_said_before_all_umounts_were_sent(crowd: Crowd) -> None:
    crowd.die()
    while crowd.kernel.mounts:
        crowd.hostd.advance(0.001)
        if crowd.hostd.events:
            assert not crowd.hostd.keeper.cleaning.crowded
    assert crowd.kernel.mounts == []


def test_the_mount_table_is_looked_at_when_no_umounts_wait(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look would take a processor from them."""
    whole = NodeMounts._look
    busy: list[bool] = []

    def look(mounts: NodeMounts) -> set[str]:
        busy.append(crowd.hostd.keeper.cleaning.busy)
        return whole(mounts)

    monkeypatch.setattr(NodeMounts, "_look", look)
    crowd.die()
    crowd.hostd.advance(5)
    assert crowd.kernel.mounts == []
    assert busy, "it was looked at"
    assert not any(busy)


def test_what_takes_long_to_look_at_is_sent_before_it_is_old(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of thousands of processes, say: a look at many of them would be too old for all."""
    whole = Keeper.see_due
    looked_at: list[int] = []

    def slow(keeper: Keeper, vm: VM, now: int) -> passes.Due | None:
        crowd.kernel.now += 60_000
        looked_at.append(now)
        return whole(keeper, vm, now)

    monkeypatch.setattr(Keeper, "see_due", slow)
    crowd.die()
    crowd.hostd.advance(60)
    assert crowd.kernel.mounts == []
    assert max(Counter(looked_at).values()) == 2
    assert len(looked_at) == len(crowd.pods) - 1, "each once, but for the first, which did not wait"


@pytest.mark.parametrize("left", [False, True])
def test_those_behind_one_that_hangs_do_not_wait_for_it(crowd: Crowd, left: bool) -> None:
    """Also those that the same worker had in the same job, before it and behind."""
    bad = crowd.pods[5]
    crowd.kernel.hang(target_of(bad, NAMES[1]), left=left)
    crowd.die()
    crowd.hostd.advance(1)
    others = [pod for pod in crowd.pods if pod != bad]
    assert {crowd.known(pod).state for pod in others} == {State.RELEASED}
    crowd.hostd.advance(5)
    assert crowd.known(bad).layers[target_of(bad, NAMES[1])].state is LayerState.HUNG
    assert crowd.told(VMReleased) == dict.fromkeys(others, 1)
    crowd.kernel.unhang(target_of(bad, NAMES[1]))
    crowd.hostd.advance(5)
    assert crowd.told(VMReleased) == dict.fromkeys(crowd.pods, 1)


def test_a_hostd_that_is_killed_in_the_middle_leaves_no_lie(crowd: Crowd, tmp_path: Path) -> None:
    """Whatever it had sent, saved and told by then, the next one knows what is gone and what hangs."""
    bad = target_of(crowd.pods[3], NAMES[0])
    crowd.kernel.hang(bad, left=True)
    crowd.die()
    crowd.hostd.advance(0.02)
    crowd.hostd.kill()
    crowd.hostd = Hostd(crowd.kernel, str(tmp_path), Config())
    crowd.hostd.until_ready()
    crowd.hostd.advance(5)
    assert crowd.known(crowd.pods[3]).layers[bad].state is LayerState.HUNG
    assert all(crowd.known(pod).state is State.RELEASED for pod in crowd.pods if pod != crowd.pods[3])
    assert all(len(crowd.known(pod).layers) == len(NAMES) for pod in crowd.pods)
    crowd.kernel.unhang(bad)
    crowd.hostd.advance(5)
    assert crowd.known(crowd.pods[3]).state is State.RELEASED


def test_what_cannot_be_sent_is_tried_again(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours costs a moment, and strands nobody."""

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(passes, "send", fail)
        crowd.die()
        crowd.hostd.advance(1)
        assert len(crowd.kernel.mounts) == MANY * len(NAMES)
    crowd.kernel.violations.clear()  # they are logged
    crowd.hostd.advance(10)
    assert crowd.kernel.mounts == []
    assert crowd.told(VMReleased) == dict.fromkeys(crowd.pods, 1)


def test_after_its_end_nothing_is_begun(crowd: Crowd) -> None:
    """What is told of at the end may be looked at once more, with a worker idle."""
    mounts = list(crowd.kernel.mounts)
    crowd.hostd.keeper.cleaning.close()
    crowd.die()
    crowd.hostd.advance(1)
    assert (crowd.hostd.pool.jobs, crowd.kernel.mounts) == (0, mounts)
