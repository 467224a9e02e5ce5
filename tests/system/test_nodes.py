"""Device nodes of block PVCs: no mounts, so that no mount table tells of them, and seen all the same."""

from __future__ import annotations

import os

import pytest

from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import in_state, layer, layer_in, shown

pytestmark = pytest.mark.usefixtures("root")


def dead_pod(node: Node) -> tuple[Pod, bytes]:
    """A VM whose one layer is a device node, and that may not be cleaned now that it is dead."""
    pod = node.pod()
    block = pod.hotplug_block("raw")
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    layer_in(node, pod, block, "mounted")
    if node.get("Mode") == "enforce":
        node.call("SetPolicy", "s", "keep", path=node.vm(pod))
    qemu.kill()
    in_state(node, pod, "held", "exited")
    return pod, block


@pytest.mark.parametrize("mode", ["observe", "enforce"])
@pytest.mark.parametrize("restart", [False, True], ids=["up", "restart"])
def test_what_the_agent_removes_is_seen_to_be_gone(node: Node, mode: str, restart: bool) -> None:
    """hostd does nothing itself then, and says that the VM is released all the same."""
    node.configure({"cleanup": {"mode": mode}})
    pod, block = dead_pod(node)
    if restart:
        node.hostd.kill()
        node.hostd.start()
    holds_for(lambda: node.states()[pod.uid] in {"held", "exited"}, 0.3)
    os.unlink(node.outside(block))
    in_state(node, pod, "released")
    assert layer(node, pod, block).state == "gone"  # type: ignore[union-attr]


def test_nodes_come_and_go_under_a_living_vm(node: Node) -> None:
    pod = node.pod()
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    for _ in range(3):
        block = pod.hotplug_block("raw")
        layer_in(node, pod, block, "mounted")
        os.unlink(node.outside(block))
        until(lambda: layer(node, pod, block) is None, why=node.hostd.log)  # noqa: B023
    block = pod.hotplug_block("last")
    layer_in(node, pod, block, "mounted")
    qemu.kill()
    in_state(node, pod, "released")
    assert not os.path.lexists(node.outside(block))


def test_a_node_that_comes_after_the_end_is_a_layer(node: Node) -> None:
    """Its VM is released, and the agent makes it from stale status."""
    pod = node.pod()
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    block = pod.hotplug_block("late")
    until(lambda: not os.path.lexists(node.outside(block)), why=node.hostd.log)
    in_state(node, pod, "released")
    assert shown(block) in node.layers(pod)


def test_a_qemu_that_starts_in_an_acknowledged_pod_is_noticed(node: Node) -> None:
    """The agent has let go of the VM, its containers run still, and what the next QEMU has is no mount."""
    pod = node.pod()
    pod.launcher()
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    node.call("UnregisterVM", "s", pod.uid)
    holds_for(lambda: node.states() == {}, 0.5, "it is acknowledged")
    block = pod.hotplug_block("raw")
    second = pod.qemu(FakeQemu, disks=[])
    layer_in(node, pod, block, "mounted")
    in_state(node, pod, "running")
    second.kill()
    in_state(node, pod, "released")
    assert not os.path.lexists(node.outside(block))
