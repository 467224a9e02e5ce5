"""What is long or many is done in turns, so that the loop's other work waits for none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hostd.bus import dispatch, long_answer, names
from tests.support.bus import Client, Failed
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import DEADLINE

UID = pod_uid(1)
PATH = names.vm_path(UID)


@asynccontextmanager
async def counting() -> AsyncIterator[Callable[[], int]]:
    """Turns of the loop."""
    turns, on = 0, True

    def turn() -> None:
        nonlocal turns
        turns += 1
        if on:
            asyncio.get_running_loop().call_soon(turn)

    turn()
    try:
        yield lambda: turns
    finally:
        on = False


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as can be."""
    monkeypatch.setattr(long_answer, "SLICE", 0)


LONG = [
    (names.MANAGER, "ListVMs", "", []),
    (names.MANAGER, "ListVMsEx", "a{sv}su", [{}, "", 0]),
    (names.MANAGER, "ListLayers", "a{sv}", [{}]),
    (names.OBJECT_MANAGER, "GetManagedObjects", "", []),
]


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize(("interface", "member", "signature", "body"), LONG)
async def test_a_long_answer_is_as_of_when_it_goes_out(
    client: Client, service: FakeService, interface: str, member: str, signature: str, body: list[Any]
) -> None:
    for number in range(2, 60):
        service.add(vm(number))
    await client.subscribe()
    # Something happens in the middle of it: the listener is there only while it is made.
    before = len(service._listeners)
    asked = asyncio.create_task(client.call(names.ROOT, interface, member, signature, *body))
    async with asyncio.timeout(DEADLINE):
        while len(service._listeners) == before:
            await asyncio.sleep(0)
    for layer in service.known[UID].layers.values():
        layer.error = "later"
    service.change(UID, name="later", layers=service.known[UID].layers)
    service.remove(pod_uid(2))
    service.add(vm(99))
    assert not asked.done()
    said = str(plain(await asked))
    assert "later" in said
    assert pod_uid(2).replace("-", "_2d") not in said.replace("-", "_2d")
    assert pod_uid(99).replace("-", "_2d") in said.replace("-", "_2d")
    assert pod_uid(59).replace("-", "_2d") in said.replace("-", "_2d")
    assert len(service._listeners) == before


def plain(value: Any) -> Any:
    """Without variants."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(value.value) if hasattr(value, "signature") else value


@pytest.mark.usefixtures("slices")
async def test_others_have_their_turn_during_a_long_answer(client: Client, service: FakeService) -> None:
    for number in range(2, 300):
        service.add(vm(number, layers=0))
    await client.manager("ListVMs")
    async with counting() as turns:
        begun = turns()
        asked = [asyncio.create_task(client.manager("ListVMs")) for _ in range(3)]
        rows = [(await each)[0] for each in asked]
        assert turns() - begun > 3 * 299
    assert [len(each) for each in rows] == [299] * 3


async def test_one_task_begins_in_a_turn(client: Client, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    async with counting() as turns:

        async def set_grace(pod_uid: str, grace_usec: int) -> None:
            began.append(turns())

        monkeypatch.setattr(service, "set_grace", set_grace)
        await client.manager("ListVMs")
        # Nothing is lost, and no bound is hit, for a caller that does not wait for its answers.
        for _ in range(5):
            await asyncio.gather(*(client.call(PATH, names.VM, "SetGrace", "t", number) for number in range(60)))
    assert len(began) == 300
    assert len(set(began)) == 300


async def test_calls_are_held_back_while_many_wait_to_begin(
    bus: Any, client: Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    begin = dispatch.Dispatcher._begin_one

    def watched(self: dispatch.Dispatcher) -> None:
        nonlocal longest
        longest = max(longest, len(self._waiting))
        begin(self)

    monkeypatch.setattr(dispatch.Dispatcher, "_begin_one", watched)
    monkeypatch.setattr(dispatch, "MOST_WAITING", 4)
    await client.manager("ListVMs")
    await asyncio.gather(*(client.call(PATH, names.VM, "SetGrace", "t", number) for number in range(60)))
    assert 1 <= longest <= 4
    with pytest.raises(Failed, match="NoSuchVM"):
        await client.manager("GetVM", "s", pod_uid(7))
