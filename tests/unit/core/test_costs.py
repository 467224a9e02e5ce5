"""What a death costs, in counts: the same however many other VMs there are, and where the kernel tells which mounts
change, however many other mounts."""

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
from hostd.linux.mount_table import Mount
from hostd.linux.pidfd import End
from tests.support.simulation import Hostd, Kernel, SimMountRows, Task, target_of


@dataclass(frozen=True)
class Cost:
    """What one death took."""

    saves: int
    reads: int
    whole_reads: int
    #: Rows of the mount table that were asked for one by one.
    rows: int
    turns: int
    events: tuple[tuple[str, int], ...]


def of_a_death(
    directory: Path, others: int, monkeypatch: pytest.MonkeyPatch, *, mount_events: bool = True, foreign: int = 0
) -> Cost:
    """Kills one VM of three layers among so many others, and counts until hostd says that it is released."""
    with Kernel() as kernel:
        qemus = [_vm(kernel) for _ in range(others + 1)]
        for number in range(foreign):
            kernel.mount(b"/foreign/%d" % number)
        kernel.directories.discard("")
        hostd = Hostd(kernel, str(directory), Config(), mount_events=mount_events)
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
        reads, whole_reads = hostd.keeper.mounts.reads, hostd.keeper.mounts.whole_reads
        row, rows = SimMountRows.row, []

        def counted_row(self: SimMountRows, number: int, *naming: bytes) -> Mount | None:
            rows.append(number)
            return row(self, number, *naming)

        monkeypatch.setattr(SimMountRows, "row", counted_row)
        kernel.die(qemus[0], End(signal=9))
        turns = hostd.advance(1)
        assert sum(isinstance(event, VMReleased) for event in hostd.events) == 1
        told = Counter(type(event).__name__ for event in hostd.events)
        monkeypatch.setattr(SimMountRows, "row", row)
        reads, whole_reads = hostd.keeper.mounts.reads - reads, hostd.keeper.mounts.whole_reads - whole_reads
        cost = Cost(len(saves), reads, whole_reads, len(rows), turns, tuple(sorted(told.items())))
        hostd.stop()
        assert kernel.violations == []
    return cost


def _vm(kernel: Kernel) -> Task:
    pod_uid = str(uuid.uuid4())
    for number in range(3):
        kernel.mount(target_of(pod_uid, b"hotplug-disks/disk-%d.img" % number))
    return kernel.qemu(pod_uid)


@pytest.mark.parametrize("mount_events", [True, False])
def test_it_does_not_grow_with_other_vms(mount_events: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = of_a_death(tmp_path / "alone", 0, monkeypatch, mount_events=mount_events)
    assert of_a_death(tmp_path / "crowd", 60, monkeypatch, mount_events=mount_events) == alone


def test_it_does_not_grow_with_foreign_mounts_where_the_kernel_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = of_a_death(tmp_path / "few", 3, monkeypatch)
    assert of_a_death(tmp_path / "many", 3, monkeypatch, foreign=500) == few
    assert few.whole_reads == 0
    # Each layer when it went, and at most once more.
    assert 3 <= few.rows <= 6


@pytest.mark.parametrize("mount_events", [True, False])
def test_it_is_a_few_saves_and_one_read_of_the_table(
    mount_events: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = of_a_death(tmp_path, 3, monkeypatch, mount_events=mount_events)
    # That it is dead and who unmounts what; what came of it; that it is released.
    assert cost.saves <= 3
    assert cost.reads <= 2
    assert dict(cost.events)[VMChanged.__name__] <= 3
