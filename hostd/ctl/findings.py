"""What doctor finds: a line of what is, and of what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    #: As it should be.
    GOOD = "good"
    #: Works, and something is missing that would make it better.
    NOTE = "note"
    #: Works now, and will cost something.
    WARNING = "warning"
    #: Does not work.
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `to_do` is empty where all is good."""

    area: str
    level: Level
    what: str
    to_do: str = ""


def good(area: str, what: str) -> Finding:
    """As it should be."""
    return Finding(area, Level.GOOD, what)


def note(area: str, what: str, to_do: str) -> Finding:
    """Could be better."""
    return Finding(area, Level.NOTE, what, to_do)


def warning(area: str, what: str, to_do: str) -> Finding:
    """Will cost something."""
    return Finding(area, Level.WARNING, what, to_do)


def bad(area: str, what: str, to_do: str) -> Finding:
    """Does not work."""
    return Finding(area, Level.BAD, what, to_do)
