"""No test hangs for ever: after a time that no test needs it fails, with the stacks of all threads on stderr."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

#: For each of a test's set-up, call and tear-down (s), on a machine however busy.
BOUND = 600.0
#: An exception that a signal handler raises may end in an asyncio callback, where it is only logged: again, then (s).
AGAIN = 5.0


@contextlib.contextmanager
def bounded(seconds: float = BOUND, again: float = AGAIN) -> Iterator[None]:
    """Raises pytest's failure in the main thread, whatever it does: a loop that turns, one that waits, or no loop."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=2)
        pytest.fail(f"hangs: not done within {seconds:g} s (stacks are on stderr)")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
