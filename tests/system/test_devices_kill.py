"""hostd's keeper of devices is killed at random moments while two callers want the same devices.

Whatever was answered was durable, and of two who want one device never both have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.devices import SysfsTree
from tests.support.wait import eventually

ROUNDS = 16
TOP = Path(__file__).parents[2]


class Truth:
    """What was answered, and what nobody can know: the call that was under way when the daemon died."""

    def __init__(self) -> None:
        #: Device → the VM whose claim was answered, and no release of it sent since.
        self.holding: dict[str, str] = {}
        #: Device → VMs whose last call on it was never answered.
        self.unknown: dict[str, set[str]] = {}
        self.answers = 0
        self.refusals = 0

    async def more_answers(self, count: int) -> None:
        """Waits until so many more calls were answered."""
        enough = self.answers + count
        await eventually(lambda: self.answers >= enough, why="no answers")

    def check(self, claims: dict[str, str]) -> None:
        """Holds the saved claims against what was answered."""
        for device, owner in self.holding.items():
            assert claims.get(device) == owner, f"{device} was {owner}'s: the answer came before it was durable"
        for device, owner in claims.items():
            allowed = {self.holding.get(device)} | self.unknown.get(device, set())
            assert owner in allowed, f"{owner} has {device} though it gave it back, or never had it"
        # What the file says is the truth of the next round.
        self.holding = dict(claims)
        self.unknown.clear()


class Daemon:
    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "socket")
        self.state = directory / "state"
        self.process: subprocess.Popen[bytes] | None = None
        self.arguments = [self.path, str(directory / "sys"), str(self.state)]

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        command = [sys.executable, "-m", "tests.support.device_daemon", *self.arguments]
        self.process = subprocess.Popen(command, cwd=TOP)
        await eventually(self._answers, why="the daemon does not come up")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.connect(self.path)
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    @property
    def claims(self) -> dict[str, str]:
        try:
            text = (self.state / "claims.json").read_text()
        except FileNotFoundError:
            return {}
        rows = json.loads(text)["claims"]
        assert len({row["device"] for row in rows}) == len(rows)
        return {row["device"]: row["vm"] for row in rows}


async def caller(vm: str, daemon: Daemon, devices: list[str], truth: Truth, dice: random.Random) -> None:
    """Claims and releases until the daemon is gone."""
    try:
        reader, writer = await asyncio.open_unix_connection(daemon.path)
    except ConnectionError:
        return
    try:
        while True:
            device = dice.choice(devices)
            verb = "release" if truth.holding.get(device) == vm and dice.random() < 0.7 else "claim"
            if verb == "release":
                del truth.holding[device]
            truth.unknown.setdefault(device, set()).add(vm)
            writer.write(f"{verb} {device} {vm}\n".encode())
            answer = (await reader.readline()).decode().strip()
            if not answer:
                return
            truth.unknown[device].discard(vm)
            truth.answers += 1
            if answer == "ok" and verb == "claim":
                owner = truth.holding.get(device)
                assert owner in {None, vm}, f"{device} is {owner}'s and {vm}'s"
                truth.holding[device] = vm
            elif answer != "ok":
                assert answer == "DeviceBusy"
                truth.refusals += 1
    except ConnectionError:
        return
    finally:
        writer.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.kill()


async def test_two_callers_and_a_daemon_that_is_killed(daemon: Daemon, tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys")
    # Four twins: few enough that the two meet often.
    devices = [tree.pci(f"0000:3b:0{n}.0", group=str(n)) for n in range(4)]
    dice = random.Random(20261130)
    truth = Truth()
    for _ in range(ROUNDS):
        await daemon.start()
        callers = [asyncio.create_task(caller(vm, daemon, devices, truth, dice)) for vm in ("ns/a", "ns/b")]
        await truth.more_answers(dice.randint(5, 30))
        # Somewhere in the next call or two: before, in or after its saving, before or after its answer.
        await asyncio.sleep(dice.uniform(0.0, 0.005))
        daemon.kill()
        await asyncio.gather(*callers)
        truth.check(daemon.claims)
        assert set(os.listdir(daemon.state)) <= {"claims.json", ".claims.json.new"} if daemon.state.exists() else True
    assert truth.answers >= ROUNDS * 5
    assert truth.refusals > 0
