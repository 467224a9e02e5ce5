"""Beside KubeVirt's own helper, which unlinks whatever is at the path and binds: stand by, take over, yield."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hostd.prhelper.listener import Listener
from tests.support.prhelper import PROGRAM, Client, Home, Rival, attributes, reaches, serves
from tests.support.wait import DEADLINE, eventually, until

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"needs {PROGRAM}"),
]


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as made:
        os.makedirs(made.directory)
        yield made


@pytest.mark.parametrize(
    ("how", "pod"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGKILL, True)],
    ids=["killed", "ended", "with its pod"],
)
async def test_hostd_stands_by_and_takes_over(home: Home, how: signal.Signals, pod: bool) -> None:
    """SIGKILL leaves a stale socket behind, SIGTERM removes it."""
    with Rival(home.path, pod=pod) as rival:
        async with home.running(enable=False) as supervisor:
            await supervisor.enable()
            status = supervisor.status
            assert (status.state, status.owner_pid, status.main_pid) == ("standby", rival.pid, 0)
            assert f"process {rival.pid} (qemu-pr-helper)" in status.why
            before = os.stat(home.path).st_ino
            with Client(home.path).greet() as client:
                assert (await supervisor.probe())["OwnerPID"] == rival.pid
                assert client.works()
            assert os.stat(home.path).st_ino == before
            rival.end(how)
            gone = time.monotonic()
            await eventually(lambda: os.path.lexists(home.path) and serves(home.path), why="hostd serves the path")
            assert time.monotonic() - gone < 1
            await reaches(supervisor, "ready")
            assert attributes(home.path) == (107, 107, 0o660)
            assert supervisor.status.last_failure == ""


async def test_hostd_yields_and_those_connected_keep_their_helper(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.prhelper.loop._RETIRED_USEC", 100_000)
    async with home.running() as supervisor:
        ours = supervisor.status.main_pid
        with Client(home.path).greet() as client:
            await eventually(lambda: supervisor.status.clients == 1, why="the client is counted")
            with Rival(home.path) as rival:
                await reaches(supervisor, "standby")
                assert supervisor.status.owner_pid == rival.pid
                assert client.works()
                with Client(home.path).greet() as new:
                    owner = new.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    assert int.from_bytes(owner[:4], sys.byteorder) == rival.pid
                rival.end(signal.SIGKILL)
                await reaches(supervisor, "ready")
                # Both take connections to their ends: the new one has the path, the old one its client.
                assert supervisor.status.main_pid not in (0, ours)
                assert client.works()
                assert serves(home.path)
        await eventually(
            lambda: not os.path.exists(f"/proc/{ours}"), deadline=DEADLINE, why="the old helper goes with its client"
        )
        assert supervisor.status.state == "ready"


async def test_without_clients_hostds_helper_goes_at_once(home: Home) -> None:
    async with home.running() as supervisor:
        ours = supervisor.status.main_pid
        with Rival(home.path):
            await eventually(lambda: not os.path.exists(f"/proc/{ours}"), why="nobody needs it")
            assert supervisor.status.last_failure == ""


async def test_rivals_may_come_and_go(home: Home) -> None:
    """KubeVirt restarts its container again and again."""
    async with home.running() as supervisor:
        for number in range(6):
            with Rival(home.path) as rival:
                await reaches(supervisor, "standby", lambda rival=rival: supervisor.status.owner_pid == rival.pid)  # type: ignore[misc]
                rival.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
            await reaches(supervisor, "ready")
            assert serves(home.path)
        assert (supervisor.status.restarts, supervisor.status.last_failure) == (0, "")


async def test_one_that_binds_between_our_look_and_our_bind_is_no_failure(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Listener.create
    rivals: list[Rival] = []

    def slower(path: bytes) -> Listener:
        if not rivals:
            rivals.append(Rival(path))
        return create(path)

    monkeypatch.setattr(Listener, "create", slower)
    try:
        async with home.running(enable=False) as supervisor:
            await supervisor.enable()
            assert (supervisor.status.state, supervisor.status.last_failure) == ("standby", "")
            assert supervisor.status.owner_pid == rivals[0].pid
    finally:
        for rival in rivals:
            rival.close()


async def test_one_may_take_its_time_between_unlink_and_bind(home: Home) -> None:
    """A socket that hostd made anew in between would make it fail, and KubeVirt's container start again and again."""
    async with home.running() as supervisor:
        os.unlink(home.path)
        await asyncio.sleep(0.1)  # it takes that much
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rival:
            rival.bind(home.path)
            rival.listen()
            await reaches(supervisor, "standby")
        await reaches(supervisor, "ready")


async def test_a_disk_that_is_full_is_said_and_tried_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def full(_: bytes) -> Listener:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(Listener, "create", full)
        async with home.running(enable=False) as supervisor:
            await supervisor.enable()
            assert supervisor.status.state == "backing-off"
            assert os.fsdecode(home.path) in supervisor.status.last_failure
            assert "No space left" in supervisor.status.last_failure
            patch.undo()
            await reaches(supervisor, "ready")


async def test_one_rival_may_take_over_from_another(home: Home) -> None:
    async with home.running(enable=False) as supervisor:
        with Rival(home.path) as first, Rival(home.path) as second:
            await supervisor.enable()
            assert supervisor.status.owner_pid == second.pid
            # It deletes the other one's socket on its way out, so nobody serves the path.
            first.end(signal.SIGTERM)
            await reaches(supervisor, "ready")
            assert serves(home.path)


async def test_our_socket_may_be_removed(home: Home) -> None:
    async with home.running() as supervisor:
        with Client(home.path).greet() as client:
            await eventually(lambda: supervisor.status.clients == 1, why="the client is counted")
            os.unlink(home.path)
            await eventually(lambda: serves(home.path), why="there is a socket again")
            await reaches(supervisor, "ready")
            assert client.works()


_STOPPED = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen(1)
print("listens", flush=True)
time.sleep(300)
"""


async def test_a_rival_that_accepts_nobody_is_not_fought(home: Home) -> None:
    """Its process is no helper by name, so only a connection tells of its end."""
    rival = subprocess.Popen([sys.executable, "-c", _STOPPED, home.path], stdout=subprocess.PIPE)
    try:
        assert rival.stdout is not None
        rival.stdout.readline()
        async with home.running(enable=False) as supervisor:
            await supervisor.enable()
            assert (supervisor.status.state, supervisor.status.owner_pid) == ("standby", rival.pid)
            found = await supervisor.probe()
            assert (found["Answered"], found["OwnerPID"]) == (False, rival.pid)
            rival.kill()
            await reaches(supervisor, "ready")
    finally:
        rival.kill()
        rival.wait()
        assert rival.stdout is not None
        rival.stdout.close()


async def test_disabled_hostd_leaves_the_rival_alone(home: Home) -> None:
    with Rival(home.path) as rival:
        async with home.running(enable=False) as supervisor:
            await supervisor.enable()
            await supervisor.disable()
        assert serves(home.path)
        assert rival.pid


async def test_a_stale_socket_is_replaced(home: Home) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(home.path)
    until(lambda: os.path.lexists(home.path))
    async with home.running():
        assert serves(home.path)
        assert os.listdir(home.directory) == ["pr-helper.sock"]


async def test_ten_times_on_and_off_leaves_nothing(home: Home) -> None:
    """kubevirt #10172: the directory's mounts grew with each time."""
    with open("/proc/self/mountinfo", "rb") as table:
        before = table.read()
    async with home.running(enable=False) as supervisor:
        for _ in range(10):
            await supervisor.enable()
            assert supervisor.status.state == "ready"
            await supervisor.disable()
            assert os.listdir(home.directory) == []
        assert supervisor.status.last_failure == ""
    with open("/proc/self/mountinfo", "rb") as table:
        assert table.read() == before
    assert attributes(home.directory) == (107, 107, 0o755)
