"""Waiting for processes to die, and pidfds that outlive hostd."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.core.model import Holder, Layer, LayerState
from hostd.core.watchers import FdStore, HolderWatch
from hostd.linux.pidfd import Identity, Process, identify
from tests.support.core import OTHER, POD, a_layer
from tests.support.wait import eventually


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with sleeper() as made:
        yield made


def held_by(*pids: int, name: bytes = b"container-disks/disk_0.img") -> Layer:
    return a_layer(name, state=LayerState.BUSY, holders=tuple(Holder(pid, "tar", "open", "") for pid in pids))


class Freed(list[tuple[str, bytes]]):
    """What was freed."""

    def __call__(self, pod_uid: str, path: bytes) -> None:
        self.append((pod_uid, path))


async def test_the_death_of_any_holder_frees_its_layer(process: subprocess.Popen[bytes]) -> None:
    freed, layer = Freed(), held_by(process.pid, os.getpid())
    watch = HolderWatch(freed)
    watch.watch(POD, [layer])
    process.kill()
    await eventually(lambda: freed == [(POD, layer.target.path)])
    watch.close()


async def test_holders_that_are_no_processes_and_dead_ones_beside_a_living_are_no_matter(
    process: subprocess.Popen[bytes],
) -> None:
    freed = Freed()
    with sleeper() as dead:
        pass
    watch = HolderWatch(freed)
    watch.watch(POD, [held_by(0), held_by(process.pid, dead.pid, 0, 1 << 30, name=b"container-disks/disk_1.img")])
    await asyncio.sleep(0)
    assert freed == []
    watch.close()


async def test_only_those_named_last_are_waited_for(process: subprocess.Popen[bytes]) -> None:
    freed = Freed()
    with sleeper() as other, sleeper() as foreign:
        watch = HolderWatch(freed)
        watch.watch(OTHER, [held_by(foreign.pid)])
        watch.watch(POD, [held_by(process.pid)])
        watch.watch(POD, [held_by(other.pid)])
        process.kill()
        process.wait()
        other.kill()
        foreign.kill()
        await eventually(lambda: len(freed) == 2)
    assert sorted(pod for pod, _ in freed) == sorted([POD, OTHER])
    watch.close()


async def test_the_end_of_a_worker_that_hung_frees_its_layer(process: subprocess.Popen[bytes]) -> None:
    freed = Freed()
    layer = a_layer(state=LayerState.HUNG, worker=identify(process.pid))
    watch = HolderWatch(freed)
    watch.watch(POD, [layer])
    await asyncio.sleep(0)
    assert freed == []
    process.kill()
    await eventually(lambda: freed == [(POD, layer.target.path)])
    watch.close()


@pytest.mark.parametrize("reused", [False, True], ids=["gone", "pid-reused"])
async def test_a_worker_that_ended_before_frees_its_layer_at_once(
    process: subprocess.Popen[bytes], reused: bool
) -> None:
    found = identify(process.pid)
    worker = Identity(found.pid, found.start_time - 1, found.boot_id, found.inode and 1) if reused else found
    if not reused:
        process.kill()
        process.wait()
    freed = Freed()
    watch = HolderWatch(freed)
    watch.watch(POD, [a_layer(state=LayerState.HUNG, worker=worker)])
    await eventually(lambda: len(freed) == 1)
    watch.close()


async def test_no_descriptor_is_left_over(process: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = HolderWatch(Freed())
    for _ in range(5):
        watch.watch(POD, [held_by(process.pid), held_by(process.pid, name=b"hotplug-disks/a.img")])
        watch.watch(OTHER, [held_by(process.pid)])
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


class Manager:
    """systemd's side: names and descriptors of its own."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store(self, name: str, fd: int) -> None:
        self.kept[name] = os.dup(fd)

    def drop(self, name: str) -> None:
        os.close(self.kept.pop(name))

    def give(self) -> list[tuple[str, int]]:
        return [(name, os.dup(fd)) for name, fd in self.kept.items()]

    def close(self) -> None:
        for name in list(self.kept):
            self.drop(name)


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.close()


def test_a_pidfd_is_kept_once_and_given_back(process: subprocess.Popen[bytes], manager: Manager) -> None:
    with Process.open(process.pid) as qemu:
        store = FdStore(manager)
        store.keep(POD, qemu)
        store.keep(POD, qemu)
        assert list(manager.kept) == [f"qemu.{POD}.{process.pid}-{qemu.identity.start_time}"]
        again = FdStore(manager)
        [adopted] = again.adopt(manager.give())[POD]
        assert adopted.identity.same_as(qemu.identity)
        again.keep(POD, adopted)
        assert len(manager.kept) == 1, "what came from there is not stored again"
        again.drop(adopted.identity)
        again.drop(adopted.identity)
        assert manager.kept == {}
        adopted.close()


def test_what_cannot_be_kept_is_said_and_not_remembered(
    process: subprocess.Popen[bytes],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    store = FdStore(manager)
    with Process.open(process.pid) as qemu:
        with monkeypatch.context() as patched:
            patched.setattr(Manager, "store", no_descriptor)
            store.keep(POD, qemu)
        assert "not over a restart" in caplog.text
        store.drop(qemu.identity)
        store.keep(POD, qemu)
        assert len(manager.kept) == 1


def test_of_a_qemu_that_died_meanwhile_the_store_still_knows(
    process: subprocess.Popen[bytes], manager: Manager
) -> None:
    with Process.open(process.pid) as qemu:
        FdStore(manager).keep(POD, qemu)
    process.kill()
    process.wait()
    store = FdStore(manager)
    [dead] = store.adopt(manager.give())[POD]
    assert not dead.alive()
    store.drop(dead.identity)
    assert manager.kept == {}
    dead.close()


def test_what_nobody_knows_is_closed_here_and_there(process: subprocess.Popen[bytes], manager: Manager) -> None:
    reader, writer = os.pipe()
    manager.store(f"qemu.{POD}.1", reader)
    manager.store("something-else", writer)
    with Process.open(process.pid) as other:
        manager.store("pr-helper", other.fd)
    os.close(reader)
    os.close(writer)
    before = len(os.listdir("/proc/self/fd"))
    assert FdStore(manager).adopt(manager.give()) == {}
    assert manager.kept == {}
    assert len(os.listdir("/proc/self/fd")) == before - 3


NAMES = st.text(max_size=10) | st.builds("{}{}{}{}".format, st.sampled_from(["qemu.", "qemu", ""]), st.sampled_from(
    [POD, OTHER, "", "."]), st.sampled_from([".", ""]), st.sampled_from(["1", "-1", "", "x"]))  # fmt: skip


@given(st.lists(st.tuples(NAMES, st.booleans()), unique_by=lambda given: given[0]))
def test_whatever_the_names_nothing_is_kept_that_nobody_owns(stored: list[tuple[str, bool]]) -> None:
    manager = Manager()
    with Process.open(os.getpid()) as ours, open("/dev/null", "rb") as other:
        for name, is_process in stored:
            manager.store(name, ours.fd if is_process else other.fileno())
        before = len(os.listdir("/proc/self/fd"))
        found = FdStore(manager).adopt(manager.give())
        adopted = [process for processes in found.values() for process in processes]
        assert "" not in found
        assert len(adopted) == len(manager.kept) == len([name for name in manager.kept if name.startswith("qemu.")])
        # Gone are those that were dropped there; those given to us are closed or adopted.
        assert len(os.listdir("/proc/self/fd")) == before - (len(stored) - len(manager.kept)) + len(adopted)
        for process in adopted:
            assert process.alive()
            process.close()
    manager.close()


async def test_holders_that_ended_before_they_could_be_watched_have_freed_their_layer() -> None:
    with sleeper() as process:
        pass
    freed, layer = Freed(), held_by(process.pid)
    watch = HolderWatch(freed)
    watch.watch(POD, [layer])
    await eventually(lambda: freed == [(POD, layer.target.path)])
    watch.close()
