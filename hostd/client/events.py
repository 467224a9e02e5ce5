"""What `Node.watch` tells.

Each of the VM events carries the VM as it is after it. `Resync` comes first and after every gap: whoever acts on it as
on everything at once, and on the others as they come, misses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostd.client.model import VM, Helper, Status


@dataclass(frozen=True, slots=True)
class Resync:
    """How everything is now: at the start, and after a gap. `reason`: start, bus, hostd (which is new), overflow."""

    reason: str
    vms: tuple[VM, ...]
    status: Status
    helper: Helper


@dataclass(frozen=True, slots=True)
class Lost:
    """`what` (bus, hostd) is gone; it is waited for. A Resync follows when it is back."""

    what: str


@dataclass(frozen=True, slots=True)
class VMNew:
    """A VM is known from now on."""

    vm: VM


@dataclass(frozen=True, slots=True)
class VMChanged:
    """Fields of a VM have new values; `changed` names them."""

    vm: VM
    changed: frozenset[str]


@dataclass(frozen=True, slots=True)
class VMExited:
    """The last QEMU of a VM died. `status` and `signal` are -1 where unknown or not so."""

    vm: VM
    status: int
    signal: int
    reason: str


@dataclass(frozen=True, slots=True)
class VMReleased:
    """Every layer of a VM is gone. `elapsed_usec`: since the death was seen; 0: unknown."""

    vm: VM
    layers: int
    elapsed_usec: int


@dataclass(frozen=True, slots=True)
class VMRemoved:
    """A VM is forgotten."""

    vm: VM


@dataclass(frozen=True, slots=True)
class LayerBlocked:
    """A layer cannot be unmounted; told once, and again when the reason changes."""

    vm: VM
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceConflict:
    """A device is used against its claim, or is not the one that was claimed; `vm` (namespace/name) is the claim's."""

    device: str
    vm: str
    reason: str


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """Mode or health of hostd changed; the counts in `status` are those of the last Resync."""

    status: Status
    changed: frozenset[str]


@dataclass(frozen=True, slots=True)
class HelperChanged:
    """Something about qemu-pr-helper changed."""

    helper: Helper
    changed: frozenset[str]


Event = (
    Resync
    | Lost
    | VMNew
    | VMChanged
    | VMExited
    | VMReleased
    | VMRemoved
    | LayerBlocked
    | DeviceConflict
    | StatusChanged
    | HelperChanged
)
