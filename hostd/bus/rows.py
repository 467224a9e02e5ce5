"""What the core knows, as the rows and values of the bus. Structs are lists: dbus-next takes no tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostd.bus import names
from hostd.bus.text import escape, escape_name, sentence

if TYPE_CHECKING:
    from hostd.core.model import VM, Holder, Layer
    from hostd.core.service import ReleaseRow, SweepRow

#: GraceUSec of a VM that has none of its own: the configuration's holds.
AS_CONFIGURED = 2**64 - 1
#: A test holds these to the model's own words.
LAYER_KINDS = ("containerdisk", "kernel-boot", "hotplug-file", "hotplug-directory", "hotplug-block")
_UINT32 = 2**32


def leader_pid(vm: VM) -> int:
    """The leader's process id as a D-Bus `u`; 0 where none was seen, or where a pidfd outlived its number."""
    pid = vm.leader.pid if vm.leader is not None else 0
    return pid if 0 < pid < _UINT32 else 0


def vm_row(vm: VM) -> list[Any]:
    """`sssssuo` of ListVMs."""
    return [
        vm.pod_uid,
        sentence(vm.vmi_uid),
        sentence(vm.namespace),
        sentence(vm.name),
        vm.state.value,
        leader_pid(vm),
        names.vm_path(vm.pod_uid),
    ]


def layer_row(vm: VM, layer: Layer) -> list[Any]:
    """`ssssssu` of ListLayers."""
    return [vm.pod_uid, *layer_of_vm(layer), layer.attempts]


def layer_of_vm(layer: Layer) -> list[str]:
    """`sssss` of VM.Layers."""
    target = layer.target
    return [
        escape(target.path),
        target.kind.value,
        escape_name(target.volume),
        layer.state.value,
        sentence(layer.error),
    ]


def holder_row(holder: Holder) -> list[Any]:
    """`usss` of ListHolders."""
    return [max(holder.pid, 0), sentence(holder.name), sentence(holder.how), holder.pod_uid]


def release_row(row: ReleaseRow) -> list[str]:
    """`sss` of Release."""
    return [escape(row.target), sentence(row.action), sentence(row.result)]


def sweep_row(row: SweepRow) -> list[str]:
    """`ssss` of Sweep."""
    return [row.pod_uid, escape(row.target), sentence(row.action), sentence(row.result)]
