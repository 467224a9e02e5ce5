"""What is told, in which order, and that nothing is missed over a loss."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

import hostd.client
from hostd.bus import names
from hostd.client import events, link, watch
from hostd.client.node import Node
from hostd.core.model import Exit, ExitReason, Holder, State
from tests.support.bus import Client, PrivateBus, private_bus, serving
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import DEADLINE
from tests.support.watcher import watching

E = TypeVar("E")
ONE, TWO = pod_uid(1), pod_uid(2)


async def test_the_life_of_a_vm(node: Node, service: FakeService) -> None:
    async with watching(node) as watcher:
        start = await watcher.first(events.Resync)
        assert (start.reason, [each.pod_uid for each in start.vms], start.status.mode) == (
            "start",
            [ONE, TWO],
            "enforce",
        )
        assert start.helper.state == "absent"
        service.add(vm(3))
        assert (await watcher.first(events.VMNew)).vm.full_name == "shop/vm3"
        service.die(pod_uid(3), Exit(-1, 9, ExitReason.SIGNAL))
        changed = await watcher.first(events.VMChanged)
        assert (changed.vm.state, changed.vm.name) == ("exited", "vm3")
        assert "state" in changed.changed
        exited = await watcher.first(events.VMExited)
        assert (exited.status, exited.signal, exited.reason, exited.vm.state) == (-1, 9, "signal", "exited")
        service.block(pod_uid(3), "busy", Holder(42, "cat", "open", ""))
        blocked = await watcher.first(events.LayerBlocked)
        assert blocked.target == blocked.vm.layers[0].target
        assert "cat" in blocked.reason
        assert blocked.vm.state == "blocked"
        service.finish(pod_uid(3), 4_200)
        released = await watcher.first(events.VMReleased)
        assert (released.layers, released.elapsed_usec, released.vm.unreleased) == (1, 4_200, ())
        service.remove(pod_uid(3))
        assert (await watcher.first(events.VMRemoved)).vm.full_name == "shop/vm3"
        assert watcher.seen == []


async def test_health_is_told(node: Node, service: FakeService) -> None:
    async with watching(node) as watcher:
        await watcher.first(events.Resync)
        service.health["workers"] = "1 hangs"
        service.change(ONE, error="x")
        told = await watcher.first(events.StatusChanged)
        assert told.status.health == (("workers", "1 hangs"),)
        assert told.changed == {"health"}


async def test_the_bus_is_lost_and_what_happened_meanwhile_is_in_the_resync(
    node: Node, bus: PrivateBus, service: FakeService
) -> None:
    async with watching(node) as watcher:
        await watcher.first(events.Resync)
        bus.stop()
        assert (await watcher.first(events.Lost)).what == "bus"
        service.die(ONE, Exit(0, -1, ExitReason.POWEROFF))
        await bus.start()
        back = await watcher.first(events.Resync)
        assert back.reason in {"bus", "hostd"}
        assert back.vms[0].state == "exited"
        service.remove(ONE)
        await watcher.first(events.VMRemoved)


async def test_hostd_is_restarted(bus_library: str) -> None:
    service = FakeService(vm(1))
    async with private_bus() as bus, hostd.client.connect(bus.address) as node, watching(node) as watcher:
        assert (await watcher.first(events.Lost)).what == "hostd"
        async with serving(bus, service):
            assert (await watcher.first(events.Resync)).reason == "hostd"
        assert (await watcher.first(events.Lost)).what == "hostd"
        service.add(vm(2))
        async with serving(bus, service):
            assert len((await watcher.first(events.Resync)).vms) == 2
            service.remove(ONE)
            await watcher.first(events.VMRemoved)


async def test_two_watchers_and_one_that_leaves(node: Node, service: FakeService) -> None:
    async with watching(node) as one:
        await one.first(events.Resync)
        async with watching(node) as other:
            await other.first(events.Resync)
            service.add(vm(3))
            await other.first(events.VMNew)
        await one.first(events.VMNew)
        service.add(vm(4))
        await one.first(events.VMNew, lambda event: event.vm.pod_uid == pod_uid(4))
    assert not node._link._feeds


async def test_a_burst_is_told_whole(node: Node, service: FakeService) -> None:
    async with watching(node) as watcher:
        await watcher.first(events.Resync)
        for number in range(1000):
            service.change(ONE, error=f"{number}")
        last = await watcher.first(events.VMChanged, lambda event: event.vm.error == "999")
        assert last.vm.pod_uid == ONE


async def test_who_does_not_take_events_gets_a_fresh_start(
    node: Node, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MOST_WAITING", 10)
    told = node.watch()
    assert isinstance(await anext(told), events.Resync)
    for number in range(50):
        service.change(ONE, error=f"{number}")
    service.add(vm(3))
    async with asyncio.timeout(DEADLINE):
        while len(await node.list()) < 3:
            pass
        event = await anext(told)
        while not isinstance(event, events.Resync):
            event = await anext(told)
    assert event.reason == "overflow"
    assert len(event.vms) == 3
    await told.aclose()  # type: ignore[attr-defined]


async def test_what_is_in_the_snapshot_is_not_told_again(node: Node, service: FakeService) -> None:
    """Signals that came before the answer stand in the queue behind the mark."""
    feed = await node._link.listen()
    service.add(vm(3))
    await node.list()
    mirror = watch.Mirror()
    await mirror.load(node._link, node._link.owner)
    service.add(vm(4))
    await node.list()
    told = []
    while feed._waiting:
        item = await feed.get()
        if not isinstance(item, (link.Here, link.Gone)):
            told.append(mirror.take(item))
    assert [event.vm.pod_uid for event in told if isinstance(event, events.VMNew)] == [pod_uid(4)]
    assert set(mirror.vms) == {ONE, TWO, pod_uid(3), pod_uid(4)}


async def test_a_signal_of_somebody_else_is_none(node: Node, bus: PrivateBus) -> None:
    """Broadcast, or sent to the client alone, which no match rule keeps out."""
    connection = node._link._connection
    assert connection is not None
    async with watching(node) as watcher:
        await watcher.first(events.Resync)
        async with await Client.connect(bus.address) as stranger:
            # Often, so that its number is above that of hostd's answer.
            for destination in [None, connection.unique_name] * 100:
                signal = stranger.message(
                    names.ROOT, names.MANAGER, "DeviceConflict", "sss", "a", "b", "c",
                    destination=destination, message_type=stranger.library.MessageType.SIGNAL,
                )  # fmt: skip
                await stranger.bus.send(signal)
            await stranger.manager("ListVMs")
        await node.list()
        assert watcher.seen == []


async def test_a_signal_that_is_not_understood_ends_nothing(node: Node, service: FakeService) -> None:
    mirror = watch.Mirror()
    await mirror.load(node._link, node._link.owner)
    feed = await node._link.listen()
    service.add(vm(3))
    await node.list()
    items = [await feed.get() for _ in range(len(feed._waiting))]
    for item in items:
        if not isinstance(item, (link.Here, link.Gone)):
            broken = item._replace(body=item.body[:1])
            assert mirror.take(broken) is None


async def test_a_vm_that_the_mirror_does_not_know(node: Node, service: FakeService) -> None:
    async with watching(node) as watcher:
        await watcher.first(events.Resync)
        service.known[pod_uid(9)] = vm(9, state=State.EXITED)
        service.finish(pod_uid(9))
        released = await watcher.first(events.VMReleased)
        assert released.vm.pod_uid == pod_uid(9)
