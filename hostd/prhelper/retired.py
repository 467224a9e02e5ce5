"""Helpers whose listener is closed: each finishes with the clients that it has, and goes with the last of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from hostd.errors import HelperFailed
from hostd.prhelper.helper import PATIENCE, Helper
from hostd.prhelper.listener import clients, holders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: s: one that is killed after its time to end by itself is dead at once, unless it waits for a device.
_PATIENCE: Final = 2 * PATIENCE


def find(number: int, died: Callable[[Helper], None]) -> list[Helper]:
    """The running helpers that hold this listener (the socket's inode number)."""
    found = []
    for pid in holders(number) if number else ():
        with contextlib.suppress(ProcessLookupError):
            found.append(Helper.find(pid, died))
    return found


class Retired:
    """Those of one back end, which is told of their deaths and tells us (`discard`)."""

    def __init__(self, numbers: Iterable[int], died: Callable[[Helper], None]) -> None:
        """`numbers`: what an earlier hostd remembered."""
        self._helpers = {helper: number for number in numbers for helper in find(number, died)}

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(helper.pid for helper in self._helpers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The listeners by which they are found again."""
        return tuple(sorted(set(self._helpers.values())))

    def add(self, helper: Helper, number: int) -> None:
        """Takes over one with its listener's number."""
        self._helpers[helper] = number

    def discard(self, helper: Helper) -> None:
        """It has ended."""
        self._helpers.pop(helper, None)

    def dismiss(self) -> None:
        """Lets those go whose last client has gone."""
        for helper in self._helpers:
            if clients(helper.pid) == 0:
                helper.ask_to_end()

    async def end(self) -> None:
        """Ends them all, clients or not. Raises HelperFailed."""
        helpers = list(self._helpers)
        for helper in helpers:
            helper.ask_to_end()
        waits = [asyncio.ensure_future(helper.over.wait()) for helper in helpers]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_PATIENCE)
            for wait in late:
                wait.cancel()
        left = [helper.pid for helper in helpers if not helper.over.is_set()]
        if left:
            raise HelperFailed(f"qemu-pr-helper {left[0]} does not end, not even when killed: it waits for a device")

    def release(self) -> None:
        """Lets go of all that live: hostd ends."""
        for helper in self._helpers:
            helper.release()
