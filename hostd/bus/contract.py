"""The contract, read: dbus/io.kubevirt.hostd1.xml says what is on the bus, and everything else is held to it.

Handlers are bound to it (`interface`), introspection is made from it, and the manual page is checked against it. The
comment before a member is its documentation; the annotation `io.kubevirt.hostd1.Access` says who may call it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET
from xml.sax.saxutils import quoteattr

from hostd.bus import names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = "io.kubevirt.hostd1.xml"
STANDARD_FILE = "standard.xml"
ACCESS = names.BUS_NAME + ".Access"
EMITS_CHANGED = names.PROPERTIES.replace("Properties", "Property") + ".EmitsChangedSignal"
DOCTYPE = (
    '<!DOCTYPE node PUBLIC "-//freedesktop//DTD D-BUS Object Introspection 1.0//EN"\n'
    ' "http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd">\n'
)


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a method or signal."""

    name: str
    type: str

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


@dataclass(frozen=True, slots=True)
class Method:
    """A method; `access` is empty for what readers may call, else a polkit action's last word, or `root`."""

    name: str
    takes: tuple[Arg, ...]
    gives: tuple[Arg, ...]
    access: str
    doc: str

    @property
    def in_signature(self) -> str:
        """The types of what it takes."""
        return "".join(arg.type for arg in self.takes)

    @property
    def out_signature(self) -> str:
        """The types of what it gives."""
        return "".join(arg.type for arg in self.gives)


@dataclass(frozen=True, slots=True)
class Property:
    """A property; `emits` is `true`, `invalidates`, `const` or `false`. `access` is about setting it."""

    name: str
    type: str
    writable: bool
    emits: str
    access: str
    doc: str


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal."""

    name: str
    args: tuple[Arg, ...]
    doc: str

    @property
    def signature(self) -> str:
        """The types of its arguments."""
        return "".join(arg.type for arg in self.args)


@dataclass(slots=True)
class Interface:
    """An interface of the contract; `xml` is its introspection."""

    name: str
    doc: str
    methods: dict[str, Method] = field(default_factory=dict)
    properties: dict[str, Property] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    xml: str = ""


@cache
def contract() -> Mapping[str, Interface]:
    """All interfaces, the standard ones among them, by name."""
    package = resources.files("hostd.bus")
    ours = parse(package.joinpath(FILE).read_text("utf-8"))
    return ours | parse(package.joinpath(STANDARD_FILE).read_text("utf-8"))


def parse(text: str) -> dict[str, Interface]:
    """The interfaces of an introspection file."""
    # The files are part of the package; nothing from outside is parsed here.
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))  # noqa: S314
    node = ET.fromstring(text, parser=parser)  # noqa: S314
    return {
        element.attrib["name"]: _interface(element, doc)
        for element, doc in _members(node)
        if element.tag == "interface"
    }


def _members(parent: ET.Element) -> Iterator[tuple[ET.Element, str]]:
    """The children, each with the comment that stands before it."""
    doc = ""
    for child in parent:
        if _is_comment(child):
            doc = " ".join((child.text or "").split())
        else:
            yield child, doc
            doc = ""


def _is_comment(element: ET.Element) -> bool:
    tag: object = element.tag
    return tag is ET.Comment


def _interface(element: ET.Element, doc: str) -> Interface:
    self = Interface(element.attrib["name"], doc)
    for child, comment in _members(element):
        name = child.attrib["name"]
        if child.tag == "method":
            access = _annotations(child).get(ACCESS, "")
            self.methods[name] = Method(name, _args(child, "in"), _args(child, "out"), access, comment)
        elif child.tag == "property":
            self.properties[name] = _property(child, comment)
        elif child.tag == "signal":
            self.signals[name] = Signal(name, _args(child, None), comment)
    self.xml = "".join(_xml(element, 1))
    return self


def _property(element: ET.Element, doc: str) -> Property:
    notes = _annotations(element)
    return Property(
        element.attrib["name"],
        element.attrib["type"],
        writable=element.attrib["access"] == "readwrite",
        emits=notes.get(EMITS_CHANGED, "true"),
        access=notes.get(ACCESS, ""),
        doc=doc,
    )


def _args(element: ET.Element, direction: str | None) -> tuple[Arg, ...]:
    return tuple(
        Arg(arg.attrib["name"], arg.attrib["type"])
        for arg in element.findall("arg")
        if direction is None or arg.attrib["direction"] == direction
    )


def _annotations(element: ET.Element) -> dict[str, str]:
    return {note.attrib["name"]: note.attrib["value"] for note in element.findall("annotation")}


def _xml(element: ET.Element, depth: int) -> Iterator[str]:
    """The element again, without comments."""
    attributes = "".join(f" {key}={quoteattr(value)}" for key, value in element.attrib.items())
    children = [child for child in element if not _is_comment(child)]
    yield f"{' ' * depth}<{element.tag}{attributes}{'' if children else '/'}>\n"
    for child in children:
        yield from _xml(child, depth + 1)
    if children:
        yield f"{' ' * depth}</{element.tag}>\n"


def introspection(interfaces: list[Interface], children: list[str]) -> str:
    """The answer to Introspect for an object with these interfaces and these children."""
    nodes = "".join(f" <node name={quoteattr(child)}/>\n" for child in children)
    return f"{DOCTYPE}<node>\n{''.join(interface.xml for interface in interfaces)}{nodes}</node>\n"


def signature_text(args: tuple[Arg, ...]) -> str:
    """Arguments as a person reads them: `(s pod_uid, a{sv} details)`."""
    return f"({', '.join(map(str, args))})"
