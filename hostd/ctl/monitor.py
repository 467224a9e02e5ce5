"""`hostctl monitor`: what happens, as it happens."""

from __future__ import annotations

import time
from dataclasses import fields
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from hostd.client import events
from hostd.client.model import plain
from hostd.ctl.screen import Cell, Style
from hostd.ctl.session import FINE
from hostd.ctl.verdict import counts
from hostd.ctl.words import count, duration, ending, state_cell

if TYPE_CHECKING:
    from argparse import Namespace

    from hostd.ctl.parser import Commands
    from hostd.ctl.session import Session

Parts = list["str | Cell"]


def add(commands: Commands) -> None:
    """Declares it."""
    commands.add("monitor", run, "Follow events, also while hostd or the bus restart.")


async def run(session: Session, _: Namespace) -> int:
    """Until it is interrupted."""
    screen = session.screen
    async for event in session.node.watch():
        if screen.as_json:
            screen.record(as_json(event, time.time_ns() // 1000))
        elif parts := told(event):
            screen.line(Cell(time.strftime("%H:%M:%S"), Style.DIM), "  ", *parts)
            screen.flush()
    return FINE


def as_json(event: events.Event, now_usec: int) -> dict[str, Any]:
    """The stable form: the event's name, when it was seen, and its fields."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    shown = {name: sorted(value) if isinstance(value, frozenset) else plain(value) for name, value in values.items()}
    return {"event": type(event).__name__, "seen_usec": now_usec, **shown}


@singledispatch
def told(event: object) -> Parts:
    """An event in words; nothing for what is not worth a line."""
    return [type(event).__name__]


@told.register
def _(event: events.Resync) -> Parts:
    states = ", ".join(f"{number} {state}" for state, number in counts(event.vms).items())
    again = {"start": "", "bus": "the bus is back: ", "hostd": "hostd is back: ", "overflow": "events were missed: "}
    return [again.get(event.reason, ""), states or "no VMs"]


@told.register
def _(event: events.Lost) -> Parts:
    return [Cell(f"{event.what} is gone", Style.BAD), "; waiting for it"]


@told.register
def _(event: events.VMNew) -> Parts:
    return [str(event.vm), " is new: ", state_cell(event.vm.state)]


@told.register
def _(event: events.VMChanged) -> Parts:
    parts: Parts = []
    if "state" in event.changed:
        parts += ["is ", state_cell(event.vm.state)]
    if "error" in event.changed and event.vm.error:
        parts += [": " if parts else "", event.vm.error]
    if "policy" in event.changed:
        parts += [", " if parts else "", f"policy {event.vm.policy}"]
    return [f"{event.vm} ", *parts] if parts else []


@told.register
def _(event: events.VMExited) -> Parts:
    return [f"{event.vm} ", Cell(ending(event.reason, event.status, event.signal), Style.STRONG)]


@told.register
def _(event: events.VMReleased) -> Parts:
    took = f" {duration(event.elapsed_usec)} after its end" if event.elapsed_usec else ""
    return [f"{event.vm}: ", Cell(f"{count(event.layers, 'layer')} released", Style.GOOD), took]


@told.register
def _(event: events.VMRemoved) -> Parts:
    return [Cell(f"{event.vm} is forgotten", Style.DIM)]


@told.register
def _(event: events.LayerBlocked) -> Parts:
    return [f"{event.vm}: ", Cell("blocked", Style.BAD), f": {event.target}: {event.reason}"]


@told.register
def _(event: events.DeviceConflict) -> Parts:
    return [Cell("conflict", Style.BAD), f" over {event.device}, claimed by {event.vm}: {event.reason}"]


@told.register
def _(event: events.StatusChanged) -> Parts:
    if "health" not in event.changed:
        return [f"hostd: mode {event.status.mode}"]
    trouble = "; ".join(f"{part}: {words}" for part, words in event.status.health)
    return ["hostd: ", Cell(trouble, Style.BAD) if trouble else Cell("all is well", Style.GOOD)]


@told.register
def _(event: events.HelperChanged) -> Parts:
    parts: Parts = ["qemu-pr-helper: ", state_cell(event.helper.state)]
    if "last_failure" in event.changed and event.helper.last_failure:
        parts.append(f": {event.helper.last_failure}")
    return parts
