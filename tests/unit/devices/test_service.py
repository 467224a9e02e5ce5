"""The keeper of devices by itself: when it looks, and when it leaves things alone. Whole lives: tests/system."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hostd.bus.protocols import DeviceService
from hostd.config import OnExit
from hostd.core.model import VM, State
from hostd.devices import service
from hostd.devices.claim import Claim, settle
from hostd.devices.claims_store import ClaimsStore
from hostd.devices.service import DeviceKeeper
from hostd.devices.sysfs import Sysfs
from hostd.devices.udev import DeviceEvents
from tests.support.devices import NULL, DevHost, DeviceUser, SysfsTree, ended, vm
from tests.support.wait import eventually

GPU = "pci/0000:3b:00.0"


class Silent(DeviceEvents):
    def start(self) -> None:
        pass


class Counted(Sysfs):
    scans = 0

    def scan(self, wanted: object = ()) -> dict:  # type: ignore[type-arg]
        self.scans += 1
        return super().scan(wanted)  # type: ignore[arg-type]


class Kept:
    """A keeper over a tree with one GPU."""

    def __init__(self, directory: Path) -> None:
        self.tree = SysfsTree(directory / "sys")
        self.tree.pci("0000:3b:00.0", group="12", number=NULL)
        self.sysfs = Counted(self.tree.root)
        self.published: dict[str, tuple[str, ...]] = {}
        listen: Callable[[Callable[[], None]], DeviceEvents] = Silent
        store = ClaimsStore(str(directory / "state"))
        self.keeper = DeviceKeeper(
            store, self.sysfs, lambda: OnExit.RELEASE, self.published.__setitem__, listen=listen, settled=1000
        )

    @property
    def pending(self) -> list[asyncio.TimerHandle]:
        turn = [self.keeper._turn] if self.keeper._turn else []
        return [*turn, *(timer for timers in self.keeper._timers.values() for timer in timers)]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


@pytest.fixture
def host(root: None) -> Iterator[DevHost]:
    with DevHost() as made:
        yield made


def test_it_is_what_the_bus_asks_for(kept: Kept) -> None:
    asked: DeviceService = kept.keeper
    assert asked is kept.keeper


async def test_many_events_are_few_scans(kept: Kept) -> None:
    kept.keeper.start([])
    assert kept.sysfs.scans == 1
    for _ in range(1000):
        kept.keeper._on_device_event()
    await eventually(lambda: kept.sysfs.scans == 2)
    await eventually(lambda: kept.keeper._turn is None)
    assert kept.sysfs.scans == 2
    kept.keeper.close()


async def test_idle_means_no_timer(kept: Kept, host: DevHost) -> None:
    """Once a VM's devices are known, only its settling is waited for, once; afterwards nothing is."""
    kept.keeper._settled = 0.01
    with DeviceUser(host, host.node("vfio/12", NULL)) as user:
        kept.keeper.start([machine := vm("a", user)])
        assert kept.published[machine.pod_uid] == (GPU,)
        await eventually(lambda: all(timer.when() < asyncio.get_running_loop().time() for timer in kept.pending))
        await eventually(lambda: kept.keeper._turn is None)
        kept.keeper.on_vm(ended(machine))
        kept.keeper.on_vm_removed(machine)
        await eventually(lambda: not kept.pending)
    kept.keeper.close()


async def test_where_nothing_can_be_watched_it_is_looked_now_and_then(
    kept: Kept, host: DevHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(touched: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(service, "OpenWatch", none_left)
    monkeypatch.setattr(service, "_BLIND", (0.01, 0.05, 0.2))
    path = host.node("vfio/12", NULL)
    with DeviceUser(host) as user:
        kept.keeper.start([machine := vm("a", user)])
        user.open(path)
        await eventually(lambda: kept.published.get(machine.pod_uid) == (GPU,))
        user.close_file(path)
        # ... and whenever somebody asks.
        assert [row.state for row in kept.keeper.devices()] == ["free"]
        kept.keeper.on_vm(ended(machine))
        assert kept.keeper._blind == set()
    kept.keeper.close()


async def test_a_close_leaves_nothing_behind(kept: Kept, host: DevHost) -> None:
    with DeviceUser(host, host.node("vfio/12", NULL)) as user:
        kept.keeper.start([vm("a", user)])
        await kept.keeper.claim(GPU, "ns/a")
        kept.keeper.close()
        assert all(timer.cancelled() for timer in kept.pending)
        assert kept.keeper._watch is not None
        assert kept.keeper._watch._inotify.fileno() == -1


async def test_a_vm_that_does_not_change_costs_nothing(kept: Kept) -> None:
    kept.keeper.start([])
    machine = VM("7bd7d6c4-0f32-4a34-ae3d-000000000001")
    kept.keeper.on_vm(machine)
    await eventually(lambda: kept.keeper._turn is None)
    kept.keeper.on_vm(machine)
    assert kept.keeper._turn is None
    kept.keeper.on_vm_removed(machine)
    kept.keeper.on_vm_removed(machine)
    await eventually(lambda: kept.keeper._turn is None)
    kept.keeper.close()


async def test_what_a_vm_is_said_to_have_since_an_earlier_hostd_is_corrected(kept: Kept) -> None:
    kept.keeper.start([VM("7bd7d6c4-0f32-4a34-ae3d-000000000001", devices=(GPU,))])
    assert kept.published == {"7bd7d6c4-0f32-4a34-ae3d-000000000001": ()}
    kept.keeper.close()


def machines(count: int, state: State) -> list[VM]:
    """VMs without a device or a claim."""
    name = f"idle-{state}"
    return [VM(f"{name}-{n}", f"vmi-{n}", "ns", f"{name}-{n}", state=state) for n in range(count)]


def steps(action: Callable[[], object]) -> int:
    """How many instructions of hostd.devices run: every turn of a loop counts, and no clock does."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("hostd.devices"):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        action()
    finally:
        sys.settrace(before)
    return count


async def test_what_a_vm_costs_does_not_grow_with_others_that_have_no_devices(tmp_path: Path) -> None:
    def life(keeper: DeviceKeeper) -> Iterator[int]:
        machine = VM("7bd7d6c4-0f32-4a34-ae3d-000000000001", namespace="ns", name="a")
        yield steps(lambda: keeper.on_vm(machine)) + steps(keeper._work)
        yield steps(lambda: keeper.on_vm(ended(machine))) + steps(keeper._work)
        yield steps(lambda: keeper.on_vm_removed(machine)) + steps(keeper._work)
        yield steps(keeper.devices)

    costs = []
    for others in (0, 500):
        keeper = Kept(tmp_path / str(others)).keeper
        keeper.start([vm for state in (State.PENDING, State.RUNNING, State.EXITED) for vm in machines(others, state)])
        await keeper.claim(GPU, "ns/a")
        keeper.devices()
        costs.append(list(life(keeper)))
        keeper.close()
    alone, among = costs
    assert min(alone) > 0
    assert among == alone


async def test_changes_of_vms_are_gathered_and_who_asks_has_the_truth_at_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.keeper.start([])
    await kept.keeper.claim(GPU, "ns/a")
    await eventually(lambda: kept.keeper._turn is None)
    monkeypatch.setattr(service, "_CHANGING", 1000.0)
    settled: list[object] = []

    def counted(*seen: Any) -> dict[str, Claim]:
        settled.append(seen)
        return settle(*seen)

    monkeypatch.setattr(service, "settle", counted)
    machine = VM("7bd7d6c4-0f32-4a34-ae3d-000000000001", namespace="ns", name="a")
    for changed in (machine, *machines(20, State.PENDING), *map(ended, machines(20, State.PENDING))):
        kept.keeper.on_vm(changed)
        await asyncio.sleep(0)
    assert (len(settled), kept.published) == (0, {})
    assert [row.pod_uid for row in kept.keeper.devices()] == [machine.pod_uid]
    assert (len(settled), kept.published) == (1, {machine.pod_uid: (GPU,)})
    kept.keeper.close()
