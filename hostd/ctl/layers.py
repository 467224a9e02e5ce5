"""`hostctl layers`: what is mounted for the VMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.bus.rows import LAYER_KINDS
from hostd.core.model import LayerState
from hostd.ctl.names import find_vm
from hostd.ctl.session import FINE
from hostd.ctl.words import name_of, state_cell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hostd.client.model import VM, Layer
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Cell, Screen
    from hostd.ctl.session import Session


def add(commands: Commands) -> None:
    """Declares it."""
    parser = commands.add("layers", run, "List the layers of VMs, or of one, and what became of them.")
    commands.vm(parser, optional=True)
    parser.add_argument("--state", choices=[state.value for state in LayerState], help="only layers in this state")
    parser.add_argument("--kind", choices=LAYER_KINDS, help="only layers of this kind")
    parser.add_argument("--paths", action="store_true", help="show where they are mounted, too")


async def run(session: Session, options: Namespace) -> int:
    """Always fine."""
    vms = await session.node.list()
    pod_uid = find_vm(vms, options.vm).pod_uid if options.vm else ""
    layers = await session.node.layers(pod_uid, state=options.state or "", kind=options.kind or "")
    if session.screen.as_json:
        session.screen.give(layers)
    else:
        show(session.screen, layers, vms, paths=options.paths)
    return FINE


def show(screen: Screen, layers: Sequence[Layer], vms: Sequence[VM], *, paths: bool) -> None:
    """The table."""
    if not layers:
        screen.line("No layers.")
        return
    called = {vm.pod_uid: name_of(vm) for vm in vms}
    screen.table(
        ("VM", "LAYER", "KIND", "STATE", "TRIES", ""),
        [_row(layer, called.get(layer.pod_uid, layer.pod_uid)) for layer in layers],
        paths=[layer.target for layer in layers] if paths else None,
    )


def _row(layer: Layer, vm: str) -> list[str | Cell]:
    return [vm, layer.volume, layer.kind, state_cell(layer.state), str(layer.attempts), layer.error]
