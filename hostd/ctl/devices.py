"""`hostctl devices`: which VM has which host device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.ctl.session import FINE
from hostd.ctl.words import state_cell

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hostd.client.model import Device
    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen
    from hostd.ctl.session import Session


def add(commands: Commands) -> None:
    """Declares it and what can be done to a device."""
    parser = commands.add("devices", run, "List host devices (PCI, mediated, USB) and who has them.")
    parser.add_argument("--kind", choices=("pci", "mdev", "usb"), help="only devices of this kind")
    parser.add_argument("--claimed", action="store_true", help="only devices that a VM has or claimed")
    below = commands.below(parser)
    claim = below.add("claim", run_claim, "Claim a device for a VM.")
    _device_and_vm(claim)
    claim.add_argument("--vmi-uid", default="", metavar="UID", help="the UID of its VirtualMachineInstance")
    release = below.add("release", run_release, "End a VM's claim on a device that is not in use.")
    _device_and_vm(release)


def _device_and_vm(parser: object) -> None:
    parser.add_argument("device", metavar="DEVICE", help="pci/0000:3b:00.0, mdev/UUID or usb/1-2")  # type: ignore[attr-defined]
    parser.add_argument("vm", metavar="NAMESPACE/NAME", help="the VM, which need not run")  # type: ignore[attr-defined]


async def run(session: Session, options: Namespace) -> int:
    """Always fine."""
    devices = await session.node.devices(kind=options.kind or "")
    if options.claimed:
        devices = [device for device in devices if device.vm or device.pod_uid]
    if session.screen.as_json:
        session.screen.give(devices)
    else:
        show(session.screen, devices)
    return FINE


def show(screen: Screen, devices: Sequence[Device]) -> None:
    """The table."""
    if not devices:
        screen.line("No devices.")
        return
    screen.table(
        ("DEVICE", "STATE", "VM", "DESCRIPTION"),
        [[each.device, state_cell(each.state), each.vm or each.pod_uid or "-", each.description] for each in devices],
    )


async def run_claim(session: Session, options: Namespace) -> int:
    """Claims."""
    await session.node.claim_device(options.device, options.vm, vmi_uid=options.vmi_uid)
    return await _tell(session, options.device)


async def run_release(session: Session, options: Namespace) -> int:
    """Gives back."""
    await session.node.release_device(options.device, options.vm)
    return await _tell(session, options.device)


async def _tell(session: Session, name: str) -> int:
    found = [device for device in await session.node.devices() if device.device == name]
    if session.screen.as_json:
        session.screen.give(found)
    else:
        show(session.screen, found)
    return FINE
