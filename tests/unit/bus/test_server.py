"""The connection: found late, lost, found again, refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.bus import names, server
from hostd.bus.server import BusServer, NameTaken, State
from tests.support.bus import POLICY_OPEN, Client, PrivateBus, adapter_on, open_fds, private_bus, serving
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import DEADLINE, eventually


@pytest.fixture(autouse=True)
def bus_library(dbus_library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server, "LAST_PAUSE", 0.2)
    with adapter_on(dbus_library) as name:
        yield name


async def test_a_bus_that_comes_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bus = PrivateBus(tmp_path)
    service = FakeService(vm(1))
    served = BusServer(service, address=bus.address)
    task = asyncio.create_task(served.run())
    await asyncio.wait_for(served.settled(), DEADLINE)
    assert not served.connected
    assert served.state is State.CONNECTING
    service.change(pod_uid(1), name="changed")
    async with bus:
        await asyncio.wait_for(served.ready.wait(), DEADLINE)
        async with await Client.connect(bus.address) as client:
            assert await client.get(names.vm_path(pod_uid(1)), names.VM, "Name") == "changed"
        served.stop()
        await asyncio.wait_for(task, DEADLINE)
    complaints = [each for each in caplog.records if each.levelno >= logging.WARNING and "reached" in each.message]
    assert len(complaints) == 1, "once a spell, not once an attempt"


async def test_five_restarts_of_the_bus() -> None:
    service = FakeService(vm(1))
    async with private_bus() as bus, serving(bus, service) as served:
        states: list[State] = []
        served.on_state = states.append
        await asyncio.sleep(0)
        before = open_fds()
        for round_ in range(5):
            bus.stop()
            await eventually(lambda: not served.connected)
            service.change(pod_uid(1), name=f"round{round_}")
            await bus.start()
            await asyncio.wait_for(served.ready.wait(), DEADLINE)
            async with await Client.connect(bus.address) as client:
                assert await client.get(names.vm_path(pod_uid(1)), names.VM, "Name") == f"round{round_}"
        assert states == [State.LOST, State.READY] * 5
        assert open_fds() == before
        assert len(service._listeners) == 1


async def test_a_name_that_is_taken() -> None:
    async with private_bus() as bus, serving(bus, FakeService()):
        before = open_fds()
        second = BusServer(FakeService(), address=bus.address)
        with pytest.raises(NameTaken, match="another hostd"):
            await asyncio.wait_for(second.run(), DEADLINE)
        assert open_fds() == before
        async with await Client.connect(bus.address) as client:
            body = [names.BUS_NAME]
            (queued,) = await client.call(
                names.DBUS_PATH, names.DBUS, "ListQueuedOwners", "s", *body, destination=names.DBUS
            )
        assert len(queued) == 1, "the second one waits in the queue"


async def test_a_name_that_is_taken_later_is_waited_for() -> None:
    service = FakeService()
    async with private_bus() as bus, serving(bus, service) as served:
        bus.stop()
        await eventually(lambda: not served.connected)
        await bus.start()
        squatter = await Client.connect(bus.address)
        (reply,) = await squatter.call(
            names.DBUS_PATH, names.DBUS, "RequestName", "su", names.BUS_NAME, 4, destination=names.DBUS
        )
        if reply == 1:
            await asyncio.sleep(0.3)
            assert not served.connected
            assert served.state is State.LOST
        squatter.close()
        await asyncio.wait_for(served.ready.wait(), DEADLINE)


async def test_a_bus_that_denies_the_name(caplog: pytest.LogCaptureFixture) -> None:
    policy = POLICY_OPEN.replace('<allow own="*"/>', "")
    async with private_bus(policy) as bus:
        served = BusServer(FakeService(), address=bus.address)
        task = asyncio.create_task(served.run())
        await asyncio.wait_for(served.settled(), DEADLINE)
        assert not served.connected
        assert "policy file" in caplog.text
        task.cancel()
        await asyncio.wait({task})


async def test_cancelled_while_it_serves() -> None:
    before = open_fds()
    service = FakeService()
    async with private_bus() as bus:
        served = BusServer(service, address=bus.address)
        task = asyncio.create_task(served.run())
        await asyncio.wait_for(served.ready.wait(), DEADLINE)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not service._listeners
    assert open_fds() == before


async def test_stop_sends_what_is_queued() -> None:
    service = FakeService(vm(1))
    async with private_bus() as bus, await Client.connect(bus.address) as client:
        async with serving(bus, service):
            await client.subscribe()
            for number in range(2000):
                service.change(pod_uid(1), name=str(number))
        await eventually(lambda: len(client.signals) >= 2000)


async def test_a_call_under_way_when_the_bus_goes() -> None:
    release = asyncio.Event()

    class Slow(FakeService):
        async def reload(self) -> None:
            await release.wait()

    async with private_bus() as bus, serving(bus, Slow()) as served:
        client = await Client.connect(bus.address)
        asked = asyncio.create_task(client.manager("Reload"))
        await eventually(lambda: served._dispatcher._tasks)
        bus.stop()
        await eventually(lambda: not served.connected)
        with pytest.raises((OSError, EOFError)):
            await asked
        client.close()
        release.set()
        await eventually(lambda: not served._dispatcher._tasks)
        await bus.start()
        await asyncio.wait_for(served.ready.wait(), DEADLINE)
