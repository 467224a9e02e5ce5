"""The contract as it is read, and what the packaging and the documentation make of it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hostd.bus import contract, names
from hostd.bus.contract import Interface, Method, Property, Signal
from hostd.bus.rows import LAYER_KINDS
from hostd.bus.vm_object import SHOWN_BY
from hostd.kubevirt.targets import Kind

TOP = Path(__file__).parents[3]
OURS = (names.MANAGER, names.VM, names.HELPER, names.LOG_CONTROL)
ALL = sorted(contract.contract())


def members(interface: Interface) -> list[tuple[str, str]]:
    found: list[Method | Property | Signal] = [*interface.methods.values(), *interface.properties.values()]
    found += interface.signals.values()
    return [(each.name, each.doc) for each in found]


@pytest.mark.parametrize("name", ALL)
def test_every_member_is_documented(name: str) -> None:
    interface = contract.contract()[name]
    assert interface.doc
    assert not [member for member, doc in members(interface) if len(doc) < 5]


@pytest.mark.parametrize("name", ALL)
def test_every_argument_has_a_name(name: str) -> None:
    interface = contract.contract()[name]
    for method in interface.methods.values():
        args = [arg.name for arg in (*method.takes, *method.gives)]
        assert all(re.fullmatch(r"[a-z_]+", arg) for arg in args)
        assert len(set(args)) == len(args)


@pytest.mark.parametrize("name", ALL)
def test_what_is_shown_is_what_was_read(name: str) -> None:
    interface = contract.contract()[name]
    again = contract.parse(contract.introspection([interface], ["child"]))[name]
    assert again.methods.keys() == interface.methods.keys()
    assert [each.in_signature for each in again.methods.values()] == [
        each.in_signature for each in interface.methods.values()
    ]
    assert "<!--" not in interface.xml


def test_the_file_in_dbus_is_the_one_that_is_installed() -> None:
    assert (TOP / "hostd/bus" / contract.FILE).resolve() == TOP / "dbus" / contract.FILE


def test_every_member_of_the_design() -> None:
    found = contract.contract()
    assert found[names.MANAGER].methods.keys() == {
        *("RegisterVM", "UnregisterVM", "GetVM", "GetVMByPID", "GetVMsByVMI", "ListVMs", "ListVMsEx", "TrackLayer"),
        *("ListLayers", "ListHolders", "Release", "Sweep", "Inhibit", "ListDevices", "ClaimDevice", "ReleaseDevice"),
        *("Reload", "GetMetrics"),
    }
    signatures = {name: (each.in_signature, each.out_signature) for name, each in found[names.MANAGER].methods.items()}
    assert signatures["RegisterVM"] == ("sa{sv}", "ob")
    assert signatures["ListVMs"] == ("", "a(sssssuo)")
    assert signatures["ListVMsEx"] == ("a{sv}su", "a(sssssuo)s")
    assert signatures["ListLayers"] == ("a{sv}", "a(ssssssu)")
    assert signatures["ListHolders"] == ("ss", "a(usss)")
    assert signatures["Release"] == ("st", "a(sss)")
    assert signatures["Inhibit"] == ("sss", "h")
    signals = {name: each.signature for name, each in found[names.MANAGER].signals.items()}
    assert signals == {
        "VMNew": "so",
        "VMExited": "soa{sv}",
        "VMReleased": "soa{sv}",
        "VMRemoved": "so",
        "LayerBlocked": "sss",
        "DeviceConflict": "sss",
    }
    emits = {name: each.emits for name, each in found[names.MANAGER].properties.items()}
    assert emits == {
        "Version": "const",
        "Features": "const",
        "Mode": "true",
        "ConfigFiles": "false",
        "Health": "true",
        "NVMs": "false",
        "NLayers": "false",
        "NBlocked": "false",
    }


def test_properties_that_are_told_of_say_so() -> None:
    told = {name for shown in SHOWN_BY.values() for name in shown}
    properties = contract.contract()[names.VM].properties
    assert told == {name for name, each in properties.items() if each.emits == "true"}


def test_the_words_for_kinds_are_the_models() -> None:
    assert tuple(Kind) == LAYER_KINDS


def actions() -> dict[str, str]:
    found = {}
    for name in OURS:
        interface = contract.contract()[name]
        members: list[Method | Property] = [*interface.methods.values(), *interface.properties.values()]
        for member in members:
            if member.access:
                found[f"{name}.{member.name}"] = member.access
    return found


def test_every_action_is_known_to_polkit() -> None:
    policy = ET.parse(TOP / "dbus/io.kubevirt.hostd1.policy").getroot()
    ids = {action.attrib["id"] for action in policy.iter("action")}
    assert {f"{names.BUS_NAME}.{action}" for action in actions().values() if action != "root"} == ids


def test_the_table_of_access_is_true() -> None:
    text = (TOP / "docs/access.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and ":" in line.split("|")[3:4].__str__()]
    documented: dict[str, str] = {}
    for row in rows:
        _, _, action, listed, _ = row.split("|")
        word = (re.search(r"hostd1\.([a-z-]+)", action) or ["", "root"])[1]
        for part in listed.split(";"):
            interface, _, each = part.partition(":")
            full = next(name for name in OURS if name.endswith("." + interface.strip()))
            documented |= {f"{full}.{member}": word for member in re.findall(r"`(\w+)`", each)}
    assert documented == actions()


@pytest.mark.parametrize("file", ["io.kubevirt.hostd1.conf", "io.kubevirt.hostd1.policy", "io.kubevirt.hostd1.xml"])
def test_the_files_are_well_formed(file: str) -> None:
    ET.parse(TOP / "dbus" / file)
