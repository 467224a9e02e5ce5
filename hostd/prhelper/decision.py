"""What to do, from what is: a pure function. See `docs/pr-helper.md` for the states in an administrator's words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it is with the helper; the words are those of the bus."""

    DISABLED = "disabled"
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    BACKING_OFF = "backing-off"
    FAILED = "failed"
    STANDBY = "standby"
    REFUSED = "refused"


class Health(StrEnum):
    """What a running helper answered to the last question."""

    UNKNOWN = "unknown"  # it was not asked yet
    ANSWERS = "answers"
    HUNG = "hung"  # it did not, or it never came up


class At(StrEnum):
    """Who is at the path, as far as it matters here."""

    OURS = "ours"
    FREE = "free"
    FOREIGN = "foreign"
    OBSTACLE = "obstacle"


class Action(StrEnum):
    """What is to be done."""

    NOTHING = "nothing"
    ASK = "ask"
    START = "start"  # a listener, unless ours is there still, and a helper on it
    RENEW = "renew"  # our socket is gone: a new listener and helper; the old one keeps its clients
    RETIRE = "retire"  # no listener any more; the helper goes when its clients have gone
    STOP = "stop"  # neither listener nor helper
    KILL = "kill"  # the helper alone; it is replaced on the same listener


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the decision depends on."""

    enabled: bool
    at: At
    #: We hold a listener, wherever its file is.
    listening: bool
    #: A helper runs that takes new clients, if the path is ours.
    running: bool
    #: Helpers run that only finish with the clients they have.
    retired: bool = False
    health: Health = Health.UNKNOWN
    #: It is too early for the next start.
    waiting: bool = False
    #: And helpers that are started all the same die as soon.
    dying: bool = False
    refusal: str = ""
    failure: str = ""
    #: Why nothing can be put at the path.
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The state that this is, what to do, and why in words."""

    state: State
    action: Action
    why: str = ""


_BY_HEALTH = {
    Health.UNKNOWN: (State.STARTING, Action.ASK),
    Health.ANSWERS: (State.READY, Action.NOTHING),
    Health.HUNG: (State.UNHEALTHY, Action.KILL),
}


def decide(facts: Facts) -> Decision:
    """The decision. Nothing that is not ours is ever acted upon."""
    holds = facts.listening or facts.running
    stop, retire = (Action.STOP, Action.RETIRE) if holds else (Action.NOTHING, Action.NOTHING)
    if not facts.enabled:
        return Decision(State.DISABLED, Action.STOP if holds or facts.retired else Action.NOTHING)
    if facts.at is At.FOREIGN:
        return Decision(State.STANDBY, retire)
    if facts.refusal:
        return Decision(State.REFUSED, stop, facts.refusal)
    if facts.running and facts.at is At.OURS and not facts.dying:
        return Decision(*_BY_HEALTH[facts.health])
    if facts.waiting or facts.dying:
        # A held listener without a helper freezes QEMU's monitor.
        return Decision(State.BACKING_OFF, stop)
    if trouble := facts.obstacle or facts.failure:
        return Decision(State.FAILED, retire, trouble)
    return Decision(State.STARTING, Action.RENEW if facts.running else Action.START)
