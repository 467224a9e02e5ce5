"""io.kubevirt.hostd1(5) against the introspection of a running daemon: nothing missing, nothing extra, nothing untold.

Both sides become the lines that the page has, `RegisterVM(in s pod_uid, …, out b existing) [manage-vms]`, so that a
difference is one to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

import pytest

from hostd.bus import names
from tests.support.man import ManPage
from tests.support.node import Node
from tests.support.qemu import FakeQemu

PAGE = ManPage("io.kubevirt.hostd1.5")
_EMITS = {"const": "const", "true": "signalled", "false": "silent"}
_STANDARD = "org.freedesktop.DBus."
#: What the nodes between objects have, which are no objects of their own.
_BETWEEN = {f"{_STANDARD}Peer", f"{_STANDARD}Introspectable"}
_VM = "/io/kubevirt/hostd1/vm/POD_UID"

Interfaces = dict[str, ET.Element]


@pytest.fixture(scope="module")
def introspected() -> Iterator[dict[str, Interfaces]]:
    """Object → interface → its XML, of every object of a running hostd that knows one VM."""
    with Node() as node:
        pod = node.pod()
        pod.containerdisk()
        pod.qemu(FakeQemu)
        node.hostd.start()
        vm = node.vm(pod)
        found = {path: interfaces for path, interfaces in walk(node, "/") if interfaces.keys() - _BETWEEN}
        found[_VM] = found.pop(vm)
        yield found


def walk(node: Node, path: str) -> Iterator[tuple[str, Interfaces]]:
    """An object with all below it, as its own introspection names them."""
    command = ("--json=short", "call", names.BUS_NAME, path, names.INTROSPECTABLE, "Introspect")
    root = ET.fromstring(json.loads(node.busctl(*command).stdout)["data"][0])
    yield path, {each.attrib["name"]: each for each in root.findall("interface")}
    for child in root.findall("node"):
        yield from walk(node, f"{path.rstrip('/')}/{child.attrib['name']}")


def of_daemon(interface: ET.Element) -> dict[str, list[str]]:
    """The page's lines for an interface, made from its introspection."""
    return {
        "Methods": [f"{method_line(each)}{access(each)}" for each in interface.findall("method")],
        "Signals": [f"{name(each)}({arguments(each, None)})" for each in interface.findall("signal")],
        "Properties": [property_line(each) for each in interface.findall("property")],
    }


def name(element: ET.Element) -> str:
    return element.attrib["name"]


def method_line(method: ET.Element) -> str:
    both = (arguments(method, "in"), arguments(method, "out"))
    return f"{name(method)}({', '.join(each for each in both if each)})"


def arguments(member: ET.Element, direction: str | None) -> str:
    wanted = [arg for arg in member.findall("arg") if direction in (None, arg.get("direction"))]
    return ", ".join(f"{direction or ''} {arg.attrib['type']} {name(arg)}".strip() for arg in wanted)


def property_line(member: ET.Element) -> str:
    emits = annotation(member, "org.freedesktop.DBus.Property.EmitsChangedSignal", "true")
    writable = {"read": "", "readwrite": ", writable"}[member.attrib["access"]]
    return f"{name(member)} {member.attrib['type']}, {_EMITS[emits]}{writable}{access(member)}"


def access(member: ET.Element) -> str:
    needs = annotation(member, "io.kubevirt.hostd1.Access", "")
    return f" [{needs}]" if needs else ""


def annotation(member: ET.Element, which: str, default: str) -> str:
    found = [each.attrib["value"] for each in member.findall("annotation") if name(each) == which]
    return found[0] if found else default


def documented() -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Interface → Methods, Signals, Properties → (line, text), by the page."""
    return {
        title.removeprefix("INTERFACE "): {
            part: PAGE.section(title).part(part).entries() for part in section_parts(title)
        }
        for title in PAGE.titles
        if title.startswith("INTERFACE ")
    }


def section_parts(title: str) -> list[str]:
    return PAGE.section(title).parts


def own(introspected: dict[str, Interfaces]) -> Interfaces:
    """All interfaces but those of the D-Bus specification."""
    return {
        interface: xml
        for interfaces in introspected.values()
        for interface, xml in interfaces.items()
        if not interface.startswith(_STANDARD)
    }


def test_interfaces_are_those_of_the_daemon(introspected: dict[str, Interfaces]) -> None:
    assert sorted(documented()) == sorted(own(introspected))


@pytest.mark.parametrize("interface", documented())
@pytest.mark.parametrize("part", ["Methods", "Signals", "Properties"])
def test_members_are_those_of_the_daemon(introspected: dict[str, Interfaces], interface: str, part: str) -> None:
    told = [line for line, _ in documented()[interface].get(part, [])]
    assert told == of_daemon(own(introspected)[interface])[part]


@pytest.mark.parametrize("interface", documented())
def test_every_member_is_explained(interface: str) -> None:
    for part, entries in documented()[interface].items():
        assert entries, f"{interface} has an empty part {part}"
        for line, text in entries:
            assert re.search(r"\w", text), f"{interface}: {line} is not explained"


def test_no_interface_has_a_part_of_another_name() -> None:
    parts = {part for entries in documented().values() for part in entries}
    assert parts == {"Methods", "Signals", "Properties"}


def test_objects_have_the_interfaces_that_the_page_names(introspected: dict[str, Interfaces]) -> None:
    section = PAGE.section("DESCRIPTION").part("Objects")
    on_all = set(re.findall(rf"{re.escape(_STANDARD)}\w+", plain_tail(section.text)))
    told = {path: interfaces_in(text) | on_all for path, text in section.entries()}
    assert told == {path: set(interfaces) for path, interfaces in introspected.items()}


def plain_tail(text: str) -> str:
    return text.partition("Each object answers")[2]


def interfaces_in(text: str) -> set[str]:
    return set(re.findall(r"(?:io\.kubevirt\.hostd1|org\.freedesktop(?:\.DBus)?)\.\w+", text))


def test_every_access_word_has_its_place_in_the_page(introspected: dict[str, Interfaces]) -> None:
    words = {
        annotation(member, "io.kubevirt.hostd1.Access", "") for xml in own(introspected).values() for member in xml
    }
    for word in words - {"", "root"}:
        assert word in PAGE.section("ACCESS").text
