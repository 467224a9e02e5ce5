"""`hostctl pr-helper`: qemu-pr-helper, for SCSI persistent reservations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.ctl.session import FINE, TROUBLE
from hostd.ctl.words import state_cell

if TYPE_CHECKING:
    from argparse import Namespace

    from hostd.client.model import Helper
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen
    from hostd.ctl.session import Session

_DOWN = frozenset({"unhealthy", "backing-off", "failed", "refused"})
#: What each state means to whoever reads it.
MEANING = {
    "disabled": "it is switched off; `hostctl pr-helper enable` starts it",
    "absent": "this hostd does not keep one",
    "starting": "it was started and has not answered yet",
    "ready": "it answers",
    "unhealthy": "it runs and does not answer; it is replaced",
    "backing-off": "it ended again and again; it is tried again later, and QEMU gets errors until then",
    "failed": "it cannot be started",
    "standby": "another helper serves the socket, most likely KubeVirt's own; hostd takes over when that one is gone",
    "refused": "it must not run here as it is",
}


def add(commands: Commands) -> None:
    """Declares it and what can be done to it."""
    parser = commands.add("pr-helper", run, "Tell how it is with qemu-pr-helper, and switch it on and off.")
    below = commands.below(parser)
    below.add("status", run, "Tell how it is (what happens without a word, too).")
    below.add("enable", run_enable, "Switch it on, now and after a restart.")
    below.add("disable", run_disable, "Switch it off, now and after a restart.")
    below.add("restart", run_restart, "Start it anew; its listening socket stays.")
    below.add("probe", run_probe, "Ask it now, and say what was found.")


async def run(session: Session, _: Namespace) -> int:
    """Exit code 3 where it is wanted and not well."""
    helper = await session.node.pr_helper.status()
    if session.screen.as_json:
        session.screen.give(helper)
    else:
        show(session.screen, helper)
    return TROUBLE if helper.enabled and helper.state in _DOWN else FINE


def show(screen: Screen, helper: Helper) -> None:
    """One fact a line."""
    meaning = MEANING.get(helper.state, "")
    screen.line("State:     ", state_cell(helper.state), f" - {meaning}" if meaning else "")
    if helper.owner_pid:
        screen.line("Rival:     ", f"process {helper.owner_pid}")
    if helper.last_failure:
        screen.line("Failure:   ", helper.last_failure)
    if helper.main_pid:
        screen.line("Process:   ", str(helper.main_pid))
    if helper.socket_path:
        screen.line("Socket:    ", helper.socket_path)
    screen.line("Multipath: ", helper.multipath)
    screen.line("Restarts:  ", str(helper.restarts))
    screen.line("Clients:   ", str(helper.clients))


async def run_enable(session: Session, options: Namespace) -> int:
    """On."""
    await session.node.pr_helper.enable()
    return await run(session, options)


async def run_disable(session: Session, options: Namespace) -> int:
    """Off."""
    await session.node.pr_helper.disable()
    return await run(session, options)


async def run_restart(session: Session, options: Namespace) -> int:
    """Anew."""
    await session.node.pr_helper.restart()
    return await run(session, options)


async def run_probe(session: Session, _: Namespace) -> int:
    """The findings, by name."""
    found = await session.node.pr_helper.probe()
    if session.screen.as_json:
        session.screen.give(found)
    else:
        session.screen.table(("FINDING", "VALUE"), [[name, str(value)] for name, value in sorted(found.items())])
    return FINE
