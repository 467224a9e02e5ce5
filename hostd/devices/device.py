"""A host device that a VM can have: its name, and what tells it from another one at the same place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hostd.errors import InvalidArgs


class Kind(StrEnum):
    """The kinds of devices; the words are those of the bus and of the names."""

    PCI = "pci"
    MDEV = "mdev"
    USB = "usb"


#: What stands after the slash, as sysfs names its directories: a PCI address, an mdev's UUID, a USB port path.
_REST = {
    Kind.PCI: re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"),
    Kind.MDEV: re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    Kind.USB: re.compile(r"[0-9]{1,4}-[0-9]{1,3}(?:\.[0-9]{1,3}){0,6}"),
}
_EXAMPLES = "pci/0000:3b:00.0, mdev/a297db4a-f4c2-11e6-90f6-d3b88d6c9525, usb/1-2"
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is there now.

    `identity` says what it is, not where: `vendor:device` (PCI, USB), `type@parent` (mdev). `serial` is the USB serial
    number where udev knows it, else empty. `group` is the IOMMU group's number, empty where there is none.
    """

    name: str
    identity: str
    description: str = ""
    serial: str = ""
    group: str = ""

    @property
    def kind(self) -> Kind:
        """By its name."""
        return kind_of(self.name)


def device_name(text: str) -> str:
    """A device's name in its plain form. Raises InvalidArgs for what cannot be one, so that none leads elsewhere."""
    name = text.lower()
    kind, _, rest = name.partition("/")
    if kind not in _REST or not _REST[Kind(kind)].fullmatch(rest):
        raise InvalidArgs(f"{text[:80]!r} is no device's name; names are such as {_EXAMPLES}")
    return name


def kind_of(name: str) -> Kind:
    """The kind that a well-formed name tells."""
    return Kind(name.partition("/")[0])


def order(name: str) -> tuple[str, ...]:
    """A sort key by which usb/1-10 comes after usb/1-2, and equal names stay together."""
    kind, _, rest = name.partition("/")
    if kind != Kind.USB:  # PCI addresses and UUIDs have a fixed width
        return (kind, rest)
    return (kind, *(part.rjust(4, "0") if part.isdigit() else part for part in _DIGITS.split(rest)))
