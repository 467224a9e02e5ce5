"""Mounts and umounts by others, by the thousand or again and again on our own target: cheap, quiet, right at last."""

from __future__ import annotations

import os

import pytest

from tests.support.mountns import MS_BIND, mount, umount
from tests.support.neighbours import doing, remounting
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import full_pod, gone, in_state, layer, only, share_of_a_core

pytestmark = pytest.mark.usefixtures("root", "mount_source")


def directories(paths: list[bytes]) -> None:
    """Makes many of them."""
    for path in paths:
        os.makedirs(path)


def victim(node: Node, kind: str) -> tuple[Pod, bytes, bytes]:
    """A pod with one layer, the layer's target and its source."""
    pod = node.pod()
    if kind == "file":
        source = node.image("tmpfs")
        target = pod.container_disks + b"/disk_0.img"
        node.namespace.touch(target)
    else:
        source = node.pvc()
        target = pod.hotplug_disks + b"/dump"
        node.namespace.mkdir(target)
    pod.bind(source, target)
    return pod, target, source


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_target_that_is_mounted_again_and_again(node: Node, kind: str) -> None:
    """The mount loop of an agent recreated from stale status what its unmount loop removed: a deadlock of two."""
    pod, target, source = victim(node, kind)
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    with remounting(node, source, target) as other:
        qemu.kill()
        until(
            lambda: (row := layer(node, pod, target)) is not None and "mounted again" in row.error,
            why=lambda: f"{layer(node, pod, target)}\n{node.hostd.log()}",
        )
        assert share_of_a_core(node, 6.0) < 0.05
        holds_for(lambda: node.states()[pod.uid] != "released", 0.3)
        assert len(node.hostd.said(pod.uid)) <= 12, node.hostd.log()
        other.end()
    gone(node, pod)
    in_state(node, pod, "released")
    # What the other one mounted from is whole.
    assert os.path.exists(node.outside(source + b"/disk.img" if kind == "directory" else source))


def test_mounts_that_come_and_go_elsewhere(node: Node) -> None:
    """Unmounts failed on a busy node, because two identical reads of the table were demanded."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    places = [node.namespace.base + b"/churn/%d" % number for number in range(200)]
    node.namespace.call(directories, places)

    def churn() -> None:
        for place in places:
            mount(b"churn", place, b"tmpfs")
        for place in places:
            umount(place)

    node.hostd.start()
    with doing(node, churn):
        qemu.kill()
        gone(node, pod, deadline=5)
        in_state(node, pod, "released")
        assert share_of_a_core(node, 2.0) < 0.1
    assert not node.hostd.said("WARNING")
    assert not node.hostd.said("ERROR")


def test_a_storm_of_thousands_and_then_silence(node: Node) -> None:
    """Rate limits against mount storms lost the last change of state."""
    pods = [full_pod(node, f"vm-{number}") for number in range(3)]
    qemus = [pod.qemu(FakeQemu, disks=[]) for pod in pods]
    node.hostd.start()
    top = node.namespace.mkdir(node.namespace.base + b"/storm")

    def storm() -> None:
        for number in range(5000):
            mount(top, places[number % len(places)], b"", MS_BIND)
            if number == 2500:
                os.kill(qemus[0].pid, 9)
        for number in range(5000):
            if number == 2500:
                os.kill(qemus[1].pid, 9)
            umount(places[number % len(places)])

    node.namespace.mark(node.namespace.base, "private")
    node.namespace.bind(top, top)
    node.namespace.mark(top, "private")
    places = [top + b"/%d" % number for number in range(50)]
    node.namespace.call(directories, places)
    node.namespace.call(storm)
    gone(node, *pods[:2], deadline=5)
    # The last change comes when all is quiet, and it alone has to be seen.
    plugged = pods[2].hotplug_file("last")
    until(lambda: node.layers(pods[2]).get(os.fsdecode(plugged)) == "mounted", why=node.hostd.log)
    pods[2].unmount(plugged)
    until(lambda: os.fsdecode(plugged) not in node.layers(pods[2]), why=node.hostd.log)
    for pod in pods[:2]:
        in_state(node, pod, "released")
    assert node.states()[pods[2].uid] == "running"
    assert len(pods[2].mounted()) == 5
    before = node.hostd.processor_time()
    holds_for(lambda: node.hostd.running, 1.0)
    assert node.hostd.processor_time() - before <= 0.05


def test_a_node_with_many_mounts_and_many_vms(node: Node) -> None:
    """A hundred layers of one VM go in one pass, and those of others meanwhile."""
    big, small = node.pod(name="big"), node.pod(name="small")
    image = node.image("tmpfs")
    for number in range(100):
        target = big.container_disks + b"/disk_%d.img" % number
        node.namespace.touch(target)
        big.bind(image, target)
    small.hotplug_directory("dump")
    qemus = [pod.qemu(FakeQemu, disks=[]) for pod in (big, small)]
    node.hostd.start()
    for qemu in qemus:
        qemu.kill()
    gone(node, big, small)
    in_state(node, big, "released")
    in_state(node, small, "released")


def test_idle_after_the_last_event(node: Node) -> None:
    """Nothing is polled while nothing is pending; a released VM whose launcher lingers is looked at now and then."""
    pods = [full_pod(node, f"vm-{number}") for number in range(4)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    node.hostd.start()
    for pod, qemu in zip(pods[:2], qemus[:2], strict=True):
        qemu.kill()
        only(node, pod)
        in_state(node, pod, "released")
    assert share_of_a_core(node, 2.0) < 0.02
