"""hostd for programs: what `hostctl` and a node agent written in Python use. asyncio, over hostd's own D-Bus adapter.

    import hostd.client as hostd

    async with hostd.connect() as node:
        for vm in await node.list(state="blocked"):
            for layer in vm.unreleased:
                print(vm, layer.target, *await node.holders(vm.pod_uid, layer.target))

    async for event in node.watch():        # survives the bus and the daemon restarting
        match event:
            case hostd.Resync(vms=vms): ...                 # first, and after each gap: how all of it is now
            case hostd.VMExited(vm=vm): ...
            case hostd.Lost(what=what): ...

    async with node.inhibit(vm.pod_uid, who="backup", why="reads the disk"):
        ...

`connect` raises `Unreachable` where there is no bus. Every call raises the errors of `hostd.errors`, by the name that
the daemon gave, and `Unreachable` where nobody answered. A path is text as on the bus: bytes that are no UTF-8, control
characters and backslashes are `\\xNN`; `Layer.path` has the bytes.
"""

from __future__ import annotations

from hostd.client.events import (
    DeviceConflict,
    Event,
    HelperChanged,
    LayerBlocked,
    Lost,
    Resync,
    StatusChanged,
    VMChanged,
    VMExited,
    VMNew,
    VMReleased,
    VMRemoved,
)
from hostd.client.failures import Unreachable
from hostd.client.model import VM, Device, Helper, Holder, Inhibitor, Layer, ReleaseRow, Status, SweepRow
from hostd.client.node import Node, connect
from hostd.core.model import ExitReason, LayerState, Policy, State

__all__ = [
    "VM",
    "Device",
    "DeviceConflict",
    "Event",
    "ExitReason",
    "Helper",
    "HelperChanged",
    "Holder",
    "Inhibitor",
    "Layer",
    "LayerBlocked",
    "LayerState",
    "Lost",
    "Node",
    "Policy",
    "ReleaseRow",
    "Resync",
    "State",
    "Status",
    "StatusChanged",
    "SweepRow",
    "Unreachable",
    "VMChanged",
    "VMExited",
    "VMNew",
    "VMReleased",
    "VMRemoved",
    "connect",
]
