"""`hostctl list` and `hostctl show`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hostd.core.model import State
from hostd.ctl.names import completions, find_vm
from hostd.ctl.session import FINE, TROUBLE
from hostd.ctl.verdict import is_stuck
from hostd.ctl.words import age, clock, ending, state_cell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from hostd.client.model import VM
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Cell, Screen
    from hostd.ctl.session import Session

#: Characters of a pod UID on a terminal.
_SHORT_UID = 8


def add(commands: Commands) -> None:
    """Declares them."""
    parser = commands.add("list", run_list, "List the VMs of this node: one line for each launcher pod.")
    parser.add_argument("--state", choices=[state.value for state in State], help="only VMs in this state")
    parser.add_argument("-n", "--namespace", default="", metavar="NAMESPACE", help="only VMs of this namespace")
    parser.add_argument("--names", action="store_true", help="only what each can be called, for scripts and shells")
    show_parser = commands.add("show", run_show, "Show all that is known of a VM.")
    commands.vm(show_parser)


async def run_list(session: Session, options: Namespace) -> int:
    """Always fine."""
    vms = await session.node.list(state=options.state or "", namespace=options.namespace)
    screen = session.screen
    if screen.as_json:
        screen.give(vms)
    elif options.names:
        for name in completions(vms):
            screen.line(name)
    else:
        show_list(screen, vms, time.time_ns() // 1000)
    return FINE


def show_list(screen: Screen, vms: Sequence[VM], now_usec: int) -> None:
    """The table."""
    if not vms:
        screen.line("No VMs.")
        return
    # The beginning of a UID is enough to name a VM with; who pipes this somewhere wants all of it.
    length = _SHORT_UID if screen.width else None
    headers = ("VM", "STATE", "LAYERS", "QEMU", "SINCE", "POD UID", "")
    screen.table(headers, [_row(vm, vm.pod_uid[:length], now_usec) for vm in vms])


def _row(vm: VM, uid: str, now_usec: int) -> list[str | Cell]:
    since = vm.released_usec or vm.exited_usec or vm.started_usec
    # A process that is gone is nobody to look for.
    pid = str(vm.leader) if vm.leader and vm.state == State.RUNNING else "-"
    note = vm.error or (ending(vm.exit_reason, vm.exit_status, vm.exit_signal) if vm.exited_usec else "")
    layers = str(len(vm.unreleased))
    return [vm.full_name or "-", state_cell(vm.state), layers, pid, age(since, now_usec), uid, note]


async def run_show(session: Session, options: Namespace) -> int:
    """Exit code 3 for a VM that is blocked."""
    vm = find_vm(await session.node.list(), options.vm)
    # A VM's own layers do not say how often their umount was tried.
    vm = replace(vm, layers=tuple(await session.node.layers(vm.pod_uid)))
    if session.screen.as_json:
        session.screen.give(vm)
    else:
        show_vm(session.screen, vm)
    return TROUBLE if is_stuck(vm) else FINE


def show_vm(screen: Screen, vm: VM) -> None:
    """One fact a line; what is not known is left out."""
    for label, value in _facts(vm):
        screen.line(f"{label + ':':<12}", value)
    if vm.layers:
        screen.line()
        screen.table(
            ("LAYER", "KIND", "STATE", "TRIES", ""),
            [[e.volume, e.kind, state_cell(e.state), str(e.attempts), e.error] for e in vm.layers],
            paths=[layer.target for layer in vm.layers],
        )


def _facts(vm: VM) -> Iterator[tuple[str, str | Cell]]:
    yield "VM", vm.full_name or "(name not known)"
    yield "Pod UID", vm.pod_uid
    if vm.vmi_uid:
        yield "VMI UID", vm.vmi_uid
    yield "State", state_cell(vm.state)
    if vm.error:
        yield "Because", vm.error
    if vm.leader:
        yield "QEMU", f"process {vm.leader}"
    if vm.started_usec:
        yield "Started", clock(vm.started_usec)
    if vm.exited_usec:
        yield "Ended", f"{clock(vm.exited_usec)}, {ending(vm.exit_reason, vm.exit_status, vm.exit_signal)}"
    if vm.released_usec:
        yield "Released", clock(vm.released_usec)
    yield "Policy", vm.policy
    if vm.grace_usec is not None:
        yield "Grace", f"{vm.grace_usec / 1e6:g} s, its own"
    for inhibitor in vm.inhibitors:
        yield "Held by", f"{inhibitor.who}: {inhibitor.why}"
    if vm.devices:
        yield "Devices", ", ".join(vm.devices)
    yield "Layers", f"{len(vm.unreleased)} of {len(vm.layers)} mounted"
