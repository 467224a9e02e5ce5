from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.prhelper import path as paths
from hostd.prhelper import rival as rivals
from hostd.prhelper.path import Sight
from hostd.prhelper.rival import Rival
from tests.support.wait import eventually

_LISTEN = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(4)
print("ready", flush=True)
while True:
    kept, _ = listener.accept()
    try:
        kept.send(bytes(4))
    except BrokenPipeError:
        pass
"""


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path / "pr.sock")


@pytest.fixture
def other(path: bytes) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _LISTEN, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


class Gone:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def watched(rival: Rival) -> bool:
    return rival.watched


@pytest.mark.parametrize("as_helper", [True, False], ids=["by its process", "by a connection"])
async def test_its_end_is_told_once(
    path: bytes, other: subprocess.Popen[bytes], as_helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sight = paths.look(path)
    assert sight.pid == other.pid
    if as_helper:
        with open(f"/proc/{other.pid}/comm") as file:
            monkeypatch.setattr(rivals, "_HELPER", file.read().strip())
    gone = Gone()
    rival = Rival(path, sight, gone)
    assert watched(rival)
    other.kill()
    other.wait()
    await eventually(lambda: gone.times, why="its end was told")
    assert not watched(rival)
    rival.close()
    assert gone.times == 1


async def test_a_pid_that_is_anothers_by_now_is_not_trusted(path: bytes, other: subprocess.Popen[bytes]) -> None:
    """The one that listened first is dead, and its number went to a process that has nothing to do with it."""
    sight = paths.look(path)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        gone = Gone()
        rival = Rival(path, Sight(sight.kind, sight.inode, stranger.pid), gone)
        assert watched(rival)
        other.kill()
        other.wait()
        await eventually(lambda: gone.times, why="the listener's end was told")
    finally:
        stranger.kill()
        stranger.wait()


async def test_one_that_is_gone_already_is_not_watched(path: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    rival = Rival(path, paths.look(path), Gone())
    assert not watched(rival)
    assert rival.name == "unknown"
    rival.close()
