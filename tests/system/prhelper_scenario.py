"""Run inside a systemd of its own by test_prhelper_systemd: the helper under hostd's units, from beginning to end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hostd.config import Backend, PRHelper
from hostd.prhelper.supervisor import Supervisor
from tests.support.prhelper import PROGRAM, Client, Rival, attributes, new_helper, reaches, serves
from tests.support.wait import DEADLINE, eventually

SOCKET, SERVICE = "hostd-pr-helper.socket", "hostd-pr-helper.service"
TOP = "/run/scenario"


def active(unit: str) -> str:
    return subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False).stdout.strip()


def supervisor(config: PRHelper) -> Supervisor:
    return Supervisor(config, f"{TOP}/state".encode(), f"{TOP}/run".encode(), interval=0.5)


async def served(path: bytes) -> float:
    begin = time.monotonic()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(path)
        assert len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4), DEADLINE)) == 4
    return time.monotonic() - begin


async def life(config: PRHelper) -> None:
    path = config.socket
    helper = supervisor(config)
    await helper.start()
    assert helper.status.state == "disabled"
    await helper.enable()
    assert helper.status.state == "ready", helper.status
    assert (active(SOCKET), active(SERVICE)) == ("active", "active")
    assert attributes(path) == (*config.owner, config.mode)
    assert attributes(os.path.dirname(path)) == (*config.owner, 0o755)
    assert (await helper.probe())["Sense"] == "0b/00/06"

    before, times = os.stat(path).st_ino, []
    for _ in range(5):
        old = helper.status.main_pid
        os.kill(old, signal.SIGKILL)
        times.append(await served(path))
        await new_helper(helper, old)
    assert os.stat(path).st_ino == before
    assert helper.status.restarts == 5
    print(f"served after a kill: median {statistics.median(times) * 1e3:.0f} ms, worst {max(times) * 1e3:.0f} ms")

    old = helper.status.main_pid
    await helper.restart()
    assert helper.status.main_pid not in (0, old)
    assert helper.status.restarts == 5

    old = helper.status.main_pid
    os.kill(old, signal.SIGSTOP)
    await new_helper(helper, old)
    assert "did not" in helper.status.last_failure

    pid = helper.status.main_pid
    with Client(path).greet() as client:
        await helper.close()
        helper = supervisor(config)
        await helper.start()
        await reaches(helper, "ready")
        assert helper.status.main_pid == pid, "the helper outlives hostd"
        with Rival(path) as rival:
            await reaches(helper, "standby")
            assert helper.status.owner_pid == rival.pid
            assert client.works(), "those who are connected keep their helper"
            assert (active(SOCKET), active(SERVICE)) == ("inactive", "active")
            rival.end(signal.SIGKILL)
            await reaches(helper, "ready")
            assert serves(path)
    with Rival(path) as rival:
        await reaches(helper, "standby")
        await eventually(lambda: active(SERVICE) == "inactive", why="nobody needs the helper")
        rival.end(signal.SIGTERM)
        await reaches(helper, "ready")

    subprocess.run(["systemctl", "stop", SOCKET], check=True)
    old = helper.status.main_pid
    os.kill(old, signal.SIGKILL)
    await new_helper(helper, old)
    subprocess.run(["systemctl", "daemon-reexec"], check=True)
    await helper.disable()
    assert (active(SOCKET), active(SERVICE)) == ("inactive", "inactive")
    assert os.listdir(os.path.dirname(path)) == []
    await helper.close()


async def elsewhere(config: PRHelper) -> None:
    helper = supervisor(config)
    await helper.start()
    await helper.enable()
    assert helper.status.state == "ready", helper.status
    assert attributes(config.socket) == (*config.owner, config.mode)
    assert serves(config.socket)
    await helper.disable()
    await helper.close()


async def crash_loop(config: PRHelper) -> None:
    program = Path(f"{TOP}/qemu-pr-helper")
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    drop_in = Path(f"/run/systemd/system/{SERVICE}.d/program.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(f"[Service]\nExecStart=\nExecStart={program}\n")
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    helper = supervisor(config)
    await helper.start()
    await helper.enable()
    await reaches(helper, "backing-off", lambda: active(SOCKET) == "inactive")
    await eventually(lambda: active(SERVICE) in ("inactive", "failed"), why="systemd does not go on either")
    program.unlink()
    await reaches(helper, "failed")
    assert str(program) in helper.status.why
    program.symlink_to(PROGRAM)
    await reaches(helper, "ready")
    await helper.disable()
    await helper.close()
    drop_in.unlink()
    subprocess.run(["systemctl", "daemon-reload"], check=True)


async def main() -> None:
    # `auto` finds systemd, and the path that the unit has needs no drop-in.
    await life(PRHelper(backend=Backend.AUTO))
    assert not os.path.exists(f"/run/systemd/system/{SOCKET}.d")
    await elsewhere(PRHelper(socket=b"/run/50%/pr/x.sock", owner=(4711, 4712), mode=0o600, backend=Backend.SYSTEMD))
    await crash_loop(PRHelper(backend=Backend.SYSTEMD))
    print("done")


if __name__ == "__main__":
    os.makedirs(f"{TOP}/run")
    sys.exit(asyncio.run(main()))
