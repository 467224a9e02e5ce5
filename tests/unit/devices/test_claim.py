"""What becomes of claims: each rule, and a state machine that holds the promises against random lives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostd.config import OnExit
from hostd.devices.asking import Wish, claimed, refuse_release
from hostd.devices.claim import Claim, Life, Run, Stage, mismatched, owns, settle, users
from hostd.devices.device import Device
from hostd.devices.listing import conflicts, devices_of, rows
from hostd.devices.run_index import RunIndex
from hostd.errors import HostdError

GPU = Device("pci/0000:3b:00.0", "10de:1eb8", "a GPU", group="12")
NIC = Device("pci/0000:5e:00.0", "8086:10ed", "a NIC", group="13")
THERE = {device.name: device for device in (GPU, NIC)}
RELEASE, HOLD = OnExit.RELEASE, OnExit.HOLD


def run(pod: str, vm: str = "ns/a", *having: Device, life: Life = Life.ALIVE, order: int = 0, vmi_uid: str = "") -> Run:
    return Run(pod, vm, vmi_uid, life, order, open={device.name: 7 for device in having})


def runs(*all_of_them: Run) -> dict[str, Run]:
    return {each.pod_uid: each for each in all_of_them}


def opened(on_exit: OnExit | None = None, *, asked: bool = False) -> dict[str, Claim]:
    """The claims once VM ns/a has the GPU open."""
    before = {GPU.name: Claim(GPU.name, "ns/a", on_exit=on_exit, asked=True)} if asked or on_exit else {}
    return settle(before, runs(run("p1", "ns/a", GPU)), THERE, RELEASE)


def test_an_open_device_is_claimed_with_what_it_is() -> None:
    (claim,) = settle({}, runs(run("p1", "ns/a", GPU)), THERE, RELEASE).values()
    assert (claim.vm, claim.pod_uid, claim.stage, claim.asked) == ("ns/a", "p1", Stage.IN_USE, False)
    assert (claim.identity, claim.description) == (GPU.identity, GPU.description)


def test_death_releases_or_holds() -> None:
    dead = runs(run("p1", life=Life.DEAD))
    assert settle(opened(), dead, THERE, RELEASE) == {}
    assert settle(opened(), dead, THERE, HOLD)[GPU.name].stage is Stage.HELD


def test_the_vms_own_choice_comes_first() -> None:
    assert settle(opened(HOLD), {}, THERE, RELEASE)[GPU.name].stage is Stage.HELD
    assert settle(opened(RELEASE), {}, THERE, HOLD) == {}


def test_what_is_held_stays_held_when_the_configuration_changes() -> None:
    held = settle(opened(), {}, THERE, HOLD)
    assert settle(held, {}, THERE, RELEASE) == held


def test_the_choice_counts_for_devices_that_come_later() -> None:
    both = settle(opened(HOLD), runs(run("p1", "ns/a", GPU, NIC)), THERE, RELEASE)
    assert both[NIC.name].on_exit is HOLD
    assert set(settle(both, {}, THERE, RELEASE)) == {GPU.name, NIC.name}


def test_not_knowing_is_not_death() -> None:
    claims = opened()
    assert settle(claims, runs(run("p1", life=Life.UNSEEN)), THERE, RELEASE) == claims


def test_unplugged_while_the_vm_lives() -> None:
    alive = runs(run("p1"))
    assert settle(opened(HOLD), alive, THERE, RELEASE)[GPU.name].stage is Stage.RESERVED
    assert settle(opened(), alive, THERE, HOLD) == {}


def test_a_vm_without_a_name_holds_nothing() -> None:
    """What has no name could never be released by name."""
    claims = settle({}, runs(run("p1", "", GPU)), THERE, HOLD)
    assert claims[GPU.name].pod_uid == "p1"
    assert settle(claims, {}, THERE, HOLD) == {}


def test_a_name_that_is_known_later_is_taken_over() -> None:
    claims = settle({}, runs(run("p1", "", GPU)), THERE, HOLD)
    assert settle(claims, runs(run("p1", "ns/a", GPU)), THERE, HOLD)[GPU.name].vm == "ns/a"


def test_a_name_that_an_agent_corrects_is_taken_over() -> None:
    corrected = runs(run("p1", "ns/b", GPU))
    after = settle(opened(), corrected, THERE, HOLD)
    assert after[GPU.name].vm == "ns/b"
    assert conflicts(after, corrected, THERE) == {}
    asked = settle(opened(asked=True), corrected, THERE, HOLD)
    assert asked[GPU.name].vm == "ns/a"
    assert len(conflicts(asked, corrected, THERE)) == 1


def test_a_reservation_outlives_runs_that_do_not_use_it() -> None:
    claims = {GPU.name: Claim(GPU.name, "ns/a", asked=True)}
    alive = replace(run("p1"), settled=True)
    after = settle(settle(claims, runs(alive), THERE, RELEASE), {}, THERE, RELEASE)
    assert after[GPU.name].stage is Stage.RESERVED


def test_a_held_device_that_the_next_run_does_without_is_free() -> None:
    """harvester #7398: the claim follows the VM's latest definition."""
    held = settle(opened(), {}, THERE, HOLD)
    starting = settle(held, runs(run("p2", life=Life.UNSEEN, order=1)), THERE, HOLD)
    assert starting[GPU.name].pod_uid == "p2"
    young = settle(starting, runs(run("p2", order=1)), THERE, HOLD)
    assert young[GPU.name].stage is Stage.HELD
    assert settle(young, runs(replace(run("p2", order=1), settled=True)), THERE, HOLD) == {}


def test_a_run_that_fails_early_loses_nothing() -> None:
    """Another VM has the device, so QEMU ends at once: the claim must still be there for the next try."""
    held = settle(opened(), {}, THERE, HOLD)
    failed = settle(held, runs(run("p2", order=1)), THERE, HOLD)
    assert settle(failed, runs(run("p2", life=Life.DEAD, order=1)), THERE, HOLD)[GPU.name].stage is Stage.HELD


def test_the_old_run_s_end_leaves_the_new_one_s_claim() -> None:
    """kubevirt #7032: ns/a is started anew while its old run is still going down."""
    wish = Wish(GPU.name, "ns/a", vmi_uid="second")
    old = run("p1", "ns/a", GPU, vmi_uid="first")
    asked = claimed(settle({}, runs(old), THERE, RELEASE), wish, GPU, runs(old), THERE)
    assert asked[GPU.name].stage is Stage.IN_USE
    new = run("p2", life=Life.UNSEEN, order=1, vmi_uid="second")
    after = settle(asked, runs(new), THERE, RELEASE)[GPU.name]
    assert (after.stage, after.pod_uid, after.vmi_uid) == (Stage.RESERVED, "p2", "second")


def test_an_asked_claim_goes_to_the_later_run_that_is_there() -> None:
    claims = opened(asked=True)
    after = settle(claims, runs(run("p2", life=Life.UNSEEN, order=1)), THERE, RELEASE)
    assert (after[GPU.name].stage, after[GPU.name].pod_uid) == (Stage.RESERVED, "p2")


def test_another_vm_that_opens_it_gets_no_claim_but_a_conflict() -> None:
    held = settle(opened(), {}, THERE, HOLD)
    thief = runs(run("p9", "ns/b", GPU))
    after = settle(held, thief, THERE, HOLD)
    assert after == held
    (conflict,) = conflicts(after, thief, THERE).values()
    assert (conflict.device, conflict.vm) == (GPU.name, "ns/a")
    assert "process 7 of ns/b (pod p9) has it open, though it is held for ns/a" in conflict.reason


def test_the_thief_gets_it_when_the_claim_ends() -> None:
    both = runs(run("p1", "ns/a", GPU), run("p9", "ns/b", GPU, order=1))
    claims = settle(opened(), both, THERE, RELEASE)
    assert claims[GPU.name].vm == "ns/a"
    after = settle(claims, runs(run("p9", "ns/b", GPU)), THERE, RELEASE)
    assert after[GPU.name].vm == "ns/b"


def test_another_device_is_a_mismatch_and_never_rebound() -> None:
    held = settle(opened(), {}, THERE, HOLD)
    other = {GPU.name: replace(GPU, identity="10de:2204")}
    for lives in ({}, runs(run("p2", "ns/a", GPU))):
        after = settle(held, lives, other, HOLD)
        assert after[GPU.name].identity == "10de:1eb8"
        assert mismatched(after[GPU.name], other[GPU.name])


@pytest.mark.parametrize(
    ("claim", "device", "other"),
    [
        (("1:2", "S1"), ("1:2", "S1"), False),
        (("1:2", "S1"), ("1:2", "S2"), True),
        (("1:2", ""), ("1:2", "S2"), False),
        (("1:2", "S1"), ("1:2", ""), False),
        (("", ""), ("1:2", ""), False),
        (("1:2", ""), ("1:3", ""), True),
    ],
)
def test_what_was_not_known_cannot_differ(claim: tuple[str, str], device: tuple[str, str], other: bool) -> None:
    known = Claim("usb/1-2", "ns/a", identity=claim[0], serial=claim[1])
    assert mismatched(known, Device("usb/1-2", device[0], serial=device[1])) is other


PODS = ("p0", "p1", "p2", "p3")
VMS = ("ns/a", "ns/b", "")
NAMES = tuple(THERE)


class Lives(RuleBasedStateMachine):
    """Runs live, open, close and die as they like; callers ask; devices go and come back as others."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[str, Claim] = {}
        self.runs = RunIndex()
        self.devices = dict(THERE)
        self.on_exit = RELEASE
        self.order = 0

    def settle(self) -> None:
        before = self.claims
        self.claims = settle(before, self.runs, self.devices, self.on_exit)
        open_in = users(self.runs)
        for name, claim in before.items():
            after = self.claims.get(name)
            if after is not None and after.vm != claim.vm:
                # Only a VM without a name gets one, and only a claim that ended makes room.
                assert not claim.vm or claim.stage is not Stage.RESERVED
                assert not any(owns(claim, each) for each in open_in.get(name, ()))
            if after is not None and after.vm == claim.vm and claim.identity and owns(claim, Run("", after.vm)):
                assert after.identity in {claim.identity, self.devices[name].identity if name in self.devices else ""}
        again = settle(self.claims, self.runs, self.devices, self.on_exit)
        assert again == self.claims, "a second look changes nothing"
        self.only_the_concerned_matter(before)

    def only_the_concerned_matter(self, before: dict[str, Claim]) -> None:
        some = self.runs.concerned(before)
        assert settle(before, some, self.devices, self.on_exit) == self.claims
        assert conflicts(self.claims, some, self.devices) == conflicts(self.claims, self.runs, self.devices)
        assert rows(self.claims, some, self.devices) == rows(self.claims, self.runs, self.devices)
        had = {pod: names for pod, names in devices_of(self.claims, self.runs).items() if names}
        assert {pod: names for pod, names in devices_of(self.claims, some).items() if names} == had

    @rule(pod=st.sampled_from(PODS), vm=st.sampled_from(VMS))
    def start(self, pod: str, vm: str) -> None:
        known = self.runs.get(pod)
        if known is None or known.life is Life.DEAD:
            self.order += 1
            self.runs[pod] = Run(pod, known.vm if known else vm, life=Life.UNSEEN, order=self.order)
            self.settle()

    @rule(pod=st.sampled_from(PODS), names=st.sets(st.sampled_from(NAMES)))
    def look(self, pod: str, names: set[str]) -> None:
        known = self.runs.get(pod)
        if known is not None and known.life is not Life.DEAD:
            self.runs[pod] = replace(known, life=Life.ALIVE, open=dict.fromkeys(names, 7))
            self.settle()

    @rule(pod=st.sampled_from(PODS))
    def grow_old(self, pod: str) -> None:
        if pod in self.runs and self.runs[pod].life is Life.ALIVE:
            self.runs[pod] = replace(self.runs[pod], settled=True)
            self.settle()

    @rule(pod=st.sampled_from(PODS))
    def die(self, pod: str) -> None:
        if pod in self.runs:
            self.runs[pod] = replace(self.runs[pod], life=Life.DEAD, open={}, settled=False)
            self.settle()

    @rule(pod=st.sampled_from(PODS))
    def be_forgotten(self, pod: str) -> None:
        if pod in self.runs and self.runs[pod].life is Life.DEAD:
            del self.runs[pod]
            self.settle()

    @rule(on_exit=st.sampled_from(OnExit))
    def reload(self, on_exit: OnExit) -> None:
        self.on_exit = on_exit
        self.settle()

    @rule(name=st.sampled_from(NAMES), identity=st.sampled_from(["10de:1eb8", "8086:10ed", ""]))
    def swap(self, name: str, identity: str) -> None:
        self.devices.pop(name, None)
        if identity:
            self.devices[name] = replace(THERE[name], identity=identity)
        self.settle()

    @rule(
        name=st.sampled_from(NAMES),
        vm=st.sampled_from(VMS[:2]),
        vmi_uid=st.sampled_from([None, "u1", "u2"]),
        on_exit=st.sampled_from([None, *OnExit]),
    )
    def ask(self, name: str, vm: str, vmi_uid: str | None, on_exit: OnExit | None) -> None:
        before, wish, found = self.claims, Wish(name, vm, vmi_uid, on_exit), self.devices.get(name)
        some = self.runs.concerned(before)
        try:
            self.claims = claimed(before, wish, found, self.runs, THERE)
        except HostdError as error:
            with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
                claimed(before, wish, found, some, THERE)
            return
        assert claimed(before, wish, found, some, THERE) == self.claims
        assert self.claims[name].vm == vm
        assert before.get(name) is None or before[name].vm == vm, "nobody's claim is taken away"
        assert claimed(self.claims, wish, found, self.runs, THERE) == self.claims
        self.settle()

    @precondition(lambda self: self.claims)
    @rule(name=st.sampled_from(NAMES), vm=st.sampled_from(VMS[:2]))
    def give_up(self, name: str, vm: str) -> None:
        claim = self.claims.get(name)
        if claim is None:
            return
        try:
            refuse_release(claim, vm, self.runs, ())
        except HostdError:
            return
        assert claim.vm == vm
        assert name not in users(self.runs)
        self.claims = {key: each for key, each in self.claims.items() if key != name}
        self.settle()
        assert name not in self.claims

    @invariant()
    def what_is_open_is_claimed(self) -> None:
        for name, having in users(self.runs).items():
            claim = self.claims[name]
            told = {key[2] for key in conflicts(self.claims, self.runs, self.devices) if key[:2] == (name, "open")}
            for each in having:
                assert owns(claim, each) != (each.pod_uid in told)

    @invariant()
    def in_use_means_open_or_not_known(self) -> None:
        for name, claim in self.claims.items():
            if claim.stage is Stage.IN_USE:
                user = self.runs[claim.used_by]
                assert user.life is Life.UNSEEN or name in user.open
                assert owns(claim, user)

    @invariant()
    def every_device_is_listed_once(self) -> None:
        listed = [row.device for row in rows(self.claims, self.runs, self.devices)]
        assert len(listed) == len(set(listed))
        assert set(listed) == {*self.claims, *self.devices}
        devices_of(self.claims, self.runs)


Lives.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLives = Lives.TestCase
