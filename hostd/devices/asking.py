"""What ClaimDevice and ReleaseDevice may do: pure functions that give the new claims, or a named error."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hostd.config import OnExit
from hostd.devices.claim import Claim, Claims, Devices, Run, Runs, Stage, identified, mismatched, owns, users
from hostd.errors import DeviceBusy, InvalidArgs, LimitExceeded, NoSuchDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostd.devices.device import Device
    from hostd.devices.open_files import Holder

#: More than any node has devices; a bound for what callers can make hostd remember.
MOST = 4096
#: Kubernetes' names are shorter; what is in them is its own affair.
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f]{1,253}/[^\s/\x00-\x1f\x7f]{1,253}")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller of ClaimDevice says."""

    device: str
    vm: str
    vmi_uid: str | None = None
    on_exit: OnExit | None = None


def vm_name(text: str) -> str:
    """`namespace/name`. Raises InvalidArgs."""
    if not _NAME.fullmatch(text):
        raise InvalidArgs(f"{text[:80]!r} is no VM's name; it is namespace/name")
    return text


def exit_choice(text: str | None) -> OnExit | None:
    """What is to become of a VM's devices at its exit; None = what the configuration says. Raises InvalidArgs."""
    if text is None:
        return None
    try:
        return OnExit(text)
    except ValueError:
        raise InvalidArgs(f"OnExit is {' or '.join(OnExit)}, not {text[:80]!r}") from None


def claimed(claims: Claims, wish: Wish, device: Device | None, runs: Runs, devices: Devices) -> dict[str, Claim]:
    """The claims with the wish granted; equal to `claims` if it was granted before.

    Raises NoSuchDevice, DeviceBusy that names the holder and its state, LimitExceeded.
    """
    known = claims.get(wish.device)
    if device is None:
        _refuse_absent(wish, known)
    assert device is not None
    if known is not None and known.vm != wish.vm:
        raise DeviceBusy(f"{wish.device} {_whose(known, users(runs).get(wish.device, ()))}")
    if known is not None and mismatched(known, device):
        raise DeviceBusy(
            f"{wish.device} is not the device that {wish.vm} claimed: {device.identity} is there now, {known.identity} "
            "was then; give the old claim up with ReleaseDevice first"
        )
    _refuse_shared_group(wish, device, claims, devices)
    if known is None and len(claims) >= MOST:
        raise LimitExceeded(f"there are {MOST} claims already; give up some with ReleaseDevice")
    result = dict(claims)
    result[wish.device] = _granted(known or identified(Claim(wish.device, wish.vm), device), wish, runs)
    return result if wish.on_exit is None else _all_on_exit(result, wish.vm, wish.on_exit)


def _refuse_absent(wish: Wish, known: Claim | None) -> None:
    if known is not None and known.vm != wish.vm:
        raise DeviceBusy(f"{wish.device} is absent, and {_whose(known, ())}")
    raise NoSuchDevice(f"there is no device {wish.device} on this host now; ListDevices shows those that there are")


def _whose(claim: Claim, open_in: Sequence[Run]) -> str:
    """Words for who has it; follow the device's name."""
    for run in open_in:
        return f"is in use by {_title(run.vm, run.pod_uid)}: process {run.open[claim.device]} has it open"
    return f"is {claim.stage} for {_title(claim.vm, claim.pod_uid)}; ReleaseDevice gives it up"


def _title(vm: str, pod_uid: str) -> str:
    pod = f"pod {pod_uid}" if pod_uid else ""
    return f"{vm} ({pod})" if vm and pod else vm or pod


def _refuse_shared_group(wish: Wish, device: Device, claims: Claims, devices: Devices) -> None:
    """A VFIO group goes to one VM as a whole, so its functions cannot be claimed apart."""
    for name, claim in claims.items():
        mate = devices.get(name)
        if name == wish.device or mate is None or claim.vm == wish.vm:
            continue
        if device.group and mate.group == device.group:
            raise DeviceBusy(f"{wish.device} shares IOMMU group {device.group} with {name}, which {_whose(claim, ())}")


def _granted(claim: Claim, wish: Wish, runs: Runs) -> Claim:
    """A held or reserved one starts anew for the run to come; one in use is asked for from now on."""
    if claim.stage is not Stage.IN_USE:
        return replace(claim, asked=True, stage=Stage.RESERVED, used_by="", vmi_uid=wish.vmi_uid or claim.vmi_uid)
    run = runs.get(claim.used_by)
    later = bool(wish.vmi_uid) and run is not None and bool(run.vmi_uid) and run.vmi_uid != wish.vmi_uid
    if later:
        return replace(claim, asked=True, renewed=True, vmi_uid=wish.vmi_uid or claim.vmi_uid)
    return replace(claim, asked=True, vmi_uid=claim.vmi_uid or wish.vmi_uid or "")


def _all_on_exit(claims: dict[str, Claim], vm: str, on_exit: OnExit) -> dict[str, Claim]:
    return {name: replace(claim, on_exit=on_exit) if claim.vm == vm else claim for name, claim in claims.items()}


def refuse_release(claim: Claim, vm: str, runs: Runs, holders: Sequence[Holder]) -> None:
    """Raises DeviceBusy where the claim is another VM's, or where anybody has the device open."""
    if claim.vm != vm:
        raise DeviceBusy(f"{claim.device} is not {vm}'s: it {_whose(claim, users(runs).get(claim.device, ()))}")
    for run in users(runs).get(claim.device, ()):
        whose = "" if owns(claim, run) else f", which is not {vm}'s"
        raise DeviceBusy(
            f"{claim.device} is in use: process {run.open[claim.device]} of {_title(run.vm, run.pod_uid)}{whose} "
            "has it open; it can be released once that is gone"
        )
    if holders:
        named = ", ".join(str(holder) for holder in holders[:4])
        raise DeviceBusy(f"{claim.device} is in use: {named} has it open; it can be released once that is gone")
