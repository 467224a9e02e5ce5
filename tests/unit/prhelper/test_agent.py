from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from hostd.errors import HelperFailed
from hostd.prhelper import agent
from hostd.prhelper.agent import serve
from hostd.prhelper.link import Agent
from tests.support.wait import eventually

# -- the agent's own end


class FakeSystemd:
    """Answers once; its connection is closed then, as PID 1 does when it executes itself anew."""

    made = 0

    def __init__(self) -> None:
        FakeSystemd.made += 1
        self._used = False

    def query(self) -> dict[str, Any]:
        if self._used:
            raise ConnectionResetError(104, "Connection reset by peer")
        self._used = True
        return {"path": b"/x", "made": FakeSystemd.made}

    def start(self, *, reload: bool) -> dict[str, Any]:
        raise ValueError(f"no such unit (reload={reload})")


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    FakeSystemd.made = 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=serve, args=(theirs, FakeSystemd))
    thread.start()
    yield ours
    ours.close()
    thread.join()
    theirs.close()


def ask(sock: socket.socket, what: str, **arguments: bool) -> dict[str, Any]:
    sock.send(json.dumps({"do": what, "with": arguments}).encode())
    reply: dict[str, Any] = json.loads(sock.recv(1 << 16))
    return reply


def test_a_closed_connection_is_opened_again(sock: socket.socket) -> None:
    assert ask(sock, "query") == {"found": {"path": "/x", "made": 1}}
    assert ask(sock, "query")["found"]["made"] == 2


def test_errors_are_told_in_words(sock: socket.socket) -> None:
    assert ask(sock, "start", reload=True) == {"error": "no such unit (reload=True)"}
    assert "found" in ask(sock, "query")
    assert "error" in ask(sock, "frobnicate")


@pytest.mark.parametrize(
    ("commands", "program"),
    [
        ([(b"/usr/bin/qemu-pr-helper", [b"/usr/bin/qemu-pr-helper"], False)], "/usr/bin/qemu-pr-helper"),
        ([(b"/bin/sh", [b"/bin/sh", b"-c", b"test 1 && exec /opt/q/qemu-pr-helper"], False)], "/opt/q/qemu-pr-helper"),
        ([(b"/usr/bin/other", [b"other"], False)], "/usr/bin/other"),
        ([], ""),
    ],
)
def test_the_program_is_found_through_a_shell(commands: list[object], program: str) -> None:
    assert agent._program(commands) == program


class PlayedUnits(agent.Systemd):
    """PID 1 as a row of moments: with each question for a job the next one begins; the last one stays."""

    def __init__(self, *moments: tuple[str, int, str]) -> None:
        """`moments`: the units' state, job and run."""
        self.moments = list(moments)
        self.now = moments[0]
        self.calls: list[str] = []

    def _get(self, unit: str, interface: str, name: str, kind: str) -> object:
        assert unit in (agent.SOCKET_UNIT, agent.SERVICE_UNIT)
        assert interface in ("Unit", "Socket", "Service")
        if name == "Job":
            self.now = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        state, job, run = self.now
        found: dict[str, tuple[str, object]] = {
            "Job": ("(uo)", (job, "/job")),
            "ActiveState": ("s", state),
            "InvocationID": ("ay", run.encode()),
            "LoadState": ("s", "loaded"),
            "Result": ("s", "signal"),
            "MainPID": ("u", 7),
            "ExecStart": ("a(sasbttttuii)", []),
            "CapabilityBoundingSet": ("t", 0),
        }
        expected, value = found[name]
        assert kind == expected
        return value

    def _call(self, method: str, signature: str = "", *arguments: str) -> None:
        assert len(signature) == len(arguments)
        self.calls.append(" ".join([method, *arguments[:1]]))


_DIES = "hostd-pr-helper.service dies as soon as it is started; see `journalctl -u hostd-pr-helper.service`"
_LONG = "hostd-pr-helper.service is activating for more than 0.2 s; see `journalctl -u hostd-pr-helper.service`"
#: One that comes up and dies, again and again.
_FLAPPING = [("active", 0, ""), *(("activating", 0, run) for run in "aabbccdd")]


@pytest.mark.parametrize(
    ("moments", "found"),
    [
        ([("active", 0, "a")], ("active", "")),
        ([("inactive", 4, ""), ("activating", 4, "a"), ("active", 0, "a")], ("active", "")),
        # It was killed from outside, and is started anew once; or twice, which is no row yet.
        ([("activating", 0, "a"), ("activating", 0, "b"), ("active", 0, "b")], ("active", "")),
        ([("activating", 0, "a"), ("activating", 0, "b"), ("activating", 0, "c"), ("active", 0, "c")], ("active", "")),
        (_FLAPPING[1:], ("activating", _DIES)),
        # By its socket: between the runs it has failed, and there is a job.
        ([("activating", 0, "a"), *(("failed", 4, run) for run in "bcd")], ("failed", _DIES)),
    ],
)
def test_a_service_settles_or_is_said_not_to(moments: list[tuple[str, int, str]], found: tuple[str, str]) -> None:
    assert PlayedUnits(*moments)._wait(agent.SERVICE_UNIT) == found


def test_one_that_only_takes_long_is_not_one_that_dies() -> None:
    with pytest.raises(TimeoutError, match=_LONG):
        PlayedUnits(("activating", 0, "a"))._wait(agent.SERVICE_UNIT, patience=0.2)


def test_that_the_service_dies_is_told_with_the_rest() -> None:
    found = PlayedUnits(*_FLAPPING).query()
    assert (found["socket"], found["service"], found["trouble"]) == ("active", "activating", _DIES)


def test_what_has_to_settle_and_does_not_is_an_error() -> None:
    with pytest.raises(OSError, match=_DIES):
        PlayedUnits(*_FLAPPING[1:])._settled(agent.SERVICE_UNIT)


def test_a_listener_that_does_not_come_up_is_an_error() -> None:
    units = PlayedUnits(("inactive", 0, ""), ("failed", 0, "a"))
    with pytest.raises(OSError, match=r"hostd-pr-helper\.socket did not start: signal; see `journalctl"):
        units.listen()
    assert "StartUnit hostd-pr-helper.socket" in units.calls


# -- the daemon's end

_PROGRAM = """
import json, os, socket, sys, time
sock = socket.socket(fileno=int(sys.argv[2]))
while request := sock.recv(65536):
    what = json.loads(request)["do"]
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os._exit(3)
    sock.send(json.dumps({"error": "it is masked"} if what == "fail" else {"found": {"pid": os.getpid()}}).encode())
"""


@pytest.fixture
async def link() -> AsyncIterator[Agent]:
    made = Agent(_PROGRAM, timeout=5)
    yield made
    made.close()


async def test_one_process_answers_all_that_is_asked(link: Agent) -> None:
    first, second = await asyncio.gather(link.ask("query"), link.ask("query"))
    assert first["pid"] == second["pid"] != os.getpid()


async def test_what_systemd_says_is_an_error_of_ours(link: Agent) -> None:
    with pytest.raises(HelperFailed, match="systemd cannot fail the helper's units: it is masked"):
        await link.ask("fail")


async def test_a_hung_one_is_ended_and_the_next_question_answered() -> None:
    link = Agent(_PROGRAM, timeout=0.5)
    with pytest.raises(HelperFailed, match="did not hang the helper's units within"):
        await link.ask("hang")
    link._timeout = 5
    assert (await link.ask("query"))["pid"]
    link.close()


async def test_a_dead_one_is_said_and_replaced(link: Agent) -> None:
    with pytest.raises(HelperFailed, match="the process that speaks to systemd ended"):
        await link.ask("die")
    assert (await link.ask("query"))["pid"]


async def test_an_idle_one_is_ended(link: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.prhelper.link._IDLE", 0.01)
    pid = (await link.ask("query"))["pid"]
    await eventually(lambda: not os.path.exists(f"/proc/{pid}"), why="the process is gone")
