"""What hostd itself says on the bus: in which order, whose, once, and as its annotations promise."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from hostd.bus import names
from hostd.bus.contract import contract
from tests.support.bus import Client
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import eventually
from tests.support.witness import full_pod

pytestmark = pytest.mark.usefixtures("root")

#: Besides the fixed objects, whose interfaces are read as well.
OBJECTS = {names.ROOT: names.MANAGER, names.HELPER_PATH: names.HELPER, names.LOG_CONTROL_PATH: names.LOG_CONTROL}


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
    """A client that hears all of hostd's signals."""
    async with await Client.connect(node.bus.address, other(dbus_library)) as connected:
        await connected.subscribe()
        yield connected


def plain(value: Any) -> Any:
    """Without variants, structs as lists."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(value.value) if hasattr(value, "signature") else value


def told(client: Client, path: str, member: str = "PropertiesChanged") -> list[list[Any]]:
    """The bodies of an object's signals so far."""
    return [plain(each.body) for each in client.signals if (each.path, each.member) == (path, member)]


def states(client: Client, path: str) -> list[str]:
    """Each state that a VM's object told."""
    return [body[1]["State"] for body in told(client, path) if "State" in body[1]]


def saved(node: Node, pod: Pod) -> str:
    """The state in hostd's own file."""
    with open(f"{node.runtime_dir}/vms/{pod.uid}.json") as file:
        return str(json.load(file)["vm"]["state"])


async def test_the_order_at_a_death(node: Node, client: Client) -> None:
    pod = full_pod(node)
    path = names.vm_path(pod.uid)
    qemu = pod.qemu(FakeQemu)
    await eventually(lambda: "running" in states(client, path), why=node.hostd.log)
    qemu.kill()
    await eventually(lambda: told(client, names.ROOT, "VMReleased"), why=node.hostd.log)
    pod.remove_cgroup()
    assert saved(node, pod) == "released"
    await client.manager("UnregisterVM", "s", pod.uid)
    await eventually(lambda: told(client, names.ROOT, "VMRemoved"))
    order = [
        each.member if each.path == names.ROOT else plain(each.body)[1]["State"]
        for each in client.signals
        if each.path == names.ROOT or "State" in plain(each.body)[1]
    ]
    # What is told of a VM's life, each before what follows from it; `cleaning` may be told as `exited` first.
    wanted = [
        "InterfacesAdded",
        "VMNew",
        "running",
        "VMExited",
        "released",
        "VMReleased",
        "InterfacesRemoved",
        "VMRemoved",
    ]
    assert [each for each in order if each in wanted] == wanted
    assert order.index("VMExited") == order.index("running") + 2, f"the state is told just before the death: {order}"
    ((_, _, details),) = told(client, names.ROOT, "VMExited")
    assert (details["ExitSignal"], details["ExitReason"], details["LeaderPID"]) == (9, "signal", qemu.pid)
    ((_, _, details),) = told(client, names.ROOT, "VMReleased")
    assert details["Layers"] == 6
    assert 0 < details["ElapsedUSec"] < 60_000_000


async def test_one_transition_is_one_signal_of_that_vm(node: Node, client: Client) -> None:
    one, two = full_pod(node, "one"), full_pod(node, "two")
    for pod in (one, two):
        pod.qemu(FakeQemu, disks=[])
    paths = [names.vm_path(pod.uid) for pod in (one, two)]
    await eventually(lambda: all("running" in states(client, path) for path in paths), why=node.hostd.log)
    await eventually(lambda: len(node.call("ListLayers", "a{sv}", "0")) == 12)
    client.signals.clear()
    await client.call(paths[0], names.VM, "SetPolicy", "s", "keep")
    await client.call(paths[0], names.VM, "SetGrace", "t", 7_000_000)
    await client.call(paths[0], names.VM, "SetGrace", "t", 7_000_000)
    await client.call(paths[0], names.VM, "SetPolicy", "s", "keep")
    await client.call("/", names.PEER, "Ping")
    assert [(each.path, plain(each.body)) for each in client.signals] == [
        (paths[0], [names.VM, {"Policy": "keep"}, []]),
        (paths[0], [names.VM, {"GraceUSec": 7_000_000}, []]),
    ]
    client.signals.clear()
    data = {"VMIUID": client.variant("s", two.vmi_uid), "Name": client.variant("s", "renamed")}
    await client.manager("RegisterVM", "sa{sv}", two.uid, data)
    await client.manager("RegisterVM", "sa{sv}", two.uid, data)
    await client.call("/", names.PEER, "Ping")
    changes = [(each.path, plain(each.body)[1].get("Name")) for each in client.signals]
    assert changes == [(paths[1], "renamed")]


async def everything(client: Client, *paths: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Values by object and interface."""
    wanted = OBJECTS | dict.fromkeys(paths, names.VM)
    return {
        (path, interface): {name: plain(value) for name, value in (await client.get_all(path, interface)).items()}
        for path, interface in wanted.items()
    }


def replay(client: Client, values: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Values as somebody has them who heard the signals. What is annotated otherwise may not be in one."""
    for each in client.signals:
        if each.member != "PropertiesChanged":
            continue
        interface, changed, invalid = plain(each.body)
        for name, value in changed.items():
            assert contract()[interface].properties[name].emits == "true", name
            values[each.path, interface][name] = value
        assert invalid == []
    client.signals.clear()


async def test_every_annotation_is_true(node: Node, client: Client) -> None:
    """Who reads once and then listens knows what is, at every quiet moment of two VMs' lives."""
    pods = [full_pod(node, "one"), full_pod(node, "two")]
    paths = [names.vm_path(pod.uid) for pod in pods]
    qemus = [pod.qemu(FakeQemu, disks=[]) for pod in pods]
    await eventually(lambda: all("running" in states(client, path) for path in paths), why=node.hostd.log)
    client.signals.clear()
    known = await everything(client, *paths)
    client.signals.clear()
    seen: dict[str, set[str]] = {names.VM: set(), names.MANAGER: set()}

    async def same() -> bool:
        """Reads anew, and holds what was heard up to then against it."""
        now = await everything(client, *paths)
        replay(client, known)
        for (path, interface), values in now.items():
            for name, value in values.items():
                emits = contract()[interface].properties[name].emits
                if emits == "true":
                    seen.setdefault(interface, set()).add(name) if value != first[path, interface][name] else None
                if emits != "false" and value != known[path, interface][name]:
                    return False
        return True

    first = {key: dict(values) for key, values in known.items()}

    async def quiet() -> None:
        # A change between two of the reads is no fault: what stays different is.
        for _ in range(50):
            if await same():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("a change was not told")

    await quiet()
    await client.call(paths[0], names.VM, "SetPolicy", "s", "keep")
    await client.call(paths[0], names.VM, "SetGrace", "t", 1_000)
    await quiet()
    node.configure({"cleanup": {"mode": "observe"}})
    await client.manager("Reload")
    await quiet()
    node.configure({"cleanup": {"mode": "enforce"}})
    node.hostd.send(signal.SIGHUP)
    await eventually(lambda: node.get("Mode") == "enforce")
    await quiet()
    for qemu in qemus:
        qemu.poweroff(0)
    await eventually(lambda: not pods[1].mounted(), why=node.hostd.log)
    await quiet()
    await eventually(lambda: node.states() == {pods[0].uid: "held", pods[1].uid: "released"}, why=node.hostd.log)
    await quiet()
    await client.call(paths[0], names.VM, "SetPolicy", "s", "clean")
    await eventually(lambda: node.states()[pods[0].uid] == "released", why=node.hostd.log)
    await quiet()
    more = {"VMIUID": client.variant("s", "another"), "Namespace": client.variant("s", "other")}
    await client.manager("RegisterVM", "sa{sv}", pods[1].uid, more | {"Name": client.variant("s", "else")})
    await quiet()
    # Most of what can change has changed on the way, so that the test is one.
    assert {"State", "ExitedUSec", "ExitStatus", "ExitReason", "ReleasedUSec", "Policy", "GraceUSec", "Layers"} <= seen[
        names.VM
    ]
    assert {"VMIUID", "Namespace", "Name"} <= seen[names.VM]
    assert "Mode" in seen[names.MANAGER]
