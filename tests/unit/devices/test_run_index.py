"""Whose runs matter to claims: the same as by asking every run, whatever came and went before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hostd.config import OnExit
from hostd.devices.claim import Claim, Life, Run, Stage, settle
from hostd.devices.listing import conflicts, devices_of, rows
from hostd.devices.run_index import RunIndex

PODS, VMS = ("p0", "p1", "p2", "p3"), ("", "ns/a", "ns/b")
GPU, STICK = "pci/0000:3b:00.0", "usb/1-2"

a_pod = st.sampled_from(PODS)
a_pod_or_none = st.sampled_from(("", *PODS))
a_vm = st.sampled_from(VMS)
a_run = st.builds(
    Run, a_pod, a_vm, life=st.sampled_from(Life), settled=st.booleans(),
    open=st.sampled_from([{}, {}, {GPU: 7}, {GPU: 7, STICK: 7}]),
)  # fmt: skip
a_claim = st.builds(
    Claim, st.sampled_from([GPU, STICK]), a_vm, a_pod_or_none, stage=st.sampled_from(Stage), asked=st.booleans(),
    renewed=st.booleans(), used_by=a_pod_or_none,
)  # fmt: skip
#: A run is a run that is seen, a pod one that is forgotten.
some_events = st.lists(st.one_of(a_run, a_pod), max_size=12)
some_claims = st.lists(a_claim, max_size=2).map(lambda claims: {claim.device: claim for claim in claims})


def concerned(runs: Mapping[str, Run], claims: Mapping[str, Claim]) -> dict[str, Run]:
    """By asking every run."""
    pods = {claim.pod_uid for claim in claims.values()} | {claim.used_by for claim in claims.values()}
    names = {claim.vm for claim in claims.values()} - {""}
    return {pod: run for pod, run in runs.items() if run.open or pod in pods or run.vm in names}


@given(some_events, some_claims)
def test_it_finds_whom_a_search_finds(events: list[Run | str], claims: dict[str, Claim]) -> None:
    index, plain = RunIndex(), dict[str, Run]()
    for event in events:
        if isinstance(event, Run):
            index[event.pod_uid] = plain[event.pod_uid] = event
        else:
            assert index.pop(event, None) == plain.pop(event, None)
        assert index.concerned(claims) == concerned(plain, claims)
    assert dict(index) == plain
    assert len(index) == len(plain)


@given(st.lists(a_run, max_size=4, unique_by=lambda run: run.pod_uid), some_claims, st.sampled_from(OnExit))
def test_the_others_have_no_say(seen: list[Run], before: dict[str, Claim], on_exit: OnExit) -> None:
    index = RunIndex()
    for order, run in enumerate(seen):
        index[run.pod_uid] = replace(run, order=order)
    some = index.concerned(before)
    claims = settle(before, index, {}, on_exit)
    assert settle(before, some, {}, on_exit) == claims
    assert conflicts(claims, some, {}) == conflicts(claims, index, {})
    assert rows(claims, some, {}) == rows(claims, index, {})
    assert having(claims, some) == having(claims, index)


def having(claims: Mapping[str, Claim], runs: Mapping[str, Run]) -> dict[str, tuple[str, ...]]:
    return {pod: names for pod, names in devices_of(claims, runs).items() if names}


def test_nothing_is_left_of_what_is_forgotten() -> None:
    index = RunIndex()
    for pod in PODS:
        index[pod] = Run(pod, "ns/a", life=Life.ALIVE, open={GPU: 7})
    for pod in PODS:
        del index[pod]
    assert (index._runs, index._having, index._pods) == ({}, set(), {})
