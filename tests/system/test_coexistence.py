"""Beside virt-handler, kubelet and people with umount(8): whoever comes first, the end is the same."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.support.mountns import MNT_DETACH, Child, enter, umount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import until
from tests.support.witness import full_pod, gone, in_state, layer_in, rows_of, stays

pytestmark = pytest.mark.usefixtures("root", "mount_source")


def unmounting(node: Node, pod: Pod, flags: int) -> Child:
    """Somebody who unmounts the pod's targets again and again, as fast as it goes."""
    targets = list(pod.targets)

    def body(tell: object) -> None:
        enter(node.namespace.path)
        tell(None)  # type: ignore[operator]
        while True:
            for target in targets:
                with contextlib.suppress(OSError):
                    umount(target, flags)

    child = Child(body)
    child.hear()
    return child


@pytest.mark.parametrize("flags", [0, MNT_DETACH], ids=["plain", "lazy"])
def test_two_clean_up_at_once(node: Node, flags: int) -> None:
    """Two paths of clean-up raced on one mount, and both failed for what the other had done."""
    pods = [full_pod(node, f"vm-{number}") for number in range(4)]
    qemus = [pod.qemu(FakeQemu, disks=[]) for pod in pods]
    node.hostd.start()
    for pod, qemu in zip(pods, qemus, strict=True):
        with unmounting(node, pod, flags) as other:
            qemu.kill()
            gone(node, pod)
            in_state(node, pod, "released")
            other.end()
    assert not node.hostd.said("ERROR")
    assert not node.hostd.said("WARNING"), node.hostd.log()


def test_virt_handler_cleans_first(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    for target in pod.targets:
        node.namespace.call(umount, target, MNT_DETACH)
    os.unlink(node.outside(pod.targets[0]))
    until(lambda: "mounted" not in [node.layers(pod).get(os.fsdecode(target)) for target in pod.targets])
    qemu.kill()
    in_state(node, pod, "released")
    assert not node.hostd.said("WARNING")


def test_what_is_hotplugged_and_unplugged_under_a_living_vm_is_not_hostds_business(node: Node) -> None:
    pod = node.pod()
    disk = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    for _ in range(3):
        plugged = pod.hotplug_file("data")
        until(lambda: node.layers(pod).get(os.fsdecode(plugged)) == "mounted", why=node.hostd.log)  # noqa: B023
        pod.unmount(plugged)
        os.unlink(node.outside(plugged))
        until(lambda: os.fsdecode(plugged) not in node.layers(pod), why=node.hostd.log)  # noqa: B023
    assert pod.mounted() == [disk]
    assert node.states()[pod.uid] == "running"
    qemu.kill()
    gone(node, pod)


def test_a_release_that_is_asked_for_joins_the_one_under_way(node: Node) -> None:
    """One worker unmounts a target, however many ask for it."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    for _ in range(5):
        rows = node.call("Release", "st", pod.uid, "0")
        assert all(row[2] for row in rows)
    gone(node, pod)
    in_state(node, pod, "released")
    assert not node.hostd.said("ERROR")


def test_attachment_pods_are_not_touched(node: Node) -> None:
    """A pod of another kind has a directory of the same name, and mounts in it that the CSI driver needs."""
    pod = full_pod(node)
    attachments = [pod.attachment(name) for name in ("data", "other.img")]
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    others = rows_of(node)
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert set(node.states()) == {pod.uid}
    for attachment in attachments:
        assert attachment.target in node.mounts(b"/")
    assert rows_of(node) == others


def test_an_attachment_pod_alone_is_no_vm(node: Node) -> None:
    node.configure({"cleanup": {"settle": "100ms"}})
    pod = node.pod()
    pod.containerdisk()
    pod.remove_cgroup()
    attachment = pod.attachment("data")
    # A bind right below hotplug-disks, as only a launcher has it; the pod's other directories say what it is.
    flat = os.path.dirname(os.path.dirname(attachment.target)) + b"/flat"
    node.namespace.mkdir(flat)
    node.namespace.bind(node.pvc(), flat)
    node.hostd.start()
    node.call("Sweep", "t", "0")
    in_state(node, pod, "released")
    assert attachment.uid not in node.states()
    assert {flat, attachment.target} <= set(node.mounts(b"/"))


def test_the_agents_records_are_read_and_never_written(node: Node) -> None:
    pod = full_pod(node)
    paths = [node.outside(path) for path in (pod.record(), pod.record("hotplug-volume"), pod.ghost)]
    before = {path: (content(path), os.stat(path).st_mtime_ns) for path in paths}
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    assert {path: (content(path), os.stat(path).st_mtime_ns) for path in paths} == before


def content(path: bytes) -> bytes:
    """What is in a file."""
    with open(path, "rb") as file:
        return file.read()


def test_the_pods_directory_vanishes_while_a_layer_is_busy(node: Node) -> None:
    """Paths of a launcher that had finished long ago were opened again and again, and failed again and again."""
    pod, late = node.pod(name="gone"), node.pod(name="late")
    target = pod.containerdisk()
    late.containerdisk()
    qemu, other = pod.qemu(FakeQemu), late.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    qemu.kill()
    layer_in(node, pod, target, "busy")
    node.namespace.call(umount, target, MNT_DETACH)
    pod.vanish()
    pod.remove_cgroup()
    holder.end()
    in_state(node, pod, "released")
    other.kill()
    gone(node, late)
    in_state(node, late, "released")
    stays_quiet = len(node.hostd.log().splitlines())
    node.call("Sweep", "t", "0")
    assert len(node.hostd.log().splitlines()) == stays_quiet


def test_the_socket_and_the_cgroup_vanish_while_hostd_looks_away(node: Node) -> None:
    """Without the dead pod's cgroup its clean-up stopped before it began."""
    import shutil
    import signal

    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.send(signal.SIGSTOP)
    qemu.kill()
    pod.remove_cgroup()
    shutil.rmtree(node.outside(pod.empty_dir + b"/sockets"))
    node.hostd.send(signal.SIGCONT)
    gone(node, pod)
    in_state(node, pod, "released")
    assert not node.hostd.said("ERROR")


def test_a_half_made_mount_of_a_vm_that_is_about_to_start_is_left(node: Node) -> None:
    """A mountpoint without its mount, and then with it, in a pod whose containers do not run yet."""
    node.configure({"cleanup": {"settle": "10s"}})
    node.hostd.start()
    pod = node.pod()
    for index in range(3):
        pod.containerdisk(index)
    stays(node, pod)
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")
    qemu.kill()
    gone(node, pod)
