"""The back end without systemd: the helper is a child of hostd, on a listener of hostd's own.

It survives hostd: the helper holds the listener too, and the next hostd takes both over (see `listener`). What it does
not survive is the death of both at once, which leaves a stale socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from hostd.errors import HelperFailed
from hostd.prhelper import path as paths
from hostd.prhelper.backend import Found
from hostd.prhelper.helper import PATIENCE, Helper
from hostd.prhelper.listener import Listener, clients, holders, recover
from hostd.prhelper.memory import Known
from hostd.prhelper.preflight import own_capabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.prhelper.memory import Memory

log = logging.getLogger(__name__)

#: s: one that is killed after its time to end by itself is dead at once, unless it waits for a device.
_PATIENCE: Final = 2 * PATIENCE


class ChildBackend:
    """See `backend.Backend`."""

    name = "child"

    def __init__(self, path: bytes, memory: Memory, changed: Callable[[], None], program: bytes) -> None:
        self._path = path
        self._memory = memory
        self._changed = changed
        self._program = program
        self._listener: Listener | None = None
        self._main: Helper | None = None
        self._retired: dict[Helper, int] = {}
        self._ends: list[str] = []
        self._recover()

    def _recover(self) -> None:
        """Takes over what an earlier hostd left running."""
        known = self._memory.known
        if known.backend != self.name:
            return
        for number in known.retired:
            for helper in self._find(number):
                self._retired[helper] = number
        for helper in self._find(known.number):
            self._main = helper
            log.info("took over qemu-pr-helper %d, which was running", helper.pid)
            break
        if self._main is not None and known.inode is not None:
            try:
                self._listener = recover(self._main.process.fd, known.inode, known.number)
            except OSError as error:
                log.warning("the helper's listener ends with the helper, for it cannot be copied: %s", error)

    def _find(self, number: int) -> list[Helper]:
        found = []
        for pid in holders(number) if number else ():
            with contextlib.suppress(ProcessLookupError):
                found.append(Helper.find(pid, self._on_death))
        return found

    def _on_death(self, helper: Helper) -> None:
        if helper is self._main:
            self._main = None
            if not helper.asked:
                self._ends.append(helper.end)
        self._retired.pop(helper, None)
        self._changed()

    async def find(self) -> Found:
        """What runs now; retired helpers whose last client has gone are let go."""
        for helper in self._retired:
            if not clients(helper.pid):
                helper.ask_to_end()
        inode = self._memory.known.inode if self._main is not None else None
        return Found(
            self._listener is not None,
            self._listener.inode if self._listener is not None else inode,
            self._main.process if self._main is not None else None,
            tuple(helper.pid for helper in self._retired),
            self._program,
            own_capabilities(),
        )

    def take_ends(self) -> list[str]:
        """How helpers ended."""
        ends, self._ends = self._ends, []
        return ends

    async def start(self) -> None:
        """See `Backend`."""
        if self._listener is None or paths.inode_at(self._path) != self._listener.inode:
            await self.retire()
            self._listener = Listener.create(self._path)
        if self._main is None:
            self._remember()  # before there is a helper that would have to be found
            self._main = Helper.spawn(self._program, self._listener.socket, self._on_death)

    def end(self, why: str = "") -> None:
        """See `Backend`."""
        if self._main is not None and why:
            self._main.kill(why)
        elif self._main is not None:
            self._main.ask_to_end()

    async def retire(self) -> None:
        """See `Backend`."""
        number = self._listener.number if self._listener is not None else self._memory.known.number
        self._close_listener()
        if self._main is not None:
            self._retired[self._main] = number
            self._main = None
        self._remember()
        await self.find()

    def _close_listener(self) -> None:
        if self._listener is not None:
            paths.remove(self._path, self._listener.inode)
            self._listener.close()
            self._listener = None

    def _remember(self) -> None:
        listener = self._listener
        retired = tuple(self._retired.values())
        if listener is None:
            self._memory.remember(Known(self.name, retired=retired) if retired else Known())
        else:
            self._memory.remember(Known(self.name, listener.inode, listener.number, retired))

    async def stop(self) -> None:
        """See `Backend`."""
        await self.retire()
        helpers = list(self._retired)
        for helper in helpers:
            helper.ask_to_end()
        await _wait(helpers)
        left = [helper.pid for helper in helpers if not helper.over.is_set()]
        self._remember()
        if left:
            raise HelperFailed(f"qemu-pr-helper {left[0]} does not end, not even when killed: it waits for a device")

    def detach(self) -> None:
        """See `Backend`. The helper has the listener too."""
        for helper in (self._main, *self._retired):
            if helper is not None:
                helper.release()
        if self._listener is not None:
            self._listener.close()


async def _wait(helpers: list[Helper]) -> None:
    waits = [asyncio.ensure_future(helper.over.wait()) for helper in helpers]
    if waits:
        _, late = await asyncio.wait(waits, timeout=_PATIENCE)
        for wait in late:
            wait.cancel()
