"""The pods and nodes that tests are made on look as kubelet's and virt-handler's do, and go without a trace."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import stat
import time
from collections.abc import Iterator

import pytest

from hostd.kubevirt.pod_cgroup import PodCgroups as Seen
from tests.support.cgroups import LAYOUTS, Layout, Unavailable
from tests.support.mountns import umount
from tests.support.node import Node
from tests.support.qemu import FakeQemu, RealQemu
from tests.support.wait import TimedOut, holds_for, until

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def node() -> Iterator[Node]:
    """A node."""
    with Node() as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_a_pods_processes_are_found_by_its_cgroup_in_every_layout(layout: Layout) -> None:
    try:
        node = Node(layout)
    except Unavailable as error:
        pytest.skip(str(error))
    with node:
        pod = node.pod()
        qemu = pod.qemu(FakeQemu)
        seen = node.namespace.call(lambda: Seen(os.fsencode(node.cgroups.root)).pods())
        assert set(seen) == {pod.uid}
        assert node.namespace.call(lambda: Seen(os.fsencode(node.cgroups.root)).processes(pod.uid)) == [qemu.pid]
        qemu.kill()
        assert node.cgroups.processes(pod.uid) == []
        pod.remove_cgroup()
        assert node.namespace.call(lambda: Seen(os.fsencode(node.cgroups.root)).pods()) == {}


@pytest.mark.parametrize("kind", [FakeQemu, RealQemu], ids=lambda kind: kind.label)
def test_a_qemu_keeps_what_it_has_open_busy_from_its_own_namespace(node: Node, kind: type[FakeQemu | RealQemu]) -> None:
    pod = node.pod()
    disk, plugged = pod.containerdisk(), pod.hotplug_file("data")
    pod.kernel_boot()
    qemu = pod.qemu(kind)
    for target in (disk, plugged):
        with pytest.raises(OSError, match="busy") as caught:
            node.namespace.call(umount, target)
        assert caught.value.errno == errno.EBUSY
    qemu.kill()
    for target in (disk, plugged):
        node.namespace.call(umount, target)
    assert len(pod.mounted()) == 2


def test_every_kind_of_target_is_where_kubevirt_puts_it(node: Node) -> None:
    pod = node.pod()
    pod.containerdisk(3)
    pod.kernel_boot()
    pod.hotplug_file("data")
    pod.hotplug_directory("dump")
    block = pod.hotplug_block("raw")
    top = node.kubelet + f"/pods/{pod.uid}/volumes/kubernetes.io~empty-dir/".encode()
    assert sorted(target.removeprefix(top) for target in pod.mounted()) == [
        b"container-disks/disk_3.img",
        b"container-disks/kernel-boot/initrd.img",
        b"container-disks/kernel-boot/vmlinuz",
        b"hotplug-disks/data.img",
        b"hotplug-disks/dump",
    ]
    assert stat.S_ISBLK(os.stat(node.outside(block)).st_mode)
    assert any("/disk/downloaded" in row and "overlay" in row for row in node.rows(top))


def test_records_are_as_virt_handler_writes_them(node: Node) -> None:
    pod = node.pod(name="vm-1", namespace="ns")
    disk = pod.containerdisk()
    pod.hotplug_directory("dump")
    pod.write_records()
    path = node.outside(pod.record())
    with open(path) as file:
        record = json.load(file)
    assert record == {
        "mountTargetEntries": [
            {
                "targetFile": disk.decode(),
                "socketFile": f"/pods/{pod.uid}/volumes/kubernetes.io~empty-dir/container-disks/disk_0.sock",
            }
        ],
        "usesSafePaths": True,
    }
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with open(node.outside(pod.ghost)) as file:
        assert set(json.load(file)) == {"name", "namespace", "socketFile", "uid"}


def test_a_node_with_a_loop_device_goes_without_a_trace() -> None:
    before = _table()
    with Node(kubelet_is_a_link=True) as node:
        pod = node.pod()
        base, directory, cgroup = node.namespace.base, node.directory, node.cgroups.root
        assert pod.hotplug_file("data", pvc="ext4") in pod.mounted()
        pod.launcher()
        qemu = pod.qemu(FakeQemu)
        assert len(_loops(base)) == 1
    assert not os.path.exists(f"/proc/{qemu.pid}")
    assert [path for path in (os.fsdecode(base), directory, cgroup) if os.path.exists(path)] == []
    assert _table() == before
    until(lambda: _loops(base) == [], why="the loop device is detached")


def _table() -> str:
    with open("/proc/1/mountinfo") as file:
        return file.read()


def _loops(base: bytes) -> list[str]:
    """Backing files below a directory; a device that is detached meanwhile is none."""
    found = []
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        with contextlib.suppress(OSError), open(path) as file:
            found.append(file.read())
    return [name for name in found if name.startswith(os.fsdecode(base))]


def test_a_wait_gives_the_value_or_says_what_did_not_come_true() -> None:
    assert until(lambda: "yes") == "yes"
    with pytest.raises(TimedOut, match=r"not within 0\.01 s: the moon rises \(last seen: 0\)"):
        until(lambda: 0, deadline=0.01, why="the moon rises")
    with pytest.raises(AssertionError, match="sinks"):
        holds_for(lambda: False, 0.01, "the moon sinks")
    start = time.monotonic()
    holds_for(lambda: True, 0.02)
    assert time.monotonic() - start >= 0.02
