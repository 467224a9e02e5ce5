"""`hostctl release` and `hostctl sweep`: clean up now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hostd.client.model import ReleaseRow, plain
from hostd.core.model import LayerState, State
from hostd.ctl.names import find_vms
from hostd.ctl.session import FAILED, FINE, TROUBLE, WrongUsage
from hostd.ctl.words import count, name_of
from hostd.errors import HostdError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hostd.client.model import VM, SweepRow
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen
    from hostd.ctl.session import Session

#: VMs that are cleaned at the same time: each waits for its own umounts.
_TOGETHER = 8
_ALIVE = (State.PENDING, State.RUNNING)


def add(commands: Commands) -> None:
    """Declares them."""
    parser = commands.add("release", run, "Unmount the layers of VMs that ended, whatever their grace.")
    commands.vm(parser, many=True)
    parser.add_argument("--all", action="store_true", help="all VMs that ended and have layers left")
    parser.add_argument("--lazy", action="store_true", help="detach what is busy, where no QEMU is among its holders")
    _common(parser)
    sweep = commands.add("sweep", run_sweep, "Look at everything now, and clean what is due.")
    _common(sweep)


def _common(parser: object) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")  # type: ignore[attr-defined]
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")  # type: ignore[attr-defined]


async def run(session: Session, options: Namespace) -> int:
    """Exit code 3 where a layer is left."""
    vms = await session.node.list()
    wanted = (
        [vm for vm in vms if vm.state not in _ALIVE and vm.unreleased] if options.all else find_vms(vms, options.vm)
    )
    if not wanted and not options.all:
        raise WrongUsage("which VM? name one or more, or say --all")
    if not options.dry_run and not agreed(session.screen, wanted, yes=options.yes):
        return FAILED
    results = await _release(session, wanted, dry_run=options.dry_run, lazy=options.lazy)
    if session.screen.as_json:
        session.screen.give([_as_json(vm, result) for vm, result in zip(wanted, results, strict=True)])
    else:
        show(session.screen, wanted, results)
    return code(results, dry_run=options.dry_run)


def agreed(screen: Screen, vms: Sequence[VM], *, yes: bool) -> bool:
    """Whether it may begin: a person is asked before more than one VM is touched."""
    if yes or not screen.asks or len(vms) < 2:
        return True
    for vm in vms:
        screen.line(f"  {vm}: {count(len(vm.unreleased), 'layer')}")
    return screen.ask(f"Release the layers of {len(vms)} VMs?")


Result = list[ReleaseRow] | HostdError


async def _release(session: Session, vms: Sequence[VM], *, dry_run: bool, lazy: bool) -> list[Result]:
    """Each VM's answer; the failure of one is no reason to leave the others."""
    turn = asyncio.Semaphore(_TOGETHER)

    async def one(vm: VM) -> Result:
        async with turn:
            try:
                return await session.node.release(vm.pod_uid, dry_run=dry_run, lazy=lazy)
            except HostdError as error:
                return error

    return list(await asyncio.gather(*(one(vm) for vm in vms)))


def show(screen: Screen, vms: Sequence[VM], results: Sequence[Result]) -> None:
    """What came of it."""
    if not vms:
        screen.line("Nothing to release: no VM that ended has layers left.")
    for vm, result in zip(vms, results, strict=True):
        if isinstance(result, HostdError):
            screen.line(f"{name_of(vm)}: {result}")
            continue
        screen.line(f"{vm}: {count(len(result), 'layer')}" + ("" if result else " left, nothing to do"))
        for row in result:
            screen.line(f"  {row.action} {row.target}: {row.result}")


def code(results: Sequence[Result], *, dry_run: bool) -> int:
    """The exit code."""
    if any(isinstance(result, HostdError) for result in results):
        return FAILED
    rows = [row for result in results if isinstance(result, list) for row in result]
    left = [row for row in rows if row.result.partition(":")[0] != LayerState.GONE]
    return TROUBLE if left and not dry_run else FINE


def _as_json(vm: VM, result: Result) -> dict[str, object]:
    named = {"pod_uid": vm.pod_uid, "vm": vm.full_name}
    if isinstance(result, HostdError):
        return named | {"error": {"name": result.dbus_name, "message": str(result)}, "layers": []}
    return named | {"error": None, "layers": plain(result)}


async def run_sweep(session: Session, options: Namespace) -> int:
    """Exit code 0 whatever is found: `status` tells what is wrong."""
    screen = session.screen
    vms = await session.node.list()
    rows = await session.node.sweep(dry_run=True)
    if not options.dry_run:
        touched = {row.pod_uid for row in rows if row.action != "leave"}
        if not agreed(screen, [vm for vm in vms if vm.pod_uid in touched], yes=options.yes):
            return FAILED
        rows = await session.node.sweep()
    if screen.as_json:
        screen.give(rows)
    else:
        show_sweep(screen, rows, vms)
    return FINE


def show_sweep(screen: Screen, rows: Sequence[SweepRow], vms: Sequence[VM]) -> None:
    """The table."""
    if not rows:
        screen.line("Nothing is left of any VM that ended.")
        return
    called = {vm.pod_uid: name_of(vm) for vm in vms}
    screen.table(
        ("VM", "ACTION", "RESULT"),
        [[called.get(row.pod_uid, row.pod_uid), row.action, row.result] for row in rows],
        paths=[row.target for row in rows],
    )
