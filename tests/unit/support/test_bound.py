"""What hangs is ended, however it hangs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.bound import bounded


def sleep() -> None:
    time.sleep(60)


def spin() -> None:
    while True:
        pass


def loop_that_waits() -> None:
    asyncio.run(asyncio.sleep(60))


def loop_that_turns() -> None:
    async def at_once() -> bytes:
        return b""

    async def turn() -> None:
        while not await at_once():
            pass

    asyncio.run(turn())


@pytest.mark.parametrize("hang", [sleep, spin, loop_that_waits, loop_that_turns])
def test_it_ends(hang: Callable[[], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match="hangs: not done within"), bounded(0.05):
        hang()


def test_a_callback_that_swallows_it_is_no_way_out() -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, _context: None)
        loop.call_soon(spin)
        await asyncio.sleep(60)

    with pytest.raises(pytest.fail.Exception), bounded(0.05, again=0.05):
        asyncio.run(wait())


def test_what_is_done_in_time_leaves_no_trace() -> None:
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with bounded(60):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    assert timer[0] == 0 or timer[0] > 1
