"""What a sight of a pod changes in the model."""

from __future__ import annotations

import pytest

from hostd.core import transitions
from hostd.core.decision import NEVER, RETRY
from hostd.core.model import ExitReason, Holder, LayerState
from hostd.core.pod_mounts import PodMounts
from hostd.kubevirt.targets import Target
from hostd.linux.mount_table import Mount
from hostd.linux.pidfd import End, Identity
from tests.support.core import a_layer, a_target, a_vm

NOW = 1_000_000_000
BLOCK = b"hotplug-disks/block"
BACKUP = Holder(7, "backup", "open", "")


def row(target: Target, number: int = 30, device: str = "0:50", root: bytes = b"/disk") -> Mount:
    return Mount(number, 21, device, root, target.path, b"tmpfs", b"tmpfs", 0, 0)


def seen(*stacks: tuple[Target, list[Mount]]) -> PodMounts:
    return PodMounts({target.path: (target, stack) for target, stack in stacks})


NOTHING = seen()
DISK = a_target()


def test_a_new_mount_is_a_layer() -> None:
    vm = a_vm()
    transitions.see_mounts(vm, seen((DISK, [row(DISK), row(DISK, 31, "0:51")])), NOW)
    layer = vm.layers[DISK.path]
    assert (layer.state, layer.seen_at, layer.source) == (LayerState.MOUNTED, NOW, ("0:51", b"/disk"))


def test_what_the_agent_takes_from_a_living_vm_is_forgotten() -> None:
    vm = a_vm(a_layer())
    transitions.see_mounts(vm, NOTHING, NOW)
    assert vm.layers == {}


def test_what_an_agent_named_stays_listed_though_it_is_not_mounted_yet() -> None:
    vm = a_vm(a_layer(tracked=True, source=("", b"")))
    transitions.see_mounts(vm, NOTHING, NOW)
    assert vm.layers[DISK.path].state is LayerState.MOUNTED


def test_what_leaves_the_table_of_a_dead_vm_is_detached_until_somebody_looked_who_pins_it() -> None:
    layer = a_layer(state=LayerState.BUSY, errno=16, error="busy", retry_at=NOW * 2, attempts=3)
    vm = a_vm(layer, exited_at=NOW)
    transitions.see_mounts(vm, NOTHING, NOW)
    assert (layer.state, layer.errno, layer.error, layer.retry_at) == (LayerState.DETACHED, 0, "", 0)


@pytest.mark.parametrize("state", [LayerState.GONE, LayerState.HUNG])
def test_what_is_gone_or_hung_stays_so(state: LayerState) -> None:
    layer = a_layer(state=state)
    transitions.see_mounts(a_vm(layer, exited_at=NOW), NOTHING, NOW)
    assert layer.state is state


def test_what_leaves_the_table_while_a_worker_is_at_it_is_that_workers_to_tell() -> None:
    """An umount that hangs leaves the table first."""
    layer = a_layer(worker=Identity(7, 8, "boot"))
    transitions.see_mounts(a_vm(layer, exited_at=NOW), NOTHING, NOW)
    assert (layer.state, layer.worker) == (LayerState.MOUNTED, Identity(7, 8, "boot"))


@pytest.mark.parametrize("state", [LayerState.GONE, LayerState.DETACHED])
def test_what_comes_back_was_mounted_by_another_and_waits_longer_each_time(state: LayerState) -> None:
    layer = a_layer(state=state, holders=(BACKUP,))
    vm = a_vm(layer, exited_at=NOW)
    waits = []
    for _ in range(12):
        layer.state = state
        transitions.see_mounts(vm, seen((DISK, [row(DISK)])), NOW)
        assert (layer.state, layer.error, layer.holders) == (LayerState.MOUNTED, transitions.REMOUNTED, ())
        waits.append(layer.retry_at - NOW)
    assert layer.remounts == 12
    assert waits == sorted(waits)
    assert waits[0] >= 1_000_000
    assert waits[-1] == RETRY[-1]


def test_a_changed_source_of_a_living_vm_is_said_and_no_death() -> None:
    layer = a_layer()
    vm = a_vm(layer)
    transitions.see_mounts(vm, seen((DISK, [row(DISK, device="0:77")])), NOW)
    assert (layer.state, layer.source) == (LayerState.MOUNTED, ("0:77", b"/disk"))
    assert layer.error.startswith("source changed: 0:77")


def test_each_refusal_counts_and_waits_longer() -> None:
    layer = a_layer()
    for attempt, pause in enumerate(RETRY, 1):
        transitions.see_busy(layer, 16, "busy", NOW)
        assert (layer.attempts, layer.retry_at - NOW) == (attempt, pause)
    assert (layer.state, layer.errno, layer.error) == (LayerState.BUSY, 16, "busy")


def test_a_hung_layer_names_its_worker_and_waits_for_it() -> None:
    layer, worker = a_layer(), Identity(9, 1, "boot")
    transitions.see_hung(layer, worker, "it hangs")
    assert (layer.state, layer.worker, layer.error, layer.retry_at) == (LayerState.HUNG, worker, "it hangs", NEVER)


def test_gone_is_gone_since_it_was_first_seen_so() -> None:
    layer = a_layer(state=LayerState.BUSY, errno=16, error="busy", holders=(BACKUP,))
    transitions.see_gone(layer, NOW)
    transitions.see_gone(layer, NOW + 5)
    assert (layer.state, layer.gone_at, layer.errno, layer.error, layer.holders) == (LayerState.GONE, NOW, 0, "", ())


def test_holders_are_named_four_and_the_number_of_the_rest() -> None:
    layer = a_layer(state=LayerState.BUSY, error="busy")
    transitions.see_holders(layer, (), NOW)
    assert layer.error == "busy"
    transitions.see_holders(layer, [Holder(pid, "tar", "open", "") for pid in range(1, 8)], NOW)
    assert layer.error == "held by tar[1] (open), tar[2] (open), tar[3] (open), tar[4] (open) and 3 more"
    assert (len(layer.holders), layer.held_at) == (7, NOW)


def test_a_pinned_layer_is_detached_and_says_by_whom() -> None:
    layer = a_layer(state=LayerState.DETACHED)
    transitions.see_pinned(layer, [BACKUP], NOW)
    assert (layer.state, layer.error) == (LayerState.DETACHED, "still pinned by backup[7] (open)")
    assert layer.retry_at > NOW


def test_what_pins_a_detached_mount_pins_it_also_after_another_was_mounted() -> None:
    layer = a_layer(state=LayerState.DETACHED, mount_ids=(7, 8), gone_at=NOW)
    transitions.see_pinned(layer, [BACKUP], NOW)
    vm, path = a_vm(layer, exited_at=NOW - 5), layer.target.path
    for _ in range(2):
        transitions.see_mounts(vm, seen((layer.target, [row(layer.target)])), NOW + 1)
    assert (layer.state, layer.pinned_ids) == (LayerState.MOUNTED, (7, 8))
    assert not {7, 8} & set(layer.mount_ids)
    transitions.see_unmounted(vm.layers[path], NOW + 2)
    assert layer.pinned_ids == (7, 8)
    transitions.see_gone(layer, NOW + 3)
    assert not layer.pinned_ids


def test_a_pinned_layer_stays_through_another_life_of_its_vm() -> None:
    pinned, plain = a_layer(state=LayerState.DETACHED), a_layer(b"hotplug-disks/data.img", state=LayerState.DETACHED)
    transitions.see_pinned(pinned, [BACKUP], NOW)
    vm = a_vm(pinned, plain)
    transitions.see_mounts(vm, NOTHING, NOW)
    assert list(vm.layers) == [pinned.target.path]
    assert pinned.error


def test_a_vm_that_lives_again_has_no_busy_layers() -> None:
    busy = a_layer(state=LayerState.BUSY, errno=16, error="busy", holders=(BACKUP,), attempts=5, retry_at=NOW)
    hung = a_layer(state=LayerState.HUNG, error="it hangs")
    for layer in (busy, hung):
        transitions.see_wanted(layer)
    assert (busy.state, busy.errno, busy.error, busy.holders, busy.attempts) == (LayerState.MOUNTED, 0, "", (), 0)
    assert (hung.state, hung.error) == (LayerState.HUNG, "it hangs")


def test_device_nodes_are_what_their_directory_says() -> None:
    vm = a_vm()
    node = a_target(BLOCK, block=True)
    transitions.see_block_nodes(vm, [node], NOW)
    assert vm.layers[node.path].state is LayerState.MOUNTED
    transitions.see_mounts(vm, NOTHING, NOW)
    assert node.path in vm.layers, "a node is no mount, so the table says nothing of it"
    transitions.see_block_nodes(vm, [], NOW)
    assert vm.layers == {}
    transitions.see_block_nodes(vm, [node], NOW)
    vm.exited_at = NOW
    transitions.see_block_nodes(vm, [], NOW)
    assert vm.layers[node.path].state is LayerState.GONE
    transitions.see_block_nodes(vm, [node], NOW)
    assert (vm.layers[node.path].state, vm.layers[node.path].remounts) == (LayerState.MOUNTED, 1)


@pytest.mark.parametrize(
    ("end", "oom", "expected"),
    [
        (None, False, (-1, -1, ExitReason.UNKNOWN)),
        (End(), True, (-1, -1, ExitReason.UNKNOWN)),
        (End(status=0), False, (0, -1, ExitReason.POWEROFF)),
        (End(status=1), False, (1, -1, ExitReason.ERROR)),
        (End(signal=9), False, (-1, 9, ExitReason.SIGNAL)),
        (End(signal=9), True, (-1, 9, ExitReason.OOM)),
        (End(signal=11), True, (-1, 11, ExitReason.SIGNAL)),
    ],
)
def test_why_a_qemu_ended(end: End | None, oom: bool, expected: tuple[int, int, ExitReason]) -> None:
    found = transitions.exit_of(end, oom=oom)
    assert (found.status, found.signal, found.reason) == expected


def test_of_many_holders_those_are_kept_that_forbid_to_detach_the_layer() -> None:
    layer = a_layer(state=LayerState.BUSY)
    many = [Holder(pid, "cat", "open", "") for pid in range(1, 10_000)]
    qemu, mount = Holder(10_000, "qemu-kvm", "open", ""), Holder(0, "/below", "mount", "")
    transitions.see_holders(layer, [*many, qemu, mount], NOW)
    assert len(layer.holders) < 100
    assert {qemu, mount} <= set(layer.holders)
    assert "9997 more" in layer.error


def test_a_table_read_before_the_umount_does_not_show_a_remount() -> None:
    layer = a_layer(state=LayerState.DETACHED, source=("0:50", b"/disk"), gone_at=NOW)
    vm = a_vm(layer, exited_at=NOW - 5)
    stale, path = seen((layer.target, [row(layer.target)])), layer.target.path
    transitions.see_mounts(vm, stale, NOW + 3, read_at=NOW - 1)
    assert (vm.layers[path].state, vm.layers[path].remounts) == (LayerState.DETACHED, 0)
    transitions.see_mounts(vm, stale, NOW + 3, read_at=NOW + 1)
    assert (vm.layers[path].state, vm.layers[path].remounts) == (LayerState.MOUNTED, 1)
