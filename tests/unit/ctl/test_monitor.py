"""Every event has its words and its JSON."""

from __future__ import annotations

import io
import json
from typing import get_args

import pytest

from hostd.client import events
from hostd.client.model import VM, Helper, Status
from hostd.ctl.monitor import as_json, told
from hostd.ctl.screen import Screen

DB = VM("7", namespace="shop", name="db", state="running")
EXAMPLES: list[tuple[events.Event, str]] = [
    (events.Resync("start", (DB,), Status(), Helper()), "1 running"),
    (events.Resync("bus", (), Status(), Helper()), "the bus is back: no VMs"),
    (events.Lost("hostd"), "hostd is gone; waiting for it"),
    (events.VMNew(DB), "shop/db (7) is new: running"),
    (events.VMChanged(DB, frozenset({"state", "leader"})), "shop/db (7) is running"),
    (events.VMChanged(DB, frozenset({"policy"})), "shop/db (7) policy clean"),
    (events.VMChanged(DB, frozenset({"leader"})), ""),
    (events.VMExited(DB, 1, -1, "error"), "shop/db (7) ended with an error (status 1)"),
    (events.VMReleased(DB, 1, 0), "shop/db (7): 1 layer released"),
    (events.VMRemoved(DB), "shop/db (7) is forgotten"),
    (events.LayerBlocked(DB, "/t", "busy"), "shop/db (7): blocked: /t: busy"),
    (events.DeviceConflict("usb/1-2", "shop/db", "taken"), "conflict over usb/1-2, claimed by shop/db: taken"),
    (events.StatusChanged(Status(mode="observe"), frozenset({"mode"})), "hostd: mode observe"),
    (events.StatusChanged(Status(health=(("a", "b"),)), frozenset({"health"})), "hostd: a: b"),
    (events.StatusChanged(Status(), frozenset({"health"})), "hostd: all is well"),
    (
        events.HelperChanged(Helper(state="failed", last_failure="no"), frozenset({"last_failure"})),
        "qemu-pr-helper: failed: no",
    ),
]


@pytest.mark.parametrize(("event", "words"), EXAMPLES)
def test_words(event: events.Event, words: str) -> None:
    out = io.StringIO()
    Screen(out).line(*told(event))
    assert out.getvalue().strip() == words


@pytest.mark.parametrize(("event", "_words"), EXAMPLES)
def test_json(event: events.Event, _words: str) -> None:
    data = json.loads(json.dumps(as_json(event, 5)))
    assert (data["event"], data["seen_usec"]) == (type(event).__name__, 5)


def test_no_kind_of_event_is_left_out() -> None:
    assert {type(event) for event, _ in EXAMPLES} == set(get_args(events.Event))
