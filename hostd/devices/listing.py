"""What is shown of devices and claims: rows, and conflicts. Pure functions over what is seen."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from hostd.core.model import DeviceConflict, DeviceRow
from hostd.devices.claim import Claim, Claims, Devices, Run, Runs, mismatched, owns, users
from hostd.devices.device import Device, order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class State(StrEnum):
    """How it stands with a device; the words are those of the bus, `reserved`, `in-use` and `held` beside them."""

    FREE = "free"
    MISMATCH = "mismatch"
    ABSENT = "absent"


def rows(claims: Claims, runs: Runs, devices: Devices) -> list[DeviceRow]:
    """Every device that is there or claimed, once, in an order that restarts do not change."""
    open_in = users(runs)
    return [
        _row(name, claims.get(name), devices.get(name), open_in.get(name, ()), devices)
        for name in sorted({*claims, *devices}, key=order)
    ]


def _row(name: str, claim: Claim | None, device: Device | None, open_in: Sequence[Run], devices: Devices) -> DeviceRow:
    kind = name.partition("/")[0]
    if claim is None:
        return DeviceRow(name, kind, "", "", State.FREE, device.description if device else "")
    words = [device.description if device else claim.description]
    words += _trouble(claim, device, devices)
    words += [f"open in process {run.open[name]} of {run.vm or run.pod_uid}" for run in open_in]
    pod_uid = open_in[0].pod_uid if open_in else claim.pod_uid
    return DeviceRow(name, kind, claim.vm, pod_uid, state(claim, device), "; ".join(word for word in words if word))


def state(claim: Claim, device: Device | None) -> str:
    """The state of a claimed device. That it is another one, or gone, is said even while it is in use."""
    if device is None:
        return State.ABSENT
    return State.MISMATCH if mismatched(claim, device) else claim.stage


def _trouble(claim: Claim, device: Device | None, devices: Devices) -> Iterator[str]:
    if device is not None and not mismatched(claim, device):
        return
    if device is not None:
        yield f"claimed was {_said(claim.identity, claim.serial)}: {claim.description}"
    elif claim.identity:
        yield "not there now"
    alike = [other.name for other in devices.values() if other.name != claim.device and _alike(claim, other)]
    if len(alike) == 1:
        yield f"one like it is at {alike[0]}"


def _alike(claim: Claim, other: Device) -> bool:
    return bool(claim.identity) and claim.identity == other.identity and claim.serial == other.serial


def _said(identity: str, serial: str) -> str:
    return f"{identity} (serial {serial})" if serial else identity or "unknown"


#: What makes two conflicts one: told once, and again only after it was over.
Key = tuple[str, str, str]


def conflicts(claims: Claims, runs: Runs, devices: Devices) -> dict[Key, DeviceConflict]:
    """Devices that a QEMU has open though they are claimed by another VM, and claims whose device is another now."""
    found: dict[Key, DeviceConflict] = {}
    for name, holders in users(runs).items():
        claim = claims.get(name)
        for run in holders if claim else ():
            assert claim is not None
            if not owns(claim, run):
                who = f"process {run.open[name]} of {run.vm or 'an unknown VM'} (pod {run.pod_uid})"
                reason = f"{who} has it open, though it is {claim.stage} for {claim.vm or claim.pod_uid}"
                found[name, "open", run.pod_uid] = DeviceConflict(name, claim.vm, reason)
    for name, claim in claims.items():
        device = devices.get(name)
        if device is not None and mismatched(claim, device):
            there, then = _said(device.identity, device.serial), _said(claim.identity, claim.serial)
            reason = f"{there} is there now, {then} was claimed; the claim stays as it was until it is released"
            found[name, "mismatch", there] = DeviceConflict(name, claim.vm, reason)
    return found


def devices_of(claims: Claims, runs: Runs) -> dict[str, tuple[str, ...]]:
    """Pod → the devices that its VM has: those that it has open, and those that are kept for it."""
    found: dict[str, set[str]] = {pod_uid: set(run.open) for pod_uid, run in runs.items()}
    for name, claim in claims.items():
        if claim.pod_uid in found:
            found[claim.pod_uid].add(name)
    return {pod_uid: tuple(sorted(names, key=order)) for pod_uid, names in found.items()}
