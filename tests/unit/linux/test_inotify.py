from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.linux import inotify, libc
from hostd.linux.inotify import Event, Inotify

TREE = libc.IN_CREATE | libc.IN_DELETE | libc.IN_MOVED_FROM | libc.IN_MOVED_TO | libc.IN_ONLYDIR | libc.IN_DELETE_SELF


@pytest.fixture
def watcher() -> Iterator[Inotify]:
    with Inotify() as opened:
        yield opened


def readable(watcher: Inotify) -> bool:
    return bool(select.select([watcher.fileno()], [], [], 0)[0])


def test_what_happens_in_a_directory(tmp_path: Path, watcher: Inotify) -> None:
    wd = watcher.add(os.fsencode(tmp_path), TREE)
    assert watcher.read() == []
    assert not readable(watcher)
    (tmp_path / "pod").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff file")).touch()
    (tmp_path / "pod").rename(tmp_path / "pod2")
    (tmp_path / "pod2").rmdir()
    assert readable(watcher)
    assert watcher.read() == [
        Event(wd, libc.IN_CREATE | libc.IN_ISDIR, b"pod"),
        Event(wd, libc.IN_CREATE, b"\xff file"),
        Event(wd, libc.IN_MOVED_FROM | libc.IN_ISDIR, b"pod"),
        Event(wd, libc.IN_MOVED_TO | libc.IN_ISDIR, b"pod2"),
        Event(wd, libc.IN_DELETE | libc.IN_ISDIR, b"pod2"),
    ]
    assert watcher.read() == []


def test_a_directory_that_goes_ends_its_watch(tmp_path: Path, watcher: Inotify) -> None:
    directory = tmp_path / "pod"
    directory.mkdir()
    wd = watcher.add(os.fsencode(directory), TREE)
    directory.rmdir()
    assert [(event.wd, event.mask & ~libc.IN_ISDIR) for event in watcher.read()] == [
        (wd, libc.IN_DELETE_SELF),
        (wd, libc.IN_IGNORED),
    ]
    watcher.remove(wd)


def test_remove(tmp_path: Path, watcher: Inotify) -> None:
    wd = watcher.add(os.fsencode(tmp_path), TREE)
    watcher.remove(wd)
    (tmp_path / "x").touch()
    assert watcher.read() == [Event(wd, libc.IN_IGNORED, b"")]


def test_the_same_inode_is_the_same_watch(tmp_path: Path, watcher: Inotify) -> None:
    assert watcher.add(os.fsencode(tmp_path), TREE) == watcher.add(os.fsencode(tmp_path) + b"/.", TREE)


def test_add_tells_what_is_wrong(tmp_path: Path, watcher: Inotify) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        watcher.add(os.fsencode(tmp_path / "missing"), TREE)
    assert missing.value.filename == os.fsencode(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        watcher.add(os.fsencode(tmp_path / "file"), TREE)


def test_overflow_is_an_event(tmp_path: Path, watcher: Inotify) -> None:
    watcher.add(os.fsencode(tmp_path), libc.IN_ATTRIB)
    bound = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    paths = [os.fsencode(tmp_path / name) for name in "ab"]
    for path in paths:
        os.close(os.open(path, os.O_CREAT))
    # Two names in turn, for the kernel folds equal events into one.
    for number in range(bound + 10):
        os.chmod(paths[number % 2], 0o600)
    events: list[Event] = []
    while more := watcher.read():
        events += more
    assert events[-1] == Event(-1, libc.IN_Q_OVERFLOW, b"")
    assert len(events) == bound + 1


def test_descriptor(watcher: Inotify) -> None:
    assert not os.get_inheritable(watcher.fileno())
    assert not os.get_blocking(watcher.fileno())
    watcher.close()
    watcher.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        watcher.add(b"/", TREE)


NAMES = st.binary(max_size=20).map(lambda name: name.replace(b"\0", b""))
EVENTS = st.lists(st.builds(Event, st.integers(-1, 2**31 - 1), st.integers(0, 2**32 - 1), NAMES))


@given(EVENTS, st.integers(0, 16))
def test_parse(events: list[Event], padding: int) -> None:
    data = b""
    for event in events:
        name = event.name + b"\0" * padding
        data += inotify._HEADER.pack(event.wd, event.mask, 0, len(name)) + name
    assert inotify.parse(data) == events
