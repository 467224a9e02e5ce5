"""The keeper on a simulated kernel: what it makes of faults, its own and others', one at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from hostd.config import Config
from hostd.core import start
from hostd.core.decision import Decision
from hostd.core.keeper import Keeper
from hostd.core.model import VM, Exit, ExitReason, LayerState, Policy, State
from hostd.core.service import Event, VMExited, VMReleased
from hostd.linux.holders import Held, Wanted
from hostd.linux.pidfd import End
from hostd.linux.pool import Hung
from tests.support.core import OTHER, POD
from tests.support.simulation import Hostd, Kernel, SimPool, SimProcess, Task, target_of

DISK = b"container-disks/disk_0.img"
#: Longer than grace and settle, and than any retry.
LONG = 60.0


class Bench:
    """A kernel and a hostd on it."""

    def __init__(self, kernel: Kernel, directory: str) -> None:
        self.kernel = kernel
        self._directory = directory
        self.config = Config()
        self.hostd: Hostd | None = None

    def vm(self, pod_uid: str = POD, *names: bytes) -> Task:
        """A VM with these targets mounted, or a containerDisk's."""
        for name in names or (DISK,):
            self.kernel.mount(target_of(pod_uid, name))
        return self.kernel.qemu(pod_uid)

    def start(self) -> Hostd:
        self.hostd = Hostd(self.kernel, self._directory, self.config)
        self.hostd.until_ready()
        self.hostd.advance(0.5)
        return self.hostd

    def known(self, pod_uid: str = POD) -> VM:
        assert self.hostd is not None
        return self.hostd.keeper.registry[pod_uid]

    def mounted(self, pod_uid: str = POD) -> list[bytes]:
        return [mount.target for mount in self.kernel.mounts if pod_uid.encode() in mount.target]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Kernel() as kernel:
        made = Bench(kernel, str(tmp_path))
        yield made
        if made.hostd is not None:
            made.hostd.kill()


def no_descriptor(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def failing_for(pod_uid: str, whole: Callable[[Keeper, VM], Decision]) -> Callable[[Keeper, VM], Decision]:
    def decide(keeper: Keeper, vm: VM) -> Decision:
        if vm.pod_uid == pod_uid:
            raise RuntimeError("a fault of ours")
        return whole(keeper, vm)

    return decide


def lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_a_death_of_which_nothing_can_be_told_is_a_death(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left to read with, and the notice of the death comes only once."""
    qemu = bench.vm()
    hostd = bench.start()
    monkeypatch.setattr(SimProcess, "end", no_descriptor)
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED
    assert bench.mounted() == []


@pytest.mark.parametrize("who", ["registry", "pool"])
def test_what_needs_a_descriptor_may_have_one_that_only_makes_things_quicker(bench: Bench, who: str) -> None:
    bench.vm()
    keeper = bench.start().keeper
    assert getattr(keeper, who).relieve == keeper.qemus.relieve


def test_a_fault_at_one_vm_delays_no_other_and_passes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, good = bench.vm(POD), bench.vm(OTHER)
    hostd = bench.start()
    with monkeypatch.context() as patched:
        patched.setattr(Keeper, "decide", failing_for(POD, Keeper.decide))
        bench.kernel.die(faulty, End(signal=9))
        bench.kernel.die(good, End(signal=9))
        hostd.advance(1)
        hostd.loop.call_soon(hostd.keeper.wake_all)
        hostd.advance(LONG)
        assert bench.known(OTHER).state is State.RELEASED
        assert bench.mounted(POD)
    hostd.advance(LONG)
    assert bench.known(POD).state is State.RELEASED


def test_a_pod_that_cannot_be_taken_up_does_not_keep_hostd_from_starting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = bench.vm(OTHER)
    bench.vm(POD)
    whole = start._take_up

    async def take_up(keeper: Keeper, pod_uid: str, *more: object) -> None:
        if pod_uid == POD:
            no_descriptor()
        await whole(keeper, pod_uid, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(start, "_take_up", take_up)
    hostd = bench.start()
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(LONG)
    assert bench.known(OTHER).state is State.RELEASED


def test_what_a_sweep_sees_first_is_not_kept_from_the_vm(bench: Bench) -> None:
    """The change was read by the sweep, so the table's own watch finds nothing new."""
    qemu = bench.vm()
    hostd = bench.start()
    hostd.loop.run_until_complete(hostd.requests.set_policy(POD, Policy.KEEP))
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(1)
    assert bench.known().state is State.HELD
    bench.kernel.lateness = 10_000_000
    bench.kernel.umount(target_of(POD, DISK))
    hostd.loop.run_until_complete(hostd.requests.sweep(dry_run=True))
    hostd.advance(1)
    assert bench.known().state is State.RELEASED


def test_what_a_sweep_that_fails_saw_first_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a VM that is known, nor for a pod that is not."""
    qemu = bench.vm()
    hostd = bench.start()
    hostd.loop.run_until_complete(hostd.requests.set_policy(POD, Policy.KEEP))
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(1)
    bench.kernel.lateness = 10_000_000
    bench.kernel.umount(target_of(POD, DISK))
    bench.kernel.mount(target_of(OTHER, DISK))
    monkeypatch.setattr(start, "qemu_pids_by_pod", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        hostd.loop.run_until_complete(hostd.requests.sweep(dry_run=False))
    hostd.advance(1)
    assert bench.known().state is State.RELEASED
    assert bench.known(OTHER).layers


def test_released_is_said_though_nothing_is_retained(bench: Bench) -> None:
    bench.config = replace(bench.config, cleanup=replace(bench.config.cleanup, retain_usec=0))
    qemu = bench.kernel.qemu(POD)
    hostd = bench.start()
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(LONG)
    assert sum(isinstance(event, VMReleased) for event in hostd.events) == 1
    assert hostd.keeper.registry.get(POD) is None


def test_a_directory_that_cannot_be_read_is_named_once_and_released_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unreadable(*_: object) -> list[bytes]:
        raise OSError(errno.EIO, "Input/output error")

    qemu = bench.vm()
    hostd = bench.start()
    with monkeypatch.context() as patched:
        patched.setattr(SimPool, "_list_block_nodes", unreadable)
        bench.kernel.die(qemu, End(signal=9))
        turns = hostd.advance(LONG)
        assert bench.known().state is State.CLEANING
        assert "device nodes" in bench.known().error
        assert lines(caplog, "cannot be looked at") == 2, "the directory once, and the VM that waits for it"
        assert turns < 1000
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED


def test_that_no_worker_is_left_is_said_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    names = [b"hotplug-disks/%d" % number for number in range(4)]
    hanging, others = bench.vm(POD, *names), [bench.vm(OTHER)]
    for number, mount in enumerate(bench.kernel.mounts):
        mount.fstype = b"kind-%d" % number  # of one kind not so many are tried
    hostd = bench.start()
    bench.kernel.hanging.update({target_of(POD, name): True for name in names})
    bench.kernel.die(hanging, End(signal=9))
    hostd.advance(20)
    for each in others:
        bench.kernel.die(each, End(signal=9))
    hostd.advance(LONG)
    assert lines(caplog, "no worker is left") == 1
    assert "hang" in next(iter(bench.known(OTHER).layers.values())).error
    for name in names:
        bench.kernel.unhang(target_of(POD, name))
    hostd.advance(LONG)
    assert bench.known(OTHER).state is State.RELEASED


def test_a_probe_in_the_middle_of_its_exec_is_no_qemu(bench: Bench) -> None:
    """It has a QEMU's name and no arguments yet; taken for the VM's own, its end would be the VM's."""
    bench.kernel.spawn(POD, b"virt-launcher-m")
    bench.kernel.mount(target_of(POD, b"hotplug-disks/dump"))
    hostd = bench.start()
    probe = bench.kernel.spawn(POD, b"qemu-system-x86")
    bench.kernel.at(bench.kernel.now + 100_000, lambda: probe.argv.extend([b"qemu-kvm", b"-machine", b"none"]))
    hostd.loop.call_soon(hostd.keeper.wake, POD)
    hostd.advance(2)
    bench.kernel.die(probe, End(status=0))
    hostd.advance(LONG)
    assert bench.known().state is State.PENDING
    assert bench.mounted()


def test_without_an_answer_who_pins_a_layer_released_is_not_said_at_once(bench: Bench) -> None:
    qemu = bench.vm()
    hostd = bench.start()
    bench.kernel.blind = True
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(5)
    (layer,) = bench.known().layers.values()
    assert (bench.known().state, layer.state) == (State.BLOCKED, LayerState.DETACHED)
    assert "cannot be told" in layer.error
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED
    assert "cannot be told" in layer.error


def test_when_the_leader_dies_another_qemu_stands_for_the_vm(bench: Bench) -> None:
    leader, other = bench.vm(), bench.kernel.qemu(POD)
    hostd = bench.start()
    bench.kernel.die(leader, End(signal=9))
    hostd.advance(1)
    vm = bench.known()
    assert vm.state is State.RUNNING
    assert (vm.leader and vm.leader.pid, vm.exit) == (other.pid, Exit())
    bench.kernel.die(other, End(status=0))
    hostd.advance(LONG)
    assert (vm.state, vm.exit.reason) == (State.RELEASED, ExitReason.POWEROFF)


def test_nothing_is_touched_any_more_once_an_inhibitor_is_taken(bench: Bench) -> None:
    """The worker is at the first of three layers when it is asked for."""
    names = [b"hotplug-disks/%d" % number for number in range(3)]
    qemu = bench.vm(POD, *names)
    hostd = bench.start()
    first = target_of(POD, names[0])
    bench.kernel.hang(first, left=False)
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(0.3)
    bench.kernel.at(bench.kernel.now + 200_000, lambda: bench.kernel.unhang(first))
    fd = hostd.loop.run_until_complete(hostd.requests.inhibit(POD, "test", "wait"))
    left = bench.mounted()
    hostd.advance(LONG)
    os.close(fd)
    assert bench.mounted() == left


def test_a_hung_layer_of_which_nobody_knows_the_worker_is_tried_again_after_a_restart(bench: Bench) -> None:
    qemu = bench.vm()
    hostd = bench.start()
    target = target_of(POD, DISK)
    bench.kernel.hang(target, left=False)
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(5)
    vm = bench.known()
    assert vm.layers[target].state is LayerState.HUNG
    vm.layers[target].worker = None
    hostd.store.save(vm)
    hostd.kill()
    bench.kernel.unhang(target)
    bench.kernel.mount(target) if not bench.mounted() else None
    bench.start().advance(LONG)
    assert bench.known().state is State.RELEASED


def test_a_qemu_that_starts_in_an_acknowledged_pod_is_noticed(bench: Bench) -> None:
    """Its containers run still, and what the new one has is no mount, which would tell of it."""
    qemu = bench.vm()
    launcher = bench.kernel.spawn(POD, b"virt-launcher")
    hostd = bench.start()
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(10)
    assert bench.known().state is State.RELEASED
    hostd.loop.run_until_complete(hostd.requests.unregister(POD))
    hostd.advance(LONG)
    assert hostd.keeper.registry.get(POD) is None
    second = bench.kernel.qemu(POD)
    hostd.advance(LONG)
    assert bench.known().state is State.RUNNING
    bench.kernel.nodes.add(node := target_of(POD, b"hotplug-disks/raw"))
    bench.kernel.die(second, End(signal=9))
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED
    assert node not in bench.kernel.nodes
    bench.kernel.die(launcher, End(status=0))


def test_an_acknowledged_pod_that_ends_is_looked_at_no_more(bench: Bench) -> None:
    qemu = bench.vm()
    launcher = bench.kernel.spawn(POD, b"virt-launcher")
    hostd = bench.start()
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(10)
    hostd.loop.run_until_complete(hostd.requests.unregister(POD))
    bench.kernel.die(launcher, End(status=0))
    hostd.advance(LONG)
    assert hostd.keeper._lingering._timers == {}
    assert hostd.advance(LONG) < 5


def test_the_death_of_what_could_not_be_read_is_not_the_vms(bench: Bench) -> None:
    """Perhaps it was a probe, and the VM is yet to start: while it lives it counts, its end proves nothing."""
    launcher = bench.kernel.spawn(POD, b"virt-launcher")
    bench.kernel.mount(target_of(POD, b"hotplug-disks/dump"))
    unknown = bench.kernel.qemu(POD)
    unknown.mute = True
    hostd = bench.start()
    hostd.advance(LONG)
    assert bench.known().state is State.RUNNING
    bench.kernel.die(unknown, End(signal=9))
    hostd.advance(LONG)
    assert bench.known().state is State.PENDING
    assert bench.mounted()
    bench.kernel.die(launcher, End(status=0))
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED
    assert not bench.mounted()


@pytest.mark.parametrize("restart", [False, True])
def test_what_could_not_be_read_is_asked_again_when_it_can(bench: Bench, restart: bool) -> None:
    bench.kernel.spawn(POD, b"virt-launcher")
    bench.kernel.mount(target_of(POD, b"hotplug-disks/dump"))
    unknown = bench.kernel.qemu(POD)
    unknown.mute = True
    hostd = bench.start()
    hostd.advance(LONG)
    unknown.mute = False
    if restart:
        hostd.kill()
        hostd = bench.start()
    else:
        hostd.loop.call_soon(hostd.pool.tell_unhung, Hung(b"/proc/%d/cmdline" % unknown.pid, 1, 0))
    hostd.advance(LONG)
    assert bench.known().had_qemu
    bench.kernel.die(unknown, End(signal=9))
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED


def test_a_pod_whose_mounts_churn_is_looked_at_once_at_a_time(bench: Bench) -> None:
    """It is no VM's, as far as anybody knows, and each change of its mounts is a reason to ask."""
    hostd = bench.start()
    asked = []

    async def asks(path: bytes) -> list[tuple[bytes, int]]:
        asked.append(path)
        await asyncio.sleep(10)
        return []

    with mock.patch.object(hostd.pool, "_list_directory", asks):
        for _ in range(100):
            hostd.loop.call_soon(hostd.keeper.on_mounts, [OTHER])
            hostd.advance(0.01)
        assert len(asked) == 1
        hostd.advance(LONG)
    assert len(asked) <= 2, "once more, for what came meanwhile"


def test_a_pod_that_cannot_be_looked_at_is_asked_again_once_in_a_while(bench: Bench) -> None:
    hostd = bench.start()
    asked = []

    async def fails(path: bytes) -> list[tuple[bytes, int]]:
        asked.append(path)
        raise OSError(errno.EIO, "Input/output error")

    with mock.patch.object(hostd.pool, "_list_directory", fails):
        for _ in range(20):
            hostd.loop.call_soon(hostd.keeper.on_mounts, [OTHER])
            hostd.advance(0.01)
        asked.clear()
        hostd.advance(LONG)
        assert len(asked) <= LONG / 5 + 1


def test_a_death_is_saved_and_its_umounts_are_on_their_way_before_anybody_is_told(bench: Bench) -> None:
    """Nothing waits for those who listen; and what they hear is what a hostd that is killed now would be told again."""
    qemu = bench.vm()
    hostd = bench.start()
    told: list[tuple[int, State]] = []

    def listen(event: Event) -> None:
        if isinstance(event, VMExited):
            saved, _ = hostd.store.load()
            told.append((hostd.pool.jobs, saved[0].state))

    hostd.told = listen
    assert hostd.pool.jobs == 0
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(1)
    assert told == [(1, State.CLEANING)]
    assert not bench.mounted()


@pytest.mark.parametrize(("kinds", "hang"), [([b"nfs4"], 2), ([b"nfs4", b"ceph"], 3)], ids=["one kind", "two kinds"])
def test_file_systems_that_hang_leave_workers_for_other_kinds(bench: Bench, kinds: list[bytes], hang: int) -> None:
    """Servers are gone, with more volumes than there are workers; those of others go, and their own when they are
    back."""
    names = [b"hotplug-disks/%d" % number for number in range(6)]
    hanging, good = bench.vm(POD, *names), bench.vm(OTHER)
    for number, mount in enumerate(mount for mount in bench.kernel.mounts if POD.encode() in mount.target):
        mount.fstype = kinds[number % len(kinds)]
        bench.kernel.hang(mount.target, left=True)
    hostd = bench.start()
    bench.kernel.die(hanging, End(signal=9))
    hostd.advance(LONG)
    layers = bench.known(POD).layers.values()
    assert sum(layer.state is LayerState.HUNG for layer in layers) == hang
    waiting = [layer for layer in layers if layer.state is LayerState.BUSY]
    assert all(f"umounts of {layer.fstype.decode()} file systems hang" in layer.error for layer in waiting)
    bench.kernel.die(good, End(signal=9))
    hostd.advance(5)
    assert bench.known(OTHER).state is State.RELEASED
    assert hostd.advance(LONG) < 500
    for name in names:
        bench.kernel.unhang(target_of(POD, name))
    hostd.advance(5)
    assert bench.known(POD).state is State.RELEASED


def test_a_sweep_that_does_nothing_leaves_nothing_behind_that_nobody_looks_at(bench: Bench) -> None:
    """What it finds first is followed, and cleaned, as if it had been found in any other way."""
    hostd = bench.start()
    bench.kernel.on_pod = lambda _: None  # nobody tells of the pods
    bench.kernel.qemu(POD)
    bench.kernel.mount(target_of(OTHER, DISK))
    hostd.ask(hostd.requests.sweep(dry_run=True))
    hostd.advance(0.2)
    assert bench.known(POD).state is State.RUNNING
    assert bench.mounted(OTHER)
    hostd.advance(LONG)
    assert not bench.mounted(OTHER)


def test_a_death_in_a_crowd_is_known_by_its_own_time(bench: Bench) -> None:
    """Its VM is looked at when its turn for a worker has come, which is later."""
    pods = [str(uuid.UUID(int=number)) for number in range(1, 101)]
    qemus = [bench.vm(pod_uid, *(b"hotplug-disks/%d.img" % number for number in range(3))) for pod_uid in pods]
    hostd = bench.start()
    hostd.events.clear()
    for qemu in qemus:
        bench.kernel.die(qemu, End(signal=9))
    died_at = bench.kernel.now
    hostd.advance(5)
    vms = [bench.known(pod_uid) for pod_uid in pods]
    assert {vm.state for vm in vms} == {State.RELEASED}
    gone = [max(layer.gone_at for layer in vm.layers.values()) for vm in vms]
    assert max(gone) - min(gone) > 100_000, "a millisecond each, one after the other"
    assert max(vm.exited_at for vm in vms) - died_at < 1_000
    assert max(vm.exited_usec for vm in vms) - min(vm.exited_usec for vm in vms) < 1_000
    told = [event for event in hostd.events if isinstance(event, VMExited)]
    assert len(told) == len(pods)


def test_who_pins_a_layer_is_asked_when_nothing_waits_to_be_unmounted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is a look at all processes, which slows down all umounts beside it."""
    pods = [str(uuid.UUID(int=number)) for number in range(1, 101)]
    qemus = [bench.vm(pod_uid, *(b"hotplug-disks/%d.img" % number for number in range(3))) for pod_uid in pods]
    hostd = bench.start()
    left: list[int] = []
    whole = SimPool._holders

    async def holders(pool: SimPool, wanted: Sequence[Wanted]) -> list[Held]:
        left.append(sum(len(bench.mounted(pod_uid)) for pod_uid in pods))
        return await whole(pool, wanted)

    monkeypatch.setattr(SimPool, "_holders", holders)
    bench.kernel.die(qemus[0], End(signal=9))
    while hostd.keeper.inspector._look is None:
        hostd.advance(0.001)
    for qemu in qemus[1:]:
        bench.kernel.die(qemu, End(signal=9))
    hostd.advance(5)
    assert left
    assert max(left) == 0
    assert {bench.known(pod_uid).state for pod_uid in pods} == {State.RELEASED}


def test_how_a_qemu_ended_is_asked_at_once_where_the_kernel_forgets_it(bench: Bench) -> None:
    """Before Linux 6.15 the answer is gone when the process is reaped; in a crowd, what is told of it comes later."""
    bench.kernel.keeps_exit = False
    pods = [str(uuid.UUID(int=number)) for number in range(1, 101)]
    qemus = [bench.vm(pod_uid) for pod_uid in pods]
    hostd = bench.start()
    for qemu in qemus:
        bench.kernel.die(qemu, End(status=3), reap=False)
    while any(hostd.keeper.qemus.followed(pod_uid) for pod_uid in pods):
        hostd.tick()
    for qemu in qemus:
        bench.kernel.reap(qemu)
    hostd.advance(5)
    assert {bench.known(pod_uid).exit for pod_uid in pods} == {Exit(3, -1, ExitReason.ERROR)}


def test_a_qemu_is_not_followed_for_a_vm_that_was_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent acknowledges a released VM just when a new QEMU in its pod is being asked what it is."""
    first = bench.vm()
    bench.kernel.spawn(POD, b"bash")
    hostd = bench.start()
    bench.kernel.die(first, End(signal=9))
    hostd.advance(LONG)
    whole = SimPool._command_lines

    async def slow(pool: SimPool, pids: Sequence[int]) -> Mapping[int, list[bytes] | None]:
        await asyncio.sleep(1)
        return await whole(pool, pids)

    monkeypatch.setattr(SimPool, "_command_lines", slow)
    second = bench.kernel.qemu(POD)
    hostd.loop.call_soon(hostd.keeper.wake, POD)
    hostd.advance(0.1)
    hostd.loop.run_until_complete(hostd.ask(hostd.requests.unregister(POD)))
    bench.kernel.mount(target_of(POD, DISK))
    hostd.advance(10)
    assert (bench.known().state, len(bench.known().qemus)) == (State.RUNNING, 1)
    hostd.events.clear()
    bench.kernel.die(second, End(signal=9))
    hostd.advance(LONG)
    assert bench.known().state is State.RELEASED
    assert bench.mounted() == []
    assert sum(isinstance(event, VMExited) for event in hostd.events) == 1


def test_released_vms_give_way_to_living_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is bounded; whoever finds no place in it is not followed."""
    monkeypatch.setattr("hostd.core.registry.MOST", 2)
    first, _ = bench.vm(POD), bench.vm(OTHER)
    hostd = bench.start()
    bench.kernel.die(first, End(signal=9))
    hostd.advance(5)
    assert bench.known().state is State.RELEASED
    third = str(uuid.UUID(int=3))
    qemu = bench.vm(third)
    hostd.advance(5)
    assert bench.known(third).state is State.RUNNING
    assert hostd.keeper.registry.get(POD) is None
    bench.kernel.die(qemu, End(signal=9))
    hostd.advance(5)
    assert bench.mounted(third) == []
