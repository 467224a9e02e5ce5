"""`hostctl holders`: why is this still mounted?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.core.model import LayerState, State
from hostd.ctl.names import find_layer, find_vm
from hostd.ctl.session import FINE, TROUBLE
from hostd.ctl.words import holding, layer_name, state_cell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence

    from hostd.client.model import VM, Holder, Layer
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen
    from hostd.ctl.session import Session

_ALIVE = (State.PENDING, State.RUNNING)


def add(commands: Commands) -> None:
    """Declares it."""
    parser = commands.add("holders", run, "Tell why layers are still mounted, and what to do about it.")
    commands.vm(parser)
    parser.add_argument("layer", nargs="?", metavar="LAYER", help="one layer: its volume, or its target")


async def run(session: Session, options: Namespace) -> int:
    """Exit code 3 where a layer of a VM that ended is held."""
    vms = await session.node.list()
    vm = find_vm(vms, options.vm)
    layers = [find_layer(vm.layers, options.layer)] if options.layer else list(vm.unreleased)
    found = [(layer, await session.node.holders(vm.pod_uid, layer.target)) for layer in layers if not layer.gone]
    if session.screen.as_json:
        session.screen.give([{"layer": layer, "holders": holders} for layer, holders in _plain(found)])
    else:
        show(session.screen, vm, found, {each.pod_uid: each.full_name for each in vms})
    held = any(holders or layer.state in (LayerState.BUSY, LayerState.HUNG) for layer, holders in found)
    return TROUBLE if held and vm.state not in _ALIVE else FINE


def _plain(found: Sequence[tuple[Layer, list[Holder]]]) -> Iterator[tuple[object, object]]:
    from hostd.client.model import plain

    for layer, holders in found:
        yield plain(layer), plain(holders)


def show(screen: Screen, vm: VM, found: Sequence[tuple[Layer, Sequence[Holder]]], called: Mapping[str, str]) -> None:
    """For a person, layer by layer."""
    if not found:
        screen.line(f"No layer of {vm} is mounted any more.")
        return
    if vm.state in _ALIVE:
        screen.line(f"{vm} is {vm.state}: its layers stay while it lives. Who uses them:")
    for number, (layer, holders) in enumerate(found):
        if number or vm.state in _ALIVE:
            screen.line()
        screen.line(f"{layer_name(layer)} is ", state_cell(layer.state), f": {layer.error}" if layer.error else "")
        screen.line(f"  {layer.target}")
        for holder in holders:
            own = holder.pod_uid == vm.pod_uid
            words, advice = holding(holder, called.get(holder.pod_uid, ""), own=own)
            screen.line(f"  - {words}.")
            if vm.state not in _ALIVE:
                screen.line(f"    To do: {advice}.")
        if not holders:
            screen.line(f"  {_nobody(vm, layer)}")


def _nobody(vm: VM, layer: Layer) -> str:
    if layer.state == LayerState.HUNG:
        return "The umount does not return: the storage behind it does not answer. It ends when that does."
    if layer.state == LayerState.DETACHED:
        return "It was detached lazily: gone from the mount table; the kernel frees it when its last user ends."
    if vm.state == State.HELD:
        return "Nobody holds it; its clean-up waits. " + _held(vm)
    if vm.state in _ALIVE:
        return "Nobody that can be seen."
    if vm.state == State.EXITED:
        return f"Nobody that can be seen holds it. {vm.error or 'Its clean-up is about to begin'}."
    return f"Nobody that can be seen holds it now. hostd tries again by itself; `hostctl release {vm.pod_uid}` at once."


def _held(vm: VM) -> str:
    """By whom, and how that ends."""
    for inhibitor in vm.inhibitors:
        return f"{inhibitor.who} asked for that ({inhibitor.why}); it goes on when that ends."
    if vm.policy != "clean":
        return f"Its policy is {vm.policy}: `hostctl hold --end {vm.pod_uid}` lets it go on."
    return f"{vm.error}." if vm.error else "`hostctl show` says more."
