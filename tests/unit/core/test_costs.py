"""What a death costs, in counts: the same however many other VMs there are."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hostd.config import Config
from hostd.core.model import VM
from hostd.core.service import VMChanged, VMReleased
from hostd.linux.pidfd import End
from tests.support.simulation import Hostd, Kernel, Task, target_of


@dataclass(frozen=True)
class Cost:
    """What one death took."""

    saves: int
    reads: int
    turns: int
    events: tuple[tuple[str, int], ...]


def of_a_death(directory: Path, others: int, monkeypatch: pytest.MonkeyPatch) -> Cost:
    """Kills one VM of three layers among so many others, and counts until hostd says that it is released."""
    with Kernel() as kernel:
        qemus = [_vm(kernel) for _ in range(others + 1)]
        hostd = Hostd(kernel, str(directory), Config())
        hostd.until_ready()
        hostd.advance(5)
        assert len(list(hostd.requests.vms())) == others + 1
        saves: list[VM] = []
        save = hostd.store.save

        def counted(vm: VM, plain: dict[str, Any] | None = None) -> None:
            saves.append(vm)
            save(vm, plain)

        monkeypatch.setattr(hostd.store, "save", counted)
        hostd.events.clear()
        reads = hostd.keeper.mounts.reads
        kernel.die(qemus[0], End(signal=9))
        turns = hostd.advance(1)
        assert sum(isinstance(event, VMReleased) for event in hostd.events) == 1
        told = Counter(type(event).__name__ for event in hostd.events)
        cost = Cost(len(saves), hostd.keeper.mounts.reads - reads, turns, tuple(sorted(told.items())))
        hostd.stop()
        assert kernel.violations == []
    return cost


def _vm(kernel: Kernel) -> Task:
    pod_uid = str(uuid.uuid4())
    for number in range(3):
        kernel.mount(target_of(pod_uid, b"hotplug-disks/disk-%d.img" % number))
    return kernel.qemu(pod_uid)


def test_it_does_not_grow_with_other_vms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = of_a_death(tmp_path / "alone", 0, monkeypatch)
    assert of_a_death(tmp_path / "crowd", 60, monkeypatch) == alone


def test_it_is_a_few_saves_and_one_read_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = of_a_death(tmp_path, 3, monkeypatch)
    # That it is dead and due; which worker does it; what came of it.
    assert cost.saves <= 4
    assert cost.reads <= 2
    assert dict(cost.events)[VMChanged.__name__] <= 3
