"""qemu-pr-helper is killed: from the kill until a new connection is served."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

from tests.bench.figures import Figure
from tests.support.prhelper import Client, Home, new_helper

_KILLS = 50


def kills() -> Iterator[Figure]:
    """As a child of hostd; connected to at the moment of its death."""
    with Home() as home:
        yield Figure("pr-helper: served after SIGKILL", "ms", asyncio.run(_kill(home)))


async def _kill(home: Home) -> list[float]:
    samples = []
    async with home.running() as supervisor:
        for _ in range(_KILLS):
            old = supervisor.status.main_pid
            os.kill(old, signal.SIGKILL)
            begin = time.monotonic()
            with await asyncio.to_thread(lambda: Client(home.path).greet()):
                samples.append((time.monotonic() - begin) * 1e3)
            await new_helper(supervisor, old)
    return samples
