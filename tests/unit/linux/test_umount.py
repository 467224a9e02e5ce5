"""One target unmounted, on real mounts in a private namespace."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from hostd.linux import umount
from tests.support.mountns import MS_BIND, Child, MountNamespace, enter, mount
from tests.support.umounts import unmount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("root")

PARENT = b"pods/uid/volumes/kubernetes.io~empty-dir/container-disks"


class Host:
    """A namespace with a kubelet root and an image to bind."""

    def __init__(self, namespace: MountNamespace) -> None:
        self.namespace = namespace
        self.kubelet = namespace.base + b"/kubelet"
        self.image = namespace.write(namespace.base + b"/image", b"data")
        namespace.mkdir(self.kubelet + b"/" + PARENT)

    def path(self, name: bytes) -> bytes:
        return self.kubelet + b"/" + PARENT + b"/" + name

    def bind(self, name: bytes, source: bytes = b"", *, directory: bool = False) -> bytes:
        path = self.path(name)
        if not self.namespace.exists(path):
            (self.namespace.mkdir if directory else self.namespace.touch)(path)
        self.namespace.bind(source or self.image, path)
        return path

    def unmount(
        self, name: bytes, *, lazy: bool = False, block_node: bool = False, parent: bytes = PARENT
    ) -> umount.Outcome:
        def inside() -> tuple[umount.Outcome, list[str], bytes]:
            root_fd = os.open(self.kubelet, os.O_PATH | os.O_DIRECTORY)
            before = os.listdir("/proc/self/fd")
            outcome = unmount(root_fd, parent + b"/" + name, lazy=lazy, block_node=block_node)
            assert os.listdir("/proc/self/fd") == before, "a descriptor was left"
            return outcome, before, os.getcwdb()

        outcome, _, cwd = self.namespace.call(inside)
        assert cwd == b"/"
        assert outcome.relative == parent + b"/" + name
        return outcome

    def mounted(self, name: bytes) -> int:
        return self.namespace.targets().count(self.path(name))


@pytest.fixture(params=["private", "shared"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with MountNamespace(request.param) as namespace:
        yield Host(namespace)


def clean(outcome: umount.Outcome, done: int = 1) -> None:
    assert outcome[1:] == (done, 0, "", True, False, False)


def test_a_file(host: Host) -> None:
    path = host.bind(b"disk_0.img")
    clean(host.unmount(b"disk_0.img"))
    assert not host.mounted(b"disk_0.img")
    assert not host.namespace.exists(path)
    assert host.namespace.call(os.stat, host.image).st_size == 4


def test_a_directory(host: Host) -> None:
    source = host.namespace.mkdir(host.namespace.base + b"/pvc")
    host.namespace.write(source + b"/precious", b"x")
    path = host.bind(b"volume", source, directory=True)
    clean(host.unmount(b"volume"))
    assert not host.namespace.exists(path)
    assert host.namespace.exists(source + b"/precious")


def test_a_stack(host: Host) -> None:
    for _ in range(5):
        host.bind(b"disk_0.img")
    # In a shared peer group each bind also propagates onto the mounts below it.
    assert host.mounted(b"disk_0.img") >= 5
    outcome = host.unmount(b"disk_0.img")
    assert outcome.errno == 0
    assert outcome.removed
    assert 1 <= outcome.done <= 5
    assert not host.mounted(b"disk_0.img")


def test_a_stack_deeper_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(umount, "STACK_BOUND", 3)
    with MountNamespace("private") as namespace:
        host = Host(namespace)
        for _ in range(5):
            host.bind(b"disk_0.img")
        outcome = host.unmount(b"disk_0.img")
        assert (outcome.done, outcome.errno, outcome.mounted) == (3, errno.EAGAIN, True)
        clean(host.unmount(b"disk_0.img"), 2)


@pytest.mark.parametrize(
    "name", [b"a b", b"tab\t", b"new\nline", b"back\\slash", b"\\040", b"\xff\xfe", b"-x", "ü".encode()]
)
def test_names(host: Host, name: bytes) -> None:
    host.bind(name)
    clean(host.unmount(name))
    assert not host.mounted(name)


def test_a_source_that_was_deleted(host: Host) -> None:
    source = host.namespace.write(host.namespace.base + b"/gone", b"x")
    host.bind(b"disk_0.img", source)
    host.namespace.call(os.unlink, source)
    assert b"//deleted" in host.namespace.table()
    clean(host.unmount(b"disk_0.img"))


def test_a_bound_device_node_on_a_file(host: Host) -> None:
    node = host.namespace.base + b"/node"
    host.namespace.call(os.mknod, node, stat.S_IFBLK | 0o600, os.makedev(240, 250))
    host.bind(b"volume", node)
    clean(host.unmount(b"volume"))
    assert host.namespace.exists(node)


@pytest.mark.parametrize("block_node", [False, True])
def test_a_block_node_that_is_no_mount(host: Host, *, block_node: bool) -> None:
    path = host.path(b"volume")
    host.namespace.call(os.mknod, path, stat.S_IFBLK | 0o600, os.makedev(240, 250))
    outcome = host.unmount(b"volume", block_node=block_node)
    assert (outcome.done, outcome.errno, outcome.mounted, outcome.removed) == (0, 0, False, block_node)
    assert host.namespace.exists(path) is not block_node


def test_a_block_node_never_stands_for_a_character_device(host: Host) -> None:
    host.namespace.call(os.mknod, host.path(b"volume"), stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert not host.unmount(b"volume", block_node=True).removed


def test_busy_with_an_open_file(host: Host) -> None:
    path = host.bind(b"disk_0.img")
    holder = host.namespace.hold(os.open, path, os.O_RDONLY)
    outcome = host.unmount(b"disk_0.img")
    assert (outcome.done, outcome.errno, outcome.removed, outcome.mounted) == (0, errno.EBUSY, False, True)
    assert host.mounted(b"disk_0.img") == 1
    holder.end()
    clean(host.unmount(b"disk_0.img"))


def test_lazy_detaches_only_what_is_busy(host: Host) -> None:
    path = host.bind(b"disk_0.img")
    holder = host.namespace.hold(os.open, path, os.O_RDONLY)
    outcome = host.unmount(b"disk_0.img", lazy=True)
    assert (outcome.errno, outcome.detached, outcome.removed) == (0, True, True)
    assert not host.mounted(b"disk_0.img")
    holder.end()
    host.bind(b"disk_0.img")
    assert not host.unmount(b"disk_0.img", lazy=True).detached


def test_busy_through_an_open_file_in_a_slave_namespace() -> None:
    with MountNamespace("shared") as namespace, namespace.copy("slave") as pod:
        host = Host(namespace)
        path = host.bind(b"disk_0.img")
        holder = pod.hold(os.open, path, os.O_RDONLY)
        assert host.unmount(b"disk_0.img").errno == errno.EBUSY
        assert path in pod.targets()
        holder.end()
        clean(host.unmount(b"disk_0.img"))
        assert path not in pod.targets()


def test_private_copies_go_with_the_file() -> None:
    with MountNamespace("private") as namespace:
        host = Host(namespace)
        path = host.bind(b"disk_0.img")
        with namespace.copy("private") as side:
            clean(host.unmount(b"disk_0.img"))
            assert path not in side.targets()


def test_a_private_copy_of_a_directory_with_an_open_file_in_it() -> None:
    """The host's own mount goes; the copy is dropped by rmdir, and what is open stays readable."""
    with MountNamespace("private") as namespace:
        host = Host(namespace)
        source = namespace.mkdir(namespace.base + b"/pvc")
        namespace.write(source + b"/file", b"x")
        path = host.bind(b"volume", source, directory=True)
        with namespace.copy("private") as side:
            holder = side.hold(os.open, path + b"/file", os.O_RDONLY)
            clean(host.unmount(b"volume"))
            assert path not in side.targets()
            assert holder.alive


def test_a_foreign_mount_below(host: Host) -> None:
    source = host.namespace.mkdir(host.namespace.base + b"/pvc/sub")
    path = host.bind(b"volume", os.path.dirname(source), directory=True)
    host.namespace.bind(host.namespace.mkdir(host.namespace.base + b"/other"), path + b"/sub")
    outcome = host.unmount(b"volume")
    assert (outcome.done, outcome.errno, outcome.mounted) == (0, errno.EBUSY, True)
    assert path + b"/sub" in host.namespace.targets()


def test_what_is_no_mountpoint(host: Host) -> None:
    host.namespace.touch(host.path(b"empty"))
    host.namespace.write(host.path(b"full"), b"data")
    host.namespace.mkdir(host.path(b"directory"))
    host.namespace.write(host.path(b"kept/file"), b"")
    host.namespace.call(os.mkfifo, host.path(b"fifo"))
    clean(host.unmount(b"empty"), 0)
    clean(host.unmount(b"directory"), 0)
    for name in (b"full", b"kept", b"fifo"):
        outcome = host.unmount(name)
        assert (outcome.errno, outcome.removed, outcome.mounted) == (0, False, False)
        assert outcome.error
        assert host.namespace.exists(host.path(name))
    assert host.namespace.exists(host.path(b"kept/file"))


@pytest.mark.parametrize("parent", [PARENT, b"pods/nobody/volumes"])
def test_what_does_not_exist(host: Host, parent: bytes) -> None:
    assert host.unmount(b"x", parent=parent)[1:] == (0, 0, "", False, False, False)


def test_the_agents_directories_stay(host: Host) -> None:
    path = host.namespace.mkdir(host.path(b"kernel-boot"))
    outcome = host.unmount(b"kernel-boot")
    assert (outcome.errno, outcome.removed) == (0, False)
    assert host.namespace.exists(path)


def test_a_file_below_kernel_boot(host: Host) -> None:
    host.bind(b"kernel-boot/vmlinuz")
    clean(host.unmount(b"kernel-boot/vmlinuz"))
    assert host.namespace.exists(host.path(b"kernel-boot"))


def test_a_symlink_as_the_target(host: Host) -> None:
    victim = host.namespace.touch(host.namespace.base + b"/victim")
    host.namespace.bind(host.image, victim)
    host.namespace.call(os.symlink, victim, host.path(b"disk_0.img"))
    outcome = host.unmount(b"disk_0.img")
    assert (outcome.done, outcome.errno, outcome.removed) == (0, errno.ELOOP, False)
    assert victim in host.namespace.targets()
    assert host.namespace.exists(host.path(b"disk_0.img"))


def test_a_symlink_on_the_way(host: Host) -> None:
    victim = host.namespace.touch(host.namespace.base + b"/elsewhere/disk_0.img")
    host.namespace.bind(host.image, victim)
    host.namespace.call(os.symlink, os.path.dirname(victim), host.path(b"kernel-boot"))
    outcome = host.unmount(b"disk_0.img", parent=PARENT + b"/kernel-boot")
    assert (outcome.done, outcome.errno) == (0, errno.ENOTDIR) or outcome.errno == errno.ELOOP
    assert "refused" in outcome.error
    assert victim in host.namespace.targets()


@pytest.mark.parametrize("relative", [b"../../x", b"/etc/passwd", b"", b".", b"a\0b"])
def test_paths_that_are_none(host: Host, relative: bytes) -> None:
    def inside() -> umount.Outcome:
        return unmount(os.open(host.kubelet, os.O_PATH), relative, lazy=True, block_node=True)

    outcome = host.namespace.call(inside)
    assert outcome.errno in (errno.EXDEV, errno.EINVAL)
    assert outcome.mounted


def test_mounted_again_before_the_mountpoint_is_deleted(host: Host) -> None:
    host.bind(b"disk_0.img")
    path = host.path(b"disk_0.img")

    def inside() -> umount.Outcome:
        real = os.unlink

        def late(name: bytes) -> None:
            mount(host.image, path, flags=MS_BIND)
            real(name)

        os.unlink = late  # type: ignore[assignment]
        return unmount(os.open(host.kubelet, os.O_PATH), PARENT + b"/disk_0.img", lazy=False, block_node=False)

    outcome = host.namespace.call(inside)
    assert (outcome.done, outcome.errno, outcome.mounted, outcome.removed) == (1, errno.EBUSY, True, False)
    assert host.mounted(b"disk_0.img") == 1


def test_an_attacker_who_swaps_the_parent(host: Host) -> None:
    """A mount elsewhere, reachable only through the attacker's symlink, survives whatever is tried."""
    namespace = host.namespace
    victim = namespace.touch(namespace.base + b"/victims/disk")
    namespace.bind(host.image, victim)
    parent = host.path(b"swapped")

    def swap(tell: Callable[[object], None]) -> None:
        enter(namespace.path)
        os.chown(host.kubelet + b"/" + PARENT, 107, 107)
        os.setresuid(107, 107, 107)
        tell(None)
        while True:
            os.mkdir(parent)
            os.close(os.open(parent + b"/disk", os.O_CREAT))
            os.rename(parent, parent + b".old")
            os.symlink(os.path.dirname(victim), parent)
            os.unlink(parent)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parent + b".old/disk")
            os.rmdir(parent + b".old")

    def attack() -> set[int]:
        root_fd = os.open(host.kubelet, os.O_PATH)
        relative = PARENT + b"/swapped/disk"
        return {unmount(root_fd, relative, lazy=True, block_node=True).errno for _ in range(2000)}

    with Child(swap) as attacker:
        attacker.hear()
        found = namespace.call(attack)
        assert attacker.alive
    assert victim in namespace.targets()
    assert namespace.exists(victim)
    assert found <= {0, errno.ELOOP, errno.ENOTDIR, errno.EAGAIN}


def test_neighbours_share_a_walk_and_others_have_their_own(host: Host) -> None:
    other = b"pods/y/volumes"
    host.namespace.mkdir(host.kubelet + b"/" + other)
    targets = [host.bind(b"a"), host.bind(b"b"), host.bind(b"c")]
    elsewhere = host.namespace.touch(host.kubelet + b"/" + other + b"/d")
    host.namespace.bind(host.image, elsewhere)

    def inside() -> tuple[list[bytes], bytes]:
        neighbours = umount.Neighbours(os.open(host.kubelet, os.O_PATH))
        wheres = []
        for relative in (PARENT + b"/a", PARENT + b"/b", other + b"/d", PARENT + b"/c"):
            assert neighbours.unmount(relative, lazy=False, block_node=False).removed
            wheres.append(os.getcwdb())
        neighbours.leave()
        return wheres, os.getcwdb()

    here, there = host.kubelet + b"/" + PARENT, host.kubelet + b"/" + other
    assert host.namespace.call(inside) == ([here, here, there, here], b"/")
    assert not {*targets, elsewhere}.intersection(host.namespace.targets())


def test_a_directory_that_was_left_is_walked_to_again(host: Host) -> None:
    """In between a stranger has put a link in its place."""
    host.bind(b"a")
    host.bind(b"b")

    def inside() -> tuple[bool, int]:
        neighbours = umount.Neighbours(os.open(host.kubelet, os.O_PATH))
        removed = neighbours.unmount(PARENT + b"/a", lazy=False, block_node=False).removed
        neighbours.leave()
        os.rename(host.path(b""), host.path(b"").rstrip(b"/") + b".aside")
        os.symlink(b"/", host.path(b"").rstrip(b"/"))
        return removed, neighbours.unmount(PARENT + b"/b", lazy=False, block_node=False).errno

    assert host.namespace.call(inside) == (True, errno.ELOOP)
