"""A client of hostd that watches in the background.

async with hostd.client.connect(address) as node, watching(node) as watcher:
    exited = await watcher.first(events.VMExited)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from hostd.client import events
from hostd.client.node import Node
from tests.support.wait import eventually

E = TypeVar("E")


class Watcher:
    """Takes events in the background."""

    def __init__(self, node: Node) -> None:
        self.seen: list[events.Event] = []
        self._task = asyncio.create_task(self._watch(node))

    async def _watch(self, node: Node) -> None:
        async for event in node.watch():
            self.seen.append(event)

    async def first(self, kind: type[E], condition: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of this kind, taken with all before it."""
        found: list[tuple[int, E]] = []

        def look() -> bool:
            if self._task.done():
                self._task.result()
            found[:] = [(n, e) for n, e in enumerate(self.seen) if isinstance(e, kind) and condition(e)][:1]
            return bool(found)

        await eventually(look, why=lambda: f"{kind.__name__}; seen: {self.seen}")
        ((at, event),) = found
        del self.seen[: at + 1]
        return event

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


@asynccontextmanager
async def watching(node: Node) -> AsyncIterator[Watcher]:
    watcher = Watcher(node)
    try:
        yield watcher
    finally:
        await watcher.end()
