"""Layers that somebody keeps busy: named, tried again, never forced; and nobody else waits for them."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.fuse import attach_loop, detach_loop
from tests.support.mountns import MNT_DETACH, Child, umount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu, Guest
from tests.support.wait import holds_for, until
from tests.support.witness import (
    A_WHILE,
    full_pod,
    gone,
    holders,
    in_state,
    layer,
    layer_in,
    listed,
    only,
    rows_of,
    stays,
)

pytestmark = pytest.mark.usefixtures("root")


def opened(path: bytes) -> int:
    """Holds a file or directory open."""
    return os.open(path, os.O_RDONLY)


def mapped(path: bytes) -> mmap.mmap:
    """Holds a file by a map alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def holding(node: Node, path: bytes, how: Callable[[bytes], object] = opened) -> Child:
    """A process on the node, outside all pods, that keeps `path` busy."""
    return node.namespace.hold(how, path)


def running(node: Node, path: bytes) -> Child:
    """A process that executes the file at `path`."""
    return node.namespace.popen([path, "300"])


def test_one_busy_layer_keeps_none_of_the_others(node: Node) -> None:
    """A clean-up that returned at its first failed unmount left every path after it, pass after pass."""
    pod = full_pod(node)
    first, *others = pod.targets
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, first)
    qemu.kill()
    only(node, pod, first)
    found = layer_in(node, pod, first, "busy", words=str(holder.pid))
    in_state(node, pod, "blocked")
    assert found.kind == "containerdisk"
    assert [one["errno"] for one in saved_layers(node, pod) if one["state"] == "busy"] == [errno.EBUSY]
    assert all(layer(node, pod, target).state == "gone" for target in others)  # type: ignore[union-attr]
    assert (holder.pid, "open") in [(pid, how) for pid, _, how, _ in holders(node, pod, first)]
    holder.end()
    gone(node, pod)
    in_state(node, pod, "released")
    assert {one["state"] for one in saved_layers(node, pod)} == {"gone"}


def saved_layers(node: Node, pod: Pod) -> list[dict[str, Any]]:
    """What hostd has written down of a pod's layers."""
    with open(f"{node.runtime_dir}/vms/{pod.uid}.json") as file:
        found: list[dict[str, Any]] = json.load(file)["vm"]["layers"]
    return found


HOLDERS = {
    "open": (opened, "open"),
    "map": (mapped, "map"),
    "cwd": (os.chdir, "cwd"),
    "root": (os.chroot, "root"),
}


@pytest.mark.parametrize(("how", "word"), HOLDERS.values(), ids=HOLDERS.keys())
def test_every_kind_of_holder_is_named(node: Node, how: Callable[[bytes], object], word: str) -> None:
    pod = node.pod()
    target = pod.containerdisk() if word in {"open", "map"} else pod.hotplug_directory("dump")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, target, how)
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    rows = holders(node, pod, target)
    assert (holder.pid, word) in [(pid, how) for pid, _, how, _ in rows], rows
    assert pod.mounted() == [target]
    holder.end()
    gone(node, pod)
    in_state(node, pod, "released")


def test_a_program_that_runs_from_a_layer_is_named(node: Node) -> None:
    pod = node.pod()
    target = pod.hotplug_directory("tools")
    with open("/bin/sleep", "rb") as file:
        program = node.namespace.write(target + b"/sleep", file.read())
    os.chmod(node.outside(program), 0o755)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = running(node, program)
    until(lambda: os.readlink(f"/proc/{holder.pid}/exe").endswith("/sleep"), why="it runs")
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    assert {how for pid, _, how, _ in holders(node, pod, target) if pid == holder.pid} & {"exe", "map"}
    holder.end()
    gone(node, pod)


def test_a_loop_device_on_a_layer_is_named(node: Node) -> None:
    """The kernel holds the file then, and no process shows it."""
    pod = node.pod()
    target = pod.hotplug_file("data")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    device = node.namespace.call(attach_loop, target)
    try:
        qemu.kill()
        layer_in(node, pod, target, "busy", words="loop")
        rows = holders(node, pod, target)
        assert "loop" in [how for _, _, how, _ in rows], rows
        assert any(os.path.basename(device).decode() in name for _, name, how, _ in rows if how == "loop"), rows
    finally:
        detach_loop(device)
    gone(node, pod)


def test_a_holder_in_another_pod_is_named_with_its_pod(node: Node) -> None:
    pod, other = node.pod(name="one"), node.pod(name="two")
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    thief = other.qemu(FakeQemu, disks=[target])
    node.hostd.start()
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(thief.pid))
    assert (thief.pid, "open", other.uid) in [(pid, how, uid) for pid, _, how, uid in holders(node, pod, target)]
    assert node.states()[other.uid] == "running"
    thief.kill()
    gone(node, pod)


def test_a_holders_death_is_the_moment_of_the_next_attempt(node: Node) -> None:
    """By time alone the attempt would come two seconds after the fifth."""
    pod = node.pod()
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, target)
    qemu.kill()
    until(lambda: (found := layer(node, pod, target)) and found.attempts >= 5, why=node.hostd.log)
    attempts = layer(node, pod, target).attempts  # type: ignore[union-attr]
    assert attempts == 5
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    begun = time.monotonic()
    holder.end()
    gone(node, pod)
    assert time.monotonic() - begun < 1.0


def test_attempts_are_few_and_so_are_the_lines(node: Node) -> None:
    pod = node.pod()
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holding(node, target)
    qemu.kill()
    layer_in(node, pod, target, "busy")
    holds_for(lambda: pod.mounted() == [target], A_WHILE)
    assert layer(node, pod, target).attempts <= 6  # type: ignore[union-attr]
    assert len(node.hostd.said(pod.uid)) <= 8, node.hostd.log()


def test_a_living_qemu_of_another_pod_is_never_detached_from(node: Node) -> None:
    """MNT_DETACH hides a mount from the table while its users write on: not under a QEMU, whatever the policy."""
    node.configure({"cleanup": {"lazy-after": {"containerdisk": "10ms", "hotplug": "10ms"}}})
    pod, other = node.pod(name="one"), node.pod(name="two")
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    thief = other.qemu(FakeQemu, disks=[target])
    node.hostd.start()
    qemu.kill()
    layer_in(node, pod, target, "busy")
    stays(node, pod)
    thief.kill()
    gone(node, pod)


def test_a_detached_layer_is_not_released_while_it_is_pinned(node: Node) -> None:
    """After MNT_DETACH the writer goes on and the device is busy: gone from the table is not gone."""
    node.configure({"cleanup": {"lazy-after": {"containerdisk": "200ms", "hotplug": "never"}}})
    pod = node.pod()
    image = pod.containerdisk(image="ext4")
    [row] = [row.split() for row in node.rows(node.namespace.base + b"/containers/") if " - ext4 " in row]
    store, device = row[4].encode(), row[-2]
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, image)
    node.namespace.umount(store)
    qemu.kill()
    gone(node, pod)
    layer_in(node, pod, image, "detached", words=str(holder.pid))
    holds_for(lambda: node.states()[pod.uid] != "released", A_WHILE, "a pinned layer is not released")
    assert backing(device), "the device is not free while its file is open"
    assert (holder.pid, "open") in [(pid, how) for pid, _, how, _ in holders(node, pod, image)]
    holder.end()
    in_state(node, pod, "released")
    until(lambda: not backing(device), why="released is the device, too")
    assert layer(node, pod, image).state == "gone"  # type: ignore[union-attr]


def backing(device: str) -> str:
    """The file behind a loop device, which the kernel lets go of with the last user of the file system on it."""
    try:
        with open(f"/sys/block/{os.path.basename(device)}/loop/backing_file") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def test_what_somebody_else_detached_is_not_released_while_it_is_pinned(node: Node) -> None:
    """virt-handler unmounts with MNT_DETACH: the layer leaves the table under its user."""
    pod = node.pod()
    target = pod.hotplug_file("data", pvc="ext4")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, target)
    qemu.kill()
    layer_in(node, pod, target, "busy")
    node.namespace.call(umount, target, MNT_DETACH)
    layer_in(node, pod, target, "detached", words=str(holder.pid))
    in_state(node, pod, "blocked")
    holder.end()
    in_state(node, pod, "released")


def test_a_hotplugged_volume_is_never_detached_by_default(node: Node) -> None:
    node.configure({"cleanup": {"lazy-after": {"containerdisk": "10ms", "hotplug": "never"}}})
    pod = node.pod()
    target = pod.hotplug_file("data")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holding(node, target)
    qemu.kill()
    layer_in(node, pod, target, "busy")
    stays(node, pod)


def test_a_file_that_the_node_serves_from_a_busy_volume_is_not_lost(node: Node) -> None:
    """A clean-up deleted the contents of volumes that were mounted still, because it deleted recursively."""
    pod = node.pod()
    target = pod.hotplug_directory("dump")
    sentinel = node.namespace.write(target + b"/sentinel", b"precious")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = holding(node, target)
    qemu.kill()
    layer_in(node, pod, target, "busy")
    stays(node, pod, seconds=0.5)
    with open(node.outside(sentinel), "rb") as file:
        assert file.read() == b"precious"
    pvc = next(row.split()[4] for row in node.rows(b"/") if "globalmount" in row)
    holder.end()
    gone(node, pod)
    assert b"sentinel" in listed(node, pvc.encode())


def test_what_hostd_did_not_make_stays_and_a_nested_mount_is_reported(node: Node) -> None:
    """Deleting the directory of an orphaned pod, the popular advice, wiped what was mounted in it."""
    pod = node.pod()
    target = pod.hotplug_directory("dump")
    stray = node.namespace.write(pod.hotplug_disks + b"/notes.txt", b"mine")
    nested = node.namespace.tmpfs(target + b"/nested")
    node.namespace.write(nested + b"/sentinel", b"precious")
    disk = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    others = [row for row in rows_of(node) if b"/nested " not in row]
    qemu.kill()
    only(node, pod, target, nested)
    layer_in(node, pod, target, "busy")
    until(lambda: "nested" in node.hostd.log(), why=node.hostd.log)
    in_state(node, pod, "blocked")
    stays(node, pod, seconds=0.5)
    node.namespace.umount(nested)
    gone(node, pod)
    in_state(node, pod, "released")
    with open(node.outside(stray), "rb") as file:
        assert file.read() == b"mine"
    assert listed(node, pod.hotplug_disks) == [b"notes.txt"]
    assert disk not in [pod.container_disks + b"/" + name for name in listed(node, pod.container_disks)]
    assert rows_of(node) == others


@pytest.fixture
def loop_pod(node: Node) -> Iterator[tuple[Pod, bytes, str]]:
    """A pod with a bind of a device node, and the loop device behind it."""
    pod = node.pod()
    image = node.namespace.write(node.namespace.base + b"/disk", bytes(1 << 20))
    device = attach_loop(node.outside(image))
    node_path = node.namespace.base + b"/dev-of-the-pvc"
    os.mknod(node.outside(node_path), 0o660 | 0o060000, os.stat(device).st_rdev)
    target = pod.hotplug_disks + b"/raw.img"
    node.namespace.touch(target)
    pod.bind(node_path, target)
    os.unlink(node.outside(node_path))
    yield pod, target, os.fsdecode(device)
    detach_loop(device)


def test_the_bind_of_a_device_that_vanished_goes_by_its_path(node: Node, loop_pod: tuple[Pod, bytes, str]) -> None:
    """Clean-up resolved the device that it meant to unmap, and was stuck once it was gone."""
    pod, _, device = loop_pod
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    detach_loop(device.encode())
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")


def test_two_vms_of_one_name_are_two(node: Node) -> None:
    """A VM that was deleted and made again under its name was taken for the one that was still shutting down."""
    old, new = node.pod(name="a", namespace="ns"), node.pod(name="a", namespace="ns")
    target = old.containerdisk()
    new.containerdisk()
    new.hotplug_directory("dump")
    qemu, successor = old.qemu(FakeQemu), new.qemu(FakeQemu)
    assert Guest("ns", "a").arguments[:2] == ["-name", "guest=ns_a,debug-threads=on"]
    node.hostd.start()
    holder = holding(node, target)
    qemu.kill()
    layer_in(node, old, target, "busy")
    in_state(node, old, "blocked")
    assert node.states()[new.uid] == "running"
    holder.end()
    in_state(node, old, "released")
    stays(node, new, seconds=0.3)
    successor.kill()
    gone(node, new)


def test_holders_that_come_and_go_many_times_a_second_cost_little(node: Node) -> None:
    """Each one's death is a reason to try again; but not as fast as they die, nor is each of them told."""
    pod = node.pod()
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    steady = holding(node, target)
    loop = b"while :; do sleep 0.2 <%s; done" % target
    command: list[str | bytes] = ["nsenter", f"--mount={node.namespace.path}", "--", "sh", "-c", loop]
    with ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(os.killpg, one.pid, signal.SIGKILL)
        until(lambda: "sleep" in str(holders(node, pod, target)))
        qemu.kill()
        layer_in(node, pod, target, "busy", words="held by")
        said, attempts = len(node.hostd.log().splitlines()), listed_attempts(node, pod, target)
        holds_for(lambda: target in pod.mounted(), 5)
        assert len(node.hostd.log().splitlines()) - said <= 2, node.hostd.log()
        assert listed_attempts(node, pod, target) - attempts < 12, "about as many as time alone would bring, and some"
    steady.end()
    gone(node, pod)
    in_state(node, pod, "released")


def listed_attempts(node: Node, pod: Pod, target: bytes) -> int:
    """How often it was tried."""
    found = layer(node, pod, target)
    return found.attempts if found else 0
