"""The worker process: its operations over a real socket, its end, and what it never does."""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hostd.linux import libc, link, mount_table, process, worker
from hostd.linux.clock import boottime_usec
from hostd.linux.holders import Wanted
from hostd.linux.note import Note
from hostd.linux.pool import WorkerError, WorkerPool
from tests.support.fuse import DeadFileSystem
from tests.support.mountns import MountNamespace, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.usefixtures("root")

#: A time that does not come.
NEVER = 1 << 62


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace("shared") as namespace:
        namespace.mkdir(namespace.base + b"/kubelet/pods")
        yield namespace


@pytest.fixture
async def pool(host: MountNamespace) -> AsyncIterator[WorkerPool]:
    made = WorkerPool(host.path, host.base + b"/kubelet")
    await made.start()
    yield made
    await made.close()


class Raw:
    """A worker without the daemon's side: messages as they are."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.bell = os.eventfd(0)
        self.note = Note.create()
        with theirs:
            self.process = link._start(theirs.fileno(), self.bell, self.note.fileno())
        self.pid = self.process.pid

    def send(self, op: str, *arguments: Any) -> None:
        self.socket.send(marshal.dumps((op, arguments)))

    def hear(self) -> Any:
        return marshal.loads(self.socket.recv(worker.MESSAGE_MAX))

    def ask(self, op: str, *arguments: Any) -> list[Any]:
        self.send(op, *arguments)
        answers = [self.hear()]
        while answers[-1][0] == worker.PART:
            answers.append(self.hear())
        return answers

    def hello(self, host: MountNamespace) -> list[Any]:
        return self.ask("hello", worker.PROTOCOL, host.path, host.base + b"/kubelet")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        os.close(self.bell)
        self.note.close()


@pytest.fixture
def raw() -> Iterator[Raw]:
    made = Raw()
    yield made
    made.close()


# -- the operations


async def test_list_directory(host: MountNamespace, pool: WorkerPool) -> None:
    directory = host.base + b"/kubelet/pods/uid"
    host.write(directory + b"/file \xff\n")
    host.mkdir(directory + b"/directory")
    host.call(os.symlink, b"nowhere", directory + b"/link")
    host.call(os.mkfifo, directory + b"/fifo")
    expected = [(b"directory", 4), (b"fifo", 0), (b"file \xff\n", 8), (b"link", 10)]
    assert sorted(await pool.run("list_directory", directory)) == expected
    assert sorted(await pool.run("list_directory", b"pods/uid")) == expected
    assert await pool.run("list_directory", b"pods/uid/directory") == []


async def test_block_nodes_are_found_among_any_number_of_other_entries(host: MountNamespace, pool: WorkerPool) -> None:
    """The pod's own user may fill its directory, and has nothing of it."""

    def fill() -> None:
        directory = host.base + b"/kubelet/pods/"
        os.mknod(directory + b"node", stat.S_IFBLK | 0o600, os.makedev(1, 3))
        os.mknod(directory + b"null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        for number in range(worker.ENTRIES_MAX + 1):
            os.mkfifo(directory + b"%d" % number)

    host.call(fill)
    names, _ = await pool.run("list_block_nodes", b"pods")
    assert names == [b"node"]


@pytest.mark.parametrize(
    ("there", "change", "told"),
    [
        ([], lambda path: os.mknod(path + b"new", stat.S_IFBLK | 0o600), True),
        ([], lambda path: os.rename(path + b"../elsewhere", path + b"new"), True),
        ([], lambda path: os.unlink(path + b"file"), False),
        ([], lambda path: os.rename(path + b"file", path + b"../gone"), False),
        ([b"node"], lambda path: os.unlink(path + b"node"), True),
        ([b"node"], lambda path: os.rename(path + b"node", path + b"../gone"), True),
        ([b"node"], lambda path: os.mknod(path + b"new", stat.S_IFBLK | 0o600), True),
    ],
)
async def test_what_comes_is_told_and_what_goes_only_where_a_node_is(
    host: MountNamespace, pool: WorkerPool, there: list[bytes], change: Callable[[bytes], None], *, told: bool
) -> None:
    """Else each mountpoint that is deleted after an umount would end a watch, which is work for the kernel."""
    directory = host.base + b"/kubelet/pods/"

    def fill() -> None:
        for path in (b"file", b"../elsewhere"):
            os.close(os.open(directory + path, os.O_CREAT))
        for name in there:
            os.mknod(directory + name, stat.S_IFBLK | 0o600)

    host.call(fill)
    names, watch = await pool.run("list_block_nodes", b"pods")
    assert names == there
    host.call(change, directory)
    assert pool.inotify
    assert [event.wd for event in pool.inotify.read() if event.mask & libc.IN_IGNORED] == [watch] * told


class Meanwhile(worker.Worker):
    """A worker in the tests' own process, and what happens after its first look at the directory."""

    def __init__(self, host: MountNamespace, inotify: int, happens: Callable[[], object]) -> None:
        super().__init__(os.eventfd(0), os.eventfd(0), Note.create().fileno(), inotify)
        self._root = b"/proc/%d/root" % host.pid + host.base + b"/kubelet"
        self._happens = iter([happens])
        self.found: list[bytes] = []

    def _block_nodes(self, directory: int) -> list[bytes]:
        found = super()._block_nodes(directory)
        for happens in self._happens:
            happens()
        return found

    def _part(self, value: object) -> None:
        assert isinstance(value, list)
        self.found += value


@pytest.fixture
def here() -> Iterator[None]:
    """A worker leaves its process in the root directory."""
    before = os.getcwd()
    yield
    os.chdir(before)


@pytest.mark.usefixtures("here")
async def test_a_node_that_goes_before_its_going_is_watched_is_not_found(
    host: MountNamespace, pool: WorkerPool
) -> None:
    node = host.base + b"/kubelet/pods/node"
    host.call(os.mknod, node, stat.S_IFBLK | 0o600)
    assert pool.inotify
    looking = Meanwhile(host, pool.inotify.fileno(), lambda: host.call(os.unlink, node))
    looking.list_block_nodes(b"pods")
    assert looking.found == []


@pytest.mark.usefixtures("here")
async def test_a_look_that_is_cut_off_leaves_the_watch_as_it_was(host: MountNamespace, pool: WorkerPool) -> None:
    node = host.base + b"/kubelet/pods/node"
    host.call(os.mknod, node, stat.S_IFBLK | 0o600)
    names, watch = await pool.run("list_block_nodes", b"pods")
    assert names == [b"node"]
    assert pool.inotify

    def cut_off() -> None:
        raise OSError(errno.EIO, "cut off")

    with pytest.raises(OSError, match="cut off"):
        Meanwhile(host, pool.inotify.fileno(), cut_off).list_block_nodes(b"pods")
    assert pool.inotify.read() == []
    host.call(os.unlink, node)
    assert [event.wd for event in pool.inotify.read() if event.mask & libc.IN_IGNORED] == [watch]


async def test_list_directory_of_many(host: MountNamespace, pool: WorkerPool) -> None:
    names = {b"%04d" % number + b"x" * 200 for number in range(1500)}

    def fill() -> None:
        for name in names:
            os.close(os.open(host.base + b"/kubelet/pods/" + name, os.O_CREAT))

    host.call(fill)
    assert {name for name, _ in await pool.run("list_directory", b"pods")} == names


async def test_list_directory_follows_no_link_below_the_root(host: MountNamespace, pool: WorkerPool) -> None:
    host.call(os.symlink, b"/etc", host.base + b"/kubelet/pods/evil")
    for path in (b"pods/evil", b"pods/evil/ssl", b"pods/../.."):
        with pytest.raises(OSError, match=r"Errno") as caught:
            await pool.run("list_directory", path)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV)
    with pytest.raises(FileNotFoundError, match="absent"):
        await pool.run("list_directory", b"pods/absent")


async def test_read_file(host: MountNamespace, pool: WorkerPool) -> None:
    data = os.urandom(100_000)
    path = host.write(host.base + b"/record", data)
    assert await pool.run("read_file", path, 1 << 20) == data
    assert await pool.run("read_file", path, 70_000) == data[:70_000]
    assert await pool.run("read_file", path, 0) == b""
    assert await pool.run("read_file", host.touch(host.base + b"/empty"), 10) == b""


async def test_read_file_takes_regular_files_only(host: MountNamespace, pool: WorkerPool) -> None:
    host.call(os.mkfifo, host.base + b"/fifo")
    host.call(os.symlink, b"/etc/passwd", host.base + b"/link")
    for name, number in ((b"/fifo", errno.EINVAL), (b"/link", errno.ELOOP), (b"/kubelet", errno.EINVAL)):
        with pytest.raises(OSError, match=r"Errno") as caught:
            await pool.run("read_file", host.base + name, 10)
        assert caught.value.errno == number
    with pytest.raises(FileNotFoundError):
        await pool.run("read_file", host.base + b"/absent", 10)


async def test_command_lines(pool: WorkerPool) -> None:
    argv: list[str | bytes] = [sys.executable, "-c", "input()", "", b"\xff", "x" * 100_000]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as one:
        wait_for(lambda: process.command_line(one.pid))  # in the middle of execve(2) it has none
        lines = await pool.run("command_lines", [one.pid, 2**22 - 1, os.getpid()])
        one.kill()
    assert lines[one.pid][1:5] == [b"-c", b"input()", b"", b"\xff"]
    assert sum(map(len, lines[one.pid])) <= worker.PART_MAX
    assert lines[2**22 - 1] is None
    assert lines[os.getpid()]
    assert await pool.run("command_lines", []) == {}


async def test_holders(host: MountNamespace, pool: WorkerPool) -> None:
    target = host.touch(host.base + b"/kubelet/pods/disk.img")
    host.bind(host.write(host.base + b"/image", b"x"), target)
    (row,) = [row for row in mount_table.parse(host.table()) if row.target == target]
    wanted = Wanted(target, row.device, row.root)
    with host.hold(os.open, target, os.O_RDONLY) as holder:
        (held,) = await pool.run("holders", [wanted])
        assert held[:2] == (target, holder.pid)
        assert held.how == "open"
        with open(f"/proc/{holder.pid}/cgroup", "rb") as file:
            assert all(path in file.read() for path in held.cgroups[:1])
    assert await pool.run("holders", [wanted]) == []
    assert await pool.run("holders", []) == []


async def test_an_error_leaves_the_worker_usable(host: MountNamespace, pool: WorkerPool) -> None:
    async with pool.worker() as one:
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                await one.read_file(b"/absent", 1)
            with pytest.raises(WorkerError, match="TypeError"):
                await one.read_file(b"/etc/passwd", "ten")  # type: ignore[arg-type]
        assert await one.resolve_root() == (host.base + b"/kubelet", "")


# -- the process


def test_an_unknown_operation(raw: Raw) -> None:
    ((kind, number, text),) = raw.ask("explode")
    assert (kind, number) == (worker.ERROR, 0)
    assert "explode" in text


def test_another_version(raw: Raw) -> None:
    ((kind, (version, root, _)),) = raw.ask("hello", worker.PROTOCOL + 1, "/proc/1/ns/mnt", b"/")
    assert (kind, version, root) == (worker.END, worker.PROTOCOL, None)


def test_its_own_namespace_is_not_entered(raw: Raw) -> None:
    assert raw.ask("hello", worker.PROTOCOL, "/proc/self/ns/mnt", b"/")[-1] == (worker.END, (worker.PROTOCOL, b"/", ""))


def test_it_ends_when_the_socket_closes(raw: Raw, host: MountNamespace) -> None:
    raw.hello(host)
    raw.socket.close()
    assert raw.process.wait(10) == 0


def test_it_ends_when_the_other_end_stops_sending(raw: Raw, host: MountNamespace) -> None:
    raw.hello(host)
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.process.wait(10) == 0


def test_the_signals_between_jobs(raw: Raw, host: MountNamespace) -> None:
    raw.hello(host)
    raw.process.send_signal(signal.SIGINT)
    assert raw.ask("root")[-1][0] == worker.END
    raw.process.send_signal(signal.SIGTERM)
    assert raw.process.wait(10) == -signal.SIGTERM


def bound(host: MountNamespace, name: bytes) -> bytes:
    target = host.touch(host.base + b"/kubelet/pods/" + name)
    host.bind(host.touch(host.base + b"/image"), target)
    return target


def test_a_job_that_was_given_up_before_it_was_begun_touches_nothing(raw: Raw, host: MountNamespace) -> None:
    """A worker that was stopped, or got no processor, wakes up to a request that nobody stands for any more."""
    raw.hello(host)
    target = bound(host, b"a")
    raw.process.send_signal(signal.SIGSTOP)
    raw.send("unmount", [(b"pods/a", False, False)], NEVER)
    raw.socket.shutdown(socket.SHUT_WR)
    raw.process.send_signal(signal.SIGCONT)
    assert raw.process.wait(10) == 0
    assert host.targets() == [target]


def test_no_target_is_begun_after_its_time(host: MountNamespace, raw: Raw) -> None:
    raw.hello(host)
    target = bound(host, b"a")
    assert raw.ask("unmount", [(b"pods/a", False, False)], boottime_usec() - 1) == [(worker.END, [])]
    assert host.targets() == [target]
    assert raw.ask("unmount", [(b"pods/a", False, False)], boottime_usec() + 60_000_000)[-1][0] == worker.END
    assert host.targets() == []


def test_sigterm_waits_for_the_end_of_the_job(raw: Raw, host: MountNamespace) -> None:
    raw.hello(host)
    target = host.mkdir(host.base + b"/kubelet/pods/dead")
    with DeadFileSystem(host, target, block=True) as dead:
        raw.send("unmount", [(b"pods/dead", False, False), (b"pods/x", False, False)], NEVER)
        wait_for(lambda: target not in host.targets())
        raw.process.send_signal(signal.SIGTERM)
        assert not select.select([raw.socket], [], [], 0.05)[0]
        dead.end()
        assert [[outcome[0] for outcome in raw.hear()[1]] for _ in range(2)] == [[b"pods/dead"], [b"pods/x"]]
    assert raw.process.wait(10) == -signal.SIGTERM


def test_it_starts_without_the_environment(host: MountNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    monkeypatch.chdir("/")
    raw = Raw()
    try:
        assert raw.hello(host)[-1][0] == worker.END
    finally:
        raw.close()


def test_nothing_is_imported_after_the_namespace_is_joined(host: MountNamespace) -> None:
    """After setns the interpreter's files may not be there: everything works from an empty tree."""
    empty = host.mkdir(host.base + b"/empty/proc")
    host.call(os.makedirs, host.base + b"/empty" + host.base + b"/kubelet/pods", 0o755)
    host.bind(b"/proc", empty, recursive=True)
    other = MountNamespace("private", of=host)
    try:
        holder = other.hold(_pivot, host.base + b"/empty")
        raw = Raw()
        try:
            path = f"/proc/{holder.pid}/ns/mnt"
            assert raw.ask("hello", worker.PROTOCOL, path, host.base + b"/kubelet")[-1][1][1] == host.base + b"/kubelet"
            for op, arguments in (
                ("unmount", ([(b"pods/x", False, False)], NEVER)),
                ("list_directory", (b"pods",)),
                ("list_directory", (b"/absent",)),
                ("read_file", (b"/absent", 1)),
                ("command_lines", ([1],)),
                ("holders", ([(b"/x", "1:1", b"/", ())],)),
                ("explode", ()),
            ):
                answer = raw.ask(op, *arguments)[-1]
                assert "import" not in str(answer).lower(), answer
                assert "No module" not in str(answer), answer
                assert answer[0] == worker.END or op in ("explode", "read_file") or arguments == (b"/absent",), answer
        finally:
            raw.close()
    finally:
        other.close()


def _pivot(root: bytes) -> None:
    """Makes a directory the namespace's root, as a container's is."""
    from tests.support import mountns

    mountns._check(mountns._libc.unshare(0x20000))
    mountns.mount(b"none", b"/", flags=mountns.MS_REC | mountns.MS_PRIVATE)
    mountns.mount(root, root, flags=mountns.MS_BIND | mountns.MS_REC)
    os.chdir(root)
    mountns.mount(b".", b"/", flags=mountns.MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def test_the_modules_that_it_loads() -> None:
    """Its start is the time in which a hung one is not replaced: nothing heavy comes in."""
    program = "import sys; import hostd.linux.worker; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"asyncio", "subprocess", "socket", "logging"} & set(found.stdout.split())
