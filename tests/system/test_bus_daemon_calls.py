"""hostd itself under clients of every kind, on a bus that comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from hostd.bus import names
from tests.support.bus import Bare, Client, Failed, busctl, gdbus, open_fds
from tests.support.mountns import Child
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, eventually
from tests.support.witness import full_pod, gone, in_state, stays

pytestmark = pytest.mark.usefixtures("root")

UNKNOWN = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
INVALID = "org.freedesktop.DBus.Error.InvalidArgs"
OURS = "io.kubevirt.hostd1.Error."


@pytest.fixture
def node(dbus_library: str) -> Iterator[Node]:
    """hostd runs, on either library; a pod that is still being made is not taken for a dead one."""
    with Node(settings={"cleanup": {"settle": "30s"}}) as made:
        made.hostd.start()
        yield made


def other(dbus_library: str) -> str:
    """The library that the daemon is not on."""
    return "dbus_next" if dbus_library == "dbus-fast" else "dbus_fast"


@pytest.fixture
async def client(node: Node, dbus_library: str) -> AsyncIterator[Client]:
    async with await Client.connect(node.bus.address, other(dbus_library)) as connected:
        yield connected


async def test_wrong_calls(node: Node, client: Client) -> None:
    """A documented name, a sentence, no traceback, and the connection lives."""
    pod = full_pod(node)
    pod.qemu(FakeQemu, disks=[])
    in_state(node, pod, "running")
    path = names.vm_path(pod.uid)
    manager, standard = (names.ROOT, names.MANAGER), "org.freedesktop.DBus.Error."
    v = client.variant
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((*manager, "GetVM", "u", 5), INVALID),
        ((*manager, "GetVM", "s", ""), INVALID),
        ((*manager, "GetVM", "s", "x" * 65536), INVALID),
        ((*manager, "GetVM", "s", "a\nb\x1b[31m"), INVALID),
        ((*manager, "GetVM", "s", UNKNOWN), OURS + "NoSuchVM"),
        ((*manager, "GetVMByPID", "u", 0), INVALID),
        ((*manager, "GetVMByPID", "u", 1), INVALID),
        ((*manager, "GetVMByPID", "u", node.hostd.pid), INVALID),
        ((*manager, "GetVMByPID", "u", 2**32 - 1), INVALID),
        ((*manager, "GetVMByPID", "u", os.getpid()), OURS + "NoSuchVM"),
        ((*manager, "RegisterVM", "sa{sv}", UNKNOWN, {"Nope": v("s", "x")}), INVALID),
        ((*manager, "RegisterVM", "sa{sv}", UNKNOWN, {"LeaderPID": v("i", -1)}), INVALID),
        ((*manager, "RegisterVM", "sa{sv}", UNKNOWN, {"LeaderPIDFD": v("h", 0)}), INVALID),
        ((*manager, "TrackLayer", "ssa{sv}", pod.uid, "/etc/passwd", {}), OURS + "NotATarget"),
        ((*manager, "ListHolders", "ss", pod.uid, "relative"), INVALID),
        ((*manager, "ListVMsEx", "a{sv}su", {"Nope": v("s", "x")}, "", 0), INVALID),
        ((*manager, "ListVMsEx", "a{sv}su", {"State": v("s", "nope")}, "", 0), INVALID),
        ((*manager, "Release", "st", pod.uid, 2**63), INVALID),
        ((*manager, "Release", "st", pod.uid, 0), OURS + "VMAlive"),
        ((*manager, "Inhibit", "sss", pod.uid, "", ""), INVALID),
        ((*manager, "ClaimDevice", "ssa{sv}", "pci/../x", "a/b", {}), INVALID),
        ((*manager, "Nope", ""), standard + "UnknownMethod"),
        ((path, names.VM, "SetGrace", "t", 2**64 - 1), INVALID),
        ((path, names.VM, "SetPolicy", "s", "perhaps"), INVALID),
        ((path, names.PROPERTIES, "Set", "ssv", names.VM, "State", v("s", "released")), standard + "PropertyReadOnly"),
        ((path, names.PROPERTIES, "Get", "ss", names.VM, "Nope"), standard + "UnknownProperty"),
        ((names.vm_path(UNKNOWN), names.VM, "Release", "t", 0), standard + "UnknownObject"),
        (("/nope", "a.b", "C", ""), standard + "UnknownObject"),
        ((path, "a.b", "C", ""), standard + "UnknownInterface"),
    ]
    for call, name in wrong:
        with pytest.raises(Failed) as failure:
            await client.call(*call)
        assert failure.value.name == name, (call, failure.value)
        assert 10 < len(failure.value.text) < 4096, call
        assert "Traceback" not in failure.value.text
    many = {f"key-{number}": v("s", "x") for number in range(5000)}
    with pytest.raises(Failed, match="does not know the key"):
        await client.manager("RegisterVM", "sa{sv}", UNKNOWN, many)
    assert await client.manager("GetVM", "s", pod.uid) == [path]
    assert "Traceback" not in node.hostd.log()


@pytest.mark.parametrize("dbus_library", ["dbus-fast"], indirect=True)
async def test_thousands_of_layers_named_for_one_vm(node: Node, client: Client) -> None:
    pod = full_pod(node)
    pod.qemu(FakeQemu, disks=[])
    in_state(node, pod, "running")
    refused: set[str] = set()
    for number in range(1500):
        target = os.fsdecode(pod.hotplug_disks) + f"/volume-{number}"
        try:
            await client.manager("TrackLayer", "ssa{sv}", pod.uid, target, {})
        except Failed as failure:
            refused.add(failure.name)
    assert refused == {OURS + "LimitExceeded"}
    stays(node, pod, seconds=0.3)
    assert "Traceback" not in node.hostd.log()


async def test_every_object_is_walked(node: Node, client: Client) -> None:
    pod = full_pod(node)
    pod.qemu(FakeQemu, disks=[])
    in_state(node, pod, "running")
    done = await busctl(node.bus, "tree", names.BUS_NAME)
    assert (done.code, done.error) == (0, "")
    for path in (names.ROOT, names.vm_path(pod.uid), names.HELPER_PATH, names.LOG_CONTROL_PATH):
        assert path in done.out
        shown = await busctl(node.bus, "introspect", names.BUS_NAME, path)
        assert (shown.code, shown.error) == (0, "")
    done = await gdbus(node.bus, "introspect", "--recurse", "--dest", names.BUS_NAME, "--object-path", "/")
    assert (done.code, done.error) == (0, "")
    assert done.out.count(f"interface {names.VM} {{") == 1


async def test_5000_messages_leave_no_descriptor(node: Node, client: Client) -> None:
    rng = random.Random(11)
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu, disks=[])
    in_state(node, pod, "running")
    living, null = os.pidfd_open(qemu.pid), os.open("/dev/null", os.O_RDONLY)
    with Child(lambda tell: tell(None)) as child:
        child.hear()
        ended = os.dup(child.pidfd)

    def message() -> Any:
        given = rng.choices([living, ended, null], k=rng.choice([0, 0, 1, 1, 2, 16]))
        details = {"LeaderPIDFD": client.variant("h", rng.choice([0, 0, 0, 1, 7, 2**31 - 1]))}
        if rng.random() < 0.2:
            details["Nope"] = client.variant("h", 0)
        target: Any = rng.choice(
            [
                (names.ROOT, names.MANAGER, "RegisterVM", "sa{sv}", rng.choice([pod.uid, "nope"]), details),
                (names.ROOT, names.MANAGER, "ListVMs", ""),
                (names.ROOT, names.MANAGER, "Nope", "h", 0),
                (names.ROOT, "a.b", "C", "ah", [0]),
                (names.vm_path(pod.uid), names.PROPERTIES, "Set", "ssv", names.VM, "Leader", client.variant("h", 0)),
            ]
        )
        return client.message(*target, unix_fds=given)

    async def ask() -> str:
        try:
            await client.ask(message())
        except Failed as failure:
            return failure.name
        return "fine"

    await client.manager("ListVMs")
    before = node.hostd.descriptors()
    seen: set[str] = set()
    for _ in range(100):
        seen |= set(await asyncio.gather(*(ask() for _ in range(50))))
    assert {"fine", INVALID, OURS + "NoSuchProcess"} <= seen
    await eventually(lambda: node.hostd.descriptors() <= before, why=lambda: f"{node.hostd.descriptors()} > {before}")
    assert "Traceback" not in node.hostd.log()
    for fd in (living, ended, null):
        os.close(fd)
    qemu.kill()
    gone(node, pod)


async def test_clients_come_and_go(node: Node, client: Client) -> None:
    async def visit(times: int) -> None:
        for number in range(times):
            bare = Bare(node.bus)
            if number % 2:
                bare.send(names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs")
            bare.close()
            await asyncio.sleep(0)
        await client.manager("ListVMs")

    async def rules() -> int:
        (stats,) = await client.call(
            names.DBUS_PATH, "org.freedesktop.DBus.Debug.Stats", "GetStats", destination=names.DBUS
        )
        return int(stats["MatchRules"].value)

    await visit(100)
    before, fds, memory = await rules(), node.hostd.descriptors(), node.hostd.memory()
    await visit(2000)
    assert await rules() == before
    assert node.hostd.descriptors() == fds
    assert node.hostd.memory() - memory < 4 << 20


async def test_an_inhibitor_ends_with_its_client(node: Node, client: Client) -> None:
    """However the client ends, and whether hostd sees it go or not."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")

    def take(tell: Any) -> None:
        async def ask() -> None:
            mine = await Client.connect(node.bus.address, client.library.__name__)
            answer = await mine.ask(
                mine.message(names.ROOT, names.MANAGER, "Inhibit", "sss", pod.uid, "backup", "reads")
            )
            tell(len(answer.unix_fds))
            await asyncio.sleep(3600)

        asyncio.run(ask())

    with Child(take) as holder:
        assert holder.hear() == 1
        # Neither the bus's restart nor hostd's own is the holder's end.
        node.bus.stop()
        node.bus.start_now()
        await eventually(lambda: not node.hostd.status.endswith("no bus"), why=node.hostd.log)
        node.hostd.kill()
        node.hostd.start()
        qemu.kill()
        in_state(node, pod, "held")
        assert node.get("Inhibitors", names.vm_path(pod.uid)) == [["backup", "reads"]]
        stays(node, pod, seconds=0.5)
        holder.kill()
        gone(node, pod)
    assert node.get("Inhibitors", names.vm_path(pod.uid)) == []


async def test_five_restarts_of_the_bus(node: Node, dbus_library: str) -> None:
    """The name is back each time, whoever listens hears again, and what dies meanwhile is cleaned up."""
    pods = [full_pod(node, f"vm-{number}") for number in range(6)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    for pod in pods:
        in_state(node, pod, "running")
    connected = sockets(node.hostd.pid)
    for pod, qemu in zip(pods[:5], qemus, strict=False):
        node.bus.stop()
        qemu.kill()
        await eventually(lambda pod=pod: not pod.mounted(), why=node.hostd.log)  # type: ignore[misc]
        node.bus.start_now()
        async with await Client.connect(node.bus.address, other(dbus_library)) as client:
            async with asyncio.timeout(10):
                while not await owned(client):
                    await asyncio.sleep(0.05)
            await client.subscribe()
            in_state(node, pod, "released")
            await client.call(names.vm_path(pod.uid), names.VM, "SetGrace", "t", 5)
            await eventually(lambda client=client: client.signals)  # type: ignore[misc]
    assert node.states()[pods[5].uid] == "running"
    qemus[5].kill()
    gone(node, pods[5])
    await eventually(lambda: sockets(node.hostd.pid) == connected)
    assert "Traceback" not in node.hostd.log()


def sockets(pid: int) -> int:
    """How many of a process's descriptors are sockets."""
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return found


async def owned(client: Client) -> bool:
    """hostd's name has an owner."""
    (found,) = await client.call(
        names.DBUS_PATH, names.DBUS, "NameHasOwner", "s", names.BUS_NAME, destination=names.DBUS
    )
    return bool(found)


async def test_a_client_that_stops_reading_delays_no_death(node: Node, client: Client) -> None:
    pods = [full_pod(node, f"vm-{number}") for number in range(3)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    for pod in pods:
        in_state(node, pod, "running")
    silent = Bare(node.bus)
    rule = f"type='signal',sender='{names.BUS_NAME}'".encode()
    silent.send(
        names.DBUS, names.DBUS_PATH, names.DBUS, "AddMatch", "s", len(rule).to_bytes(4, "little") + rule + b"\0"
    )
    greedy = Bare(node.bus)
    greedy.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(3000):
            greedy.send(names.BUS_NAME, names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects")
    for qemu in qemus:
        qemu.kill()
    gone(node, *pods)
    async with asyncio.timeout(DEADLINE):
        assert len(await client.manager("ListVMs")) == 1
    greedy.close()
    silent.close()
    assert open_fds(node.hostd.pid) == node.hostd.descriptors()
