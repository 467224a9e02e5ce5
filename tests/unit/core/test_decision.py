"""The life of a VM as the design has it, each promise by its name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostd.config import Cleanup, LazyAfter, Mode
from hostd.core.decision import (
    DOUBT,
    HOLDERS_HOLD,
    LOOK_FIRST,
    NEVER,
    RETRY,
    STABLE,
    Decision,
    Facts,
    clamp,
    decide,
    grace_of,
    lazily,
    retry_delay,
    sooner,
)
from hostd.core.model import VM, Holder, LayerState, Policy, State
from hostd.linux.cgroup import Population
from tests.support.core import a_layer, a_vm

SECOND = 1_000_000
NOW = 1_000 * SECOND
CLEANUP = Cleanup()
DIRECTORY = b"hotplug-disks/dump"
FILE = b"hotplug-disks/data.img"
POPULATED = Facts(cgroup=Population.POPULATED, understood=True)
EMPTY = Facts(cgroup=Population.EMPTY, understood=True)
GONE = Facts(cgroup=Population.GONE, understood=True)


BACKUP = Holder(9, "backup", "open", "")


def dead(*layers: object, since: int = 0, **more: object) -> VM:
    """A VM whose QEMU died `since` µs ago."""
    return a_vm(*layers, **{"had_qemu": True, "exited_at": NOW - since, "state": State.EXITED} | more)  # type: ignore[arg-type]


def at(
    vm: VM, facts: Facts = POPULATED, now: int = NOW, cleanup: Cleanup = CLEANUP, *, hurry: bool = False
) -> Decision:
    return decide(vm, facts, cleanup, now, hurry=hurry)


# -- alive


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("inhibited", [False, True])
@pytest.mark.parametrize("exited_at", [0, NOW - 3600 * SECOND])
@pytest.mark.parametrize("cgroup", [None, *Population])
def test_a_living_qemu_means_running_whatever_else_is_seen(
    hurry: bool, inhibited: bool, exited_at: int, cgroup: Population | None
) -> None:
    vm = a_vm(a_layer(), had_qemu=True, exited_at=exited_at, state=State.CLEANING)
    assert at(vm, Facts(qemu=True, cgroup=cgroup, inhibited=inhibited), hurry=hurry) == Decision(State.RUNNING)


@pytest.mark.parametrize("state", list(State))
def test_doubt_changes_nothing_and_asks_again_soon(state: State) -> None:
    decision = at(dead(a_layer(), since=3600 * SECOND, state=state), Facts(doubt="process 7 looks like a QEMU"))
    assert (decision.state, decision.due, decision.forget) == (state, (), False)
    assert decision.why == "process 7 looks like a QEMU"
    assert decision.look_at == NOW + DOUBT


# -- not knowing is not death


def unborn(age: int = 3600 * SECOND, *layers: object, **more: object) -> VM:
    return a_vm(*(layers or (a_layer(),)), **{"first_seen_at": NOW - age} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "facts",
    [
        POPULATED,
        Facts(cgroup=Population.UNREADABLE, understood=True),
        Facts(cgroup=None, understood=False),
        Facts(cgroup=None, understood=True, named=True),
    ],
    ids=["containers-run", "unreadable", "strange-host", "a-process-names-it"],
)
def test_a_pod_without_a_qemu_is_not_dead_without_evidence(facts: Facts) -> None:
    decision = at(unborn(), facts)
    assert (decision.state, decision.dead, decision.due) == (State.PENDING, False, ())
    assert decision.why, "it says why it waits"
    assert decision.look_at is not None
    assert NOW < decision.look_at <= NOW + 5 * SECOND


@pytest.mark.parametrize(
    "facts", [EMPTY, GONE, Facts(cgroup=None, understood=True)], ids=["empty", "gone", "nobody-names-it"]
)
def test_a_pod_without_a_qemu_is_dead_on_evidence(facts: Facts) -> None:
    layer = a_layer()
    decision = at(unborn(3600 * SECOND, layer), facts)
    assert decision.dead
    assert decision.state in {State.EXITED, State.CLEANING}


@pytest.mark.parametrize("facts", [EMPTY, GONE, Facts(cgroup=None, understood=True)])
def test_and_never_sooner_than_settle(facts: Facts) -> None:
    decision = at(unborn(CLEANUP.settle_usec - 1), facts)
    assert (decision.state, decision.due, decision.why) == (State.PENDING, (), "")
    assert decision.look_at == NOW + 1
    assert at(unborn(CLEANUP.settle_usec), facts).dead


def test_a_pod_taken_for_dead_lives_again_when_its_containers_start() -> None:
    """Its cgroup was empty because its images were being pulled still."""
    vm = unborn(3600 * SECOND, a_layer(seen_at=NOW - 10 * SECOND), exited_at=NOW - 60 * SECOND, state=State.RELEASED)
    decision = at(vm, POPULATED)
    assert (decision.state, decision.dead, decision.due) == (State.PENDING, False, ())
    assert at(vm, EMPTY).due


def test_the_pause_between_looks_at_a_pending_pod_grows_and_is_bounded() -> None:
    ages = [0, SECOND, 10 * SECOND, 60 * SECOND, 86_400 * SECOND]
    pauses = [(at(unborn(age), POPULATED).look_at or 0) - NOW for age in ages]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (LOOK_FIRST, 5 * SECOND)


# -- grace


def test_layers_wait_for_grace_while_the_pod_lingers() -> None:
    vm = dead(a_layer(), since=CLEANUP.grace_usec - 1)
    decision = at(vm)
    assert (decision.state, decision.dead, decision.due) == (State.EXITED, True, ())
    assert decision.look_at is not None
    assert decision.look_at <= NOW + 1
    assert at(vm, now=NOW + 1).state is State.CLEANING


def test_a_directory_bind_has_no_grace() -> None:
    directory, file = a_layer(DIRECTORY), a_layer(FILE)
    decision = at(dead(file, directory))
    assert decision.due == (directory,)


@pytest.mark.parametrize("facts", [EMPTY, GONE])
def test_there_is_no_grace_once_nothing_runs_in_the_pod(facts: Facts) -> None:
    vm = dead(a_layer(), a_layer(FILE), grace_usec=3600 * SECOND)
    assert grace_of(vm, facts, CLEANUP) == 0
    assert len(at(vm, facts).due) == 2


@pytest.mark.parametrize(("own", "expected"), [(0, 0), (7 * SECOND, 7 * SECOND), (None, CLEANUP.grace_usec)])
def test_a_vms_own_grace_counts_before_the_configuration(own: int | None, expected: int) -> None:
    assert grace_of(dead(grace_usec=own), POPULATED, CLEANUP) == expected


def test_who_asks_for_release_does_not_wait_for_grace() -> None:
    assert at(dead(a_layer(), grace_usec=3600 * SECOND), hurry=True).due


def test_what_was_mounted_after_the_death_has_a_grace_of_its_own() -> None:
    late = a_layer(FILE, seen_at=NOW - SECOND)
    assert at(dead(late, since=3600 * SECOND)).due == ()
    assert at(dead(late, since=3600 * SECOND), now=NOW + SECOND).due == (late,)


# -- held, observed


@pytest.mark.parametrize(
    ("facts", "policy"),
    [(dataclasses.replace(EMPTY, inhibited=True), Policy.CLEAN), (EMPTY, Policy.KEEP)],
    ids=["inhibitor", "policy-keep"],
)
@pytest.mark.parametrize("hurry", [False, True])
def test_held_layers_are_left_alone(facts: Facts, policy: Policy, hurry: bool) -> None:
    decision = at(dead(a_layer(DIRECTORY), since=3600 * SECOND, policy=policy), facts, hurry=hurry)
    assert (decision.state, decision.due) == (State.HELD, ())


def test_nothing_is_held_where_nothing_is_left() -> None:
    vm = dead(a_layer(state=LayerState.GONE), since=3600 * SECOND, policy=Policy.KEEP)
    assert at(vm, EMPTY).state is State.RELEASED


@pytest.mark.parametrize(
    ("policy", "mode"), [(Policy.KEEP, Mode.ENFORCE), (Policy.CLEAN, Mode.OBSERVE)], ids=["policy-keep", "observe"]
)
def test_what_somebody_else_unmounted_is_looked_at_though_nothing_may_be_unmounted(policy: Policy, mode: Mode) -> None:
    """Else nobody would ever find it gone, and the VM would not be released when the agent has done all the work."""
    cleanup = dataclasses.replace(CLEANUP, mode=mode)
    gone = a_layer(FILE, state=LayerState.DETACHED)
    some = at(dead(gone, a_layer(), since=SECOND, policy=policy), EMPTY, cleanup=cleanup)
    assert (some.due, some.state) == ((gone,), State.EXITED if mode is Mode.OBSERVE else State.HELD)
    every = at(dead(gone, since=SECOND, policy=policy), EMPTY, cleanup=cleanup)
    assert (every.due, every.state) == ((gone,), State.CLEANING)
    pinned = a_layer(FILE, state=LayerState.DETACHED, retry_at=NOW + SECOND)
    later = at(dead(pinned, a_layer(), since=SECOND, policy=policy), EMPTY, cleanup=cleanup)
    assert (later.due, later.look_at) == ((), NOW + SECOND)


def test_observe_mode_says_what_it_would_do_and_does_nothing() -> None:
    observe = dataclasses.replace(CLEANUP, mode=Mode.OBSERVE)
    decision = at(dead(a_layer(), a_layer(DIRECTORY), since=3600 * SECOND), EMPTY, cleanup=observe)
    assert (decision.state, decision.due) == (State.EXITED, ())
    assert "would unmount 2 layers" in decision.why


# -- retry


@pytest.mark.parametrize("attempts", [1, 2, 5, 9, 50])
def test_a_change_cuts_a_delay_short_but_not_to_nothing(attempts: int) -> None:
    """Holders may come and go many times a second, each a reason to try again."""
    delay = retry_delay(attempts)
    layer = a_layer(state=LayerState.BUSY, attempts=attempts, tried_at=NOW, retry_at=NOW + delay)
    assert sooner(layer, NOW) == NOW + delay // 10, "a change right after the attempt"
    assert sooner(layer, NOW + delay // 2) == NOW + delay // 2, "one later is a reason at once"
    assert sooner(layer, NOW + 2 * delay) == NOW + delay, "nothing is put off"
    layer.retry_at = sooner(layer, NOW)
    assert sooner(layer, NOW + 1) == NOW + delay // 10, "nor does one change after the other make it sooner"


def test_the_pause_between_attempts_doubles_up_to_a_cap() -> None:
    pauses = [retry_delay(attempts) for attempts in range(1, 50)]
    assert pauses == sorted(pauses)
    assert pauses[: len(RETRY)] == list(RETRY)
    assert set(pauses[len(RETRY) :]) == {30 * SECOND}
    assert retry_delay(0) == RETRY[0]


def test_a_busy_layer_waits_and_its_neighbours_do_not() -> None:
    busy = a_layer(state=LayerState.BUSY, error="held by backup[7] (open)", attempts=3, retry_at=NOW + SECOND)
    free = a_layer(FILE)
    vm = dead(busy, free, since=3600 * SECOND)
    assert at(vm).due == (free,)
    free.state = LayerState.GONE
    decision = at(vm)
    assert (decision.state, decision.why) == (State.BLOCKED, "held by backup[7] (open)")
    assert decision.look_at is not None
    assert decision.look_at <= NOW + SECOND
    assert at(vm, now=NOW + SECOND).due == (busy,)


def test_a_hung_layer_is_not_tried_by_time() -> None:
    hung = a_layer(state=LayerState.HUNG, error="the umount does not come back", retry_at=NEVER)
    decision = at(dead(hung, since=3600 * SECOND), EMPTY)
    assert (decision.state, decision.due, decision.look_at) == (State.BLOCKED, (), None)


def test_a_layer_that_was_mounted_again_must_stay_away_before_it_counts_as_gone() -> None:
    vm = dead(a_layer(state=LayerState.GONE, remounts=1, gone_at=NOW), since=3600 * SECOND)
    decision = at(vm, EMPTY)
    assert (decision.state, decision.look_at) == (State.BLOCKED, NOW + STABLE)
    assert at(vm, EMPTY, now=NOW + STABLE).state is State.RELEASED


# -- lazily


@pytest.mark.parametrize(
    ("name", "more", "age", "asked", "expected"),
    [
        (b"container-disks/disk_0.img", {}, 31, False, True),
        (b"container-disks/kernel-boot/vmlinuz", {}, 31, False, True),
        (b"container-disks/disk_0.img", {}, 29, False, False),
        (FILE, {}, 86_400, False, False),
        (DIRECTORY, {}, 86_400, False, False),
        (FILE, {}, 0, True, True),
        (b"container-disks/disk_0.img", {"attempts": 1}, 31, False, False),
        (b"container-disks/disk_0.img", {"state": LayerState.MOUNTED}, 31, True, False),
        (b"container-disks/disk_0.img", {"state": LayerState.HUNG}, 31, True, False),
        (b"container-disks/disk_0.img", {"holders": (Holder(9, "qemu-system-x86", "open", ""),)}, 31, False, False),
        (b"container-disks/disk_0.img", {"holders": (Holder(9, "qemu-kvm", "open", ""),)}, 31, True, False),
        (b"container-disks/disk_0.img", {"holders": (Holder(0, "/x", "mount", ""),)}, 31, True, False),
        (b"container-disks/disk_0.img", {"holders": ()}, 86_400, True, False),
        # Who held it then is not who holds it now.
        (b"container-disks/disk_0.img", {"held_at": NOW - HOLDERS_HOLD - 1}, 86_400, True, False),
        (b"container-disks/disk_0.img", {"held_at": 0}, 86_400, True, False),
    ],
)
def test_what_may_be_detached(name: bytes, more: dict[str, object], age: int, asked: bool, expected: bool) -> None:
    busy = {"state": LayerState.BUSY, "attempts": 5, "holders": (BACKUP,), "held_at": NOW}
    layer = a_layer(name, **busy | more)  # type: ignore[arg-type]
    found = lazily([layer], dead(layer, since=age * SECOND), CLEANUP, NOW, asked=asked)
    assert found == ({layer.target.path} if expected else set())


def test_never_means_never() -> None:
    never = dataclasses.replace(CLEANUP, lazy_after=LazyAfter(None, None))
    layer = a_layer(state=LayerState.BUSY, attempts=99, holders=(BACKUP,), held_at=NOW)
    assert not lazily([layer], dead(layer, since=10 * 365 * 86_400 * SECOND), never, NOW, asked=False)


# -- released and forgotten


def test_a_released_vm_is_kept_for_retain_and_then_forgotten() -> None:
    vm = dead(a_layer(state=LayerState.GONE), since=3600 * SECOND, state=State.RELEASED, released_at=NOW)
    decision = at(vm, EMPTY)
    assert (decision.state, decision.forget, decision.look_at) == (State.RELEASED, False, NOW + CLEANUP.retain_usec)
    assert at(vm, EMPTY, now=NOW + CLEANUP.retain_usec).forget


def test_a_released_vm_whose_pod_still_runs_is_not_forgotten_for_a_qemu_may_start_in_it() -> None:
    vm = dead(since=86_400 * SECOND, state=State.RELEASED, released_at=NOW - 86_000 * SECOND)
    decision = at(vm)
    assert not decision.forget
    assert decision.look_at == NOW + 30 * SECOND


# -- whatever it is


moments = st.integers(0, NOW)
layers = st.builds(
    a_layer,
    st.sampled_from([b"container-disks/disk_0.img", FILE, DIRECTORY]),
    state=st.sampled_from(LayerState),
    seen_at=moments,
    retry_at=st.one_of(st.integers(0, 2 * NOW), st.just(NEVER)),
    attempts=st.integers(0, 50),
    remounts=st.integers(0, 3),
    gone_at=moments,
)
vms = st.builds(
    a_vm,
    layers,
    state=st.sampled_from(State),
    had_qemu=st.booleans(),
    exited_at=moments,
    first_seen_at=moments,
    released_at=moments,
    policy=st.sampled_from(Policy),
    grace_usec=st.none() | st.integers(0, NOW),
)
facts_ = st.builds(
    Facts,
    qemu=st.booleans(),
    doubt=st.sampled_from(["", "who knows"]),
    cgroup=st.none() | st.sampled_from(Population),
    understood=st.booleans(),
    named=st.booleans(),
    inhibited=st.booleans(),
)


@settings(deadline=None)
@given(vms, facts_, st.booleans(), st.sampled_from(Mode))
def test_a_decision_is_always_safe_and_never_spins(vm: VM, facts: Facts, hurry: bool, mode: Mode) -> None:
    decision = at(vm, facts, cleanup=dataclasses.replace(CLEANUP, mode=mode), hurry=hurry)
    if facts.qemu or facts.doubt:
        assert not decision.due
    if facts.inhibited or vm.policy is Policy.KEEP or mode is Mode.OBSERVE:
        assert all(layer.state is LayerState.DETACHED for layer in decision.due), "only looked at"
    if decision.due:
        assert decision.dead
        assert all(layer.state is not LayerState.GONE and layer.retry_at <= NOW for layer in decision.due)
    if decision.state is State.RELEASED and not facts.doubt:
        assert all(layer.state is LayerState.GONE for layer in vm.layers.values())
    if decision.look_at is not None and not decision.forget:
        assert decision.look_at > NOW, "a timer in the past is a busy loop"
    assert not (decision.forget and decision.due)


def test_clamp() -> None:
    assert [clamp(value, 2, 4) for value in (1, 2, 3, 4, 5)] == [2, 2, 3, 4, 4]
