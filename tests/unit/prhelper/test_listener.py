from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.linux.pidfd import Process
from hostd.prhelper.listener import Listener, clients, holders, recover

# Holds what it got as stdin on fd 3, as a helper does, and as many accepted connections as come.
_HOLDER = """
import os, socket, sys
os.dup2(0, 3)
listener = socket.socket(fileno=3)
print("ready", flush=True)
kept = []
while True:
    kept.append(listener.accept())
    print("accepted", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path / "pr.sock")


@pytest.fixture
def listener(path: bytes) -> Iterator[Listener]:
    made = Listener.create(path)
    yield made
    made.close()


@pytest.fixture
def holder(listener: Listener) -> Iterator[subprocess.Popen[bytes]]:
    listener.socket.setblocking(True)
    process = subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=listener.socket.fileno(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_it_listens_without_blocking(path: bytes, listener: Listener) -> None:
    assert listener.socket.getblocking() is False
    assert listener.socket.get_inheritable() is False
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_whole_node_of_vms_may_queue(path: bytes, listener: Listener) -> None:
    """They all connect at once, while the helper is being replaced."""
    socks = [socket.socket(socket.AF_UNIX) for _ in range(128)]
    try:
        for sock in socks:
            sock.setblocking(False)
            sock.connect(path)
    finally:
        for sock in socks:
            sock.close()


def test_a_path_that_is_taken_stays_taken(path: bytes, listener: Listener) -> None:
    before = os.lstat(path).st_ino
    with pytest.raises(OSError, match="in use"):
        Listener.create(path)
    assert os.lstat(path).st_ino == before


def test_who_holds_it_is_found_and_gives_it_back(listener: Listener, holder: subprocess.Popen[bytes]) -> None:
    number = listener.number
    assert holders(number) == [holder.pid]
    assert holders(number + 1_000_000_000) == []
    with Process.open(holder.pid) as process:
        copy = recover(process.fd, listener.inode, number)
        assert copy.number == number
        assert copy.socket.get_inheritable() is False
        copy.close()
        with pytest.raises(OSError, match="another socket"):
            recover(process.fd, listener.inode, number + 1)


def test_a_dead_holder_gives_nothing(listener: Listener, holder: subprocess.Popen[bytes]) -> None:
    with Process.open(holder.pid) as process:
        holder.kill()
        holder.wait()
        with pytest.raises(ProcessLookupError):
            recover(process.fd, listener.inode, listener.number)


def test_clients_are_counted(path: bytes, holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdout is not None
    assert clients(holder.pid) == 0
    socks = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for number, sock in enumerate(socks, 1):
        sock.connect(path)
        assert holder.stdout.readline() == b"accepted\n"
        assert clients(holder.pid) == number
    for sock in socks:
        sock.close()


def test_the_dead_have_no_clients() -> None:
    assert clients(2**22 + 1) == 0


def test_not_knowing_is_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(_: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", no_descriptor)
    assert clients(os.getpid()) is None
