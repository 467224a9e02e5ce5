"""The node went down with two VMs: hostd lasted until they were gone, and held nobody up."""

from __future__ import annotations

import json
from typing import Any

from tests.node.checks.node import run


def _entries(*match: str) -> list[dict[str, Any]]:
    output = run("journalctl", "--boot=-1", "--output=json", "--no-pager", *match).stdout
    return [json.loads(line) for line in output.splitlines()]


def _time(unit: str, message: str) -> int:
    """When PID 1 said so last (µs)."""
    times = [int(entry["__MONOTONIC_TIMESTAMP"]) for entry in _entries("_PID=1")
             if entry.get("UNIT") == unit and str(entry["MESSAGE"]).startswith(message)]  # fmt: skip
    assert times, f"PID 1 never said {message!r} of {unit}"
    return times[-1]


def test_hostd_was_stopped_after_the_last_vm() -> None:
    stopping = _time("hostd.service", "Stopping")
    pods = _time("kubepods.slice", "Removed slice")
    assert stopping > pods


def test_hostd_held_nobody_up() -> None:
    took = _time("hostd.service", "Stopped") - _time("hostd.service", "Stopping")
    print(f"hostd's own stop at shutdown: {took / 1e6:.2f} s")
    assert took < 10_000_000


def test_it_stopped_cleanly() -> None:
    since = _time("hostd.service", "Stopping")
    entries = [
        entry for entry in _entries("_PID=1", "UNIT=hostd.service") if int(entry["__MONOTONIC_TIMESTAMP"]) >= since
    ]
    messages = [str(entry["MESSAGE"]) for entry in entries]
    assert not [line for line in messages if "Failed" in line or "timed out" in line or "Killing" in line], messages
