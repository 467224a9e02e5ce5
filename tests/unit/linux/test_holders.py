"""Who holds a layer: real holders of every sort, seen from the host's namespace."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from hostd.linux import holders, mount_table
from hostd.linux.holders import Held, Wanted
from tests.support.fuse import DeadFileSystem, attach_loop, detach_loop
from tests.support.mountns import MNT_DETACH, Child, MountNamespace, mount, umount, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("root")

DIRECTORY = b"/kubelet/pods/uid/container-disks"


class Host:
    """The host's namespace with a file layer, a directory layer, and a pod's view of the directory they are in."""

    def __init__(self, namespace: MountNamespace) -> None:
        self.namespace = namespace
        self.base = namespace.base
        image = namespace.write(self.base + b"/image", b"data" * 1024)
        self.file = namespace.touch(self.base + DIRECTORY + b"/disk_0.img")
        namespace.bind(image, self.file)
        namespace.write(self.base + b"/pvc/file", b"data" * 1024)
        namespace.mkdir(self.base + b"/pvc/sub")
        self.directory = namespace.mkdir(self.base + DIRECTORY + b"/volume")
        namespace.bind(self.base + b"/pvc", self.directory)

    def wanted(self, target: bytes) -> Wanted:
        rows = [row for row in mount_table.parse(self.namespace.table()) if row.target == target]
        return Wanted(target, rows[0].device, rows[0].root, tuple(row.mount_id for row in rows))

    def find(self, *wanted: Wanted) -> list[Held]:
        return self.namespace.call(holders.find, wanted)

    def of(self, target: bytes) -> list[tuple[int, str]]:
        found = self.find(self.wanted(target))
        assert all(held.target == target for held in found)
        return [(held.pid, held.how) for held in found]


@pytest.fixture
def host() -> Iterator[Host]:
    with MountNamespace("shared") as namespace:
        yield Host(namespace)


@pytest.fixture(params=["file", "directory"])
def target(request: pytest.FixtureRequest, host: Host) -> bytes:
    found: bytes = getattr(host, request.param)
    return found


def a_file_in(target: bytes) -> bytes:
    return target if target.endswith(b".img") else target + b"/file"


def map_only(path: bytes) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    os.close(fd)
    # Python's own copy of the descriptor.
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(b"/proc/self/fd/" + number.encode())
        except FileNotFoundError:
            continue
        if link == path:
            os.close(int(number))
    return mapped


def test_nobody(host: Host, target: bytes) -> None:
    assert host.of(target) == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_an_open_file(host: Host, target: bytes, flags: int) -> None:
    holder = host.namespace.hold(os.open, a_file_in(target), flags)
    (held,) = host.find(host.wanted(target))
    assert held[:4] == (target, holder.pid, held.name, "open")
    with open(f"/proc/{holder.pid}/comm") as file:
        assert held.name + "\n" == file.read()
    holder.end()
    assert host.of(target) == []


def test_each_process_once(host: Host) -> None:
    holder = host.namespace.hold(lambda: [os.open(host.file, os.O_RDONLY) for _ in range(3)])
    assert host.of(host.file) == [(holder.pid, "open")]


def test_the_image_itself_is_another_mounts(host: Host) -> None:
    host.namespace.hold(os.open, host.base + b"/image", os.O_RDONLY)
    host.namespace.hold(os.chdir, host.base + b"/pvc")
    assert host.of(host.file) == []
    assert host.of(host.directory) == []


def test_cwd(host: Host) -> None:
    holder = host.namespace.hold(os.chdir, host.directory + b"/sub")
    assert host.of(host.directory) == [(holder.pid, "cwd")]


def test_root(host: Host) -> None:
    def enter() -> None:
        cwd = os.open("/", os.O_PATH)
        os.chroot(host.directory)
        os.fchdir(cwd)
        os.close(cwd)

    holder = host.namespace.hold(enter)
    assert host.of(host.directory) == [(holder.pid, "root")]


def test_a_map_without_a_descriptor(host: Host, target: bytes) -> None:
    holder = host.namespace.hold(map_only, a_file_in(target))
    assert host.of(target) == [(holder.pid, "map")]


def test_a_program(host: Host) -> None:
    with open("/bin/sleep", "rb") as program:
        host.namespace.write(host.base + b"/pvc/sleep", program.read())
    host.namespace.call(os.chmod, host.base + b"/pvc/sleep", 0o755)
    holder = host.namespace.popen([host.directory + b"/sleep", b"1000"])
    wait_for(lambda: (holder.pid, "exe") in host.of(host.directory))
    assert set(host.of(host.directory)) == {(holder.pid, "exe"), (holder.pid, "map")}


def test_a_loop_device(host: Host) -> None:
    image = host.namespace.write(host.base + b"/pvc/disk", b"\0" * (1 << 20))
    del image
    loop = host.namespace.call(attach_loop, host.directory + b"/disk")
    try:
        (held,) = host.find(host.wanted(host.directory))
        assert held == (host.directory, 0, os.path.basename(loop).decode(), "loop", ())
        holder = host.namespace.hold(os.open, loop, os.O_RDONLY)
        assert host.of(host.directory) == [(0, "loop"), (holder.pid, "loop")]
        holder.end()
    finally:
        detach_loop(loop)
    assert host.of(host.directory) == []


def test_a_mount_below(host: Host) -> None:
    host.namespace.tmpfs(host.directory + b"/sub")
    (held,) = host.find(host.wanted(host.directory))
    assert held == (host.directory, 0, os.fsdecode(host.directory + b"/sub"), "mount", ())


def test_a_holder_in_a_slave_namespace(host: Host, target: bytes) -> None:
    with host.namespace.copy("slave") as pod:
        assert host.of(target) == []
        holder = pod.hold(os.open, a_file_in(target), os.O_RDONLY)
        assert host.of(target) == [(holder.pid, "open")]


def test_a_holder_in_a_slaves_slave_and_in_a_peer(host: Host) -> None:
    with host.namespace.copy("slave") as outer:
        outer.call(mount, b"none", b"/", b"", 1 << 20 | 1 << 14)
        with outer.copy("slave") as inner, host.namespace.copy("shared") as peer:
            holders_ = [one.hold(os.open, host.file, os.O_RDONLY) for one in (inner, peer)]
            assert host.of(host.file) == sorted((holder.pid, "open") for holder in holders_)


def test_another_path_in_the_container(host: Host) -> None:
    """A container has the emptyDir under a path of its own."""
    with host.namespace.copy("slave") as pod:
        inside = pod.mkdir(host.base + b"/run/container-disks")
        pod.mount(host.base + DIRECTORY, inside, flags=4096 | 16384)
        holder = pod.hold(os.open, inside + b"/disk_0.img", os.O_RDONLY)
        assert host.of(host.file) == [(holder.pid, "open")]
        mapper = pod.hold(map_only, inside + b"/disk_0.img")
        assert host.of(host.file) == sorted([(holder.pid, "open"), (mapper.pid, "map")])


def test_a_private_copy_is_a_pin(host: Host, target: bytes) -> None:
    with host.namespace.copy("private") as side:
        holder = side.hold(os.open, a_file_in(target), os.O_RDONLY)
        ((pid, how),) = host.of(target)
        assert how == "namespace"
        assert pid in (side.pid, holder.pid)
        # The kernel agrees: that file does not make the host's umount busy. Then it is what pins the layer.
        wanted = host.wanted(target)
        host.namespace.umount(target)
        found = {(held.pid, held.how) for held in host.find(wanted)}
        assert found == {(pid, "namespace"), (holder.pid, "open")}


def test_two_layers_of_one_volume_are_told_apart(host: Host) -> None:
    other = host.namespace.touch(host.base + b"/kubelet/pods/other/container-disks/disk_0.img")
    host.namespace.bind(host.base + b"/image", other)
    with host.namespace.copy("slave") as pod:
        holder = pod.hold(os.open, other, os.O_RDONLY)
        assert host.of(host.file) == []
        assert host.of(other) == [(holder.pid, "open")]


def test_many_layers_at_once(host: Host) -> None:
    first = host.namespace.hold(os.open, host.file, os.O_RDONLY)
    second = host.namespace.hold(os.chdir, host.directory)
    found = host.find(host.wanted(host.file), host.wanted(host.directory))
    assert {(held.target, held.pid, held.how) for held in found} == {
        (host.file, first.pid, "open"),
        (host.directory, second.pid, "cwd"),
    }


def test_a_stack(host: Host) -> None:
    lower = host.namespace.hold(os.open, host.file, os.O_RDONLY)
    host.namespace.bind(host.namespace.write(host.base + b"/another", b"x"), host.file)
    upper = host.namespace.hold(os.open, host.file, os.O_RDONLY)
    assert {(lower.pid, "open"), (upper.pid, "open")} <= set(host.of(host.file))


@pytest.mark.parametrize("ids", [True, False])
def test_a_detached_mount_that_is_pinned(host: Host, target: bytes, *, ids: bool) -> None:
    wanted = host.wanted(target)
    if not ids:
        wanted = wanted._replace(mount_ids=())
    holder = host.namespace.hold(os.open, a_file_in(target), os.O_RDONLY)
    mapper = host.namespace.hold(map_only, a_file_in(target))
    host.namespace.umount(target, MNT_DETACH)
    found = {(held.pid, held.how) for held in host.find(wanted)}
    assert found == {(holder.pid, "open"), (mapper.pid, "map")}
    holder.end()
    mapper.end()
    assert host.find(wanted) == []


def test_a_source_that_was_deleted(host: Host) -> None:
    wanted = host.wanted(host.file)
    host.namespace.call(os.unlink, host.base + b"/image")
    with host.namespace.copy("slave") as pod:
        holder = pod.hold(os.open, host.file, os.O_RDONLY)
        assert [(held.pid, held.how) for held in host.find(wanted)] == [(holder.pid, "open")]
        assert host.of(host.file) == [(holder.pid, "open")]


@pytest.mark.parametrize("name", [b"a b", b"new\nline", b"back\\slash", b"\xff"])
def test_names(host: Host, name: bytes) -> None:
    target = host.namespace.touch(host.base + DIRECTORY + b"/" + name)
    host.namespace.bind(host.namespace.write(host.base + b"/source " + name, b"x" * 4096), target)
    with host.namespace.copy("slave") as pod:
        opener = pod.hold(os.open, target, os.O_RDONLY)
        mapper = pod.hold(map_only, target)
        assert host.of(target) == sorted([(opener.pid, "open"), (mapper.pid, "map")])


def test_a_thread_that_outlives_the_first_one(host: Host) -> None:
    program = (
        "import ctypes,os,sys,threading,time;"
        "fd=os.open(sys.argv[1],os.O_RDONLY);"
        "threading.Thread(target=time.sleep,args=(1000,)).start();"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    holder = host.namespace.popen(["python3", "-c", program, host.file])

    def is_zombie() -> bool:
        with open(f"/proc/{holder.pid}/stat", "rb") as file:
            return b") Z" in file.read()

    wait_for(is_zombie)
    assert host.of(host.file) == [(holder.pid, "open")]


def test_a_dead_file_system_does_not_hang_it(host: Host) -> None:
    target = host.namespace.mkdir(host.base + DIRECTORY + b"/dead")
    with DeadFileSystem(host.namespace, target):
        holder = host.namespace.hold(os.open, target, os.O_PATH)
        found: list[Held] = []

        def body(tell: Callable[[object], None]) -> None:
            from tests.support.mountns import enter

            enter(host.namespace.path)
            tell(holders.find([wanted]))

        wanted = host.wanted(target)
        with Child(body) as child:
            import select

            assert select.select([child._reader], [], [], 10)[0], "it hangs"
            found = child.hear()
        assert [(held.pid, held.how) for held in found] == [(holder.pid, "open")]
        host.namespace.umount(target, MNT_DETACH)


def test_an_overlay(host: Host) -> None:
    for name in (b"lower", b"upper", b"work", b"merged"):
        host.namespace.mkdir(host.base + b"/o/" + name)
    host.namespace.write(host.base + b"/o/lower/disk", b"x" * 4096)
    base = host.base + b"/o/"
    options = b"lowerdir=%slower,upperdir=%supper,workdir=%swork" % (base, base, base)
    host.namespace.mount(b"overlay", base + b"merged", b"overlay", 0, options)
    target = host.namespace.touch(host.base + DIRECTORY + b"/overlaid")
    host.namespace.bind(base + b"merged/disk", target)
    with host.namespace.copy("slave") as pod:
        opener = pod.hold(os.open, target, os.O_RDONLY)
        mapper = pod.hold(map_only, target)
        assert host.of(target) == sorted([(opener.pid, "open"), (mapper.pid, "map")])


def test_the_kernel_agrees_on_who_makes_it_busy(host: Host, target: bytes) -> None:
    with host.namespace.copy("slave") as pod:
        holder = pod.hold(os.open, a_file_in(target), os.O_RDONLY)
        with pytest.raises(OSError, match=r"Errno 16"):
            host.namespace.call(umount, target)
        assert host.of(target) == [(holder.pid, "open")]
        holder.end()
        assert host.of(target) == []
        host.namespace.call(umount, target)
