"""Devices: PCI functions on vfio-pci behind an IOMMU, opened by VMs, plugged and unplugged for real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.hostd import reaches, released
from tests.node.checks.monitor import Monitor, MonitorError
from tests.node.checks.node import NAME, call, get, run, until
from tests.node.checks.pods import Pod

_PCI = Path("/sys/bus/pci/devices")
_MODEL, _OTHER_MODEL = "e1000e", "qemu-xhci"


class Spare:
    """One of the machine's spare PCI functions, and where it sits."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = f"pci/{address}"

    def bind(self) -> None:
        """To vfio-pci, as an administrator or a device plugin does."""
        (_PCI / self.address / "driver_override").write_text("vfio-pci")
        Path("/sys/bus/pci/drivers_probe").write_text(self.address)

    @property
    def file(self) -> Path:
        """The VFIO group's device file."""
        return Path("/dev/vfio", os.readlink(_PCI / self.address / "iommu_group").rpartition("/")[2])

    @property
    def row(self) -> tuple[str, str, str]:
        """VM, pod UID and state, as ListDevices says; all empty where it does not list it."""
        rows = {row[0]: row for row in call("ListDevices", "a{sv}", "0")}
        _, _, vm, pod, state, _ = rows.get(self.name, ["", "", "", "", "", ""])
        return vm, pod, state

    def becomes(self, state: str, vm: str = "", pod: str = "") -> None:
        """Waits until ListDevices says so."""
        until(lambda: self.row == (vm, pod, state), f"{self.name} is {state} of {vm!r}: {self.row}")


@pytest.fixture(scope="module")
def spares() -> list[Spare]:
    run("modprobe", "vfio-pci")
    addresses = sorted(each.name for each in _PCI.iterdir() if (each / "device").read_text().strip() == "0x10d3")
    assert len(addresses) == 2, addresses
    found = [Spare(address) for address in addresses]
    for spare in found:
        spare.bind()
        until(spare.file.exists, f"{spare.file} exists")
    return found


@pytest.fixture
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    made = Pod(request.function.__name__.removeprefix("test_").replace("_", "-")[:40])
    source = Path(f"/var/lib/node/{made.name}.img")
    source.write_bytes(bytes(4096))
    made.containerdisk(0, source)
    yield made
    released(made)


def _devices(pod: Pod) -> object:
    return get("Devices", call("GetVM", "s", pod.uid), f"{NAME}.VM")


def _refused(member: str, *arguments: str) -> str:
    done = call(member, *arguments, check=False)
    assert done.returncode != 0
    return str(done.stderr)


def test_each_spare_device_has_a_group_of_its_own_and_is_free(spares: list[Spare]) -> None:
    assert spares[0].file != spares[1].file
    for spare in spares:
        spare.becomes("free")


def test_what_a_qemu_opens_is_in_use_until_it_dies(spares: list[Spare], pod: Pod) -> None:
    spare, vm = spares[0], f"default/{pod.name}"
    pod.devices.append(spare.file)
    qemu = pod.fake_qemu()
    spare.becomes("in-use", vm, pod.uid)
    assert _devices(pod) == [spare.name]
    with pytest.raises(OSError, match="busy"):
        os.open(spare.file, os.O_RDWR)
    said = _refused("ReleaseDevice", "ss", spare.name, vm)
    assert str(qemu.pid) in said, said
    spares[1].becomes("free")
    qemu.kill()
    spare.becomes("free")


def test_what_is_held_outlives_vm_and_hostd(spares: list[Spare], pod: Pod) -> None:
    spare, vm = spares[0], f"default/{pod.name}"
    call("ClaimDevice", "ssa{sv}", spare.name, vm, "1", "OnExit", "s", "hold")
    spare.becomes("reserved", vm)
    pod.devices.append(spare.file)
    qemu = pod.fake_qemu()
    spare.becomes("in-use", vm, pod.uid)
    qemu.kill()
    until(lambda: spare.row[::2] == (vm, "held"), f"{spare.name} is held: {spare.row}")
    run("systemctl", "restart", "hostd.service")
    until(lambda: spare.row[::2] == (vm, "held"), f"{spare.name} is held: {spare.row}")
    said = _refused("ClaimDevice", "ssa{sv}", spare.name, "default/other", "0")
    assert vm in said, said
    assert "held" in said, said
    call("ReleaseDevice", "ss", spare.name, vm)
    spare.becomes("free")


def test_a_qemu_with_anothers_device_is_a_conflict(spares: list[Spare], pod: Pod) -> None:
    spare = spares[1]
    call("ClaimDevice", "ssa{sv}", spare.name, "default/owner", "0")
    pod.devices.append(spare.file)
    qemu = pod.fake_qemu()
    reaches(pod, "running")
    match = [f"HOSTD_DEVICE={spare.name}", "HOSTD_VM=default/owner", "PRIORITY=4"]
    until(lambda: run("journalctl", "--no-pager", "--quiet", "--boot", *match).stdout, "the conflict is told")
    qemu.kill()
    call("ReleaseDevice", "ss", spare.name, "default/owner")
    spare.becomes("free")


def test_devices_that_go_and_come_are_seen_by_udevs_events(spares: list[Spare]) -> None:
    """Absent when it is unplugged, a mismatch when another takes the place, itself again when it is back."""
    spare, vm, monitor = spares[1], "default/plugged", Monitor()
    assert "udev" not in get("Health")
    call("ClaimDevice", "ssa{sv}", spare.name, vm, "0")
    spare.becomes("reserved", vm)
    monitor.call("device_del", id="spare2")
    spare.becomes("absent", vm)
    _plug(monitor, _OTHER_MODEL, "stranger")
    spare.becomes("mismatch", vm)
    monitor.call("device_del", id="stranger")
    spare.becomes("absent", vm)
    _plug(monitor, _MODEL, "back", romfile="")
    spare.becomes("reserved", vm)
    spare.bind()
    call("ReleaseDevice", "ss", spare.name, vm)
    spare.becomes("free")


def _plug(monitor: Monitor, model: str, name: str, **more: str) -> None:
    """Into the second port, once QEMU is done with what was in it."""

    def plugged() -> bool:
        try:
            monitor.call("device_add", driver=model, id=name, bus="port2", **more)
        except MonitorError as error:
            if "slot 0" not in str(error) and "in use" not in str(error):
                raise
            return False
        return True

    until(plugged, f"{name} is plugged")
