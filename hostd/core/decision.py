"""What is to be done about a VM: pure functions of what is known, what was just seen, and the time.

Nothing here looks or acts. A pass calls `decide` with fresh facts, carries the answer out, and calls it again; so the
order of events does not matter, and a restart needs no replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostd.core.model import VM, Layer, LayerState, Policy, State
from hostd.kubevirt.targets import Kind
from hostd.linux.cgroup import Population

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostd.config import Cleanup

#: How soon a pod without a QEMU is looked at again, and how seldom at last (µs).
LOOK_FIRST = 200_000
LOOK_LAST = 5_000_000
#: The same where it cannot be told whether a QEMU lives; what ends a doubt wakes the VM by itself (µs).
DOUBT = 1_000_000
#: The same for a pod whose VM is released but whose containers still run: a new QEMU may start in it.
LINGER_LAST = 30_000_000
#: Back-off between attempts on a layer that is not to be had: the second comes quickly, for what a dying process still
#: holds is gone in milliseconds, the others double up to the cap.
RETRY = (20_000, 100_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 30_000_000)
#: What of a delay has to be over before a change may cut the rest of it short.
_EARLY = 10
#: How long a layer that was mounted again has to stay away before anybody calls it gone (µs).
STABLE = 2_000_000
#: How long what was found out about a layer's holders holds (µs): a QEMU may open it meanwhile.
HOLDERS_HOLD = 1_000_000
#: Not to be tried again by time: something else has to happen first.
NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a pod just now."""

    #: A QEMU of the pod lives.
    qemu: bool = False
    #: Why it cannot be told whether one lives; empty where it can.
    doubt: str = ""
    #: The pod's cgroup; None where it was never seen.
    cgroup: Population | None = None
    #: The host's pod cgroups are understood, so that an absent one says something.
    understood: bool = False
    #: A process's cgroup names the pod though its cgroup was not found; asked only where that matters.
    named: bool = False
    #: An inhibitor is taken on this VM or on all.
    inhibited: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the facts."""

    state: State
    #: The VM's last QEMU is dead, or it never had one and never will.
    dead: bool = False
    #: To be unmounted (or, where detached, looked at) now.
    due: tuple[Layer, ...] = ()
    #: Look again then (CLOCK_BOOTTIME, µs), if nothing happens before; None = only when something happens.
    look_at: int | None = None
    #: The VM is to be dropped from the list.
    forget: bool = False
    #: What keeps the VM from going on, in words.
    why: str = ""


def decide(vm: VM, facts: Facts, cleanup: Cleanup, now: int, *, hurry: bool = False) -> Decision:
    """The next step for a VM. `hurry`: somebody asked for its release, so grace is not waited for."""
    if facts.qemu:
        return Decision(State.RUNNING)
    if facts.doubt:
        return Decision(vm.state, dead=bool(vm.exited_at), look_at=now + DOUBT, why=facts.doubt)
    # A pod that was taken for dead and whose containers run now had only not begun: its images were still being pulled.
    if not vm.had_qemu and (not vm.exited_at or facts.cgroup is Population.POPULATED):
        why, settled_at = life_before_qemu(vm, facts, cleanup)
        if why or now < settled_at:
            soon = now + clamp((now - vm.first_seen_at) // 20, LOOK_FIRST, LOOK_LAST)
            return Decision(State.PENDING, look_at=soon if why else min(soon, settled_at), why=why)
    return _after_death(vm, facts, cleanup, now, hurry=hurry)


def life_before_qemu(vm: VM, facts: Facts, cleanup: Cleanup) -> tuple[str, int]:
    """Why a pod that never had a QEMU cannot be called dead, and when it may be at the earliest.

    Not knowing is not death: only a cgroup that was seen and is empty or gone counts, or one that no process names
    on a host whose pod cgroups are understood; and never sooner than `settle` after the pod and the last of its layers
    were first seen.
    """
    # Something mounted is a sign of life as good as the pod itself: the agent mounts, then the QEMU starts.
    settled_at = max([vm.first_seen_at, *(layer.seen_at for layer in vm.layers.values())]) + cleanup.settle_usec
    match facts.cgroup:
        case Population.POPULATED:
            return "its containers run and no QEMU was seen yet", settled_at
        case Population.EMPTY | Population.GONE:
            return "", settled_at
        case Population.UNREADABLE:
            return "its cgroup cannot be read, so nobody knows whether it lives", settled_at
    if not facts.understood:
        return "no pod cgroups are found on this host, so nobody knows whether it lives", settled_at
    if facts.named:
        return "its cgroup was not found, and yet a process names it", settled_at
    return "", settled_at


def _after_death(vm: VM, facts: Facts, cleanup: Cleanup, now: int, *, hurry: bool) -> Decision:
    left = [layer for layer in vm.layers.values() if layer.state is not LayerState.GONE]
    grace = 0 if hurry else grace_of(vm, facts, cleanup)
    over_at = (vm.exited_at or now) + grace
    # What has left the table, by whomever, is only looked at: that is done also while nothing may be unmounted.
    looked_at = [layer for layer in left if layer.state is LayerState.DETACHED]
    waits = _waits(vm, facts, cleanup, len(left) - len(looked_at))
    times = [(layer, _due_at(layer, vm, over_at, grace, now)) for layer in (looked_at if waits else left)]
    due = tuple(layer for layer, time in times if time <= now)
    soonest = None if due else min((time for _, time in times if time < NEVER), default=None)
    look_at = _earlier(soonest, _linger(vm, facts, now))
    if waits:
        state, why = waits
        return Decision(state, dead=True, due=due, look_at=look_at, why=why)
    if due:
        return Decision(State.CLEANING, dead=True, due=due)
    if left:
        stuck = [layer for layer in left if layer.state is not LayerState.MOUNTED or layer.remounts]
        why = "; ".join(sorted({layer.error for layer in stuck if layer.error}))
        return Decision(State.BLOCKED if stuck else State.EXITED, dead=True, look_at=look_at, why=why)
    stable_at = max((layer.gone_at + STABLE for layer in vm.layers.values() if layer.remounts), default=0)
    if now < stable_at:
        return Decision(
            State.BLOCKED, dead=True, look_at=stable_at, why="a layer was mounted again; is it the last time?"
        )
    if now < over_at:
        return Decision(State.EXITED, dead=True, look_at=_earlier(over_at, _linger(vm, facts, now)))
    return _released(vm, facts, cleanup, now)


def _waits(vm: VM, facts: Facts, cleanup: Cleanup, layers: int) -> tuple[State, str] | None:
    """The state in which so many layers stay mounted because somebody wants it so, and who; None if they may go."""
    if layers and facts.inhibited:
        return State.HELD, "an inhibitor is taken"
    if layers and vm.policy is Policy.KEEP:
        return State.HELD, "its policy is `keep`"
    if layers and cleanup.mode == "observe":
        return State.EXITED, f"observe mode: would unmount {layers} layers"
    return None


def _released(vm: VM, facts: Facts, cleanup: Cleanup, now: int) -> Decision:
    """A pod that still runs stays listed, for a QEMU may start in it again."""
    if facts.cgroup is Population.POPULATED:
        return Decision(State.RELEASED, dead=True, look_at=_linger(vm, facts, now))
    retained_until = (vm.released_at or now) + cleanup.retain_usec
    return Decision(State.RELEASED, dead=True, look_at=retained_until, forget=now >= retained_until)


def _earlier(*times: int | None) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _linger(vm: VM, facts: Facts, now: int) -> int | None:
    """When a pod that still runs is looked at again, for a QEMU that starts in it unannounced."""
    if facts.cgroup is not Population.POPULATED:
        return None
    return now + clamp((now - (vm.exited_at or now)) // 20, LOOK_FIRST, LINGER_LAST)


def grace_of(vm: VM, facts: Facts, cleanup: Cleanup) -> int:
    """How long after death a VM's layers are left alone (µs): not at all once nothing runs in the pod."""
    if facts.cgroup in {Population.EMPTY, Population.GONE}:
        return 0
    return cleanup.grace_usec if vm.grace_usec is None else vm.grace_usec


def _due_at(layer: Layer, vm: VM, over_at: int, grace: int, now: int) -> int:
    """When a layer is to be tried. One that was mounted after the death gets a grace of its own: perhaps a new QEMU
    is about to start in the pod, perhaps somebody mounts in a loop."""
    died_at = vm.exited_at or now
    if layer.seen_at > died_at:
        at = layer.seen_at + grace
    else:
        at = died_at if layer.target.kind is Kind.HOTPLUG_DIRECTORY else over_at
    return max(at, layer.retry_at)


def lazily(layers: Iterable[Layer], vm: VM, cleanup: Cleanup, now: int, *, asked: bool) -> set[bytes]:
    """The targets that may be unmounted with MNT_DETACH now.

    Only such as were refused at least twice, and whose holders were looked for just now: none may be a QEMU, or a mount
    below, for that would be torn away too. And only long enough after the death, unless an administrator asked for it
    (`asked`).
    """
    return {
        layer.target.path
        for layer in layers
        if layer.state is LayerState.BUSY
        and layer.holders  # who holds it must be known: it could be a QEMU
        and not any(holder.qemu or holder.how == "mount" for holder in layer.holders)
        and layer.attempts > 1
        and now - layer.held_at <= HOLDERS_HOLD
        and (asked or now >= (vm.exited_at or now) + _lazy_after(layer, cleanup))
    }


def _lazy_after(layer: Layer, cleanup: Cleanup) -> int:
    usec = cleanup.lazy_after_usec(layer.target.kind)
    return NEVER // 2 if usec is None else usec


def retry_delay(attempts: int) -> int:
    """How long a layer is left alone after so many attempts that failed (µs)."""
    return RETRY[clamp(attempts - 1, 0, len(RETRY) - 1)]


def sooner(layer: Layer, time: int) -> int:
    """When a layer that was to be tried later is tried because something changed: then, or a while after the last
    attempt, for changes may come one after the other as fast as attempts fail."""
    return min(layer.retry_at, max(time, layer.tried_at + retry_delay(layer.attempts) // _EARLY))


def clamp(value: int, low: int, high: int) -> int:
    """The value, or the bound that it is beyond."""
    return max(low, min(value, high))
