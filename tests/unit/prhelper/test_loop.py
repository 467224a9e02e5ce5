"""How often a helper that dies at once is started before the listener is closed, with a back end that is played."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from hostd.prhelper import loop
from hostd.prhelper.backend import Backend, End, Found
from hostd.prhelper.listener import Listener
from hostd.prhelper.preflight import own_capabilities
from hostd.prhelper.supervisor import Supervisor
from tests.support.prhelper import PROGRAM, Home, reaches
from tests.support.wait import DEADLINE


class Dying:
    """A back end whose helpers die as soon as they are started."""

    name = "systemd"

    def __init__(self, path: bytes, end: End) -> None:
        self._path, self._end = path, end
        self._listener: Listener | None = None
        self._ends: list[End] = []
        self.done: list[str] = []

    async def find(self) -> Found:
        inode = self._listener.inode if self._listener else None
        return Found(self._listener is not None, inode, program=os.fsencode(PROGRAM), capabilities=own_capabilities())

    def take_ends(self) -> list[End]:
        ends, self._ends = self._ends, []
        return ends

    async def start(self) -> None:
        self.done.append("start")
        self._listener = self._listener or Listener.create(self._path)
        self._ends.append(self._end)

    def end(self, why: str = "") -> None:
        raise AssertionError(f"there is none to be ended: {why}")

    async def retire(self) -> None:
        await self.stop()

    async def stop(self) -> None:
        self.done.append("stop")
        if self._listener:
            self._listener.close()
            self._listener = None
            os.unlink(self._path)

    def detach(self) -> None:
        pass


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


async def _backing_off(home: Home, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Supervisor:
    async def choose(*_: object) -> Backend:
        return backend

    monkeypatch.setattr(loop, "choose", choose)
    supervisor = home.supervisor()
    await supervisor.start()
    await supervisor.enable()
    await reaches(supervisor, "backing-off")
    return supervisor


@pytest.mark.parametrize(
    ("end", "done"),
    [
        (End("it dies"), ["start", "start", "stop"]),
        # That is what systemd did already.
        (End("it dies again and again", again=True), ["start", "stop"]),
    ],
)
async def test_there_is_one_more_try_and_then_no_listener(
    home: Home, monkeypatch: pytest.MonkeyPatch, end: End, done: list[str]
) -> None:
    backend = Dying(home.path, end)
    supervisor = await _backing_off(home, monkeypatch, backend)
    assert backend.done[: len(done)] == done
    assert supervisor.status.last_failure == end.words
    await supervisor.disable()
    await supervisor.close()


async def test_its_end_is_heard_though_it_was_just_woken(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = await _backing_off(home, monkeypatch, Dying(home.path, End("it dies")))
    supervisor._wake_up()
    async with asyncio.timeout(DEADLINE):
        await supervisor.close()
