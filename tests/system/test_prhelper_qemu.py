"""A real QEMU as the helper's client, as unprivileged as KubeVirt runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.prhelper import PROGRAM, Home, Rival, new_helper, reaches
from tests.support.wait import DEADLINE, eventually

QEMU = "qemu-system-x86_64"

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM) or shutil.which(QEMU) is None, reason=f"needs {PROGRAM}, {QEMU}"),
]


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


class Monitor:
    """A QEMU without a guest, as 107:107, and its monitor."""

    def __init__(self, path: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                "setpriv", "--reuid=107", "--regid=107", "--clear-groups",
                QEMU, "-nodefaults", "-display", "none", "-machine", "none", "-S",
                "-object", f"pr-manager-helper,id=pr0,path={os.fsdecode(path)}",
                "-chardev", f"socket,id=m,fd={theirs.fileno()}", "-mon", "chardev=m,mode=control",
            ]  # fmt: skip
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(),))
        ours.settimeout(DEADLINE)
        self._socket = ours
        self._stream = ours.makefile("rwb")
        if self._read() is not None:
            self.call("qmp_capabilities")

    def _read(self) -> dict[str, Any] | None:
        line = self._stream.readline()
        return json.loads(line) if line else None

    def call(self, command: str) -> Any:
        """One command's result."""
        self._stream.write(json.dumps({"execute": command}).encode())
        self._stream.flush()
        while (reply := self._read()) is not None:
            if "event" not in reply:
                return reply["return"]
        raise EOFError("QEMU has ended")

    @property
    def connected(self) -> bool:
        """What QEMU believes of its helper."""
        return bool(self.call("query-pr-managers")[0]["connected"])

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()
        with contextlib.suppress(BrokenPipeError):
            self._stream.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


async def test_qemu_starts_and_its_monitor_answers_while_helpers_die(home: Home) -> None:
    async with home.running(interval=0.3) as supervisor:
        with Monitor(home.path) as qemu:
            assert qemu.connected
            await eventually(lambda: supervisor.status.clients == 1, why="QEMU is counted")
            times = []
            for number in range(20):
                old = supervisor.status.main_pid
                # Dead, stopped until it is found out, or told to end.
                os.kill(old, (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)[number % 3])
                while supervisor.status.main_pid in (0, old) or supervisor.status.state != "ready":
                    begin = time.monotonic()
                    assert await asyncio.to_thread(lambda: qemu.call("query-pr-managers")[0]["id"]) == "pr0"
                    times.append(time.monotonic() - begin)
            await supervisor.restart()
            assert qemu.call("query-status")["running"] is False
            print(f"monitor: median {statistics.median(times) * 1e3:.1f} ms, worst {max(times) * 1e3:.1f} ms")
            assert max(times) < 1
            with Monitor(home.path) as another:
                assert another.connected


async def test_qemu_waits_for_a_helper_that_is_being_replaced(home: Home) -> None:
    """It connects while there is none: the listener takes it, and the next helper serves it."""
    async with home.running() as supervisor:
        old = supervisor.status.main_pid
        os.kill(old, signal.SIGKILL)
        with await asyncio.to_thread(Monitor, home.path) as qemu:
            assert qemu.process.poll() is None
            await new_helper(supervisor, old)
            assert qemu.connected


async def test_qemu_keeps_its_helper_when_hostd_yields(home: Home) -> None:
    async with home.running() as supervisor:
        with Monitor(home.path) as qemu:
            await eventually(lambda: supervisor.status.clients == 1, why="QEMU is counted")
            with Rival(home.path):
                await reaches(supervisor, "standby")
                assert qemu.connected
                assert supervisor.status.clients == 1
                os.chown(home.path, 107, 107)  # as virt-handler does
                with Monitor(home.path) as new:
                    assert new.connected


async def test_qemu_is_not_let_in_where_the_owner_is_another(home: Home) -> None:
    """The mode is no decoration."""
    home.config = type(home.config)(
        socket=home.path, backend=home.config.backend, owner=(0, 0), mode=0o600, selinux_label=""
    )
    async with home.running():
        with Monitor(home.path) as qemu:
            _, errors = qemu.process.communicate(timeout=DEADLINE)
            assert qemu.process.returncode == 1
            assert b"Permission denied" in errors
