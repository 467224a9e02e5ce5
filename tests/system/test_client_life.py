"""The client library beside a real hostd: what it tells is true, and it loses nothing over restarts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator

import pytest

import hostd.client
from hostd.client import events
from hostd.client.node import Node as Client
from hostd.errors import InvalidArgs, NotATarget, ProcessMismatch, VMAlive, VMExists
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, eventually, holds_for
from tests.support.watcher import Watcher, watching
from tests.support.witness import FULL, full_pod

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    """The client of a node whose hostd does not run yet."""
    async with hostd.client.connect(node.bus.address) as connected:
        yield connected


async def synced(watcher: Watcher) -> events.Resync:
    return await watcher.first(events.Resync)


async def test_the_life_of_a_vm(dbus_library: str) -> None:
    with Node() as node:
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        async with hostd.client.connect(node.bus.address) as client, watching(client) as watcher:
            (vm,) = (await synced(watcher)).vms
            assert (vm.pod_uid, vm.vmi_uid, vm.state, vm.leader) == (pod.uid, pod.vmi_uid, "running", qemu.pid)
            assert {layer.path for layer in vm.layers} == {*pod.targets, *pod.blocks}
            with pytest.raises(VMAlive):
                await client.release(pod.uid)
            qemu.kill()
            exited = await watcher.first(events.VMExited)
            assert exited.vm.pod_uid == pod.uid
            assert exited.reason in {"signal", "unknown"}
            released = await watcher.first(events.VMReleased)
            assert pod.mounted() == []
            assert (released.vm.state, released.vm.unreleased) == ("released", ())
            assert released.elapsed_usec > 0
            await client.unregister(pod.uid)
            assert (await watcher.first(events.VMRemoved)).vm.pod_uid == pod.uid
            assert await client.list() == []


async def test_a_vm_that_died_while_hostd_was_dead(node: Node, client: Client) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    async with watching(client) as watcher:
        assert (await watcher.first(events.Lost)).what == "hostd"
        node.hostd.start()
        if (await synced(watcher)).vms[0].state != "running":
            await watcher.first(events.VMChanged, lambda event: event.vm.state == "running")
        node.hostd.kill()
        assert (await watcher.first(events.Lost)).what == "hostd"
        qemu.kill()
        assert len(pod.mounted()) == FULL
        node.hostd.start()
        back = await synced(watcher)
        if back.vms[0].state != "released":
            await watcher.first(events.VMReleased)
        assert pod.mounted() == []


async def test_the_bus_is_restarted_while_a_vm_dies(node: Node, client: Client) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    async with watching(client) as watcher:
        await synced(watcher)
        node.bus.stop()
        assert (await watcher.first(events.Lost)).what == "bus"
        qemu.kill()
        await eventually(lambda: not pod.mounted())
        await node.bus.start()
        vm = (await synced(watcher)).vms[0]
        if vm.state != "released":
            await watcher.first(events.VMReleased)
        assert client.running
        other = full_pod(node, "other")
        other.qemu(FakeQemu)
        await watcher.first(
            events.VMChanged, lambda event: (event.vm.pod_uid, event.vm.state) == (other.uid, "running")
        )


async def test_register_with_a_pidfd(node: Node, client: Client) -> None:
    pod, other = full_pod(node), full_pod(node, "other")
    qemu, other_qemu = pod.qemu(FakeQemu), other.qemu(FakeQemu)
    node.hostd.start()
    await client.register(pod.uid, pid=qemu.pid, namespace="shop", name="db", grace_usec=1_000)
    assert await client.register(pod.uid, pid=qemu.pid, namespace="shop", name="db", grace_usec=1_000) is True
    vm = await client.get(pod.uid)
    assert (vm.full_name, vm.leader, vm.grace_usec) == ("shop/db", qemu.pid, 1_000)
    with pytest.raises((ProcessMismatch, VMExists)):
        await client.register(pod.uid, pid=other_qemu.pid)
    with pytest.raises(InvalidArgs):
        await client.register(pod.uid, pidfd=0)
    assert (await client.find_by_pid(qemu.pid)).pod_uid == pod.uid
    assert [each.pod_uid for each in await client.find_by_vmi(pod.vmi_uid)] == [pod.uid]


async def test_an_inhibitor_outlives_hostd_and_ends_with_its_block(node: Node, client: Client) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    async with watching(client) as watcher:
        await synced(watcher)
        async with client.inhibit(pod.uid, who="backup", why="reads the disk"):
            qemu.kill()
            await watcher.first(events.VMChanged, lambda event: event.vm.state == "held")
            node.hostd.kill()
            node.hostd.start()
            await synced(watcher)
            vm = await client.get(pod.uid)
            assert [(each.who, each.why) for each in vm.inhibitors] == [("backup", "reads the disk")]
            holds_for(lambda: len(pod.mounted()) == FULL, 1.0)
        await watcher.first(events.VMReleased)
        assert pod.mounted() == []


async def test_an_inhibitor_ends_with_a_child_that_has_a_copy(node: Node, client: Client) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    async with client.inhibit(pod.uid, who="a", why="b") as fd:
        child = subprocess.Popen(["sleep", "300"], pass_fds=[fd])
    try:
        qemu.kill()
        holds_for(lambda: len(pod.mounted()) == FULL, 0.7)
    finally:
        child.kill()
        child.wait()
    await eventually(lambda: not pod.mounted())


async def test_who_holds_a_layer(node: Node, client: Client) -> None:
    pod = full_pod(node)
    target = pod.targets[0]
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    async with watching(client) as watcher:
        await synced(watcher)
        qemu.kill()
        blocked = await watcher.first(events.LayerBlocked)
        assert blocked.vm.pod_uid == pod.uid
        (layer,) = [each for each in await client.layers(pod.uid) if not each.gone]
        assert (layer.path, layer.state) == (target, "busy")
        assert layer.attempts > 0
        assert [(each.pid, each.how) for each in await client.holders(pod.uid, target)] == [(holder.pid, "open")]
        with pytest.raises(NotATarget):
            await client.holders(pod.uid, b"/etc/passwd")
        (row,) = await client.release(pod.uid)
        assert row.result.startswith("busy")
        holder.end()
        await watcher.first(events.VMReleased)


async def test_sweep_and_policy(node: Node, client: Client) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    await client.set_policy(pod.uid, "keep")
    qemu.kill()
    await eventually(lambda: node.states()[pod.uid] == "held")
    rows = await client.sweep(dry_run=True)
    assert {row.pod_uid for row in rows} == {pod.uid}
    assert len(pod.mounted()) == FULL
    await client.set_policy(pod.uid, "clean")
    await eventually(lambda: not pod.mounted(), DEADLINE)
