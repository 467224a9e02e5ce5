"""Floods, slow and silent clients, a bus that stalls: bounded, nothing lost, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hostd.bus import names, stream
from tests.support.bus import Bare, Client, Failed, adapter_on, open_fds, private_bus, serving, staged
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import DEADLINE, eventually

UID = pod_uid(1)
PATH = names.vm_path(UID)


@pytest.fixture(autouse=True)
def bus_library(dbus_library: str) -> Iterator[str]:
    with adapter_on(dbus_library) as name:
        yield name


async def test_5000_messages_good_bad_and_unknown_leave_no_descriptor() -> None:
    rng = random.Random(7)
    async with staged(vm(1)) as (bus, service), await Client.connect(bus.address) as client:
        await client.manager("ListVMs")
        pidfd = os.pidfd_open(os.getpid())
        ended = os.pidfd_open(os.posix_spawn("/bin/true", ["true"], {}))
        os.wait()
        null = os.open("/dev/null", os.O_RDONLY)
        before = open_fds()

        def message() -> Any:
            given = rng.choices([pidfd, ended, null], k=rng.choice([0, 0, 1, 1, 2, 16]))
            index = rng.choice([0, 0, 0, 1, 7, 2**31 - 1])
            details = {"LeaderPIDFD": client.variant("h", index)}
            if rng.random() < 0.3:
                details["Nope"] = client.variant("h", 0)
            target: Any = rng.choice(
                [
                    (names.ROOT, names.MANAGER, "RegisterVM", "sa{sv}", rng.choice([UID, "nope"]), details),
                    (names.ROOT, names.MANAGER, "Nope", "h", index),
                    (names.ROOT, "a.b", "C", "ah", [index]),
                    ("/nope", names.MANAGER, "ListVMs", ""),
                    (names.ROOT, names.PEER, "Ping", "h", index),
                    (PATH, names.PROPERTIES, "Set", "ssv", names.VM, "Leader", client.variant("h", index)),
                ]
            )
            return client.message(*target, unix_fds=given)

        async def ask() -> str:
            try:
                await client.ask(message())
            except Failed as failure:
                return "traceback" if "Traceback" in failure.text else failure.name
            return "fine"

        seen: set[str] = set()
        for _ in range(100):
            seen |= set(await asyncio.gather(*(ask() for _ in range(50))))
        assert {"fine", "org.freedesktop.DBus.Error.InvalidArgs"} <= seen
        assert "traceback" not in seen
        await eventually(lambda: open_fds() == before, why=lambda: f"{open_fds() - before} descriptors are left")
        assert any(name == "register" for name, _ in service.asked)
        for fd in (pidfd, ended, null):
            os.close(fd)


async def test_a_burst_of_5000_signals() -> None:
    async with staged(vm(1)) as (bus, service), await Client.connect(bus.address) as client:
        await client.subscribe()
        for number in range(5000):
            service.change(UID, name=str(number))
        await eventually(lambda: len(client.signals) == 5000)
        assert [each.body[1]["Name"].value for each in client.signals] == [str(number) for number in range(5000)]


async def test_a_bus_that_stalls_in_a_burst() -> None:
    async with staged(vm(1)) as (bus, service), await Client.connect(bus.address) as client:
        await client.subscribe()
        bus.freeze()
        for number in range(5000):
            service.change(UID, name=str(number))
        bus.thaw()
        await eventually(lambda: len(client.signals) == 5000)
        assert [each.body[1]["Name"].value for each in client.signals] == [str(number) for number in range(5000)]


async def test_a_bus_that_stalls_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GIVE_UP", 1_000_000)
    service = FakeService(vm(1))
    async with private_bus() as bus, serving(bus, service) as server:
        bus.freeze()
        while server.connected:
            for number in range(1000):
                service.change(UID, name=str(number))
            await asyncio.sleep(0)
        bus.thaw()
        await asyncio.wait_for(server.ready.wait(), DEADLINE)


async def test_a_subscriber_that_stops_reading() -> None:
    async with staged(vm(1)) as (bus, service), await Client.connect(bus.address) as client:
        silent = Bare(bus)
        rule = f"type='signal',sender='{names.BUS_NAME}'".encode()
        body = len(rule).to_bytes(4, "little") + rule + b"\0"
        silent.send(names.DBUS, names.DBUS_PATH, names.DBUS, "AddMatch", "s", body)
        for number in range(5000):
            service.change(UID, name=str(number), error="x" * 200)
        assert await client.get(PATH, names.VM, "Name") == "4999"
        silent.close()


async def test_a_client_that_asks_and_never_reads() -> None:
    async with (
        staged(*(vm(number) for number in range(1, 101))) as (bus, _),
        await Client.connect(bus.address) as client,
    ):
        greedy = Bare(bus)
        greedy.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(2000):
                greedy.send(names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs")
        for _ in range(20):
            assert await client.get(PATH, names.VM, "Name") == "vm1"
        greedy.close()
        assert greedy.serial > 50


def resident() -> int:
    """Bytes of this process in memory: daemon and clients."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_3000_clients_come_and_go() -> None:
    async with staged(vm(1)) as (bus, service):

        async def visit() -> None:
            client = await Client.connect(bus.address)
            await client.manager("ListVMs")
            client.close()

        async with await Client.connect(bus.address) as watcher:

            async def rules() -> int:
                (stats,) = await watcher.call(
                    names.DBUS_PATH, "org.freedesktop.DBus.Debug.Stats", "GetStats", destination=names.DBUS
                )
                return int(stats["MatchRules"].value)

            for _ in range(10):
                await asyncio.gather(*(visit() for _ in range(10)))
            gc.collect()
            fds, matches, size = open_fds(), await rules(), resident()
            for _ in range(290):
                await asyncio.gather(*(visit() for _ in range(10)))
            gc.collect()
            await eventually(lambda: open_fds() == fds)
            assert await rules() == matches
            assert resident() - size < 8 * 1024 * 1024
        assert service.asked == []
