from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostd.linux import libc
from hostd.prhelper.watch import DirectoryWatch
from tests.support.wait import eventually


def watching(seen: Seen) -> bool:
    return seen.watch.watching


class Seen:
    """A watch, and how often it called."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.watch = DirectoryWatch(os.fsencode(path), self._on_change)

    def _on_change(self) -> None:
        self.count += 1

    async def more(self) -> None:
        before = self.count
        await eventually(lambda: self.count > before, why="the change was told")


@pytest.fixture
async def seen(tmp_path: Path) -> AsyncIterator[Seen]:
    (tmp_path / "pr").mkdir()
    made = Seen(tmp_path / "pr/pr.sock")
    yield made
    made.watch.close()


async def test_nothing_is_watched_before_the_first_look(seen: Seen, tmp_path: Path) -> None:
    assert not watching(seen)
    (tmp_path / "pr/pr.sock").touch()
    await asyncio.sleep(0)
    assert seen.count == 0
    seen.watch.look()
    assert watching(seen)
    assert seen.count == 1, "what came before the watch was told to nobody"
    seen.watch.look()
    assert seen.count == 1


async def test_changes_of_the_path_are_told(seen: Seen, tmp_path: Path) -> None:
    seen.watch.look()
    path = tmp_path / "pr/pr.sock"
    path.touch()
    await seen.more()
    path.chmod(0o600)
    await seen.more()
    path.unlink()
    await seen.more()
    (tmp_path / "pr").chmod(0o700)
    await seen.more()


async def test_other_names_are_not(seen: Seen, tmp_path: Path) -> None:
    seen.watch.look()
    before = seen.count
    (tmp_path / "pr/multipathd.socket").touch()
    (tmp_path / "pr/pr.sock").touch()
    await seen.more()
    (tmp_path / "pr/multipathd.socket").unlink()
    await asyncio.sleep(0)
    assert seen.count == before + 1


async def test_a_directory_that_goes_is_told_and_the_next_one_watched(seen: Seen, tmp_path: Path) -> None:
    seen.watch.look()
    (tmp_path / "pr").rename(tmp_path / "old")
    await seen.more()
    assert not watching(seen)
    seen.watch.look()
    assert not watching(seen)
    (tmp_path / "pr").mkdir()
    seen.watch.look()
    assert watching(seen)
    (tmp_path / "pr/pr.sock").touch()
    await seen.more()


async def test_no_watch_left_is_said_once(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(libc, "inotify_add_watch", full)
    seen.watch.look()
    seen.watch.look()
    assert not watching(seen)
    assert caplog.text.count("cannot be watched") == 1
