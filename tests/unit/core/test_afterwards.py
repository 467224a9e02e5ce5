"""What waits until nothing is to be unmounted any more."""

from __future__ import annotations

import asyncio
import gc

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
