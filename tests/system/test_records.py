"""Files that a crash, a full disk or somebody's mistake left: hostd's own and virt-handler's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable

import pytest

from tests.support.mountns import MNT_DETACH, umount
from tests.support.node import MANAGER, NAME, Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import until
from tests.support.witness import full_pod, gone, in_state, stays

pytestmark = pytest.mark.usefixtures("root")


def written(content: bytes) -> Callable[[str], None]:
    """Makes a file of this content."""

    def make(path: str) -> None:
        with open(path, "wb") as file:
            file.write(content)

    return make


def directory_with_a_file(path: str) -> None:
    """A directory that is not empty."""
    os.mkdir(path)
    written(b"x")(path + "/file")


#: What lies where a file should be. (That nobody may read it proves nothing: hostd is root.)
BROKEN: dict[str, Callable[[str], None]] = {
    "empty": written(b""),
    "nul": written(bytes(4096)),
    "truncated": written(b'{"version":1,"boot":"'),
    "null": written(b"null"),
    "list": written(b"[]"),
    "number": written(b"7"),
    "garbage-after": written(b'{"mountTargetEntries":[]}}'),
    "wrong-types": written(b'{"version":1,"mountTargetEntries":{"targetFile":7},"vm":[]}'),
    "not-utf-8": written(b'{"a":"\xff\xfe"}'),
    "deep": written(b"[" * 100_000),
    "huge": written(b" " * (6 << 20) + b"{}"),
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "full-directory": directory_with_a_file,
    "dangling": lambda path: os.symlink("/nowhere/at/all", path),
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3)),
    "zero-device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),
    "link-to-passwd": lambda path: os.symlink("/etc/passwd", path),
}
broken = pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN.keys())


@broken
def test_a_state_file_that_cannot_be_used_is_set_aside_and_named(node: Node, make: Callable[[str], None]) -> None:
    """An empty or torn checkpoint stopped a daemon from ever starting again."""
    bad, good, dead = full_pod(node, "bad"), full_pod(node, "good"), full_pod(node, "dead")
    qemus = [pod.qemu(FakeQemu) for pod in (bad, good, dead)]
    node.hostd.start()
    node.hostd.kill()
    paths = {pod: f"{node.runtime_dir}/vms/{pod.uid}.json" for pod in (bad, dead)}
    for path in paths.values():
        os.unlink(path)
        make(path)
    qemus[2].kill()
    node.hostd.start()
    # Both are found again by looking: the living one lives, the dead one is cleaned.
    gone(node, dead)
    stays(node, bad, good, seconds=0.3)
    assert (node.states()[bad.uid], node.states()[good.uid]) == ("running", "running")
    health = json.dumps(node.get("Health"))
    for pod in paths:
        assert node.hostd.said(pod.uid, "cannot be used")
        assert pod.uid in health
    aside = os.listdir(node.runtime_dir + "/bad")
    assert sorted(aside) == sorted(f"{pod.uid}.json" for pod in paths)
    node.hostd.kill()
    node.hostd.start()
    assert (node.states()[bad.uid], node.states()[good.uid]) == ("running", "running")
    assert len(node.hostd.said("cannot be used")) == 2, "a second start has nothing to complain of"
    for qemu in qemus[:2]:
        qemu.kill()
    gone(node, bad, good)


def test_a_state_file_of_another_version_is_judged_by_what_it_says(node: Node) -> None:
    """After an upgrade, or back: keys that nobody knows are passed over, another format is set aside."""
    newer, other = full_pod(node, "newer"), full_pod(node, "other")
    qemus = [pod.qemu(FakeQemu) for pod in (newer, other)]
    node.hostd.start()
    node.call("SetGrace", "t", "7000000", path=node.vm(newer))
    node.hostd.kill()
    for pod, change in ((newer, {"colour": "red"}), (other, {"version": 99})):
        path = f"{node.runtime_dir}/vms/{pod.uid}.json"
        with open(path) as file:
            plain = json.load(file)
        plain |= change
        plain["vm"]["shape"] = ["round"]
        with open(path, "w") as file:
            json.dump(plain, file)
    node.hostd.start()
    assert node.states() == {newer.uid: "running", other.uid: "running"}
    assert node.get("GraceUSec", node.vm(newer)) == 7_000_000
    assert os.listdir(node.runtime_dir + "/bad") == [other.uid + ".json"]
    for qemu in qemus:
        qemu.kill()
    gone(node, newer, other)


def test_what_an_earlier_boot_left_is_nobodys_to_delete(node: Node) -> None:
    """After a reboot the mountpoints are there, and nothing is mounted on them: kubelet deletes them with the pod."""
    pod = node.pod()
    for name in (b"empty.img", b"full.img"):
        node.namespace.write(pod.hotplug_disks + b"/" + name, b"x" if name.startswith(b"full") else b"")
    node.namespace.mkdir(pod.hotplug_disks + b"/empty")
    node.namespace.write(pod.hotplug_disks + b"/full/file", b"x")
    pod.write_records()
    pod.remove_cgroup()
    node.hostd.start()
    node.call("Sweep", "t", "0")
    until(lambda: node.states().get(pod.uid) in (None, "released"), why=lambda: str(node.states()))
    assert sorted(os.listdir(node.outside(pod.hotplug_disks))) == [b"empty", b"empty.img", b"full", b"full.img"]
    assert not node.hostd.said("ERROR")


def test_the_same_state_file_is_bad_again(node: Node) -> None:
    """What was set aside before is in the way of nothing."""
    pod = full_pod(node)
    pod.qemu(FakeQemu, disks=[])
    for make in (BROKEN["directory"], BROKEN["full-directory"], BROKEN["empty"], BROKEN["full-directory"]):
        node.hostd.start()
        node.hostd.kill()
        path = f"{node.runtime_dir}/vms/{pod.uid}.json"
        os.unlink(path)
        make(path)
    node.hostd.start()
    assert node.states() == {pod.uid: "running"}
    assert len(pod.mounted()) == 5


@broken
def test_a_record_of_the_agents_that_cannot_be_used_costs_nobody_anything(
    node: Node, make: Callable[[str], None]
) -> None:
    bad, good = full_pod(node, "bad"), full_pod(node, "good")
    paths = [os.fsdecode(node.outside(path)) for path in (bad.record(), bad.record("hotplug-volume"), bad.ghost)]
    for path in paths:
        os.unlink(path)
        make(path)
    before = [os.lstat(path) for path in paths]
    qemus = [pod.qemu(FakeQemu) for pod in (bad, good)]
    node.hostd.start()
    assert node.states() == {bad.uid: "running", good.uid: "running"}
    for qemu in qemus:
        qemu.kill()
    gone(node, bad, good)
    for path, status in zip(paths, before, strict=True):
        now = os.lstat(path)
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (status.st_ino, status.st_mtime_ns, status.st_size)
    assert "Traceback" not in node.hostd.log()


#: How agents of other releases wrote their paths: their own view of the host, or links that are not resolved.
PREFIXES = {"proc-root": b"/proc/1/root", "state": b"/state", "none": b""}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
@pytest.mark.parametrize("safe_paths", [True, False, None], ids=str)
@pytest.mark.parametrize("link", [False, True], ids=["root", "linked-root"])
def test_records_of_other_releases_name_the_vm(prefix: bytes, safe_paths: bool | None, link: bool) -> None:
    """A path that was configured was compared with one that was resolved, and the pod hung in Terminating for ever."""
    with Node(kubelet_is_a_link=link) as node:
        pod = node.pod(name="vm", namespace="ns")
        pod.containerdisk()
        pod.hotplug_file("data")
        if link:
            pod._records = {
                which: [target.replace(node.kubelet, node.kubelet_configured) for target in targets]
                for which, targets in pod._records.items()
            }
        pod.write_records(prefix=prefix, safe_paths=safe_paths)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        [row] = node.call("ListVMs")
        assert row[:4] == [pod.uid, pod.vmi_uid, "ns", "vm"]
        assert set(node.layers(pod)) == {os.fsdecode(target) for target in pod.targets}
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")


def test_a_record_that_names_what_is_no_target_has_no_effect(node: Node) -> None:
    pod, other = full_pod(node, "one"), full_pod(node, "two")
    foreign = node.pvc()
    traps = [
        foreign,
        b"/etc/passwd",
        b"/",
        pod.container_disks,
        pod.container_disks + b"/../../../../plugins",
        pod.directory,
        other.containerdisk(7),
    ]
    entries = [{"targetFile": os.fsdecode(trap), "socketFile": ""} for trap in traps]
    pod.write(pod.record(), json.dumps({"mountTargetEntries": entries, "usesSafePaths": True}).encode())
    qemu, _ = pod.qemu(FakeQemu), other.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert len(other.mounted()) == 6
    assert foreign in node.mounts(b"/")
    assert os.path.exists("/etc/passwd")


def test_a_kubelet_root_that_comes_after_hostd(node: Node) -> None:
    """hostd is installed before the kubelet is."""
    later = node.namespace.base + b"/later"
    node.configure({"host": {"kubelet-root": os.fsdecode(later)}})
    node.hostd.start()
    assert node.hostd.said(os.fsdecode(later))
    os.symlink(node.kubelet, node.outside(later))
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")
    until(lambda: len(node.layers(pod)) == 6, why=lambda: f"{node.layers(pod)}\n{node.hostd.log()}")
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")


def test_a_vm_that_died_before_the_kubelets_root_was_found(node: Node) -> None:
    later = node.namespace.base + b"/later"
    node.configure({"host": {"kubelet-root": os.fsdecode(later)}})
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    assert len(pod.mounted()) == 5
    os.symlink(node.kubelet, node.outside(later))
    gone(node, pod)
    in_state(node, pod, "released")


# -- a full disk


@pytest.fixture
def small(node: Node) -> Node:
    """hostd's runtime directory on a file system of 64 KiB; hostd runs outside the node to see it."""
    os.makedirs(node.runtime_dir)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", node.runtime_dir], check=True)
    node._undo.append(lambda: umount(node.runtime_dir.encode(), MNT_DETACH))
    node.hostd = node.daemon(inside=False)
    return node


def fill(node: Node) -> None:
    """Takes all that is left of it."""
    with open(node.runtime_dir + "/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(node.runtime_dir).f_bavail == 0


def register(node: Node, pod: Pod) -> subprocess.CompletedProcess[str]:
    """RegisterVM with a name of its own."""
    arguments = ("RegisterVM", "sa{sv}", pod.uid, "1", "Name", "s", "given")
    return node.busctl("call", NAME, MANAGER, NAME + ".Manager", *arguments, check=False)


def test_a_full_disk_is_an_error_for_the_caller_and_loses_nothing(small: Node) -> None:
    """A state file was truncated to nothing on a full disk, or deleted."""
    node = small
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    path = f"{node.runtime_dir}/vms/{pod.uid}.json"
    before = content(path)
    fill(node)
    refused = register(node, pod)
    assert refused.returncode != 0
    assert "saved" in refused.stderr
    assert content(path) == before
    assert os.listdir(os.path.dirname(path)) == [pod.uid + ".json"]
    os.unlink(node.runtime_dir + "/filler")
    assert register(node, pod).returncode == 0
    assert b"given" in content(path)
    qemu.kill()
    gone(node, pod)


def test_a_full_disk_keeps_no_layer_from_going(small: Node) -> None:
    node = small
    pod, late = full_pod(node, "one"), full_pod(node, "two")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    fill(node)
    other = late.qemu(FakeQemu)
    in_state(node, late, "running")
    qemu.kill()
    other.kill()
    gone(node, pod, late)
    until(lambda: "state" in node.get("Health"), why=lambda: str(node.get("Health")))
    assert len(node.hostd.said("cannot be saved")) <= 2
    os.unlink(node.runtime_dir + "/filler")
    in_state(node, late, "released")
    node.call("SetPolicy", "s", "clean", path=node.vm(late))
    node.call("SetPolicy", "s", "clean", path=node.vm(pod))
    until(lambda: "state" not in node.get("Health"), why=lambda: str(node.get("Health")))


def test_hostd_starts_on_a_full_disk(small: Node) -> None:
    node = small
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    fill(node)
    node.hostd.kill()
    qemu.kill()
    node.hostd.start()
    gone(node, pod)


def content(path: str) -> bytes:
    """What is in a file."""
    with open(path, "rb") as file:
        return file.read()
