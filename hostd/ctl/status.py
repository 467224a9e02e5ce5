"""`hostctl status`: is this node clean?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.client.model import plain
from hostd.ctl.helper import MEANING
from hostd.ctl.screen import Cell, Style
from hostd.ctl.session import FINE, TROUBLE
from hostd.ctl.verdict import Verdict, Word, counts, is_stuck, judge
from hostd.ctl.words import count, name_of, state_cell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

    from hostd.client.model import VM, Helper, Status
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen
    from hostd.ctl.session import Session

_SAID = {
    Word.CLEAN: ("clean", "every layer on this node is a living VM's", Style.GOOD),
    Word.CLEANING: ("cleaning up", "VMs ended, their layers are on their way out", Style.WAIT),
    Word.HELD: ("held", "layers of VMs that ended stay, because somebody said so", Style.WAIT),
    Word.BLOCKED: ("blocked", "layers of VMs that ended do not go", Style.BAD),
    Word.UNHEALTHY: ("unhealthy", "hostd, or what it keeps, is not well", Style.BAD),
}
#: What a node problem detector takes of a message.
_SHORT = 80


def add(commands: Commands) -> None:
    """Declares it."""
    parser = commands.add("status", run, "Tell whether this node is clean, and what speaks against it.")
    parser.add_argument("--short", action="store_true", help="say it in one line of at most 80 characters")


async def run(session: Session, options: Namespace) -> int:
    """Exit code 3 where something is blocked or unhealthy."""
    node, screen = session.node, session.screen
    status, vms, helper = await node.status(), await node.list(), await node.pr_helper.status()
    verdict = judge(status, vms, helper, await node.devices())
    if screen.as_json:
        screen.give(as_json(status, vms, helper, verdict))
    elif options.short:
        screen.line(short(vms, verdict))
    else:
        show(screen, status, vms, helper, verdict)
    return TROUBLE if verdict.trouble else FINE


def as_json(status: Status, vms: Sequence[VM], helper: Helper, verdict: Verdict) -> dict[str, Any]:
    """The stable form."""
    return {
        "clean": verdict.clean,
        "state": verdict.word.value,
        "reasons": list(verdict.reasons),
        "vms": counts(vms),
        "hostd": plain(status),
        "pr_helper": plain(helper),
    }


def short(vms: Sequence[VM], verdict: Verdict) -> str:
    """One line."""
    told = "; ".join(verdict.reasons) or (", ".join(f"{n} {state}" for state, n in counts(vms).items()) or "no VMs")
    line = f"{verdict.word}: {told}"
    return line if len(line) <= _SHORT else line[: _SHORT - 1] + "…"


def show(screen: Screen, status: Status, vms: Sequence[VM], helper: Helper, verdict: Verdict) -> None:
    """For a person."""
    word, meaning, style = _SAID[verdict.word]
    screen.line("This node is ", Cell(word, style), f": {meaning}.")
    for reason in verdict.reasons:
        screen.line("  ", reason)
    if verdict.word is Word.BLOCKED:
        stuck = [name_of(vm) for vm in vms if is_stuck(vm)]
        called = stuck[0] if len(stuck) == 1 else "VM"
        screen.line(f"`hostctl holders {called}` tells who holds a layer and what to do about it.")
    screen.line()
    by_state = counts(vms)
    parts: list[str | Cell] = ["VMs:       ", str(len(vms))]
    for number, (state, many) in enumerate(by_state.items()):
        parts += [" (" if number == 0 else ", ", f"{many} ", state_cell(state)]
    screen.line(*parts, ")" if by_state else "")
    screen.line(f"Layers:    {sum(len(vm.unreleased) for vm in vms)} mounted")
    screen.line(f"hostd:     {status.version}, mode {status.mode}", _observing(status))
    screen.line("Health:    ", _health(status))
    screen.line("pr-helper: ", state_cell(helper.state or "absent"), _helper(helper))


def _observing(status: Status) -> str:
    return " (says what it would do, and does nothing)" if status.mode == "observe" else ""


def _health(status: Status) -> Cell:
    """The parts that are not well; how it is with each stands among the reasons."""
    parts = ", ".join(part for part, _ in status.health)
    return Cell(f"not well: {parts}", Style.BAD) if parts else Cell("all is well", Style.GOOD)


def _helper(helper: Helper) -> str:
    if not helper.enabled:
        return ""
    if helper.state != "ready":
        return f" ({MEANING[helper.state]})" if helper.state in MEANING else ""
    return f", {count(helper.clients, 'client')}, restarted {count(helper.restarts, 'time')}"
