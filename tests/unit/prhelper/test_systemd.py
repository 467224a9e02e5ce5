"""The back end with a systemd that is played: what it makes of what it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostd.config import PRHelper
from hostd.errors import HelperFailed
from hostd.prhelper import path as paths
from hostd.prhelper import retired, service, systemd
from hostd.prhelper.backend import End
from hostd.prhelper.link import Agent
from hostd.prhelper.memory import Known, Memory
from hostd.prhelper.systemd import SystemdBackend
from tests.support.prhelper import Rival
from tests.support.wait import eventually

#: As the unit's: starts one helper after the other.
_SHELL = "while true; do sh -c 'exec sleep 60'; done"


class Units(Agent):
    """Both units as PID 1 would have them; the helper is a process that only sleeps, by itself or below a shell."""

    def __init__(self, path: bytes) -> None:
        super().__init__()
        self.path = path
        self.asked: list[str] = []
        self.load = "loaded"
        self.fails = False
        self.trouble = ""
        self.hears_nothing = False
        #: What happens while the service is being started.
        self.meanwhile: Callable[[], None] = lambda: None
        self.listener: socket.socket | None = None
        self.command = ["sleep", "60"]
        self.helper: subprocess.Popen[bytes] | None = None
        self.apart: list[int] = []
        self.no_scopes = False

    async def ask(self, what: str, **arguments: int) -> dict[str, Any]:
        self.asked.append(what + "+reload" * arguments.get("reload", False))
        match what:
            case "listen" if self.hears_nothing:
                raise HelperFailed("systemd did not listen")
            case "listen":
                self.listen()
            case "start":
                self.meanwhile()
                self.respawn()
            case "set_apart" if self.no_scopes:
                raise HelperFailed("no scope can be made")
            case "set_apart":
                self.apart.append(arguments["pid"])
                self.helper = None
            case "stop":
                self.hang_up()
                self.kill()
                self.trouble = ""
        return {
            "load": {"hostd-pr-helper.socket": self.load, "hostd-pr-helper.service": "loaded"},
            "socket": "active" if self.listener else "inactive",
            "service": "activating" if self.trouble else "active" if self.helper else "inactive",
            "trouble": self.trouble,
            "main_pid": self.helper.pid if self.helper else 0,
            "result": "success" if self.helper else "exit-code",
            "program": "/usr/bin/sleep",
            "capabilities": 7,
        }

    def listen(self) -> None:
        if self.listener is None:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.path)
            self.listener.listen()

    def hang_up(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def respawn(self) -> None:
        if self.helper is None and not self.fails:
            self.helper = subprocess.Popen(self.command, process_group=0)

    def kill(self) -> None:
        if self.helper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.helper.pid, signal.SIGKILL)
            self.helper.wait()
            self.helper = None

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, top: Path) -> None:
        self.path = os.fsencode(top / "pr.sock")
        self.memory = Memory(os.fsencode(top / "state"), os.fsencode(top / "run"))
        self.units = Units(self.path)
        self.drop_in = str(top / "50-hostd.conf")
        self.calls = 0
        self.backend = self.another()

    def another(self) -> SystemdBackend:
        """As after a restart of hostd."""
        return SystemdBackend(PRHelper(socket=self.path), self.memory, self._on_change, self.units, self.drop_in)

    def _on_change(self) -> None:
        self.calls += 1


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    # The listener is this process's here, as it is PID 1's on a real host.
    monkeypatch.setattr(systemd, "_SYSTEMD_PID", os.getpid())
    made = Bench(tmp_path)
    yield made
    made.backend.detach()
    made.units.hang_up()
    made.units.kill()


async def test_missing_units_are_trouble(bench: Bench) -> None:
    assert await bench.backend.trouble() == ""
    bench.units.load = "not-found"
    assert "hostd-pr-helper.socket is not-found; install" in await bench.backend.trouble()


async def test_started_it_is_found_without_asking_again(bench: Bench) -> None:
    await bench.backend.start()
    found = await bench.backend.find()
    assert found.listening
    assert found.process
    assert bench.units.helper
    assert found.process.pid == bench.units.helper.pid
    assert found.inode == paths.inode_at(bench.path) == bench.memory.known.inode
    assert (found.program, found.capabilities) == (b"/usr/bin/sleep", 7)
    await bench.backend.find()
    assert bench.units.asked == ["listen+reload", "start"]


async def test_a_death_is_told_with_its_signal(bench: Bench) -> None:
    await bench.backend.start()
    assert bench.units.helper
    old = bench.units.helper.pid
    bench.units.kill()
    bench.units.respawn()
    await eventually(lambda: bench.calls, why="the death was told")
    found = await bench.backend.find()
    assert found.process
    assert found.process.pid != old
    ends = bench.backend.take_ends()
    assert len(ends) == 1
    assert str(old) in ends[0].words
    assert bench.backend.take_ends() == []


async def test_one_that_was_asked_to_end_is_no_failure(bench: Bench) -> None:
    await bench.backend.start()
    bench.backend.end()
    assert bench.units.helper
    assert bench.units.helper.wait() == -signal.SIGTERM
    await eventually(lambda: bench.calls, why="the end was told")
    assert bench.backend.take_ends() == []


async def test_one_that_is_killed_bears_the_reason(bench: Bench) -> None:
    await bench.backend.start()
    bench.backend.end("it did not answer")
    assert bench.units.helper
    assert bench.units.helper.wait() == -signal.SIGKILL
    await eventually(lambda: bench.calls, why="the end was told")
    assert bench.backend.take_ends() == [End("it did not answer")]


async def test_a_shells_helpers_are_watched_one_after_the_other(bench: Bench) -> None:
    bench.units.command = ["sh", "-c", _SHELL]
    await bench.backend.start()
    assert bench.units.helper
    seen: list[int] = []
    for _ in range(3):
        helper = (await bench.backend.find()).process
        assert helper
        assert helper.pid not in (bench.units.helper.pid, *seen)
        seen.append(helper.pid)
        calls = bench.calls
        os.kill(helper.pid, signal.SIGKILL)
        await eventually(lambda calls=calls: bench.calls > calls, why="the death was told")  # type: ignore[misc]
        assert len(bench.backend.take_ends()) == 1
    assert bench.units.asked == ["listen+reload", "start"], "that is no matter for systemd"


async def test_a_shell_that_starts_no_helper_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RESPAWN_SECONDS", 0.2)
    bench.units.command = ["sh", "-c", "kill -STOP $$"]
    await bench.backend.start()
    assert bench.units.helper
    assert bench.units.helper.wait() == -signal.SIGKILL
    bench.units.helper, bench.units.command = None, ["sleep", "60"]
    bench.units.respawn()
    await eventually(lambda: bench.calls, why="the shell's end was told")
    assert (await bench.backend.find()).process


async def test_a_service_that_does_not_start_is_an_end(bench: Bench) -> None:
    bench.units.fails = True
    await bench.backend.start()
    assert "hostd-pr-helper.service did not start: exit-code; see `journalctl" in bench.backend.take_ends()[0].words
    found = await bench.backend.find()
    assert found.listening
    assert found.process is None


async def test_a_service_that_never_settles_is_an_end_and_can_be_stopped(bench: Bench) -> None:
    """Whichever of its runs is met by chance."""
    bench.units.trouble = "it dies at once"
    end = End("it dies at once", again=True)
    await bench.backend.start()
    found = await bench.backend.find()
    assert (found.listening, found.process) == (True, None)
    assert bench.backend.take_ends() == [end], "once for one time of waiting"
    assert bench.calls
    await bench.backend.find()
    assert bench.backend.take_ends() == [end], "nobody tells of the next one: it is asked again"
    assert bench.units.asked == ["listen+reload", "start", "query"]
    await bench.backend.stop()
    assert not (await bench.backend.find()).listening
    assert bench.backend.take_ends() == []


@pytest.mark.parametrize("comes_up", [True, False])
async def test_a_rival_that_binds_while_the_service_starts_keeps_its_socket(bench: Bench, comes_up: bool) -> None:
    made: list[Rival] = []
    bench.units.meanwhile = lambda: made.append(Rival(bench.path))
    bench.units.fails = not comes_up
    await bench.backend.start()
    with made[0]:
        found = await bench.backend.find()
        rivals = paths.inode_at(bench.path)
        assert found.listening
        assert found.inode != rivals
        await bench.backend.stop()
        assert paths.inode_at(bench.path) == rivals


async def test_a_rival_that_binds_as_soon_as_systemd_did_is_found_out(bench: Bench) -> None:
    """Before it could be seen what systemd had made."""
    listen, made = bench.units.listen, []

    def listen_and_lose() -> None:
        listen()
        made.append(Rival(bench.path))

    bench.units.listen = listen_and_lose  # type: ignore[method-assign]
    await bench.backend.start()
    with made[0]:
        assert (await bench.backend.find()).inode is None
        await bench.backend.stop()
        assert paths.inode_at(bench.path)


async def test_where_systemd_says_nothing_what_is_known_stays_known(bench: Bench) -> None:
    for has_listened in (False, True):
        if has_listened:
            bench.units.hears_nothing = False
            await bench.backend.start()
        known = bench.memory.known.inode
        bench.units.hears_nothing = True
        with pytest.raises(HelperFailed):
            await bench.backend.start()
        assert bench.memory.known.inode == known == paths.inode_at(bench.path)
        assert bench.memory.known.backend == "systemd", "the next hostd looks what came of it"
        await bench.backend.find()
        assert bench.units.asked[-1] == "query", "and so does this one"


async def test_a_rivals_socket_is_not_removed_whatever_was_thought_of_it(bench: Bench) -> None:
    await bench.backend.start()
    bench.units.fails = True
    with Rival(bench.path):
        bench.memory.remember(replace(bench.memory.known, inode=paths.inode_at(bench.path)))
        await bench.backend.stop()
        assert paths.inode_at(bench.path)


async def test_what_an_earlier_hostd_started_is_known_again(bench: Bench) -> None:
    await bench.backend.start()
    bench.backend.detach()
    for known in (bench.memory.known, Known()):
        bench.memory.remember(known)
        bench.backend = bench.another()
        found = await bench.backend.find()
        assert found.inode == paths.inode_at(bench.path), "it is systemd's, whether remembered or not"
        assert found.process
        bench.backend.detach()


async def test_anothers_socket_is_not_taken_for_ours(bench: Bench) -> None:
    await bench.backend.start()
    os.unlink(bench.path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(bench.path)
    assert (await bench.backend.find()).inode != paths.inode_at(bench.path)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients of every helper."""
    made = [1]
    monkeypatch.setattr(systemd, "clients", lambda _: len(made))
    monkeypatch.setattr(retired, "clients", lambda _: len(made))
    monkeypatch.setattr(systemd, "number_of", lambda _: 4711)
    return made


async def test_retired_it_stays_for_its_clients_whatever_comes_after(bench: Bench, connected: list[int]) -> None:
    await bench.backend.start()
    assert bench.units.helper
    old = bench.units.helper
    await bench.backend.retire()
    assert bench.units.apart == [old.pid]
    found = await bench.backend.find()
    assert (found.listening, found.process, found.retired) == (False, None, (old.pid,))
    assert not os.path.lexists(bench.path)
    assert bench.memory.known == Known("systemd", retired=(4711,))
    await bench.backend.start()
    found = await bench.backend.find()
    assert found.process
    assert (found.process.pid != old.pid, found.retired) == (True, (old.pid,))
    connected.clear()
    await bench.backend.find()
    assert old.wait() == -signal.SIGTERM
    await eventually(lambda: bench.calls, why="its end is told")
    assert (await bench.backend.find()).retired == ()
    assert bench.backend.take_ends() == []


async def test_one_that_cannot_be_set_apart_is_given_up(
    bench: Bench, connected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The path is another's by now, whatever becomes of those who are connected."""
    bench.units.no_scopes = True
    await bench.backend.start()
    await bench.backend.retire()
    assert "have to connect again: no scope can be made" in caplog.text
    await eventually(lambda: bench.calls, why="the end is told")
    found = await bench.backend.find()
    assert (found.listening, found.retired, bench.backend.take_ends()) == (False, (), [])


async def test_retired_without_clients_it_goes(bench: Bench, connected: list[int]) -> None:
    connected.clear()
    await bench.backend.start()
    await bench.backend.retire()
    assert bench.units.asked[-1] == "stop"
    assert (await bench.backend.find()).retired == ()
    assert bench.memory.known == Known()


async def test_a_listener_that_somebody_else_stopped_is_no_listener(bench: Bench, connected: list[int]) -> None:
    await bench.backend.start()
    assert bench.units.helper
    old = bench.units.helper
    bench.units.hang_up()
    bench.backend._units = None
    found = await bench.backend.find()
    assert (found.listening, found.process, found.retired) == (False, None, (old.pid,))
    assert not os.path.lexists(bench.path)
    old.kill()
    old.wait()


async def test_stopped_nothing_is_left(bench: Bench) -> None:
    await bench.backend.start()
    await bench.backend.stop()
    found = await bench.backend.find()
    assert (found.listening, found.process, found.retired, found.inode) == (False, None, (), None)
    assert not os.path.lexists(bench.path)
    assert bench.memory.known == Known()
    assert bench.backend.take_ends() == []
