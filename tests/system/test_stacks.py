"""What is mounted on a target: several mounts, other file systems, sources that are gone."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.mountns import MS_PRIVATE, MS_REC, mount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import until
from tests.support.witness import gone, in_state, layer_in, listed, rows_of

pytestmark = pytest.mark.usefixtures("root", "mount_source")


@pytest.mark.parametrize("depth", [2, 5, 70])
def test_a_stack_of_private_mounts_goes_whole(node: Node, depth: int) -> None:
    """One umount takes one mount of a stack away, and who calls it once leaves the rest."""
    node.namespace.call(mount, b"none", b"/", b"", MS_PRIVATE | MS_REC)
    pod = node.pod()
    target, image = pod.containerdisk(0), node.image("overlay")
    pod.containerdisk(3)
    node.namespace.call(mount, b"none", b"/", b"", MS_PRIVATE | MS_REC)
    for _ in range(depth - 1):
        pod.bind(image, target)
    assert pod.mounted().count(target) == depth
    stack_goes(node, pod)


@pytest.mark.parametrize("depth", [2, 5, 8])
def test_a_stack_of_shared_mounts_goes_whole(node: Node, depth: int) -> None:
    """Each restart of an agent doubled a node's mounts: a bind on a shared target appears on its source as well, and
    one umount then takes several away."""
    pod = node.pod()
    target, image = pod.containerdisk(0), node.image("overlay")
    pod.containerdisk(3)
    for _ in range(depth - 1):
        pod.bind(image, target)
    assert pod.mounted().count(target) >= depth
    stack_goes(node, pod)


def stack_goes(node: Node, pod: Pod) -> None:
    """Everything on the pod's targets goes with its QEMU, and nothing else does but what was mounted along with it."""
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    others = [row for row in rows_of(node) if b"/rootfs/disk/downloaded " not in row]
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert listed(node, pod.container_disks) == [b"disk_0.sock", b"disk_3.sock"]
    assert rows_of(node) == others


def test_a_stack_whose_lower_mount_is_held_is_busy_and_then_goes(node: Node) -> None:
    pod = node.pod()
    target = pod.containerdisk()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    pod.bind(node.image("tmpfs"), target)
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    assert pod.mounted() == [target]
    holder.end()
    gone(node, pod)


@pytest.mark.parametrize("kind", ["overlay", "ext4", "tmpfs", "btrfs"])
def test_targets_are_known_by_where_they_are_mounted(node: Node, kind: str) -> None:
    """A source that was worked out of the table's root field was wrong on btrfs and for volumes on other devices."""
    if kind == "btrfs" and shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is not installed: it is in Debian's btrfs-progs")
    pod = node.pod()
    image = pod.containerdisk(0, image=kind)
    pod.hotplug_file("data", pvc=kind if kind != "overlay" else "tmpfs")
    pod.hotplug_directory("dump", pvc=kind if kind != "overlay" else "tmpfs")
    inner, target = os.path.dirname(node.image(kind, b"/some/where/file")), pod.hotplug_disks + b"/inner"
    node.namespace.mkdir(target)
    pod.bind(inner, target)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    others = rows_of(node)
    holder = node.namespace.hold(os.open, image, os.O_RDONLY)
    qemu.kill()
    layer_in(node, pod, image, "busy", words=str(holder.pid))
    pod.unmount(image)
    layer_in(node, pod, image, "detached", words=str(holder.pid))
    holder.end()
    gone(node, pod)
    in_state(node, pod, "released")
    assert rows_of(node) == others


def test_a_target_whose_source_was_deleted_goes(node: Node) -> None:
    """A bind mount outlives the file that it was made of; its row then ends in //deleted."""
    pod = node.pod()
    image = node.image("tmpfs")
    target = pod.container_disks + b"/disk_0.img"
    node.namespace.touch(target)
    pod.bind(image, target)
    os.unlink(node.outside(image))
    assert any("//deleted " in row for row in node.rows(target))
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert listed(node, pod.container_disks) == []


@pytest.mark.parametrize("name", [b"a(deleted).img", b"x\\040(deleted)", b"deleted", b"kernel-boot.img"])
def test_a_name_that_looks_like_the_kernels_remark_is_a_name(node: Node, name: bytes) -> None:
    pod = node.pod()
    directory = node.namespace.mkdir(node.namespace.base + b"/x/deleted")
    image = node.namespace.write(directory + b"/" + name, b"image")
    target = pod.container_disks + b"/" + name
    node.namespace.touch(target)
    pod.bind(image, target)
    qemu = pod.qemu(FakeQemu, disks=[target])
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert listed(node, pod.container_disks) == []
    assert os.path.exists(node.outside(image))


def test_a_target_named_many_times_in_records_is_one(node: Node) -> None:
    """Every failed sync appended the same target to the record again."""
    pod = node.pod()
    target = pod.containerdisk()
    pod._records["container-disk"] *= 5000
    pod.write_records()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    assert list(node.layers(pod)) == [target.decode()]
    assert os.path.getsize(f"{node.runtime_dir}/vms/{pod.uid}.json") < 4096
    qemu.kill()
    gone(node, pod)


def test_a_target_tracked_many_times_under_many_names_is_one(node: Node) -> None:
    pod = node.pod()
    target = pod.containerdisk().decode()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    spellings = [target, target.replace("/volumes/", "//volumes/./"), target + "/", "/proc/1/root" + target]
    for _ in range(5):
        for spelling in spellings:
            assert node.call("TrackLayer", "ssa{sv}", pod.uid, spelling, "0") is True
    assert list(node.layers(pod)) == [target]
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")


def test_what_is_mounted_on_the_two_directories_themselves_is_left(node: Node) -> None:
    """kubelet mounts emptyDirs that have a medium of their own: those are not a VM's layers."""
    pod = node.pod()
    node.namespace.tmpfs(pod.hotplug_disks)
    target = pod.hotplug_file("data")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    assert list(node.layers(pod)) == [target.decode()]
    qemu.kill()
    until(lambda: target not in pod.mounted(), why=node.hostd.log)
    in_state(node, pod, "released")
    assert pod.mounted() == [pod.hotplug_disks]
