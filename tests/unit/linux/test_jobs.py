"""What a worker says is looked at before it is believed: any value, of any shape."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.linux import jobs, link, worker
from hostd.linux.holders import Held
from hostd.linux.link import Link, State, WorkerDied
from hostd.linux.umount import Outcome

ATOMS = st.none() | st.booleans() | st.integers(-2, 5) | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
VALUES: st.SearchStrategy[Any] = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=7) | st.lists(inner, max_size=7).map(tuple), max_leaves=10
)
#: Like what is said, with something else in a place or two.
OUTCOMES = st.tuples(st.just(b"a"), *[st.integers(0, 2)] * 2, st.text(max_size=3) | ATOMS, *[st.booleans() | ATOMS] * 3)
ROWS = st.tuples(
    st.binary(max_size=3), st.integers() | ATOMS, st.text(max_size=3), st.text(max_size=3), st.lists(ATOMS, max_size=2)
)
PARTS = VALUES | OUTCOMES | st.lists(ROWS, max_size=2) | st.lists(st.tuples(st.binary(max_size=3), ATOMS), max_size=2)


def outcomes(part: object) -> list[Outcome]:
    return [jobs._outcome(part, b"a")]


def taken(add: Callable[[object, Any], None], into: Any, part: object) -> Any:
    add(part, into)
    return into


@given(PARTS)
def test_a_part_is_of_its_types_or_not_understood(part: object) -> None:
    with contextlib.suppress(ValueError):
        for outcome in outcomes(part):
            assert [type(each) for each in outcome[3:]] == [str, bool, bool, bool]
    with contextlib.suppress(ValueError):
        for held in taken(jobs._add_held, [], part):
            assert type(held) is Held
            assert type(held.target) is bytes
            assert all(type(path) is bytes for path in held.cgroups)
    with contextlib.suppress(ValueError):
        for name, kind in taken(jobs._add_names, [], part):
            assert type(name) is bytes
            assert isinstance(kind, int)
    with contextlib.suppress(ValueError):
        assert all(type(name) is bytes for name in taken(jobs._add_nodes, [], part))
    with contextlib.suppress(ValueError):
        for line in taken(jobs._add_line, {}, part).values():
            assert line is None or all(type(argument) is bytes for argument in line)
    with contextlib.suppress(ValueError):
        assert taken(jobs._add_data, bytearray(), part) == part


class Mute(Link):
    """A worker whose part the test plays."""

    def __init__(self) -> None:
        self.other: socket.socket

        def start(fd: int, _bell: int, _note: int, _inotify: int) -> subprocess.Popen[bytes]:
            self.other = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return subprocess.Popen(["sleep", "100"])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "_start", start)
            super().__init__(60, lambda _: None)
        self.state = State.BUSY

    def end(self) -> None:
        process = self._process
        self.kill()
        self.close()
        self.other.close()
        process.returncode = None
        process.wait()


MESSAGES = (
    st.tuples(st.sampled_from([worker.PART, worker.END, worker.ERROR]), PARTS)
    | st.tuples(st.just(worker.ERROR), ATOMS, ATOMS)
    | VALUES
).map(marshal.dumps)


@given(st.lists(MESSAGES | MESSAGES.map(lambda data: data[: len(data) // 2]) | st.just(b"\xff"), max_size=4))
@settings(suppress_health_check=[HealthCheck.too_slow])
async def test_whatever_a_worker_says_its_job_ends_and_the_loop_goes_on(messages: list[bytes]) -> None:
    trouble: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
    mute = Mute()
    job = jobs.Worker(mute).unmount([(b"a", False, False)])
    for message in filter(None, messages):
        mute.other.send(message)
    mute._receive()
    mute.end()
    with contextlib.suppress(Exception):
        assert all(type(outcome) is Outcome for outcome in await job)
    assert mute.job is None
    assert trouble == []


async def test_what_was_taken_back_is_in_no_later_request() -> None:
    """A job of more targets than one request holds, cut short while the first request is under way."""
    mute = Mute()
    items = [(b"pods/%0100d" % number, False, False) for number in range(640)]
    job = jobs.Worker(mute).unmount(items)
    _, (first, _) = marshal.loads(mute.other.recv(worker.MESSAGE_MAX))
    assert len(first) < 500
    job.take_back(500)
    answer = [(path, 1, 0, "", True, False, False) for path, _, _ in first]
    mute.other.send(marshal.dumps((worker.END, answer)))
    mute._receive()
    _, (second, _) = marshal.loads(mute.other.recv(worker.MESSAGE_MAX))
    assert [*first, *second] == items[:500]
    assert job.at == len(first)
    mute.end()
    with pytest.raises(WorkerDied) as caught:
        await job
    assert len(caught.value.done) == len(first)
