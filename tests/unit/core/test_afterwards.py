"""What waits until nothing is to be unmounted any more."""

from __future__ import annotations

import asyncio
import gc

import pytest

from hostd.core import afterwards
from hostd.core.afterwards import Afterwards
from hostd.core.model import VM, State
from hostd.core.teller import Before
from tests.support.core import OTHER, POD
from tests.support.wait import eventually


class Seen:
    """An Afterwards, and what it did."""

    def __init__(self) -> None:
        self.busy = True
        self.done: list[tuple[str, Before]] = []
        self.afterwards = Afterwards(lambda: self.busy, lambda vm, before: self.done.append((vm.pod_uid, before)))

    def add(self, pod_uid: str, state: State = State.RUNNING) -> None:
        self.afterwards.add(VM(pod_uid), Before(state, ""))


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_it_waits_while_umounts_do_and_says_how_it_was_at_first() -> None:
    seen = Seen()
    seen.add(POD)
    seen.add(OTHER)
    seen.add(POD, State.CLEANING)
    await turns()
    assert (seen.done, gc.isenabled()) == ([], False)
    seen.busy = False
    await eventually(lambda: len(seen.done) == 2)
    assert seen.done == [(POD, Before(State.RUNNING, "")), (OTHER, Before(State.RUNNING, ""))]
    await eventually(gc.isenabled)


async def test_it_does_not_wait_for_ever() -> None:
    seen = Seen()
    seen.add(POD)
    called: list[bool] = []
    seen.afterwards.then(lambda: called.append(True))
    await eventually(lambda: bool(seen.done and called))
    seen.busy = False
    await eventually(gc.isenabled)


async def test_at_once_on_request_and_only_once() -> None:
    seen = Seen()
    seen.add(POD)
    seen.afterwards.do(POD)
    seen.afterwards.do(POD)
    seen.afterwards.do(OTHER)
    assert [pod for pod, _ in seen.done] == [POD]
    seen.afterwards.close()


async def test_where_it_is_quiet_nobody_waits() -> None:
    seen = Seen()
    seen.busy = False
    called: list[bool] = []
    seen.afterwards.then(lambda: called.append(True))
    assert called
    seen.add(POD)
    seen.afterwards.close()
    assert (len(seen.done), gc.isenabled()) == (1, True)


async def test_who_waits_for_quiet_has_it_or_has_waited_long() -> None:
    seen = Seen()
    waiting = asyncio.create_task(seen.afterwards.quiet())
    await turns()
    assert not waiting.done()
    seen.busy = False
    await waiting
    await seen.afterwards.quiet()
    seen.busy = True
    await seen.afterwards.quiet()
    seen.afterwards.close()


async def test_umounts_that_begin_later_are_let_have_their_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago it was that something began to wait."""
    monkeypatch.setattr(afterwards, "_PATIENCE", 3600.0)
    monkeypatch.setattr(afterwards, "_SLICE", 0.0)
    seen = Seen()
    seen.busy = False
    seen.add(POD)
    seen.add(OTHER)
    seen.afterwards._late_at = 0.0
    await turns(1)
    seen.busy = True
    await asyncio.sleep(0.02)
    assert [pod for pod, _ in seen.done] == [POD]
    seen.busy = False
    await eventually(lambda: len(seen.done) == 2)
    seen.afterwards.close()


async def test_nothing_waits_for_long_though_umounts_leave_off_for_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such moment would be the beginning of another wait."""
    monkeypatch.setattr(afterwards, "_PATIENCE", 3600.0)
    monkeypatch.setattr(afterwards, "_LONGEST", 0.05)
    seen = Seen()
    called: list[bool] = []
    seen.add(POD)
    await eventually(lambda: len(seen.done) == 1)
    seen.afterwards.then(lambda: called.append(True))
    await eventually(lambda: called == [True])
    assert gc.isenabled(), "that it is off is for moments"
    seen.busy = False
    seen.afterwards.close()
