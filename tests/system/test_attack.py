"""What an unprivileged user (107, as QEMU runs) may do below its own emptyDirs, while hostd works there as root."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator

import pytest

from tests.support.mountns import Child, enter
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import QEMU_UID, FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import (
    A_WHILE,
    full_pod,
    gone,
    in_state,
    layer,
    layer_in,
    listed,
    rows_of,
    share_of_a_core,
    stays,
)

pytestmark = pytest.mark.usefixtures("root")


def attacking(node: Node, step: Callable[[], None], *, view: str = "") -> Child:
    """User 107, who does something as fast as it goes."""

    def body(tell: Callable[[object], None]) -> None:
        enter(view or node.namespace.path)
        os.setgroups([])
        os.setresgid(QEMU_UID, QEMU_UID, QEMU_UID)
        os.setresuid(QEMU_UID, QEMU_UID, QEMU_UID)
        tell(None)
        while True:
            with contextlib.suppress(OSError):
                step()

    child = Child(body)
    child.hear()
    return child


class Treasure:
    """What must not be touched, whatever the attacker points at it: files, mounts, another VM."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.victim = full_pod(node, "victim")
        self.victim.qemu(FakeQemu, disks=[])
        self.file = node.namespace.write(node.namespace.base + b"/treasure/empty-file")
        self.directory = node.namespace.mkdir(node.namespace.base + b"/treasure/empty-directory")
        self.mount = node.namespace.tmpfs(node.namespace.base + b"/treasure/mount.img")
        self.rows = rows_of(node)

    def is_whole(self) -> bool:
        """Whether all of it is there still."""
        paths = (self.file, self.directory, self.mount)
        return (
            len(self.victim.mounted()) == 5
            and all(os.path.lexists(self.node.outside(path)) for path in paths)
            and [row for row in rows_of(self.node) if row in self.rows] == self.rows
        )


@pytest.fixture
def treasure(node: Node) -> Treasure:
    """On the test's node."""
    return Treasure(node)


def test_a_link_in_the_place_of_a_target_is_not_followed(node: Node, treasure: Treasure) -> None:
    pod = node.pod()
    target = pod.hotplug_file("data")
    for name, aim in (("a.img", treasure.file), ("b", treasure.directory), ("c.img", treasure.mount)):
        os.symlink(aim, node.outside(pod.hotplug_disks + b"/" + name.encode()))
    node.hostd.start()
    qemu = pod.qemu(FakeQemu, disks=[])
    in_state(node, pod, "running")
    for name in ("a.img", "b", "c.img"):
        node.call("TrackLayer", "ssa{sv}", pod.uid, os.fsdecode(pod.hotplug_disks) + "/" + name, "0")
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "blocked", "released")
    assert not os.path.lexists(node.outside(target))
    assert treasure.is_whole()
    assert listed(node, pod.hotplug_disks) == [b"a.img", b"b", b"c.img"]


@pytest.mark.parametrize("component", ["hotplug-disks", "kubernetes.io~empty-dir", "volumes", "pod"])
def test_a_link_on_the_way_is_not_followed(node: Node, treasure: Treasure, component: str) -> None:
    """The agent recorded a path, and one of its components leads into another VM's directory now."""
    pod = node.pod()
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    in_state(node, pod, "running")
    names = os.listdir(node.outside(treasure.victim.hotplug_disks))
    for name in names:
        node.call("TrackLayer", "ssa{sv}", pod.uid, os.fsdecode(pod.hotplug_disks + b"/" + name), "0")
    mine, theirs = pod.hotplug_disks, treasure.victim.hotplug_disks
    while component not in (os.path.basename(mine).decode(), "pod" if mine == pod.directory else ""):
        mine, theirs = os.path.dirname(mine), os.path.dirname(theirs)
    shutil.rmtree(node.outside(mine))
    os.symlink(theirs, node.outside(mine))
    qemu.kill()
    until(lambda: node.hostd.said(pod.uid, "refused", "symlink"), why=node.hostd.log)
    stays(node, treasure.victim, seconds=0.8)
    assert treasure.is_whole()


#: What the attacker's loop does. Each leaves things as they were, so that hostd can succeed in between.
def swap_with_link(directory: bytes, aim: bytes) -> Iterator[None]:
    """The target's directory is now a directory, now a link to somebody else's."""
    link = directory + b".link"
    aside = directory + b".aside"
    with contextlib.suppress(OSError):
        os.symlink(aim, link)
    while True:
        os.rename(directory, aside)
        os.rename(link, directory)
        yield
        os.rename(directory, link)
        os.rename(aside, directory)
        yield


ROUNDS = 4


@pytest.mark.parametrize("aim", ["victim", "treasure", "root"])
def test_the_directory_is_swapped_with_a_link_while_hostd_unmounts(node: Node, treasure: Treasure, aim: str) -> None:
    """The parent directory belongs to the attacker where kubelet's emptyDir is writable for all."""
    aims = {"victim": treasure.victim.hotplug_disks, "treasure": os.path.dirname(treasure.file), "root": b"/"}
    node.hostd.start()
    for number in range(ROUNDS):
        pod = node.pod(name=f"vm-{number}")
        os.chmod(node.outside(pod.empty_dir), 0o777)
        names = [os.path.splitext(name)[0] for name in listed(node, treasure.victim.hotplug_disks) if name != b"raw"]
        for name in names:
            (pod.hotplug_file if name == b"data" else pod.hotplug_directory)(name)
        qemu = pod.qemu(FakeQemu, disks=[])
        in_state(node, pod, "running")
        swap = swap_with_link(pod.hotplug_disks, aims[aim])
        with attacking(node, lambda swap=swap: next(swap)) as attacker:  # type: ignore[misc]
            qemu.kill()
            until(lambda pod=pod: node.states()[pod.uid] in {"released", "blocked"}, why=node.hostd.log)  # type: ignore[misc]
            attacker.end()
        assert treasure.is_whole()
        restore(node, pod)
    # A rename changes no mount table's contents, and so nothing tells of it: somebody has to look.
    node.call("Sweep", "t", "0")
    gone(node, *[pod for pod in node.pods if pod is not treasure.victim])
    assert treasure.is_whole()
    assert "Traceback" not in node.hostd.log()


def restore(node: Node, pod: Pod) -> None:
    """Brings the directory back to where it was before the attack."""
    directory = node.outside(pod.hotplug_disks)
    if os.path.islink(directory):
        os.unlink(directory)
    if os.path.lexists(directory + b".aside"):
        os.rename(directory + b".aside", directory)


def test_a_mountpoint_that_was_renamed_takes_its_mount_along_and_is_not_released(node: Node) -> None:
    """In a namespace where nothing is mounted on it a mountpoint can be renamed, and PID 1's mount follows: it has
    left the target, and the table."""
    pod = node.pod()
    target = pod.hotplug_file("data")
    directory = node.namespace.mkdir(pod.hotplug_disks + b"/sub")
    os.chown(node.outside(directory), QEMU_UID, QEMU_UID)
    qemu = pod.qemu(FakeQemu, disks=[])
    with node.namespace.copy("private") as side:
        side.umount(target)
        node.hostd.start()
        holder = node.namespace.hold(os.open, target, os.O_RDONLY)
        qemu.kill()
        layer_in(node, pod, target, "busy", words=str(holder.pid))
        with attacking(node, lambda: os.rename(target, directory + b"/hidden"), view=side.path):
            until(lambda: pod.mounted() == [directory + b"/hidden"], why=lambda: str(pod.mounted()))
        holder.end()
        layer_in(node, pod, target, "detached", words="hidden")
        holds_for(lambda: node.states()[pod.uid] != "released", 0.7, "it is mounted still")
        assert pod.mounted() == [directory + b"/hidden"]
    node.namespace.umount(directory + b"/hidden")
    in_state(node, pod, "released")


def test_names_are_shuffled_while_hostd_unmounts(node: Node, treasure: Treasure) -> None:
    """The directory is the attacker's own: what is no mountpoint in it is made, renamed, linked and removed at will."""
    chance = random.Random(11)
    node.hostd.start()
    for number in range(ROUNDS):
        pod = full_pod(node, f"vm-{number}")
        for _ in range(5):
            pod.hotplug_file(f"more-{_}")
        qemu = pod.qemu(FakeQemu, disks=[])
        in_state(node, pod, "running")
        directory = pod.hotplug_disks
        names = [*os.listdir(node.outside(directory)), b"other", b"new.img"]

        def shuffle(directory: bytes = directory, names: list[bytes] = names) -> None:
            path, other = (directory + b"/" + chance.choice(names) for _ in range(2))
            with contextlib.suppress(OSError):
                os.symlink(chance.choice((treasure.file, treasure.directory, treasure.mount)), path)
            with contextlib.suppress(OSError):
                os.rename(path, other)
            with contextlib.suppress(OSError):
                os.link(other, path)
            with contextlib.suppress(OSError):
                os.mkdir(path)
            with contextlib.suppress(OSError):
                os.unlink(other)

        with attacking(node, shuffle) as attacker:
            qemu.kill()
            gone(node, pod)
            attacker.end()
        assert treasure.is_whole()
    assert "Traceback" not in node.hostd.log()


def test_a_hard_link_to_a_precious_file_is_not_deleted(node: Node) -> None:
    """A target's mountpoint that holds something is somebody's file."""
    pod = node.pod()
    target = pod.hotplug_file("data")
    pod.unmount(target)
    os.unlink(node.outside(target))
    precious = node.namespace.write(pod.empty_dir + b"/private/precious", b"content")
    os.link(node.outside(precious), node.outside(target))
    pod.bind(node.image("tmpfs"), target)
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    with open(node.outside(target), "rb") as file:
        assert file.read() == b"content"


def test_a_deep_tree_in_the_place_of_a_mountpoint_is_left(node: Node) -> None:
    """Nothing is deleted recursively, so nothing can be led anywhere by what lies in a tree."""
    pod = node.pod()
    target = pod.hotplug_disks + b"/dump"
    here = os.open(node.outside(pod.hotplug_disks), os.O_PATH)
    os.mkdir(b"dump", dir_fd=here)
    for _ in range(1200):
        below = os.open(b"dump" if not _ else b"d", os.O_PATH, dir_fd=here)
        os.close(here)
        here = below
        os.mkdir(b"d", dir_fd=here)
    os.close(here)
    pod.hotplug_directory("dump")
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert listed(node, target) == [b"d"]


@pytest.mark.parametrize(
    "kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK], ids=["fifo", "socket", "char", "block"]
)
def test_a_special_file_in_the_place_of_a_mountpoint_is_no_trap(node: Node, kind: int) -> None:
    """Opening a FIFO waits for ever, and opening a device may do anything."""
    pod = node.pod()
    target = pod.hotplug_disks + b"/data.img"
    os.mknod(node.outside(target), kind | 0o600, os.makedev(1, 3))
    pod.bind(node.image("tmpfs"), target)
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    until(lambda: node.states()[pod.uid] in {"released", "blocked"}, why=node.hostd.log)
    assert node.states()[pod.uid] == "released"
    assert stat.S_IFMT(os.lstat(node.outside(target)).st_mode) == kind


def test_only_the_block_nodes_of_a_dead_vm_are_deleted(node: Node) -> None:
    """A PVC of block mode is a device node, and no mount."""
    pod, living = full_pod(node, "dead"), full_pod(node, "living")
    characters = pod.hotplug_disks + b"/tty"
    os.mknod(node.outside(characters), stat.S_IFCHR | 0o600, os.makedev(1, 3))
    elsewhere = pod.container_disks + b"/raw"
    os.mknod(node.outside(elsewhere), stat.S_IFBLK | 0o600, os.makedev(1, 3))
    qemu = pod.qemu(FakeQemu, disks=[])
    living.qemu(FakeQemu, disks=[])
    node.hostd.start()
    assert layer(node, pod, pod.blocks[0]).kind == "hotplug-block"  # type: ignore[union-attr]
    qemu.kill()
    in_state(node, pod, "released")
    assert not os.path.lexists(node.outside(pod.blocks[0]))
    assert os.path.lexists(node.outside(characters))
    assert os.path.lexists(node.outside(elsewhere))
    assert os.path.lexists(node.outside(living.blocks[0]))


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/",
        "relative",
        "{pod}/volumes/kubernetes.io~empty-dir/hotplug-disks/../../../../x",
        "{pod}/volumes/kubernetes.io~empty-dir/sockets/launcher-sock",
        "{pod}/volumes/kubernetes.io~empty-dir/hotplug-disks",
        "{pod}/volumes/kubernetes.io~empty-dir/container-disks/kernel-boot",
        "{pod}/volumes/kubernetes.io~csi/pvc/mount",
        "{other}/volumes/kubernetes.io~empty-dir/hotplug-disks/data.img",
        "{pod}/volumes/kubernetes.io~empty-dir/hotplug-disks/a/b",
    ],
)
def test_an_agent_cannot_name_what_is_no_target(node: Node, treasure: Treasure, path: str) -> None:
    pod = node.pod()
    pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    named = path.format(pod=os.fsdecode(pod.directory), other=os.fsdecode(treasure.victim.directory))
    refused = node.busctl(
        "call", "io.kubevirt.hostd1", "/io/kubevirt/hostd1", "io.kubevirt.hostd1.Manager", "TrackLayer",
        "ssa{sv}", pod.uid, named, "0", check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    assert node.layers(pod) == {}
    assert treasure.is_whole()


def test_a_process_that_calls_itself_qemu_in_another_pod_names_nobody(node: Node, treasure: Treasure) -> None:
    """The command line says whose VM it is, and anybody can write one: the pod is what the cgroup says."""
    liar = node.pod(name="liar")
    with FakeQemu(treasure.victim.guest, place=liar.place) as fake:
        node.hostd.start()
        in_state(node, liar, "running")
        fake.kill()
        in_state(node, liar, "released")
    assert treasure.is_whole()
    assert node.states()[treasure.victim.uid] == "running"


def test_a_directory_full_of_entries_keeps_nobody_from_being_released(node: Node) -> None:
    """Of hotplug-disks only root's device nodes matter, however many files its owner makes beside them."""
    pod = node.pod()
    disk, block = pod.containerdisk(), pod.hotplug_block("raw")
    for number in range(66_000):
        os.link(node.outside(disk[:-4] + b".sock"), node.outside(pod.hotplug_disks) + b"/%d" % number)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert not os.path.lexists(node.outside(block))
    assert len(listed(node, pod.hotplug_disks)) == 66_000
    assert not node.hostd.said("cannot be looked at")


def test_a_directory_in_which_much_happens_costs_little(node: Node) -> None:
    """It is its owner's, who may make and remove files as fast as he likes, and of any number."""
    pod = node.pod()
    pod.hotplug_block("raw")
    some = node.namespace.touch(pod.empty_dir + b"/private/some")
    for number in range(20_000):
        os.link(node.outside(some), node.outside(pod.hotplug_disks) + b"/%d" % number)
    pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    path = pod.hotplug_disks + b"/file"

    def make_and_remove() -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT))
        os.unlink(path)

    with attacking(node, make_and_remove):
        assert share_of_a_core(node, 2 * A_WHILE) < 0.05
    assert node.states()[pod.uid] == "running"
