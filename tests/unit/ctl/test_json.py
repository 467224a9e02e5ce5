"""hostctl(1) documents the JSON of each command: every field that there is, and none that is not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import Any

import pytest

import hostd.client
from hostd.client.model import VM, Device, Helper, Holder, Inhibitor, Layer, ReleaseRow, Status, SweepRow
from hostd.core.model import Exit, ExitReason
from hostd.core.model import Holder as CoreHolder
from hostd.ctl import main, session
from tests.support.bus import staged
from tests.support.fake_service import pod_uid, vm
from tests.support.man import ManPage
from tests.unit.ctl.test_commands import Hostctl

PAGE = ManPage("hostctl.1")


def documented() -> dict[str, set[str]]:
    """Command → the words that its entry sets in italics: names of fields."""
    found = {}
    for block in re.split(r"^\.TP\n", PAGE.section("JSON").roff, flags=re.MULTILINE)[1:]:
        tag, _, text = block.replace("\\-", "-").partition("\n")
        lines = re.findall(r"^\.(?:IR|I) (.*)$", text, re.MULTILINE)
        words = [re.findall(r'"([^"]*)"|(\S+)', line) for line in lines]
        found[tag.removeprefix(".B ")] = {quoted or bare for line in words for quoted, bare in line[::2]}
    return found


def names(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


def keys(value: Any) -> Iterator[str]:
    """Of all objects in it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for each in value:
            yield from keys(each)


#: What is documented, by the types that are printed.
OF_TYPES = {
    "list": names(VM, Inhibitor),
    "layers": names(Layer),
    "devices": names(Device),
    "pr-helper": names(Helper),
    "sweep": names(SweepRow),
    "release": names(ReleaseRow) | {"pod_uid", "vm", "error", "name", "message", "layers"},
    "holders": names(Holder) | {"layer", "holders"},
    "status": names(Status) | {"clean", "state", "reasons", "vms", "hostd", "pr_helper"},
}


@pytest.mark.parametrize("command", OF_TYPES)
def test_fields_are_those_of_the_types(command: str) -> None:
    assert documented()[command] == OF_TYPES[command]


@pytest.fixture
async def hostctl() -> AsyncIterator[Hostctl]:
    async with staged(vm(1), vm(2, layers=2)) as (bus, service), hostd.client.connect(bus.address) as node:
        service.die(pod_uid(2), Exit(-1, 9, ExitReason.SIGNAL))
        service.block(pod_uid(2), "held by cat[42] (open)", CoreHolder(42, "cat", "open", ""))
        yield Hostctl(node)


LINES = ("status", "list", "layers", "holders vm2", "release vm2", "sweep", "devices", "pr-helper", "metrics")


@pytest.mark.parametrize("line", LINES)
async def test_what_is_printed_is_documented(hostctl: Hostctl, line: str) -> None:
    page = documented()
    # Values of other commands are in some of them; numbers by state and labels have names of their own.
    known = page[line.split(maxsplit=1)[0]] | page["list"] | page["layers"] | page["pr-helper"]
    free = {"pending", "running", "exited", "held", "cleaning", "blocked", "released"}
    free |= {"state", "kind", "reason", "le", "mode", "version", "result"} if line == "metrics" else set()
    assert set(keys(await hostctl.json(*line.split()))) <= known | free


def test_every_command_has_its_entry() -> None:
    assert set(documented()) == {*OF_TYPES, "show", "hold", "monitor", "metrics", "doctor"}


def test_exit_codes_are_those_of_the_program() -> None:
    codes = {session.FINE, session.FAILED, session.USAGE, session.TROUBLE, main._INTERRUPTED}
    assert {int(tag) for tag, _ in PAGE.section("EXIT STATUS").tagged()} == codes
