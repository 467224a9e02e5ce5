"""Is this node clean? One word, and what speaks against it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hostd.core.model import LayerState, State
from hostd.ctl.words import count, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostd.client.model import VM, Device, Helper, Status

#: States of qemu-pr-helper in which reservations do not work though they are wanted.
_HELPER_DOWN = frozenset({"unhealthy", "backing-off", "failed", "refused"})


class Word(StrEnum):
    """The node in a word."""

    #: Every layer on it is a living VM's.
    CLEAN = "clean"
    #: VMs ended, and their layers are on their way out.
    CLEANING = "cleaning"
    #: Layers of VMs that ended stay because somebody said so: an inhibitor, a policy, observe mode.
    HELD = "held"
    #: Layers of VMs that ended do not go.
    BLOCKED = "blocked"
    #: Something of hostd itself, or of what it keeps, is not well.
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, and `reasons` in sentences. `trouble`: somebody should look."""

    word: Word
    reasons: tuple[str, ...]

    @property
    def trouble(self) -> bool:
        """Blocked or unhealthy."""
        return self.word in (Word.BLOCKED, Word.UNHEALTHY)

    @property
    def clean(self) -> bool:
        """Whether nothing of a VM that ended is left."""
        return self.word is Word.CLEAN


def judge(status: Status, vms: Sequence[VM], helper: Helper, devices: Sequence[Device] = ()) -> Verdict:
    """What is true of this node."""
    stuck, unwell = [blocked(vm) for vm in vms if is_stuck(vm)], _unwell(status, helper, devices)
    held = [vm for vm in vms if vm.state == State.HELD or (vm.state == State.EXITED and status.mode == "observe")]
    ending = [vm for vm in vms if vm.state in (State.EXITED, State.CLEANING) and vm not in held]
    if stuck or unwell:
        return Verdict(Word.BLOCKED if stuck else Word.UNHEALTHY, (*stuck, *unwell))
    if ending:
        return Verdict(Word.CLEANING, tuple(_left(vm) for vm in ending))
    return Verdict(Word.HELD, tuple(_held(vm) for vm in held)) if held else Verdict(Word.CLEAN, ())


def is_stuck(vm: VM) -> bool:
    """Blocked, also in the moments in which its layers are tried again."""
    ended = vm.state in (State.EXITED, State.CLEANING)
    busy = any(layer.state in (LayerState.BUSY, LayerState.HUNG) for layer in vm.layers)
    return vm.state == State.BLOCKED or (ended and busy)


def blocked(vm: VM) -> str:
    """Which of its layers do not go, and why."""
    bad = [layer for layer in vm.unreleased if layer.state in (LayerState.BUSY, LayerState.HUNG, LayerState.DETACHED)]
    told = ", ".join(f"{count(number, 'layer')} {state}" for state, number in Counter(e.state for e in bad).items())
    why = "; ".join(dict.fromkeys(each for each in (*(layer.error for layer in bad), vm.error) if each))
    return f"{name_of(vm)}: {', '.join(each for each in (told, why) if each) or vm.state}"


def _left(vm: VM) -> str:
    return f"{name_of(vm)}: {count(len(vm.unreleased), 'layer')} left"


def _held(vm: VM) -> str:
    who = ", ".join(f"{each.who}: {each.why}" for each in vm.inhibitors)
    return f"{name_of(vm)}: {who or vm.error or f'policy {vm.policy}'}"


def _unwell(status: Status, helper: Helper, devices: Sequence[Device]) -> list[str]:
    found = [f"{part}: {trouble}" for part, trouble in status.health]
    if helper.enabled and helper.state in _HELPER_DOWN:
        found.append(f"qemu-pr-helper is {helper.state}" + (f": {helper.last_failure}" if helper.last_failure else ""))
    found += [f"device {each.device} is not the one that was claimed" for each in devices if each.state == "mismatch"]
    return found


def counts(vms: Sequence[VM]) -> dict[str, int]:
    """VMs by state, in the order of a VM's life; states that no VM is in are left out."""
    found = Counter(vm.state for vm in vms)
    known = [state.value for state in State]
    return {state: found[state] for state in [*known, *sorted(set(found) - set(known))] if found[state]}
