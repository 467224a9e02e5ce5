"""The back end without systemd: the helper is a child of hostd, on a listener of hostd's own.

It survives hostd: the helper holds the listener too, and the next hostd takes both over (see `listener`). What it does
not survive is the death of both at once, which leaves a stale socket.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from hostd.prhelper import path as paths
from hostd.prhelper.backend import End, Found
from hostd.prhelper.helper import Helper
from hostd.prhelper.listener import Listener, recover
from hostd.prhelper.memory import Known
from hostd.prhelper.preflight import own_capabilities
from hostd.prhelper.retired import Retired, find

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.prhelper.memory import Memory

log = logging.getLogger(__name__)


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
        self._ends: list[End] = []
        known = memory.known if memory.known.backend == self.name else Known()
        self._retired = Retired(known.retired, self._on_death)
        self._recover(known)

    def _recover(self, known: Known) -> None:
        """Takes over what an earlier hostd left running."""
        for helper in find(known.number, self._on_death):
            self._main = helper
            log.info("took over qemu-pr-helper %d, which was running", helper.pid)
            break
        if self._main is not None and known.inode is not None:
            try:
                self._listener = recover(self._main.process.fd, known.inode, known.number)
            except OSError as error:
                log.warning("the helper's listener ends with the helper, for it cannot be copied: %s", error)

    def _on_death(self, helper: Helper) -> None:
        if helper is self._main:
            self._main = None
            if not helper.asked:
                self._ends.append(helper.end)
        self._retired.discard(helper)
        self._changed()

    async def find(self) -> Found:
        """See `Backend`."""
        self._retired.dismiss()
        inode = self._memory.known.inode if self._main is not None else None
        return Found(
            self._listener is not None,
            self._listener.inode if self._listener is not None else inode,
            self._main.process if self._main is not None else None,
            self._retired.pids,
            self._program,
            own_capabilities(),
        )

    def take_ends(self) -> list[End]:
        """See `Backend`."""
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
            self._retired.add(self._main, number)
            self._main = None
        self._remember()
        self._retired.dismiss()

    def _close_listener(self) -> None:
        if self._listener is not None:
            paths.remove(self._path, self._listener.inode)
            self._listener.close()
            self._listener = None

    def _remember(self) -> None:
        listener = self._listener
        retired = self._retired.numbers
        if listener is None:
            self._memory.remember(Known(self.name, retired=retired) if retired else Known())
        else:
            path = os.fsdecode(self._path)
            self._memory.remember(Known(self.name, listener.inode, listener.number, retired, path))

    async def stop(self) -> None:
        """See `Backend`."""
        await self.retire()
        try:
            await self._retired.end()
        finally:
            self._remember()

    def detach(self) -> None:
        """See `Backend`. The helper has the listener too."""
        self._retired.release()
        if self._main is not None:
            self._main.release()
        if self._listener is not None:
            self._listener.close()
