"""qemu-pr-helper is killed: from the kill until a new connection is served."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from hostd.config import Backend, PRHelper
from hostd.prhelper.supervisor import Supervisor
from tests.bench.figures import Figure
from tests.support.prhelper import Home, new_helper, served_after_kill
from tests.support.systemd import CannotBoot, Systemd

_KILLS = 50
_TREE = Path(__file__).parents[2]
_UNITS = [_TREE / f"systemd/hostd-pr-helper.{kind}" for kind in ("socket", "service")]


def kills() -> Iterator[Figure]:
    """As a child of hostd, and under a systemd of its own where one can be booted."""
    with Home() as home:
        yield Figure("pr-helper: served after SIGKILL (child)", "ms", asyncio.run(_as_child(home)))
    try:
        systemd = Systemd(_UNITS)
    except CannotBoot as reason:
        print(f"pr-helper: not measured under systemd: {reason}", file=sys.stderr)
        return
    with systemd:
        done = systemd.run("env", f"PYTHONPATH={_TREE}", sys.executable, "-B", "-m", "tests.bench.pr_helper")
    samples = json.loads(done.stdout.splitlines()[-1])
    yield Figure("pr-helper: served after SIGKILL (systemd)", "ms", samples)


async def _as_child(home: Home) -> list[float]:
    async with home.running() as supervisor:
        return await _kill(supervisor, home.path)


async def _under_systemd() -> list[float]:
    config = PRHelper(backend=Backend.SYSTEMD)
    supervisor = Supervisor(config, b"/run/bench/state", b"/run/bench/run")
    await supervisor.start()
    await supervisor.enable()
    return await _kill(supervisor, config.socket)


async def _kill(supervisor: Supervisor, path: bytes) -> list[float]:
    samples = []
    for _ in range(_KILLS):
        old = supervisor.status.main_pid
        samples.append(await served_after_kill(old, path) * 1e3)
        await new_helper(supervisor, old)
    return samples


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_under_systemd())))
