"""Mount namespaces: PID 1's is the one that counts, wherever hostd runs, and copies in others are dropped or named."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.support.daemon import Daemon
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import full_pod, gone, holders, in_state, layer_in, listed, rows_of

pytestmark = pytest.mark.usefixtures("root")

#: Ways for hostd to get a mount namespace of its own: what PrivateTmp= and ProtectSystem= make of it, or a container.
UNSHARED = {
    "slave": ("unshare", "--mount", "--propagation", "slave"),
    "private": ("unshare", "--mount", "--propagation", "private"),
    "shared": ("unshare", "--mount", "--propagation", "shared"),
}


@pytest.mark.parametrize("wrapper", UNSHARED.values(), ids=UNSHARED.keys())
@pytest.mark.parametrize("inside", [True, False], ids=["of-the-nodes", "of-another"])
def test_hostd_in_a_namespace_of_its_own_acts_in_pid_1s(node: Node, wrapper: tuple[str, ...], inside: bool) -> None:
    """An umount in a unit's own slave namespace took the mount away there, while the host still had it."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    # nsenter comes after the wrapper in a Daemon's command, and it has to come before.
    enter = ("nsenter", f"--mount={node.namespace.path}", "--") if inside else ()
    with Daemon(node.configuration, node.bus.address, wrapper=(*enter, *wrapper)) as hostd:
        hostd.start()
        assert os.readlink(f"/proc/{hostd.pid}/ns/mnt") not in (
            os.readlink(node.namespace.path),
            os.readlink("/proc/self/ns/mnt"),
        )
        others = rows_of(node)
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")
        assert rows_of(node) == others
        assert hostd.stop() == 0


def test_it_never_says_released_while_the_node_has_it(node: Node) -> None:
    """The word "unmounted" in a log, and the row in /proc/1/mountinfo."""
    pod = node.pod()
    target = pod.hotplug_directory("dump")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.chdir, target)
    with node.namespace.copy("private") as other:
        qemu.kill()
        layer_in(node, pod, target, "busy")
        other.umount(target)
        holds_for(lambda: node.states()[pod.uid] != "released" and pod.mounted() == [target], 1.0)
    holder.end()
    in_state(node, pod, "released")
    assert not pod.mounted()


@pytest.mark.parametrize("kind", ["file", "directory", "kernel-boot"])
def test_a_private_copy_in_another_namespace_is_dropped_with_the_mountpoint(node: Node, kind: str) -> None:
    """A side container mounts without propagation and keeps a copy that the node's umount does not reach."""
    pod = node.pod()
    make: dict[str, Callable[[], bytes]] = {
        "file": pod.containerdisk,
        "directory": lambda: pod.hotplug_directory("dump"),
        "kernel-boot": lambda: pod.kernel_boot(b"vmlinuz")[0],
    }
    target = make[kind]()
    qemu = pod.qemu(FakeQemu, disks=[])
    with node.namespace.copy("private") as side:
        node.hostd.start()
        assert target in side.targets()
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")
        assert target not in side.targets()


def test_a_private_copy_that_stays_is_a_pin_and_is_named(node: Node) -> None:
    """The mountpoint is not empty, so it cannot be deleted, and the copy in the other namespace keeps the volume."""
    pod = node.pod()
    directory = pod.hotplug_disks + b"/dump"
    node.namespace.write(directory + b"/below-the-mount", b"x")
    target = pod.hotplug_directory("dump")
    qemu = pod.qemu(FakeQemu)
    with node.namespace.copy("private") as side:
        node.hostd.start()
        qemu.kill()
        gone(node, pod)
        layer_in(node, pod, target, "detached", words=str(side.pid))
        assert target in side.targets()
        assert "namespace" in [how for _, _, how, _ in holders(node, pod, target)]
        holds_for(lambda: node.states()[pod.uid] != "released", 1.0, "a pinned layer is not released")
    in_state(node, pod, "released")
    assert listed(node, directory) == [b"below-the-mount"]


def test_a_copy_in_a_container_that_follows_is_no_pin(node: Node) -> None:
    """A slave namespace sees the node's umount; its copy is gone with it."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    with node.namespace.copy("slave") as container:
        node.hostd.start()
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")
        assert not [target for target in container.targets() if target in pod.targets]


def test_one_that_has_it_open_in_a_container_is_named(node: Node) -> None:
    pod = node.pod()
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    with node.namespace.copy("slave") as container:
        holder = container.hold(os.open, target, os.O_RDONLY)
        qemu.kill()
        layer_in(node, pod, target, "busy", words=str(holder.pid))
        assert holder.pid in [pid for pid, *_ in holders(node, pod, target)]
    gone(node, pod)


def test_hostd_makes_no_mounts_however_often_it_starts(node: Node) -> None:
    """Each restart of an agent doubled the mounts of its node, until after a dozen the node was of no use."""
    pods = [full_pod(node, f"vm-{number}") for number in range(4)]
    for pod in pods:
        pod.qemu(FakeQemu)
    before = sorted(node.namespace.table().splitlines())
    with open("/proc/self/mountinfo", "rb") as file:
        ours = file.read()
    for _ in range(12):
        node.hostd.start()
        assert sorted(node.namespace.table().splitlines()) == before
        node.hostd.kill()
    with open("/proc/self/mountinfo", "rb") as file:
        assert file.read() == ours


def test_a_namespace_that_is_not_there_is_an_error_that_names_it(node: Node) -> None:
    node.configure({"host": {"mount-namespace": "/proc/1/ns/nothing"}})
    pod = full_pod(node)
    pod.qemu(FakeQemu).kill()
    assert node.hostd.run_to_its_end() > 0
    assert node.hostd.said("/proc/1/ns/nothing")
    assert "Traceback" not in node.hostd.log()
    assert len(pod.mounted()) == 5


def test_the_umount_and_removal_in_another_namespace_is_no_trouble(node: Node) -> None:
    """Deleting a mountpoint elsewhere detaches the mount here, silently."""
    pod = node.pod()
    target = pod.hotplug_directory("dump")
    disk = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    with node.namespace.copy("private") as other:
        other.umount(target)
        other.call(os.rmdir, target)
        until(lambda: target not in pod.mounted(), why="the kernel detached it")
    assert pod.mounted() == [disk]
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert not node.hostd.said("ERROR")
