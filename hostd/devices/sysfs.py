"""What sysfs tells of host devices, read below a root that tests can name.

    bus/pci/devices/ADDRESS/{vendor,device,class}, driver →, iommu_group →     a PCI function
    bus/mdev/devices/UUID → …/PARENT/UUID, with mdev_type →                    a mediated device
    bus/usb/devices/PORT/{idVendor,idProduct,busnum,devnum,bDeviceClass}       a USB device
    dev/char/MAJOR:MINOR →                                                     what a device file belongs to
    kernel/iommu_groups/GROUP/devices/*                                        what a VFIO group is made of

Only attributes whose reading takes no device's lock are read: a USB device that is being reset would else hold the
reader up for seconds. So names and serial numbers come from udev's database (`hostd.devices.udev`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from hostd.devices.device import Device, Kind
from hostd.log import plain

#: (major, minor) of a character device.
Number = tuple[int, int]
#: No attribute that is read here is longer.
_ATTRIBUTE_MAX = 4096
#: bDeviceClass of hubs, which no VM gets.
_HUB = "09"
#: Where each kind's devices are listed.
_LISTS = {Kind.PCI: b"bus/pci/devices", Kind.MDEV: b"bus/mdev/devices", Kind.USB: b"bus/usb/devices"}


@dataclass(frozen=True, slots=True)
class Names:
    """What people call a device, and its serial number; empty where nobody knows."""

    vendor: str = ""
    model: str = ""
    serial: str = ""


#: Asks for the names of the device in a directory of sysfs.
Namer = Callable[[bytes], Names]


class Sysfs:
    """Sysfs below `root`. Nothing raises for what is missing or vanishes while it is read: that is an absence."""

    def __init__(self, root: bytes = b"/sys", namer: Namer | None = None) -> None:
        self.root = root
        self._namer = namer
        #: Names by directory and identity, so that a device is asked for once.
        self._names: dict[tuple[bytes, str], Names] = {}

    # --- which devices there are ---

    def scan(self, wanted: Collection[str] = ()) -> dict[str, Device]:
        """The devices that VMs can have now: PCI functions bound to a VFIO driver, mediated devices, USB devices that
        are no hubs. Those in `wanted` count as well whatever their driver, if they are there."""
        names = {*self._listed(), *wanted}
        found = {name: self.device(name) for name in names}
        return {name: device for name, device in found.items() if device is not None}

    def _listed(self) -> Iterator[str]:
        for kind, place in _LISTS.items():
            for entry in self._entries(place):
                path = os.path.join(self.root, place, entry)
                if kind is Kind.MDEV or self._assignable(kind, path):
                    yield f"{kind}/{os.fsdecode(entry)}"

    def _assignable(self, kind: Kind, path: bytes) -> bool:
        if kind is Kind.PCI:
            return _has_vfio_driver(path)
        # Interfaces (1-2:1.0) and root hubs (usb1) stand in the same list.
        return b":" not in os.path.basename(path) and _text(path, b"bDeviceClass") not in {_HUB, ""}

    def device(self, name: str) -> Device | None:
        """The device of a well-formed name, read now; None if there is none."""
        kind, _, rest = name.partition("/")
        try:
            path = os.path.realpath(os.path.join(self.root, _LISTS[Kind(kind)], os.fsencode(rest)), strict=True)
        except OSError:
            return None
        read = {Kind.PCI: self._pci, Kind.MDEV: self._mdev, Kind.USB: self._usb}[Kind(kind)]
        return read(name, path)

    def _pci(self, name: str, path: bytes) -> Device | None:
        identity = f"{_hex(path, b'vendor')}:{_hex(path, b'device')}"
        if identity == ":":
            return None
        group, driver = _link(path, b"iommu_group"), _link(path, b"driver")
        names = self._named(path, identity)
        more = [f"IOMMU group {group}" if group else "", driver or "no driver"]
        return Device(name, identity, _described(identity, names, more), group=group)

    def _mdev(self, name: str, path: bytes) -> Device | None:
        parent, kind = os.fsdecode(os.path.basename(os.path.dirname(path))), _link(path, b"mdev_type")
        group = _link(path, b"iommu_group")
        model = _text(path, b"mdev_type/name")
        more = [f"of {parent}", f"IOMMU group {group}" if group else ""]
        return Device(name, f"{kind}@{parent}", _described(kind, Names(model=model), more), group=group)

    def _usb(self, name: str, path: bytes) -> Device | None:
        identity = f"{_text(path, b'idVendor')}:{_text(path, b'idProduct')}"
        if identity == ":":
            return None
        names = self._named(path, identity)
        more = [f"bus {_text(path, b'busnum')} device {_text(path, b'devnum')}"]
        if names.serial:
            more.insert(0, f"serial {names.serial}")
        return Device(name, identity, _described(identity, names, more), serial=names.serial)

    def _named(self, path: bytes, identity: str) -> Names:
        if self._namer is None:
            return Names()
        known = self._names.get((path, identity))
        if known is None:
            known = self._names[path, identity] = self._namer(path)
        return known

    def forget_names(self) -> None:
        """Asks udev's database anew from now on: what is at an address may have changed."""
        self._names.clear()

    # --- device files ---

    def behind(self, number: Number) -> tuple[str, ...]:
        """The devices that whoever has this character device open has: all of a VFIO group that are bound to a VFIO
        driver, the one of a VFIO device file, or a USB device. () for any other file, and for one that is gone."""
        link = os.path.join(self.root, b"dev/char/%d:%d" % number)
        try:
            path = os.path.realpath(link, strict=True)
        except OSError:
            return ()
        match _link(path, b"subsystem"):
            case "vfio":
                return tuple(self._of_group(os.fsdecode(os.path.basename(path)).removeprefix("noiommu-")))
            case "vfio-dev":
                return _name(os.path.dirname(os.path.dirname(path)))
            case "usb":
                return _name(path)
        return ()

    def _of_group(self, group: str) -> Iterator[str]:
        place = b"kernel/iommu_groups/%s/devices" % os.fsencode(group)
        for entry in self._entries(place):
            path = os.path.realpath(os.path.join(self.root, place, entry))
            # The others of a viable group have no driver at all, or are bridges.
            if _has_vfio_driver(path):
                yield from _name(path)

    def numbers(self, device: Device) -> set[Number]:
        """The character devices through which this device can be opened."""
        place = os.path.join(self.root, _LISTS[device.kind], os.fsencode(device.name.partition("/")[2]))
        files = [os.path.join(place, b"dev")] if device.kind is Kind.USB else []
        files += [os.path.join(place, b"vfio-dev", entry, b"dev") for entry in self._entries(place + b"/vfio-dev")]
        for prefix in ("", "noiommu-") if device.group else ():
            files.append(os.path.join(self.root, b"class/vfio", os.fsencode(prefix + device.group), b"dev"))
        return {number for file in files if (number := _number(file)) is not None}

    def _entries(self, place: bytes) -> list[bytes]:
        try:
            return sorted(os.listdir(os.path.join(self.root, place)))
        except OSError:
            return []


def _has_vfio_driver(path: bytes) -> bool:
    """vfio-pci and its relatives (mlx5_vfio_pci, nvgrace_gpu_vfio_pci, vfio_mdev, …) all have it in their name."""
    return "vfio" in _link(path, b"driver")


def _name(path: bytes) -> tuple[str, ...]:
    kind = _link(path, b"subsystem")
    return (f"{kind}/{os.fsdecode(os.path.basename(path))}",) if kind in list(Kind) else ()


def _link(path: bytes, name: bytes) -> str:
    """The last component of a symbolic link's target; empty if there is no such link."""
    try:
        return os.fsdecode(os.path.basename(os.readlink(os.path.join(path, name))))
    except OSError:
        return ""


def _text(path: bytes, name: bytes) -> str:
    """An attribute as one line of text; empty if it cannot be read."""
    try:
        fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return plain(os.read(fd, _ATTRIBUTE_MAX).strip())
        finally:
            os.close(fd)
    except OSError:
        return ""


def _hex(path: bytes, name: bytes) -> str:
    return _text(path, name).removeprefix("0x")


def _number(path: bytes) -> Number | None:
    directory, name = os.path.split(path)
    major, colon, minor = _text(directory, name).partition(":")
    return (int(major), int(minor)) if colon and major.isdecimal() and minor.isdecimal() else None


def _described(identity: str, names: Names, more: list[str]) -> str:
    called = " ".join(part for part in (names.vendor, names.model) if part)
    return plain(", ".join(part for part in (f"{identity} {called}".strip(), *more) if part))
