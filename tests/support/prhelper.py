"""qemu-pr-helper in tests: a rival as KubeVirt's container runs it, its clients, and a place for a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from hostd.config import Backend, PRHelper
from hostd.linux.process import children
from hostd.prhelper.listener import holders
from hostd.prhelper.memory import Memory
from hostd.prhelper.preflight import Places
from hostd.prhelper.supervisor import Supervisor
from tests.support.wait import DEADLINE, eventually, until

PROGRAM = "/usr/bin/qemu-pr-helper"
_TIMEVAL = struct.Struct("@ll")


class Client:
    """A connection to a helper, as QEMU's: greeted, or still waiting to be."""

    def __init__(self, path: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Waits for a place in the queue, as QEMU does: a helper that made its socket itself has room for one or two
        # there, and with a time-out of Python's the kernel would not wait.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(DEADLINE), 0))
        try:
            self.socket.connect(path)
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(DEADLINE)

    def greet(self) -> Self:
        """The handshake."""
        assert len(self.socket.recv(4)) == 4, "the helper closed the connection"
        self.socket.send(bytes(4))
        return self

    def works(self) -> bool:
        """Whether a request on /dev/null is answered on this very connection."""
        with open(os.devnull, "rb") as nothing:
            try:
                socket.send_fds(self.socket, [bytes([0x5E, *[0] * 7, 8, *[0] * 7])], [nothing.fileno()])
                return len(self.socket.recv(104)) == 104
            except OSError:
                return False

    def cut_off(self) -> bool:
        """Waits for the helper's end of the connection to close."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:  # it had not read all that we sent
            return True

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def serves(path: bytes) -> bool:
    """Whether somebody at the path shakes hands, now."""
    try:
        with Client(path) as client:
            client.greet()
    except OSError:
        return False
    return True


async def served_after_kill(pid: int, path: bytes) -> float:
    """Seconds from a helper's SIGKILL until a connection made at the moment of its death, at once, is served."""
    pidfd = os.pidfd_open(pid)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [], DEADLINE)
    os.close(pidfd)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.connect(path)
        assert len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4), DEADLINE)) == 4
    return time.monotonic() - begin


def assert_prompt(times: list[float]) -> None:
    """200 ms, and most far below that. A busy machine makes everybody wait for longer than that once or twice."""
    ordered = sorted(times)
    print(f"served after a kill: median {statistics.median(times) * 1e3:.1f} ms, worst {ordered[-1] * 1e3:.1f} ms")
    assert ordered[-3] < 0.2
    assert statistics.median(times) < 0.05


class Rival:
    """A helper that unlinks what is at the path and binds, as the one in KubeVirt's container does.

    `pod`: in namespaces of its own, whose first process it is not; it dies with that one.
    """

    def __init__(self, path: bytes, *, pod: bool = False) -> None:
        command: list[bytes | str] = [PROGRAM, "-k", path]
        if pod:
            command = [
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                '"$@"; :',
                "sh",
                *command,
            ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._pod = pod
        try:
            self.pid = until(self._find, why="the rival runs")
            until(lambda: self._listens(path), why="the rival listens")
        except BaseException:
            self.close()
            raise

    def _find(self) -> int:
        pid = self._process.pid
        for _ in range(2 * self._pod):
            pid = next(iter(children(pid)), 0)
            if not pid:
                break
        return pid

    def _listens(self, path: bytes) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
            sock.settimeout(DEADLINE)
            sock.connect(path)
            owner = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            # A helper that has not greeted yet is not up: it even forgets a SIGTERM that comes before.
            return int.from_bytes(owner[:4], sys.byteorder) == self.pid and len(sock.recv(4)) == 4
        return False

    def end(self, how: signal.Signals) -> None:
        """Ends it (or its pod) and reaps it."""
        self._process.send_signal(how)
        self._process.wait(DEADLINE)

    def close(self) -> None:
        """Ends it if it lives still."""
        if self._process.poll() is None:
            self.end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Home:
    """Directories for one supervisor, and more than one of them after the other."""

    def __init__(self, **config: object) -> None:
        self.top = tempfile.mkdtemp(prefix="hostd-test-")
        os.chmod(self.top, 0o755)
        self.directory = f"{self.top}/daemons/pr"
        self.path = os.fsencode(f"{self.directory}/pr-helper.sock")
        self.sys_block = f"{self.top}/block"
        os.makedirs(self.sys_block)
        self.multipathd = f"{self.top}/multipathd.socket"
        self.program = PROGRAM
        self.selinux = f"{self.top}/no-selinux"
        self.config = PRHelper(socket=self.path, backend=Backend.CHILD, **config)  # type: ignore[arg-type]

    @property
    def places(self) -> Places:
        """This home's own host."""
        return Places(os.fsencode(self.program), self.sys_block, (os.fsencode(self.multipathd),), self.selinux)

    def supervisor(self, interval: float = 10.0) -> Supervisor:
        """One that was not started yet."""
        top = os.fsencode(self.top)
        return Supervisor(self.config, top + b"/state", top + b"/run", places=self.places, interval=interval)

    @asynccontextmanager
    async def running(self, *, enable: bool = True, interval: float = 10.0) -> AsyncIterator[Supervisor]:
        """One that runs, and is ready unless `enable` is false. Its helper is ended with it."""
        supervisor = self.supervisor(interval)
        await supervisor.start()
        try:
            if enable:
                await supervisor.enable()
                await reaches(supervisor, "ready")
            yield supervisor
        finally:
            await supervisor.disable()
            await supervisor.close()

    def script(self, text: str, mode: int = 0o755) -> None:
        """Puts a shell script in the helper's place."""
        self.program = f"{self.top}/helper"
        with open(f"{self.program}.new", "w") as file:
            file.write(f"#!/bin/sh\n{text}\n")
            os.fchmod(file.fileno(), mode)
        os.rename(f"{self.program}.new", self.program)

    def multipath_device(self, name: str = "dm-0", uuid: str = "mpath-360000") -> None:
        """A device-mapper device in this home's /sys/block."""
        os.makedirs(f"{self.sys_block}/{name}/dm")
        with open(f"{self.sys_block}/{name}/dm/uuid", "w") as file:
            file.write(f"{uuid}\n")

    def close(self) -> None:
        """Removes everything, with the helpers that a test which failed left behind."""
        end_helpers(f"{self.top}/run")
        shutil.rmtree(self.top)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def end_helpers(runtime_dir: str) -> None:
    """Ends the helpers that a hostd with this runtime directory left running."""
    known = Memory(b"/nowhere", os.fsencode(runtime_dir)).known
    for number in filter(None, (known.number, *known.retired)):
        for pid in holders(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def reaches(supervisor: Supervisor, state: str, more: Callable[[], object] = lambda: True) -> None:
    """Waits for a state, and for whatever else is to be true then."""
    await eventually(
        lambda: supervisor.status.state == state and more(), why=lambda: f"{state}; it is {supervisor.status}"
    )


async def new_helper(supervisor: Supervisor, old: int) -> int:
    """The pid of the ready helper that came after `old`."""
    await reaches(supervisor, "ready", lambda: supervisor.status.main_pid not in (0, old))
    return supervisor.status.main_pid


def attributes(path: bytes | str) -> tuple[int, int, int]:
    """Owner, group and mode."""
    found = os.lstat(path)
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)
