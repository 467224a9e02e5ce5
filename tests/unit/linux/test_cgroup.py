from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hostd.linux import cgroup
from hostd.linux.cgroup import Hierarchy, Population, PopulationWatch
from tests.support.wait import until

ROOT = b"/sys/fs/cgroup"
FOUND = cgroup.hierarchies(ROOT)
UNIFIED = next((found.path for found in FOUND if found.unified), None)
PIDS = next((found.path for found in FOUND if found.controllers == "pids"), None)
MEMORY = next((found.path for found in FOUND if found.controllers == "memory"), None)
needs_unified = pytest.mark.skipif(UNIFIED is None, reason="no cgroup2 here")
needs_pids = pytest.mark.skipif(PIDS is None, reason="no cgroup v1 with pids here")
needs_memory = pytest.mark.skipif(MEMORY is None, reason="no cgroup v1 with memory here")


def made(parent: bytes) -> Iterator[bytes]:
    path = parent + b"/hostd-test-" + secrets.token_hex(4).encode()
    os.mkdir(path)
    try:
        yield path
    finally:
        for directory, _, _ in os.walk(path, topdown=False):
            until(lambda directory=directory: removed(directory))  # type: ignore[misc]


def removed(directory: bytes) -> bool:
    """A process that has just died may keep its cgroup for a moment."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@pytest.fixture(
    params=[pytest.param(UNIFIED, marks=needs_unified), pytest.param(PIDS, marks=needs_pids)], ids=["v2", "v1"]
)
def group(request: pytest.FixtureRequest) -> Iterator[bytes]:
    yield from made(request.param)


@pytest.fixture
def unified() -> Iterator[bytes]:
    assert UNIFIED is not None
    yield from made(UNIFIED)


@pytest.fixture
def start() -> Iterator[Callable[[bytes], subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []

    def begin(path: bytes) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "1000"])
        children.append(child)
        Path(os.fsdecode(path), "cgroup.procs").write_text(str(child.pid))
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()


Start = Callable[[bytes], "subprocess.Popen[bytes]"]


def test_hierarchies_are_those_of_proc() -> None:
    told = {line.split(":")[1] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    assert {found.controllers for found in FOUND} == told
    assert [found.unified for found in FOUND] == [found.controllers == "" for found in FOUND]
    assert all(os.path.isdir(found.path) and not os.path.islink(found.path) for found in FOUND)


def test_a_directory_of_a_hierarchy_is_one_itself(group: bytes) -> None:
    unified = group.startswith(UNIFIED or b"?")
    assert cgroup.hierarchies(group) == [Hierarchy(group, unified, "" if unified else "pids")]


def test_other_roots(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "cpu").symlink_to(os.fsdecode(FOUND[0].path))
    (tmp_path / "file").touch()
    assert cgroup.hierarchies(os.fsencode(tmp_path)) == []
    with pytest.raises(FileNotFoundError):
        cgroup.hierarchies(os.fsencode(tmp_path / "missing"))


def test_life_and_death(group: bytes, start: Start) -> None:
    deep = group + b"/a/b"
    assert cgroup.population(group) is Population.EMPTY
    os.makedirs(deep)
    assert cgroup.population(group) is Population.EMPTY
    first, second = start(deep), start(group)
    assert cgroup.population(group) is cgroup.population(deep) is Population.POPULATED
    assert cgroup.processes(group) == sorted([first.pid, second.pid])
    assert cgroup.processes(deep) == [first.pid]
    second.kill()
    second.wait()
    assert cgroup.population(group) is Population.POPULATED
    first.kill()
    # Not waited for: a zombie is nobody's life.
    until(lambda: cgroup.population(group) is Population.EMPTY)
    assert cgroup.processes(group) == []
    assert first.wait() == -signal.SIGKILL
    until(lambda: removed(deep))
    assert cgroup.population(deep) is Population.GONE
    assert cgroup.processes(deep) == []
    assert cgroup.population(group + b"/never/there") is Population.GONE


def test_a_census_is_the_same_whether_its_file_stays_open_or_not(group: bytes, start: Start) -> None:
    os.mkdir(pod := group + b"/pod")

    def told() -> tuple[Population, list[int]]:
        assert kept.census() == closed.census() == cgroup.census(pod)
        return cgroup.census(pod)

    with cgroup.Group(pod) as kept, cgroup.Group(pod) as closed:
        closed.close()
        assert (kept.fileno() >= 0) == group.startswith(UNIFIED or b"?"), "only version 2 has the file"
        assert told() == (Population.EMPTY, [])
        child = start(pod)
        assert told() == (Population.POPULATED, [child.pid])
        child.kill()
        child.wait()
        until(lambda: cgroup.population(pod) is Population.EMPTY)
        assert told() == (Population.EMPTY, [])
        until(lambda: removed(pod))
        assert told() == (Population.GONE, [])
        os.mkdir(pod)
        assert told() == (Population.EMPTY, []), "the one that has its name now"
        child = start(pod)
        assert told() == (Population.POPULATED, [child.pid])
        child.kill()
        child.wait()


def test_a_census_of_what_may_not_be_read_is_an_error(group: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with cgroup.Group(group) as kept:
        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(os, "pread", refuse)
        for ask in (kept.census, lambda: cgroup.census(group)):
            with pytest.raises(PermissionError):
                ask()


def test_no_cgroup_is_not_empty(tmp_path: Path) -> None:
    """Else a wrong configuration would read as everybody's death."""
    assert cgroup.population(os.fsencode(tmp_path)) is Population.UNREADABLE
    (tmp_path / "cgroup.events").write_text("frozen 0\n")
    assert cgroup.population(os.fsencode(tmp_path)) is Population.UNREADABLE
    (tmp_path / "file").touch()
    assert cgroup.population(os.fsencode(tmp_path / "file")) is Population.UNREADABLE


@pytest.mark.parametrize("name", ["cgroup.events", "cgroup.procs"])
def test_what_may_not_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "cgroup.procs").touch()
    real = os.open

    def refuse(path: bytes, flags: int) -> int:
        if path.endswith(name.encode()):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert cgroup.population(os.fsencode(tmp_path)) is Population.UNREADABLE


def test_a_process_out_of_sight_is_life(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("0\n0\n")
    assert cgroup.population(os.fsencode(tmp_path)) is Population.POPULATED
    assert cgroup.processes(os.fsencode(tmp_path)) == []


@needs_unified
def test_the_root_has_no_events() -> None:
    assert UNIFIED is not None
    assert cgroup.population(UNIFIED) is Population.POPULATED
    assert os.getpid() in cgroup.processes(UNIFIED)


@needs_unified
def test_threaded_children(unified: bytes, start: Start) -> None:
    threaded = unified + b"/threaded"
    os.mkdir(threaded)
    Path(os.fsdecode(threaded), "cgroup.type").write_text("threaded")
    child = start(unified)
    Path(os.fsdecode(threaded), "cgroup.threads").write_text(str(child.pid))
    with pytest.raises(OSError, match="not supported"):
        Path(os.fsdecode(threaded), "cgroup.procs").read_text()
    assert cgroup.processes(unified) == [child.pid]
    assert cgroup.population(unified) is Population.POPULATED


def test_groups_that_vanish_while_they_are_walked(group: bytes, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"/a", b"/b", b"/c"):
        os.mkdir(group + name)
    child = start(group + b"/c")
    real = os.scandir

    def vanish(path: bytes) -> object:
        entries = real(path)
        if path == group:
            os.rmdir(group + b"/a")
            os.rmdir(group + b"/b")
        return entries

    monkeypatch.setattr(os, "scandir", vanish)
    assert cgroup.processes(group) == [child.pid]


def test_a_group_that_vanishes_before_it_is_listed(group: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir(group + b"/a")
    real = os.scandir

    def vanish(path: bytes) -> object:
        if path == group + b"/a":
            os.rmdir(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert cgroup.processes(group) == []


def test_oom_kills_of_v2(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 3\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert cgroup.oom_kills(os.fsencode(tmp_path)) == 1


def test_oom_kills_of_v1_are_summed(tmp_path: Path) -> None:
    for directory, count in (tmp_path, 1), (tmp_path / "a", 2), (tmp_path / "a" / "b", 0):
        directory.mkdir(exist_ok=True)
        (directory / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")
    assert cgroup.oom_kills(os.fsencode(tmp_path)) == 3


def test_oom_kills_unknown(tmp_path: Path) -> None:
    assert cgroup.oom_kills(os.fsencode(tmp_path)) is None
    assert cgroup.oom_kills(os.fsencode(tmp_path / "missing")) is None
    (tmp_path / "memory.events").write_text("low 0\noom_kill max\n\nx\n")
    assert cgroup.oom_kills(os.fsencode(tmp_path)) is None


@needs_memory
def test_oom_kills_of_the_kernel() -> None:
    assert MEMORY is not None
    for path in made(MEMORY):
        os.mkdir(path + b"/a")
        assert cgroup.oom_kills(path) == 0
        Path(os.fsdecode(path), "a", "memory.limit_in_bytes").write_text("8M")
        eat = 'echo $$ > "$0/cgroup.procs"; exec tail /dev/zero'
        with subprocess.Popen(["sh", "-c", eat, os.fsdecode(path + b"/a")]) as child:
            assert child.wait() == -signal.SIGKILL
        assert cgroup.oom_kills(path) == 1


@needs_unified
async def test_watch(unified: bytes, start: Start) -> None:
    """An event each for the first and for the last process; nothing in between, and no spinning."""
    told: asyncio.Queue[list[bytes]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    os.mkdir(unified + b"/a")
    with closing(PopulationWatch(unified)) as watch:
        loop.add_reader(watch.fileno(), lambda: told.put_nowait(watch.drain()))
        assert await asyncio.wait_for(told.get(), 20) == [unified]
        child = start(unified + b"/a")
        assert await asyncio.wait_for(told.get(), 20) == [unified]
        second = start(unified)
        second.kill()
        second.wait()
        child.kill()
        assert await asyncio.wait_for(told.get(), 20) == [unified]
        assert cgroup.population(unified) is Population.EMPTY
        for _ in range(50):
            await asyncio.sleep(0)
        assert told.empty()
        loop.remove_reader(watch.fileno())


@needs_unified
def test_watch_of_many_and_of_the_removed(unified: bytes, start: Start) -> None:
    paths = [unified + b"/a", unified + b"/b", unified + b"/c"]
    for path in paths:
        os.mkdir(path)
    before = len(os.listdir("/proc/self/fd"))
    with closing(PopulationWatch(*paths[:2])) as watch:
        watch.add(paths[2])
        watch.add(paths[2])
        assert sorted(watch.drain()) == paths
        assert watch.drain() == []
        child = start(paths[1])
        assert watch.drain() == [paths[1]]
        child.kill()
        child.wait()
        until(lambda: removed(paths[1]))
        assert watch.drain() == [paths[1]]
        assert watch.drain() == []
        watch.remove(paths[1])
        watch.remove(paths[0])
        start(paths[0])
        assert watch.drain() == []
        start(paths[2])
        assert watch.drain() == [paths[2]]
    assert len(os.listdir("/proc/self/fd")) == before


@needs_unified
def test_watch_refuses_what_has_no_events(unified: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for missing in (unified + b"/missing", UNIFIED or b"", PIDS or b"/"):
        with pytest.raises(FileNotFoundError):
            PopulationWatch(unified, missing)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_unified
def test_watch_closes_once(unified: bytes) -> None:
    watch = PopulationWatch(unified)
    assert not os.get_inheritable(watch.fileno())
    watch.close()
    watch.close()
