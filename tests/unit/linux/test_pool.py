"""The pool of workers, on real mounts, with workers that hang, die and come back."""

from __future__ import annotations

import asyncio
import errno
import marshal
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from hostd.linux.pool import Hung, Item, PoolExhausted, Worker, WorkerDied, WorkerError, WorkerHung, WorkerPool
from tests.support.fuse import DeadFileSystem
from tests.support.mountns import MountNamespace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.usefixtures("root")


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        await asyncio.sleep(0.005)


def item(name: bytes) -> Item:
    return b"pods/" + name, False, False


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return {int(pid) for pid in file.read().split()}


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace("shared") as namespace:
        namespace.mkdir(namespace.base + b"/kubelet/pods")
        namespace.write(namespace.base + b"/image", b"data")
        yield namespace


@pytest.fixture
async def pool(host: MountNamespace) -> AsyncIterator[WorkerPool]:
    before, fds = children(), os.listdir("/proc/self/fd")
    made = WorkerPool(host.path, host.base + b"/kubelet", bound=6, hung_after=0.2)
    await made.start()
    yield made
    await made.close()
    await until(lambda: os.listdir("/proc/self/fd") == fds)
    assert len(children() - before) <= 6


def bind(host: MountNamespace, *names: bytes) -> list[Item]:
    for name in names:
        host.bind(host.base + b"/image", host.touch(host.base + b"/kubelet/pods/" + name))
    return [item(name) for name in names]


def dead(host: MountNamespace, name: bytes) -> DeadFileSystem:
    return DeadFileSystem(host, host.mkdir(host.base + b"/kubelet/pods/" + name), block=True)


async def test_unmounts_in_the_other_namespace(host: MountNamespace, pool: WorkerPool) -> None:
    items = bind(host, b"a", b"b b", b"\xff\n")
    outcomes = await pool.run("unmount", items)
    assert [outcome.relative for outcome in outcomes] == [relative for relative, _, _ in items]
    assert all(outcome[1:] == (1, 0, "", True, False, False) for outcome in outcomes)
    assert host.targets() == []


async def test_one_that_is_busy_does_not_keep_the_others(host: MountNamespace, pool: WorkerPool) -> None:
    items = bind(host, b"a", b"b", b"c")
    with host.hold(os.open, host.base + b"/kubelet/pods/a", os.O_RDONLY):
        outcomes = await pool.run("unmount", items)
    assert [outcome.errno for outcome in outcomes] == [errno.EBUSY, 0, 0]


async def test_a_path_that_no_message_holds(host: MountNamespace, pool: WorkerPool) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        await pool.run("unmount", [item(b"x" * 200_000)])
    assert caught.value.errno == errno.ENAMETOOLONG
    (outcome,) = await pool.run("unmount", [item(b"x" * 5000)])
    assert outcome.errno == errno.ENAMETOOLONG
    assert (await pool.run("unmount", bind(host, b"a")))[0].removed


@pytest.mark.parametrize("answer", [(0, "no outcome"), (1,), (2, 5), (7, 7, 7), ()])
async def test_an_answer_that_is_none(pool: WorkerPool, answer: tuple[object, ...]) -> None:
    async with pool.worker() as worker:
        link = worker.link
        os.kill(worker.pid, signal.SIGSTOP)
        job = asyncio.ensure_future(worker.unmount([item(b"a")]))
        await asyncio.sleep(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            link._socket.close()
            link._socket = ours
            ours.setblocking(False)
            theirs.send(marshal.dumps(answer))  # type: ignore[arg-type]
            os.eventfd_write(link._bell, 1)
            with pytest.raises((ValueError, TypeError, IndexError)):
                await job
    await until(lambda: worker.pid not in children())


async def test_no_targets(pool: WorkerPool) -> None:
    assert await pool.run("unmount", []) == []


async def test_more_targets_than_one_message_holds(host: MountNamespace, pool: WorkerPool) -> None:
    items = [item(b"%04d" % number + b"x" * 200) for number in range(1000)]
    outcomes = await pool.run("unmount", items)
    assert [outcome.relative for outcome in outcomes] == [relative for relative, _, _ in items]
    items = bind(host, b"a")
    assert (await pool.run("unmount", items))[0].done == 1


async def test_the_root_may_be_a_symlink(host: MountNamespace) -> None:
    host.call(os.symlink, b"kubelet", host.base + b"/link")
    pool = WorkerPool(host.path, host.base + b"/link")
    await pool.start()
    try:
        assert pool.root == host.base + b"/kubelet"
        assert (await pool.run("unmount", bind(host, b"a")))[0].removed
    finally:
        await pool.close()


async def test_the_root_may_come_later(host: MountNamespace) -> None:
    pool = WorkerPool(host.path, host.base + b"/later")
    await pool.start()
    try:
        assert pool.root is None
        assert pool.problem
        (outcome,) = await pool.run("unmount", [item(b"a")])
        assert (outcome.errno, outcome.mounted) == (errno.ENOENT, True)
        assert "later" in outcome.error
        host.mkdir(host.base + b"/later/pods")
        assert await pool.refresh() == host.base + b"/later"
        assert pool.problem == ""
        (outcome,) = await pool.run("unmount", [item(b"a")])
        assert (outcome.errno, outcome.mounted) == (0, False)
    finally:
        await pool.close()


async def test_the_table_is_the_other_namespaces(host: MountNamespace, pool: WorkerPool) -> None:
    bind(host, b"a")
    with open(pool.mountinfo_path, "rb") as file:
        assert file.read() == host.table()


async def test_no_such_namespace() -> None:
    pool = WorkerPool("/proc/1/ns/none", b"/")
    with pytest.raises(WorkerError, match="/proc/1/ns/none"):
        await pool.start()
    await pool.close()


async def test_a_worker_inherits_nothing(pool: WorkerPool) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        async with pool.worker() as first:
            os.kill(first.pid, signal.SIGKILL)
        await until(lambda: first.pid not in children())
        async with pool.worker() as one, pool.worker() as two:
            for worker in (one, two):
                fds = {fd: os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")}
                assert {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}.items() <= fds.items()
                kinds = sorted({link.split(":")[0] for link in fds.values() if link != "/dev/null"})
                assert kinds == ["/memfd", "anon_inode", "socket"]
                assert len(fds) == 3 + len(("socket", "bell", "inotify", "note", "note, mapped"))
                with open(f"/proc/{worker.pid}/comm", encoding="ascii") as file:
                    assert file.read() == "hostd-worker\n"
                assert os.getpgid(worker.pid) == worker.pid
                assert os.readlink(f"/proc/{worker.pid}/cwd") == "/"
    finally:
        os.close(reader)
        os.close(writer)


async def test_the_hung_one_is_named_and_what_follows_is_never_touched(host: MountNamespace, pool: WorkerPool) -> None:
    before = bind(host, b"a")
    after = bind(host, b"z")
    came_back: list[Hung] = []
    pool.on_unhung(came_back.append)
    with dead(host, b"m") as server:
        async with pool.worker() as worker:
            with pytest.raises(WorkerHung) as caught:
                await worker.unmount([*before, item(b"m"), *after])
        assert (caught.value.relative, caught.value.pid) == (b"pods/m", worker.pid)
        # Of a quick one just before it the table tells, if not the worker.
        assert {outcome.relative for outcome in caught.value.done} <= {b"pods/a"}
        assert host.base + b"/kubelet/pods/a" not in host.targets()
        (hung,) = pool.hung
        assert (hung.what, hung.pid) == (b"pods/m", worker.pid)
        # Others are served at once, while it hangs.
        assert (await pool.run("unmount", bind(host, b"other")))[0].removed
        os.kill(worker.pid, signal.SIGTERM)
        assert not came_back
        server.end()
        await until(lambda: came_back)
    assert came_back == [hung]
    assert pool.hung == []
    assert host.base + b"/kubelet/pods/z" in host.targets()
    await until(lambda: worker.pid not in children())


@pytest.mark.parametrize("relief", [True, False])
async def test_where_no_descriptor_is_left_for_a_worker_others_are_asked_for(pool: WorkerPool, relief: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failures: list[int | None] = []

    def relieve(error: OSError) -> bool:
        failures.append(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return relief

    pool.relieve = relieve
    try:
        async with pool.worker() as worker:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: failures)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failures == [errno.EMFILE]
    assert ("Too many open files" in pool.problem) != relief, "without relief it is tried later"
    await until(lambda: len(pool._idle) == 3)


async def test_a_stopped_worker_is_a_hung_one(host: MountNamespace, pool: WorkerPool) -> None:
    items = bind(host, b"a", b"b")
    async with pool.worker() as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerHung) as caught:
            await worker.unmount(items)
    assert (caught.value.relative, caught.value.done) == (b"pods/a", [])
    os.kill(worker.pid, signal.SIGCONT)
    await until(lambda: not pool.hung)
    # It did the one that it had been told of, if any; never the next.
    assert host.base + b"/kubelet/pods/b" in host.targets()


async def test_until_all_hang(host: MountNamespace, pool: WorkerPool) -> None:
    stopped = []
    for number in range(6):
        async with pool.worker() as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            stopped.append(worker.pid)
            with pytest.raises(WorkerHung):
                await worker.unmount([item(b"%d" % number)])
        assert len(pool.hung) == number + 1
        assert len(children() & set(stopped)) == number + 1
    assert [hung.what for hung in pool.hung] == [b"pods/%d" % number for number in range(6)]
    with pytest.raises(PoolExhausted, match="6 worker"):
        await pool.run("unmount", [item(b"x")])
    os.kill(stopped[0], signal.SIGCONT)
    await until(lambda: len(pool.hung) == 5)
    assert (await pool.run("unmount", bind(host, b"a")))[0].removed


async def test_a_waiter_learns_that_all_hang(host: MountNamespace) -> None:
    pool = WorkerPool(host.path, host.base + b"/kubelet", size=1, bound=1, hung_after=0.2)
    await pool.start()
    try:
        async with pool.worker() as worker:
            waiting = asyncio.create_task(pool.run("unmount", [item(b"b")]))
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(WorkerHung):
                await worker.unmount([item(b"a")])
            with pytest.raises(PoolExhausted, match="pods/a"):
                await waiting
    finally:
        await pool.close()


async def test_a_killed_worker(host: MountNamespace, pool: WorkerPool) -> None:
    with dead(host, b"m"):
        async with pool.worker() as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            job = asyncio.ensure_future(worker.unmount([item(b"a"), item(b"b")]))
            await asyncio.sleep(0)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="signal 9") as caught:
                await job
    assert (caught.value.relative, caught.value.pid) == (b"pods/a", worker.pid)
    for _ in range(5):
        assert (await pool.run("unmount", bind(host, b"a")))[0].removed


async def test_an_idle_worker_that_is_killed_is_replaced(host: MountNamespace, pool: WorkerPool) -> None:
    await until(lambda: len(pool._idle) == 3)
    killed = {link.pid for link in pool._idle}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not killed & children())
    await until(lambda: len(pool._idle) == 3)
    assert (await pool.run("unmount", bind(host, b"a")))[0].removed


async def test_cancellation_gives_the_worker_up(host: MountNamespace, pool: WorkerPool) -> None:
    items = bind(host, b"a", b"b")
    async with pool.worker() as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        job = asyncio.ensure_future(worker.unmount(items))
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
    others = {(await pool.run("unmount", [item(b"nothing")]))[0].relative for _ in range(20)}
    assert others == {b"pods/nothing"}
    await until(lambda: pool.hung)
    os.kill(worker.pid, signal.SIGCONT)
    await until(lambda: worker.pid not in children())
    assert pool.hung == []
    assert host.base + b"/kubelet/pods/b" in host.targets()
    assert all(outcome.removed for outcome in await pool.run("unmount", [items[1]]))


async def test_at_most_size_jobs_and_first_come_first_served(pool: WorkerPool) -> None:
    order = []

    async def ask(number: int) -> None:
        async with pool.worker():
            order.append(number)

    async with pool.worker(), pool.worker():
        tasks = [asyncio.create_task(ask(number)) for number in range(4)]
        await asyncio.sleep(0.02)
        assert order == []
        tasks[1].cancel()
    await asyncio.wait(tasks)
    assert order == [0, 2, 3]


async def test_a_waiter_that_is_cancelled_with_a_worker_in_hand(pool: WorkerPool) -> None:
    async with pool.worker(), pool.worker():
        task = asyncio.create_task(pool.run("resolve_root"))
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), pool.worker(), pool.worker():
        pass


async def test_an_idle_worker_is_had_without_a_suspension(pool: WorkerPool) -> None:
    step = pool.worker().__aenter__()
    with pytest.raises(StopIteration):
        step.send(None)


async def test_close_does_not_wait_for_the_hung(host: MountNamespace) -> None:
    pool = WorkerPool(host.path, host.base + b"/kubelet", hung_after=0.2)
    await pool.start()
    with dead(host, b"m"):
        with pytest.raises(WorkerHung):
            await pool.run("unmount", [item(b"m")])
        (hung,) = pool.hung
        async with asyncio.timeout(5):
            await pool.close()
        assert hung.pid in children()
    os.waitpid(hung.pid, 0)
    with pytest.raises(WorkerError, match="stopping"):
        await pool.run("resolve_root")


async def test_close_during_a_job(host: MountNamespace) -> None:
    pool = WorkerPool(host.path, host.base + b"/kubelet")
    await pool.start()
    async with pool.worker() as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        job = asyncio.ensure_future(worker.unmount([item(b"a")]))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(WorkerDied):
            await job
    assert worker.pid not in children()


async def test_a_root_that_hangs(host: MountNamespace) -> None:
    host.mkdir(host.base + b"/hanging")
    with DeadFileSystem(host, host.base + b"/hanging"):
        pool = WorkerPool(host.path, host.base + b"/hanging/kubelet", hung_after=0.2)
        await pool.start()
        assert pool.root is None
        assert pool.hung[0].what == host.base + b"/hanging/kubelet"
        with open(pool.mountinfo_path, "rb") as file:
            assert file.read() == host.table()
        await asyncio.sleep(0.5)
        assert len(pool.hung) < 10, "workers are started without end"
        await pool.close()


async def test_a_frozen_daemon_does_not_take_its_workers_for_hung(host: MountNamespace, pool: WorkerPool) -> None:
    ((relative, *_),) = bind(host, b"a")
    async with pool.worker() as worker:
        job = asyncio.ensure_future(worker.unmount([(relative, False, False)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.5)
        assert (await job)[0].removed


async def test_nothing_is_left_after_many_workers(host: MountNamespace, pool: WorkerPool) -> None:
    await until(lambda: len(pool._idle) == 3)
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for link in list(pool._idle):
            os.kill(link.pid, signal.SIGKILL)
        gone = {link.pid for link in pool._idle}
        await until(lambda gone=gone: len(pool._idle) == 3 and not gone & children())  # type: ignore[misc]
    assert len(os.listdir("/proc/self/fd")) == fds


async def test_looks_have_their_turn_among_umounts_that_never_end(pool: WorkerPool) -> None:
    loop = asyncio.get_running_loop()

    def take_all() -> None:
        while taken := pool.take():
            loop.call_soon(pool.give_back, taken)

    pool.on_free = take_all
    take_all()
    async with asyncio.timeout(10), pool.worker():
        pool.on_free = lambda: None


async def test_umounts_have_their_turn_among_looks_that_never_end(pool: WorkerPool) -> None:
    took: list[Worker] = []

    def take_one() -> None:
        if not took and (taken := pool.take()):
            took.append(taken)

    pool.on_free = take_one

    async def look() -> None:
        while not took:
            async with pool.worker():
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        await asyncio.gather(*(look() for _ in range(8)))
    pool.on_free = lambda: None
    for each in took:
        pool.give_back(each)


def test_workers_end_with_the_daemon(host: MountNamespace) -> None:
    program = f"""
import asyncio, sys
from hostd.linux.pool import WorkerPool
async def main():
    pool = WorkerPool({host.path!r}, {host.base + b"/kubelet"!r})
    await pool.start()
    while len(pool._idle) < 3:
        await asyncio.sleep(0.01)
    print(*[link.pid for link in pool._links], flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout
        pidfds = [os.pidfd_open(int(pid)) for pid in daemon.stdout.readline().split()]
        daemon.kill()
        # The pipe ends although workers were about: they do not hold it.
        assert daemon.stdout.read() == b""
    assert len(pidfds) == 3
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd)
        assert poll.poll(5000)
        os.close(pidfd)
