"""Run inside a systemd of its own by test_prhelper_systemd: the helper under hostd's units, from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hostd.config import Backend, PRHelper
from hostd.linux.process import pids, read_comm
from hostd.prhelper import loop
from hostd.prhelper.supervisor import Supervisor
from tests.support.mountns import MS_BIND, mount
from tests.support.prhelper import (
    PROGRAM,
    Client,
    Rival,
    assert_prompt,
    attributes,
    new_helper,
    reaches,
    served_after_kill,
    serves,
)
from tests.support.wait import eventually

SOCKET, SERVICE = "hostd-pr-helper.socket", "hostd-pr-helper.service"
TOP = "/run/scenario"
#: As a node with some dozens of pods has them: it takes long to build a sandbox among them.
MOUNTS = 500


def active(unit: str) -> str:
    return subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False).stdout.strip()


def supervisor(config: PRHelper) -> Supervisor:
    return Supervisor(config, f"{TOP}/state".encode(), f"{TOP}/run".encode(), interval=0.5)


def helpers() -> set[int]:
    """All qemu-pr-helper processes here."""
    found = set()
    for pid in pids():
        with contextlib.suppress(ProcessLookupError):
            if read_comm(pid) == b"qemu-pr-helper":
                found.add(pid)
    return found


def scopes() -> list[str]:
    """Units of helpers that only finish with their clients."""
    command = ["systemctl", "list-units", "--plain", "--no-legend", "hostd-pr-helper-retired-*.scope"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


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
    for _ in range(50):
        # Whether hostd has seen it already or not.
        (old,) = helpers()
        times.append(await served_after_kill(old, path))
    assert os.stat(path).st_ino == before
    assert_prompt(times)
    await reaches(helper, "ready", lambda: {helper.status.main_pid} == helpers())
    assert 0 < helper.status.restarts <= 50
    assert (active(SOCKET), active(SERVICE)) == ("active", "active")

    old, restarts = helper.status.main_pid, helper.status.restarts
    await helper.restart()
    assert helper.status.main_pid not in (0, old)
    assert helper.status.restarts == restarts

    old = helper.status.main_pid
    os.kill(old, signal.SIGSTOP)
    # A whole node of VMs that connect meanwhile.
    clients = [Client(path) for _ in range(128)]
    await new_helper(helper, old)
    assert "was stopped" in helper.status.last_failure
    for each in clients:
        each.greet().close()

    # The shell that starts the next one is stopped.
    old = helper.status.main_pid
    with open(f"/proc/{old}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGSTOP)
    os.kill(old, signal.SIGKILL)
    await new_helper(helper, old)
    assert serves(path)

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
            await eventually(
                lambda: (active(SOCKET), active(SERVICE), len(scopes())) == ("inactive", "inactive", 1),
                why=lambda: f"the helper stands apart: {scopes()}",
            )
            assert client.works(), "those who are connected keep their helper"
            rival.end(signal.SIGKILL)
            begin = time.monotonic()
            await eventually(lambda: serves(path), why="hostd serves the path")
            print(f"taken over within {time.monotonic() - begin:.2f} s")
            await reaches(helper, "ready")
        assert client.works(), "nor does the takeover cut them off"
        assert helper.status.main_pid != pid
        await helper.close()
        helper = supervisor(config)
        await helper.start()
        await reaches(helper, "ready", lambda: helper.status.clients == 1)
        assert client.works(), "and the next hostd knows them"
    await eventually(lambda: not scopes() and len(helpers()) == 1, why="it goes with its last client")
    with Rival(path) as rival:
        await reaches(helper, "standby")
        await eventually(lambda: active(SERVICE) == "inactive", why="nobody needs the helper")
        rival.end(signal.SIGTERM)
        await reaches(helper, "ready")

    old = helper.status.main_pid
    subprocess.run(["systemctl", "stop", SOCKET], check=True)
    os.kill(old, signal.SIGKILL)
    await new_helper(helper, old)
    assert serves(path)
    subprocess.run(["systemctl", "daemon-reexec"], check=True)
    await helper.disable()
    assert (active(SOCKET), active(SERVICE), helpers()) == ("inactive", "inactive", set())
    assert os.listdir(os.path.dirname(path)) == []
    await helper.close()


async def reloaded(config: PRHelper) -> None:
    helper = supervisor(config)
    await helper.start()
    await helper.enable()
    with Client(config.socket).greet() as client:
        for socket_path in (b"/run/50%/pr/x.sock", config.socket):
            old = helper.status.socket_path
            helper.reload(replace(config, socket=socket_path))
            await reaches(helper, "ready", lambda to=socket_path: helper.status.socket_path == os.fsdecode(to))  # type: ignore[misc]
            assert serves(socket_path)
            assert not os.path.lexists(old)
            assert client.works(), "those who are connected do not notice"
        assert not os.path.exists(f"/run/systemd/system/{SOCKET}.d/50-hostd.conf")
    for backend, state in ((Backend.CHILD, "inactive"), (Backend.AUTO, "active")):
        old_pid = helper.status.main_pid
        helper.reload(replace(config, backend=backend))
        await new_helper(helper, old_pid)
        assert (active(SOCKET), active(SERVICE), len(helpers())) == (state, state, 1)
        assert serves(config.socket)
    await helper.disable()
    await helper.close()


async def for_multipath(config: PRHelper) -> None:
    """The drop-in that comes with the package."""
    drop_in = Path(f"/run/systemd/system/{SERVICE}.d/multipath.conf")
    drop_in.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / f"systemd/drop-ins/{SERVICE}.d-multipath.conf", drop_in)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    helper = supervisor(config)
    await helper.start()
    await helper.enable()
    assert helper.status.state == "ready", helper.status
    show = ["systemctl", "show", "--value", "--property=CapabilityBoundingSet", SERVICE]
    assert "cap_sys_admin" in subprocess.run(show, capture_output=True, text=True, check=True).stdout
    namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in (1, helper.status.main_pid)}
    assert len(namespaces) == 1, "multipathd listens on an abstract socket of the host's"
    await helper.disable()
    await helper.close()
    drop_in.unlink()
    subprocess.run(["systemctl", "daemon-reload"], check=True)


async def elsewhere(config: PRHelper) -> None:
    helper = supervisor(config)
    await helper.start()
    await helper.enable()
    assert helper.status.state == "ready", helper.status
    assert attributes(config.socket) == (*config.owner, config.mode)
    assert serves(config.socket)
    await helper.disable()
    await helper.close()


def own_command() -> str:
    """The ExecStart= that the unit comes with."""
    unit = subprocess.run(["systemctl", "cat", SERVICE], capture_output=True, text=True, check=True).stdout
    return next(line for line in unit.replace("\\\n", "").splitlines() if line.startswith("ExecStart="))


@contextlib.contextmanager
def helper_program(command: str, script: str, more: str = "") -> Iterator[Path]:
    """A program in the helper's place. `command`: the service's, in which PROGRAM stands for it; `more` of the unit."""
    program = Path(f"{TOP}/qemu-pr-helper")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    drop_in = Path(f"/run/systemd/system/{SERVICE}.d/program.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text(f"[Service]\nExecStart=\n{command.replace(PROGRAM, str(program))}\n{more}\n")
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    yield program
    drop_in.unlink()
    program.unlink()  # which may be a link to the true one by now
    subprocess.run(["systemctl", "daemon-reload"], check=True)


class Failures(logging.Handler):
    """What was said of the helper to be wrong."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def connected(path: bytes) -> Client | None:
    """One who waits at the socket; None while nobody listens."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        return Client(path)
    return None


async def crash_loop(config: PRHelper, command: str, script: str) -> None:
    """The listener is closed, whoever is connected, and nobody waits for a service that cannot come to rest."""
    failures = Failures()
    logging.getLogger("hostd.prhelper").addHandler(failures)
    with helper_program(command, script) as program:
        helper = supervisor(config)
        await helper.start()
        enabling = asyncio.create_task(helper.enable())
        waiting = await eventually(lambda: connected(config.socket), why="the listener is there")
        assert waiting
        with waiting:
            await reaches(helper, "backing-off", lambda: active(SOCKET) == "inactive")
        await enabling
        await eventually(lambda: active(SERVICE) in ("inactive", "failed"), why="systemd does not go on either")
        program.unlink()
        await reaches(helper, "failed")
        assert str(program) in helper.status.why
        program.symlink_to(PROGRAM)
        await reaches(helper, "ready")
        await helper.disable()
        await helper.close()
    assert not [words for words in failures.said if "for more than" in words], failures.said
    logging.getLogger("hostd.prhelper").removeHandler(failures)


async def overtaken(config: PRHelper, script: str) -> None:
    """A rival binds while the service, which takes a while, is being started."""
    with helper_program(f"ExecStart={PROGRAM}", script, "ExecStartPre=/bin/sleep 0.5"):
        helper = supervisor(config)
        await helper.start()
        enabling = asyncio.create_task(helper.enable())
        await eventually(lambda: active(SOCKET) == "active", why="the listener is there")
        with Rival(config.socket) as rival:
            before = os.lstat(config.socket)
            await reaches(helper, "standby", lambda: active(SOCKET) == "inactive")
            await enabling
            assert helper.status.owner_pid == rival.pid
            await helper.disable()
            after = os.lstat(config.socket)
            assert (after.st_ino, after.st_uid, after.st_mode) == (before.st_ino, before.st_uid, before.st_mode)
            assert serves(config.socket)
        await helper.close()


def many_mounts() -> None:
    for number in range(MOUNTS):
        place = os.fsencode(f"{TOP}/mounts/{number}")
        os.makedirs(place)
        mount(place, place, flags=MS_BIND)


async def main() -> None:
    many_mounts()
    loop._RETIRED_USEC = 100_000
    # `auto` finds systemd, and the path that the unit has needs no drop-in.
    await life(PRHelper(backend=Backend.AUTO))
    assert not os.path.exists(f"/run/systemd/system/{SOCKET}.d")
    await reloaded(PRHelper())
    await for_multipath(PRHelper())
    await elsewhere(PRHelper(socket=b"/run/50%/pr/x.sock", owner=(4711, 4712), mode=0o600, backend=Backend.SYSTEMD))
    # An administrator's own command is started by systemd each time, the unit's by its shell.
    for command in (f"ExecStart={PROGRAM}", own_command()):
        for script in ("kill -SEGV $$", "exit 1"):
            await crash_loop(PRHelper(backend=Backend.SYSTEMD), command, script)
    for script in (f"exec {PROGRAM}", "kill -SEGV $$"):
        await overtaken(PRHelper(backend=Backend.SYSTEMD), script)
    print("done")


if __name__ == "__main__":
    os.makedirs(f"{TOP}/run")
    sys.exit(asyncio.run(main()))
