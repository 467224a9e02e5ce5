"""Devices where there is no hardware: a sysfs tree of the test's own, device files, and processes that open them.

    tree = SysfsTree(tmp_path / "sys")
    tree.pci("0000:3b:00.0", group="12", number=NULL)      # /dev/vfio/12 is a copy of /dev/null
    tree.usb("1-2", bus=1, device=4, number=ZERO)
    tree.remove("pci/0000:3b:00.0")

The tree has the links and attributes of a real one as far as hostd reads them. The character devices that stand in for
VFIO groups and USB devices are those that any process may open as often as it likes.

    with DevHost() as host:                                # a mount namespace with a /dev of its own
        path = host.node("vfio/12", NULL)
        with DeviceUser(host) as user:
            user.open(path); user.close_file(path)
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import Self

from hostd.core.model import VM, State
from hostd.linux.pidfd import identify
from tests.support.mountns import MountNamespace
from tests.support.qemu import Place, Program

Number = tuple[int, int]
NULL, ZERO, FULL, RANDOM, URANDOM, KMSG = (1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (1, 11)
NUMBERS = (NULL, ZERO, FULL, RANDOM, URANDOM, KMSG)


class SysfsTree:
    """A sysfs at `root`. Identities are `vendor:device`."""

    def __init__(self, root: Path) -> None:
        self.path = root
        self.root = os.fsencode(root)
        for name in ("bus/pci/devices", "bus/mdev/devices", "bus/usb/devices", "dev/char", "class/vfio"):
            (root / name).mkdir(parents=True, exist_ok=True)

    # --- devices ---

    def pci(
        self,
        address: str,
        identity: str = "10de:1eb8",
        *,
        driver: str = "vfio-pci",
        group: str = "",
        number: Number | None = None,
        cdev: Number | None = None,
    ) -> str:
        """A PCI function; `number` is that of its group's file, `cdev` that of its own VFIO device file."""
        where = self.path / "devices/pci0000:00" / address
        self._device("pci", where, address)
        vendor, _, device = identity.partition(":")
        self._write(where / "vendor", f"0x{vendor}\n")
        self._write(where / "device", f"0x{device}\n")
        self.bind(address, driver)
        if group:
            self._join(where, group, number)
        if cdev:
            own = where / "vfio-dev" / f"vfio{cdev[1]}"
            self._char(own, "vfio-dev", cdev)
        return f"pci/{address}"

    def bind(self, address: str, driver: str) -> None:
        """Binds a PCI function to a driver, or to none with ""."""
        where = self.path / "devices/pci0000:00" / address
        (where / "driver").unlink(missing_ok=True)
        if driver:
            self._link(where / "driver", self.path / "bus/pci/drivers" / driver)

    def mdev(
        self, kind: str = "nvidia-35", *, parent: str = "0000:06:00.0", group: str = "", number: Number | None = None,
        name: str = "GRID T4-4A", uid: str = "",
    ) -> str:  # fmt: skip
        """A mediated device of a type, below a parent."""
        uid = uid or str(uuid.uuid4())
        above = self.path / "devices/pci0000:00" / parent
        self._write(above / "mdev_supported_types" / kind / "name", name + "\n")
        where = above / uid
        self._device("mdev", where, uid)
        self._link(where / "mdev_type", above / "mdev_supported_types" / kind)
        self._link(where / "driver", self.path / "bus/mdev/drivers/vfio_mdev")
        if group:
            self._join(where, group, number)
        return f"mdev/{uid}"

    def usb(
        self, port: str, identity: str = "046d:c52b", *, bus: int = 1, device: int = 4, number: Number | None = None,
        device_class: str = "00",
    ) -> str:  # fmt: skip
        """A USB device on a port."""
        where = self.path / "devices/pci0000:00/usb1" / port
        self._device("usb", where, port)
        vendor, _, product = identity.partition(":")
        attributes = {"idVendor": vendor, "idProduct": product, "busnum": bus, "devnum": device}
        for name, value in {**attributes, "bDeviceClass": device_class}.items():
            self._write(where / name, f"{value}\n")
        if number:
            self._char(where, "usb", number)
        return f"usb/{port}"

    def remove(self, name: str) -> None:
        """Takes a device away, with what led to it."""
        kind, _, rest = name.partition("/")
        link = self.path / f"bus/{kind}/devices" / rest
        where = link.resolve()
        link.unlink()
        for other in [*(self.path / "dev/char").iterdir(), *self.path.glob("kernel/iommu_groups/*/devices/*")]:
            if other.resolve().is_relative_to(where):
                other.unlink()
        shutil.rmtree(where)

    # --- making ---

    def _device(self, bus: str, where: Path, name: str) -> None:
        where.mkdir(parents=True, exist_ok=True)
        self._link(where / "subsystem", self.path / "bus" / bus)
        self._link(self.path / f"bus/{bus}/devices" / name, where)

    def _join(self, where: Path, group: str, number: Number | None) -> None:
        members = self.path / "kernel/iommu_groups" / group / "devices"
        self._link(members / where.name, where)
        self._link(where / "iommu_group", members.parent)
        if number:
            self._char(self.path / "devices/virtual/vfio" / group, "vfio", number)
            self._link(self.path / "class/vfio" / group, self.path / "devices/virtual/vfio" / group)

    def _char(self, where: Path, subsystem: str, number: Number) -> None:
        self._write(where / "dev", f"{number[0]}:{number[1]}\n")
        if not (where / "subsystem").exists():
            self._link(where / "subsystem", self.path / "class" / subsystem)
        self._link(self.path / "dev/char" / f"{number[0]}:{number[1]}", where)

    def _link(self, link: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class DevHost(MountNamespace):
    """A mount namespace whose /dev is a tmpfs of its own with /dev/null, and nothing else yet."""

    def __init__(self) -> None:
        super().__init__("private")
        try:
            self.tmpfs(b"/dev")
            self.node("null", NULL)
        except BaseException:
            self.close()
            raise

    def node(self, name: str, number: Number) -> bytes:
        """Makes a character device /dev/`name` if there is none; gives its path."""
        path = b"/dev/" + name.encode()
        self.mkdir(os.path.dirname(path))
        if not self.exists(path):
            self.call(os.mknod, path, stat.S_IFCHR | 0o666, os.makedev(*number))
        return path


# Opens and closes what it is told on its standard input: descriptor by descriptor.
_SCRIPT = r"""
echo ready
while read -r verb n path; do
    case $verb in
        open) eval "exec $n<\"\$path\"" || exit 98;;
        close) eval "exec $n<&-";;
    esac
    echo "did $n"
done
"""


class DeviceUser(Program):
    """A process of a DevHost or a copy of one: opens and closes device files as told, at most seven at once."""

    def __init__(self, host: MountNamespace, *paths: bytes) -> None:
        self._slots: dict[bytes, int] = {}
        super().__init__(["/bin/sh", "-c", _SCRIPT], Place(mount_namespace=host.path))
        try:
            for path in paths:
                self.open(path)
        except BaseException:
            self.close()
            raise

    def _until_ready(self) -> None:
        self._read_until(b"ready")

    def open(self, path: bytes) -> None:
        """Opens a file and keeps it open."""
        number = next(number for number in range(3, 10) if number not in self._slots.values())
        self._slots[path] = number
        self._tell(b"open %d %s" % (number, path))
        self._read_until(b"did %d" % number)

    def close_file(self, path: bytes) -> None:
        """Closes a file that it has open."""
        number = self._slots.pop(path)
        self._tell(b"close %d -" % number)
        self._read_until(b"did %d" % number)

    def __enter__(self) -> Self:
        return self


def vm(name: str, *users: DeviceUser, pod_uid: str = "", vmi_uid: str = "", state: State | None = None) -> VM:
    """What the keeper knows of a VM with these QEMUs: running if it has any, pending if not."""
    return VM(
        pod_uid or str(uuid.uuid4()),
        vmi_uid or str(uuid.uuid4()),
        "ns",
        name,
        state=state or (State.RUNNING if users else State.PENDING),
        qemus=[identify(user.pid) for user in users],
    )


def ended(machine: VM) -> VM:
    """The same VM after its last QEMU's death."""
    machine.state, machine.qemus = State.EXITED, []
    return machine
