"""What is told of a pod's directory of device nodes: once for any number of changes, and none of them is missed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from hostd.core.nodes import BlockNodes
from hostd.core.survey import Survey
from hostd.kubevirt.targets import Target
from hostd.linux import libc
from hostd.linux.inotify import Inotify
from hostd.linux.worker import _CAME_OR_WENT
from tests.support.core import POD, a_target, a_vm
from tests.support.wait import eventually


class Looks:
    """A survey of one directory, whose files are its device nodes."""

    def __init__(self, directory: Path, inotify: Inotify | None) -> None:
        self.directory = directory
        self.inotify = inotify
        self.count = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def block_nodes(self, pod_uid: str) -> tuple[list[Target], int] | None:
        assert pod_uid == POD
        self.count += 1
        watch = self.inotify.add(os.fsencode(self.directory), _CAME_OR_WENT) if self.inotify else -1
        names = sorted(os.listdir(self.directory))
        if self.meanwhile:
            await self.meanwhile()
        return [a_target(b"hotplug-disks/" + name.encode(), block=True) for name in names], watch


class Bench:
    """A directory, and who is told of it."""

    def __init__(self, directory: Path, inotify: Inotify | None) -> None:
        self.looks = Looks(directory, inotify)
        self.told: list[str] = []
        self.nodes = BlockNodes(cast("Survey", self.looks), inotify, self.told.append)
        self.vm = a_vm()

    def touch(self, *names: str) -> None:
        for name in names:
            (self.looks.directory / name).touch()

    def names(self) -> list[str]:
        return [os.path.basename(path).decode() for path in self.vm.layers]


@pytest.fixture
def inotify() -> Iterator[Inotify]:
    with Inotify() as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.core.nodes._AFTER", 20_000)
    monkeypatch.setattr("hostd.core.nodes._SHARE", 0)


async def test_any_number_of_changes_is_told_once_until_somebody_looks(tmp_path: Path, inotify: Inotify) -> None:
    bench = Bench(tmp_path, inotify)
    assert await bench.nodes.look(bench.vm)
    bench.touch("one", "two")
    await eventually(lambda: bench.told == [POD])
    bench.touch("three")
    await asyncio.sleep(0.1)
    assert bench.told == [POD]
    assert await bench.nodes.look(bench.vm)
    assert bench.names() == ["one", "three", "two"]
    (tmp_path / "two").unlink()
    await eventually(lambda: bench.told == [POD, POD])
    await bench.nodes.look(bench.vm)
    assert bench.names() == ["one", "three"]
    bench.nodes.close()


async def test_a_change_while_it_is_looked_is_not_missed(tmp_path: Path, inotify: Inotify) -> None:
    """Its notice comes before it is known whose watch it is."""
    bench = Bench(tmp_path, inotify)

    async def meanwhile() -> None:
        bench.touch("late")
        await asyncio.sleep(0.05)

    bench.looks.meanwhile = meanwhile
    await bench.nodes.look(bench.vm)
    assert bench.names() == []
    await eventually(lambda: bench.told == [POD])
    bench.looks.meanwhile = None
    await bench.nodes.look(bench.vm)
    assert bench.names() == ["late"]
    bench.nodes.close()


async def test_a_watch_that_nobody_speaks_for_is_not_remembered(tmp_path: Path, inotify: Inotify) -> None:
    """A worker watches a directory twice where there are nodes, and the first watch may have ended meanwhile."""
    bench = Bench(tmp_path, inotify)

    async def meanwhile() -> None:
        bench.touch("late")
        inotify.add(os.fsencode(tmp_path / "late"), _CAME_OR_WENT & ~libc.IN_ONLYDIR)
        (tmp_path / "late").unlink()
        await eventually(lambda: len(bench.nodes._ended) == 2)

    bench.looks.meanwhile = meanwhile
    await bench.nodes.look(bench.vm)
    assert bench.nodes._ended == set()
    bench.nodes.close()


async def test_the_end_of_the_directory_is_a_change(tmp_path: Path, inotify: Inotify) -> None:
    directory = tmp_path / "hotplug-disks"
    directory.mkdir()
    bench = Bench(directory, inotify)
    await bench.nodes.look(bench.vm)
    directory.rmdir()
    await eventually(lambda: bench.told == [POD])
    bench.nodes.close()


async def test_of_a_pod_that_was_forgotten_nothing_is_told(tmp_path: Path, inotify: Inotify) -> None:
    bench = Bench(tmp_path, inotify)
    await bench.nodes.look(bench.vm)
    bench.nodes.forget(POD)
    bench.touch("one")
    await asyncio.sleep(0.1)
    assert bench.told == []
    assert (bench.nodes._watched, bench.nodes._ended) == ({}, set())
    bench.nodes.close()


async def test_a_watch_that_has_ended_is_not_ended_again(tmp_path: Path, inotify: Inotify) -> None:
    bench = Bench(tmp_path, inotify)
    await bench.nodes.look(bench.vm)
    bench.touch("one")
    await eventually(lambda: bench.told == [POD])
    bench.nodes.forget(POD)
    assert (bench.nodes._watched, bench.nodes._watches) == ({}, {})
    bench.nodes.close()


async def test_nothing_is_kept_of_a_pod_that_is_forgotten_while_it_is_looked_at(
    tmp_path: Path, inotify: Inotify
) -> None:
    bench = Bench(tmp_path, inotify)

    async def meanwhile() -> None:
        bench.nodes.forget(POD)

    bench.looks.meanwhile = meanwhile
    assert await bench.nodes.look(bench.vm)
    assert bench.names() == []
    await eventually(lambda: (bench.nodes._watched, bench.nodes._watches) == ({}, {}))
    assert (bench.nodes._vms, bench.nodes._took) == ({}, {})
    bench.touch("one")
    await asyncio.sleep(0.1)
    assert bench.told == []
    bench.nodes.close()


async def test_a_pod_that_is_met_again_meanwhile_keeps_its_watch(tmp_path: Path, inotify: Inotify) -> None:
    bench = Bench(tmp_path, inotify)

    async def meanwhile() -> None:
        bench.looks.meanwhile = None
        bench.nodes.forget(POD)
        await bench.nodes.look(a_vm())

    bench.looks.meanwhile = meanwhile
    assert await bench.nodes.look(bench.vm)
    bench.touch("one")
    await eventually(lambda: bench.told == [POD])
    bench.nodes.close()


async def test_a_look_that_failed_is_tried_again(
    tmp_path: Path, inotify: Inotify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch has told, and tells no more until somebody has looked."""
    monkeypatch.setattr("hostd.core.nodes._AGAIN", 30_000)
    bench = Bench(tmp_path, inotify)
    await bench.nodes.look(bench.vm)
    bench.touch("one")
    await eventually(lambda: bench.told == [POD])

    async def unreadable(_: str) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(bench.looks, "block_nodes", unreadable)
        assert not await bench.nodes.look(bench.vm)
    await eventually(lambda: bench.told == [POD, POD])
    await bench.nodes.look(bench.vm)
    assert bench.names() == ["one"]
    bench.nodes.close()


async def test_without_inotify_looks_alone_tell(tmp_path: Path) -> None:
    bench = Bench(tmp_path, None)
    await bench.nodes.look(bench.vm)
    bench.touch("one")
    await bench.nodes.look(bench.vm)
    assert bench.names() == ["one"]
    bench.nodes.close()
