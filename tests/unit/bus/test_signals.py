"""Events as signals: whose, in which order, with which values."""

from __future__ import annotations

from typing import Any

import pytest

from hostd.bus import names
from hostd.core.model import Exit, ExitReason, Holder, State
from tests.support.bus import Client, PrivateBus, staged
from tests.support.fake_service import FakeService, pod_uid, vm

UID = pod_uid(1)
PATH = names.vm_path(UID)


@pytest.fixture
async def listener(client: Client) -> Client:
    await client.subscribe()
    return client


async def told(client: Client) -> list[tuple[str, str, list[Any]]]:
    """Path, member and body of each signal so far: an answer comes after all that was said before it."""
    await client.call("/", names.PEER, "Ping")
    found = [(each.path, each.member, each.body) for each in client.signals]
    client.signals.clear()
    return found


def values(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.value for name, value in given.items()}


async def test_a_life(listener: Client, service: FakeService) -> None:
    uid, path = pod_uid(2), names.vm_path(pod_uid(2))
    service.add(vm(2))
    service.die(uid, Exit(status=3, reason=ExitReason.ERROR))
    service.block(uid, "target is busy", Holder(44, "dd", "open", ""), Holder(0, "/dev/loop1", "loop", ""))
    service.finish(uid)
    service.remove(uid)
    seen = await told(listener)
    assert [(where, member) for where, member, _ in seen] == [
        (names.ROOT, "InterfacesAdded"),
        (names.ROOT, "VMNew"),
        (path, "PropertiesChanged"),
        (names.ROOT, "VMExited"),
        (path, "PropertiesChanged"),
        (names.ROOT, "LayerBlocked"),
        (path, "PropertiesChanged"),
        (names.ROOT, "VMReleased"),
        (names.ROOT, "InterfacesRemoved"),
        (names.ROOT, "VMRemoved"),
    ]
    bodies = [body for _, _, body in seen]
    assert bodies[0][0] == path
    assert values(bodies[0][1][names.VM])["State"] == "running"
    assert bodies[1] == [uid, path]
    assert values(bodies[3][2]) == {"ExitStatus": 3, "ExitSignal": -1, "ExitReason": "error", "LeaderPID": 10_002}
    assert {name: value.signature for name, value in bodies[3][2].items()} == {
        "ExitStatus": "i",
        "ExitSignal": "i",
        "ExitReason": "s",
        "LeaderPID": "u",
    }
    layer = next(iter(vm(2).layers)).decode()
    assert bodies[5] == [uid, layer, "target is busy; held by dd (44, open), /dev/loop1 (loop)"]
    assert values(bodies[7][2]) == {"Layers": 1, "ElapsedUSec": 4200, "ExitReason": "error"}
    assert bodies[8] == [path, [names.VM]]
    assert bodies[9] == [uid, path]


async def test_one_change_is_one_signal_with_what_a_get_gives(listener: Client, service: FakeService) -> None:
    service.change(UID, state=State.EXITED, exit=Exit(signal=9, reason=ExitReason.OOM), exited_usec=5, qemus=[])
    ((path, member, (interface, changed, invalidated)),) = await told(listener)
    assert (path, member, interface, invalidated) == (PATH, "PropertiesChanged", names.VM, [])
    assert values(changed) == {
        "State": "exited",
        "ExitedUSec": 5,
        "ExitStatus": -1,
        "ExitSignal": 9,
        "ExitReason": "oom",
    }
    now = await listener.get_all(PATH, names.VM)
    assert {name: now[name] for name in changed} == values(changed)


async def test_what_nobody_sees_is_not_told(listener: Client, service: FakeService) -> None:
    service.change(UID, qemus=[], cgroup_seen=True, had_qemu=True)
    assert await told(listener) == []


async def test_only_that_vms_object_speaks(listener: Client, service: FakeService) -> None:
    service.add(vm(2))
    await told(listener)
    service.change(pod_uid(2), name="x")
    assert [path for path, _, _ in await told(listener)] == [names.vm_path(pod_uid(2))]


async def test_health_and_mode(listener: Client, service: FakeService) -> None:
    service.health["store"] = "disk\nfull"
    service.change(UID, name="x")
    service.change(UID, name="y")
    seen = [(path, values(body[1])) for path, _, body in await told(listener)]
    assert seen == [
        (PATH, {"Name": "x"}),
        (names.ROOT, {"Health": {"store": r"disk\x0afull"}}),
        (PATH, {"Name": "y"}),
    ]


async def test_nobody_reads_what_was_not_told(listener: Client, service: FakeService) -> None:
    """What is wrong with a part may change without any VM's doing."""
    for health in ({"cgroups": "none are found"}, {}):
        service.health = health
        for _ in range(2):
            assert (await listener.get_all(names.ROOT, names.MANAGER))["Health"] == health
        ((path, _, body),) = await told(listener)
        assert (path, values(body[1])) == (names.ROOT, {"Health": health})


async def test_names_that_are_no_utf8(listener: Client, service: FakeService) -> None:
    service.change(UID, name="a\udcff\x00b", error="bad \udcfe")
    ((_, _, body),) = await told(listener)
    assert values(body[1]) == {"Name": r"a\xff\x00b", "Error": r"bad \xfe"}


async def test_an_event_that_is_unknown_ends_nothing(listener: Client, service: FakeService) -> None:
    service.tell("nonsense")  # type: ignore[arg-type]
    service.change(UID, name="x")
    assert len(await told(listener)) == 1


async def test_without_a_bus_nothing_is_told(bus: PrivateBus, service: FakeService) -> None:
    bus.stop()
    service.change(UID, name="x")
    service.add(vm(3))
    service.remove(pod_uid(3))


async def test_a_client_that_comes_later(bus_library: str) -> None:
    async with staged(vm(1)) as (bus, service):
        service.change(UID, name="x")
        async with await Client.connect(bus.address) as client:
            assert await client.get(PATH, names.VM, "Name") == "x"
