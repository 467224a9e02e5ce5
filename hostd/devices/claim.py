"""Claims, and what becomes of them: pure functions over what is seen. No clock, no file, no process here.

    ClaimDevice ──▶ reserved ──a QEMU of the VM opens it──▶ in-use ◀──opened unasked
                        ▲                                     │
                        ├──closed while the VM lives, if asked for
                        │                                     └──the VM's QEMU dies──▶ held (on-exit = hold) or no claim
                        └──died, but it was claimed for a later run already

A claim belongs to a VM by name. `settle` is level-triggered: given the same sight twice, the second time changes
nothing; so a restart needs no replay. It never gives one VM's claim to another, and never changes what a claim is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hostd.config import OnExit
from hostd.devices.device import Device


class Stage(StrEnum):
    """How far a claim has come; the words are those of the bus."""

    RESERVED = "reserved"
    IN_USE = "in-use"
    HELD = "held"


class Life(StrEnum):
    """What is known of a run."""

    #: It has no QEMU yet, or hostd has not looked at what its QEMU has open.
    UNSEEN = "unseen"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Claim:
    """One VM's claim on one device.

    `vm` is `namespace/name`, empty while nobody knows it; `pod_uid` and `vmi_uid` are of its latest run known.
    `identity` and `serial` say which device was claimed (see `Device`), as far as that was known.
    """

    device: str
    vm: str
    pod_uid: str = ""
    vmi_uid: str = ""
    identity: str = ""
    serial: str = ""
    description: str = ""
    stage: Stage = Stage.RESERVED
    #: Somebody called ClaimDevice, so it outlives the device's being closed while the VM lives.
    asked: bool = False
    #: It was asked for a later run while an earlier one still had the device open.
    renewed: bool = False
    #: The run that had the device open last; empty = none since it was claimed.
    used_by: str = ""
    #: What its VM wants at its exit; None = what the configuration says then.
    on_exit: OnExit | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One launcher pod's run as the devices part sees it; a later one has a greater `order`."""

    pod_uid: str
    vm: str = ""
    vmi_uid: str = ""
    life: Life = Life.UNSEEN
    order: int = 0
    #: It has been alive for so long that what it has not opened it will not open.
    settled: bool = False
    #: What its QEMUs have open: device → pid.
    open: Mapping[str, int] = field(default_factory=dict)


Claims = Mapping[str, Claim]
Runs = Mapping[str, Run]
Devices = Mapping[str, Device]


def owns(claim: Claim, run: Run) -> bool:
    """Whether the claim is this run's VM's. A VM without a name is nobody but its pod."""
    return claim.vm == run.vm if claim.vm and run.vm else claim.pod_uid == run.pod_uid


def users(runs: Runs) -> dict[str, list[Run]]:
    """Device → the living runs that have it open, oldest first."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs.values(), key=lambda run: run.order):
        if run.life is Life.ALIVE:
            for device in run.open:
                found.setdefault(device, []).append(run)
    return found


def mismatched(claim: Claim, device: Device) -> bool:
    """Whether another device is at the place than the one that was claimed. What was not known cannot differ."""
    other_kind = bool(claim.identity and device.identity) and claim.identity != device.identity
    return other_kind or bool(claim.serial and device.serial and claim.serial != device.serial)


def settle(claims: Claims, runs: Runs, devices: Devices, on_exit: OnExit) -> dict[str, Claim]:
    """The claims as they have to be, given what is seen now. A pod that `runs` does not have is dead."""
    open_in = users(runs)
    newest = _newest(runs)
    result: dict[str, Claim] = {}
    for name, claim in claims.items():
        own = [run for run in open_in.get(name, ()) if owns(claim, run) or _renamed(claim, run)]
        if own:
            result[name] = _in_use(claim, own)
            continue
        kept = _closed(claim, runs, newest, on_exit) if claim.stage is Stage.IN_USE else _waiting(claim, newest)
        if kept is not None:
            result[name] = kept
    for name, holders in open_in.items():
        if name not in result:
            result[name] = _automatic(name, holders[0], devices.get(name), _wish(claims, holders[0].vm))
    return result


def _newest(runs: Runs) -> dict[str, Run]:
    """VM → its latest run. A dead one counts only where there is no other."""
    found: dict[str, Run] = {}
    for run in sorted(runs.values(), key=lambda run: (run.life is not Life.DEAD, run.order)):
        if run.vm:
            found[run.vm] = run
    return found


def _in_use(claim: Claim, own: list[Run]) -> Claim:
    """It stays with the run that has had it, as long as that has it; two runs may share a USB device."""
    run = next((run for run in own if run.pod_uid == claim.pod_uid), own[-1])
    vmi_uid = claim.vmi_uid if claim.renewed else run.vmi_uid or claim.vmi_uid
    vm = run.vm or claim.vm if _renamed(claim, run) else claim.vm or run.vm
    return replace(claim, vm=vm, pod_uid=run.pod_uid, vmi_uid=vmi_uid, stage=Stage.IN_USE, used_by=run.pod_uid)


def _renamed(claim: Claim, run: Run) -> bool:
    """A claim that nobody asked for goes by the name of the run that made it, also when an agent knows that better."""
    return claim.stage is Stage.IN_USE and not claim.asked and claim.used_by == run.pod_uid


def _closed(claim: Claim, runs: Runs, newest: Mapping[str, Run], on_exit: OnExit) -> Claim | None:
    """It was in use and is not any more, or nobody can tell yet."""
    run = runs.get(claim.used_by)
    if run is not None and run.life is Life.UNSEEN:
        return claim
    later = newest.get(claim.vm)
    if run is not None and run.life is Life.ALIVE:
        return _followed(_reserved(claim), later) if claim.asked else None
    for_later = later is not None and later.life is not Life.DEAD and later.pod_uid != claim.used_by
    if claim.renewed or (claim.asked and for_later):
        return _followed(_reserved(claim), later)
    # What nobody can name could never be released by name.
    if not claim.vm or (claim.on_exit or on_exit) is OnExit.RELEASE:
        return None
    return _followed(replace(claim, stage=Stage.HELD), later)


def _reserved(claim: Claim) -> Claim:
    return replace(claim, stage=Stage.RESERVED, used_by="", renewed=False)


def _waiting(claim: Claim, newest: Mapping[str, Run]) -> Claim | None:
    """It is reserved or held. A held one ends when a later run of its VM does well without the device."""
    later = newest.get(claim.vm)
    followed = _followed(claim, later)
    without = later is not None and later.settled and later.life is Life.ALIVE and later.pod_uid != claim.used_by
    return None if claim.stage is Stage.HELD and without else followed


def _followed(claim: Claim, later: Run | None) -> Claim:
    """The claim, moved to its VM's latest run. A run that is dead already has nothing to tell."""
    if later is None or later.life is Life.DEAD or later.pod_uid == claim.pod_uid:
        return claim
    return replace(claim, pod_uid=later.pod_uid, vmi_uid=later.vmi_uid or claim.vmi_uid)


def _automatic(name: str, run: Run, device: Device | None, wish: OnExit | None) -> Claim:
    claim = Claim(name, run.vm, run.pod_uid, run.vmi_uid, stage=Stage.IN_USE, used_by=run.pod_uid, on_exit=wish)
    return identified(claim, device) if device else claim


def identified(claim: Claim, device: Device) -> Claim:
    """A new claim, with what it is on."""
    return replace(claim, identity=device.identity, serial=device.serial, description=device.description)


def _wish(claims: Claims, vm: str) -> OnExit | None:
    """What was asked for the exit of this VM with one of its claims; it counts for all of its devices."""
    return next((claim.on_exit for claim in claims.values() if vm and claim.vm == vm and claim.on_exit), None)
