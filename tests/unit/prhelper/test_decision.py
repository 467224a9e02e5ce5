from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hostd.prhelper.decision import Action, At, Decision, Facts, Health, State, decide

NOTHING_YET = Facts(enabled=True, at=At.FREE, listening=False, running=False)
SERVES = Facts(enabled=True, at=At.OURS, listening=True, running=True, health=Health.ANSWERS)

_BOTH = (True, False)
EVERYTHING = [
    Facts(*values[:4], retired=values[4], health=values[5], waiting=values[6] != "", dying=values[6] == "dying",
          refusal=values[7], failure=values[8], obstacle="in the way" if values[1] is At.OBSTACLE else "")
    for values in product(_BOTH, At, _BOTH, _BOTH, _BOTH, Health, ("", "waiting", "dying"), ("", "no"), ("", "cannot"))
]  # fmt: skip


def changed(facts: Facts, **changes: object) -> Facts:
    return replace(facts, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "state", "action"),
    [
        (NOTHING_YET, State.STARTING, Action.START),
        (changed(NOTHING_YET, at=At.OURS, listening=True), State.STARTING, Action.START),
        (changed(NOTHING_YET, waiting=True), State.BACKING_OFF, Action.NOTHING),
        (changed(NOTHING_YET, waiting=True, listening=True, at=At.OURS), State.BACKING_OFF, Action.STOP),
        (changed(NOTHING_YET, failure="cannot"), State.FAILED, Action.NOTHING),
        (changed(NOTHING_YET, failure="cannot", listening=True, at=At.OURS), State.FAILED, Action.RETIRE),
        (changed(NOTHING_YET, at=At.OBSTACLE, obstacle="in the way"), State.FAILED, Action.NOTHING),
        (changed(NOTHING_YET, at=At.FOREIGN), State.STANDBY, Action.NOTHING),
        (changed(NOTHING_YET, refusal="no"), State.REFUSED, Action.NOTHING),
        (SERVES, State.READY, Action.NOTHING),
        (changed(SERVES, failure="cannot"), State.READY, Action.NOTHING),
        (changed(SERVES, waiting=True), State.READY, Action.NOTHING),
        (changed(SERVES, waiting=True, dying=True), State.BACKING_OFF, Action.STOP),
        (changed(SERVES, refusal="no"), State.REFUSED, Action.STOP),
        (changed(SERVES, health=Health.UNKNOWN), State.STARTING, Action.ASK),
        (changed(SERVES, health=Health.HUNG), State.UNHEALTHY, Action.KILL),
        (changed(SERVES, at=At.FREE), State.STARTING, Action.RENEW),
        (changed(SERVES, at=At.FREE, failure="cannot"), State.FAILED, Action.RETIRE),
        (changed(SERVES, at=At.FOREIGN), State.STANDBY, Action.RETIRE),
        (changed(SERVES, enabled=False), State.DISABLED, Action.STOP),
        (changed(NOTHING_YET, enabled=False), State.DISABLED, Action.NOTHING),
        (changed(NOTHING_YET, enabled=False, retired=True), State.DISABLED, Action.STOP),
    ],
)
def test_what_follows(facts: Facts, state: State, action: Action) -> None:
    decision = decide(facts)
    assert (decision.state, decision.action) == (state, action)


def decisions() -> list[tuple[Facts, Decision]]:
    return [(facts, decide(facts)) for facts in EVERYTHING]


def test_disabled_is_disabled_whatever_else() -> None:
    assert all((decision.state is State.DISABLED) is not facts.enabled for facts, decision in decisions())


def test_a_rival_is_never_fought() -> None:
    for facts, decision in decisions():
        if facts.enabled and facts.at is At.FOREIGN:
            assert decision.state is State.STANDBY
            assert decision.action in (Action.NOTHING, Action.RETIRE)


def test_what_is_refused_never_runs() -> None:
    for facts, decision in decisions():
        if facts.refusal:
            assert decision.action in (Action.NOTHING, Action.STOP, Action.RETIRE)


def test_ready_is_only_what_answers_at_our_path() -> None:
    for facts, decision in decisions():
        if decision.state is State.READY:
            assert facts.running
            assert facts.at is At.OURS
            assert facts.health is Health.ANSWERS


def test_no_listener_is_held_where_nobody_will_serve_it() -> None:
    for facts, decision in decisions():
        if decision.state in (State.BACKING_OFF, State.FAILED, State.REFUSED, State.STANDBY) and facts.listening:
            assert decision.action in (Action.STOP, Action.RETIRE)


def test_what_speaks_against_it_is_told() -> None:
    assert decide(changed(NOTHING_YET, refusal="no")).why == "no"
    assert decide(changed(NOTHING_YET, failure="cannot")).why == "cannot"
    assert decide(changed(NOTHING_YET, at=At.OBSTACLE, obstacle="in the way", failure="cannot")).why == "in the way"
