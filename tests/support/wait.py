"""Waiting in tests: always for a condition, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How long anything may take on a busy machine. Only a failing test ever waits this long.
DEADLINE = 20.0
_PAUSE = 0.003


class TimedOut(AssertionError):
    """A condition did not come true in time; the message says which and what was seen last."""


def until(condition: Callable[[], T], deadline: float = DEADLINE, why: str | Callable[[], str] = "") -> T:
    """The first true value of `condition()`. Raises TimedOut with `why` (text, or a function that says what it saw)."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimedOut(_failure(deadline, why, value))
        time.sleep(_PAUSE)
    return value


async def eventually(condition: Callable[[], T], deadline: float = DEADLINE, why: str | Callable[[], str] = "") -> T:
    """`until` for tests whose event loop has to run meanwhile."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimedOut(_failure(deadline, why, value))
        await asyncio.sleep(_PAUSE)
    return value


def holds_for(condition: Callable[[], object], seconds: float, why: str = "") -> None:
    """Asserts that `condition()` stays true for a while: for what must not happen, which no event announces."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not condition():
            raise AssertionError(why or "a condition that must hold does not")
        time.sleep(_PAUSE)


def _failure(deadline: float, why: str | Callable[[], str], value: object) -> str:
    reason = why() if callable(why) else why
    return f"not within {deadline:g} s: {reason or 'a condition'} (last seen: {value!r})"
