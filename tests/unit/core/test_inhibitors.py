"""Inhibitors live as long as a copy of their descriptor, over restarts of hostd, and no longer."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.core import inhibitors as module
from hostd.core.inhibitors import Inhibitors
from hostd.core.model import Inhibitor
from hostd.errors import LimitExceeded
from hostd.linux import small_file
from hostd.linux.clock import boot_id
from tests.support.core import OTHER, POD
from tests.support.damage import damaged, json_values
from tests.support.wait import eventually

WHO = Inhibitor(POD, "backup", "a snapshot is taken")


class Held:
    """The inhibitors of one hostd after the other in one directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.ended: list[Inhibitor] = []
        self.now = Inhibitors(directory, self.ended.append)

    def take(self, inhibitor: Inhibitor = WHO) -> int:
        return self.now.take(inhibitor.pod_uid, inhibitor.who, inhibitor.why)

    def restart(self) -> list[str]:
        self.now.close()
        self.now = Inhibitors(self.directory, self.ended.append)
        return self.now.restore()

    def files(self) -> list[str]:
        return sorted(os.listdir(self.now.directory))


@pytest.fixture
async def held(tmp_path: Any) -> Any:
    made = Held(str(tmp_path))
    yield made
    made.now.close()


@pytest.fixture
async def fifo(held: Held) -> AsyncIterator[str]:
    """The path of one inhibitor's FIFO, whose writer lives all through the test."""
    fd = held.take()
    yield os.path.join(held.now.directory, next(name for name in held.files() if not name.endswith(".json")))
    os.close(fd)


async def test_it_holds_its_vm_until_the_descriptor_is_closed(held: Held) -> None:
    fd = held.take()
    assert held.now.of(POD) == [WHO]
    assert held.now.of(OTHER) == []
    os.close(fd)
    await eventually(lambda: held.ended == [WHO])
    assert held.now.of(POD) == []
    assert held.now._on == {}, "of VMs that were held once nothing is kept"
    assert held.files() == []


async def test_one_for_all_vms_holds_each(held: Held) -> None:
    fd = held.take(Inhibitor("", "upgrade", "the node is upgraded"))
    assert len(held.now.of(POD)) == len(held.now.of(OTHER)) == 1
    os.close(fd)
    await eventually(lambda: held.ended)


async def test_only_the_last_copy_counts(held: Held) -> None:
    fd = held.take()
    copy = os.dup(fd)
    os.close(fd)
    other = held.take(Inhibitor(POD, "another", "goes first"))
    os.close(other)
    await eventually(lambda: held.ended)
    assert held.now.of(POD) == [WHO]
    os.close(copy)
    await eventually(lambda: len(held.ended) == 2)


async def test_it_ends_with_its_holder_however_that_ends(held: Held) -> None:
    fd = held.take()
    with subprocess.Popen(["sleep", "100"], pass_fds=[fd]) as holder:
        os.close(fd)
        assert held.now.of(POD) == [WHO]
        holder.kill()
    await eventually(lambda: held.ended == [WHO])


async def test_what_a_client_writes_means_nothing(held: Held) -> None:
    fd = held.take()
    os.write(fd, b"release it!" * 1000)
    other = held.take(Inhibitor(OTHER, "another", "goes first"))
    os.close(other)
    await eventually(lambda: held.ended)
    assert held.now.of(POD) == [WHO]
    os.close(fd)
    await eventually(lambda: len(held.ended) == 2)


async def test_it_survives_a_restart_of_hostd(held: Held) -> None:
    fd = held.take()
    assert held.restart() == []
    assert held.now.of(POD) == [WHO]
    os.close(fd)
    await eventually(lambda: held.ended == [WHO])
    assert held.files() == []


async def test_one_let_go_while_hostd_was_down_is_gone(held: Held) -> None:
    fd = held.take()
    held.now.close()
    os.close(fd)
    held.now = Inhibitors(held.directory, held.ended.append)
    assert held.now.restore() == []
    assert (held.now.of(POD), held.ended, held.files()) == ([], [WHO], [])


NOTES = {
    "empty": b"",
    "nul": bytes(40),
    "null": b"null",
    "list": b"[]",
    "truncated": b'{"boot": "',
    "no-keys": b"{}",
    "nobody": json.dumps({"boot": boot_id(), "pod_uid": POD, "why": ""}).encode(),
    "no-words": json.dumps({"boot": boot_id(), "pod_uid": POD, "who": ["a"], "why": ""}).encode(),
    "half-a-pair": json.dumps({"boot": boot_id(), "pod_uid": POD, "who": "\ud800", "why": ""}).encode(),
    "large": b" " * (1 << 20) + b"{}",
    "another-boot": json.dumps({"boot": "x", "pod_uid": POD, "who": "", "why": ""}).encode(),
    "huge": b"[" * 100_000,
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES.keys())
async def test_a_bad_note_is_said_and_costs_no_other(held: Held, fifo: str, note: bytes) -> None:
    good = held.take(Inhibitor(OTHER, "good", ""))
    with open(fifo + ".json", "wb") as file:
        file.write(note)
    complaints = held.restart()
    assert len(complaints) == 1
    assert os.path.basename(fifo) in complaints[0]
    assert held.now.of(OTHER) == [Inhibitor(OTHER, "good", "")]
    assert held.now.of(POD) == []
    assert held.restart() == []
    os.close(good)
    await eventually(lambda: held.ended)


GOOD = {"boot": boot_id(), "pod_uid": POD, "who": "backup", "why": "a snapshot is taken"}


@given(st.binary(max_size=60) | (damaged(GOOD) | json_values).map(lambda plain: json.dumps(plain).encode()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_note_is_taken_up_or_said(held: Held, note: bytes) -> None:
    writer = held.take()
    (name,) = [name for name in held.files() if name.endswith(".json")]
    with open(os.path.join(held.now.directory, name), "wb") as file:
        file.write(note)
    descriptors = len(os.listdir("/proc/self/fd"))
    complaints = held.restart()
    taken = [inhibitor for pod_uid in (POD, OTHER) for inhibitor in held.now.of(pod_uid)]
    for inhibitor in taken:
        assert all(word.encode() or not word for word in (inhibitor.pod_uid, inhibitor.who, inhibitor.why))
    # One that is dropped is not open any more; one of a pod that nobody knows is taken up as well.
    assert len(os.listdir("/proc/self/fd")) == descriptors - len(complaints)
    assert bool(complaints) == (not held.files())
    os.close(writer)
    await eventually(lambda: not held.files())


@pytest.mark.parametrize("kind", ["file", "directory", "link", "missing-note", "fifo-note"])
async def test_what_is_no_fifo_with_a_note_is_dropped(held: Held, fifo: str, kind: str) -> None:
    match kind:
        case "missing-note":
            os.unlink(fifo + ".json")
        case "fifo-note":
            os.unlink(fifo + ".json")
            os.mkfifo(fifo + ".json")
        case _:
            os.unlink(fifo)
            {"file": lambda: open(fifo, "w").close(), "directory": lambda: os.mkdir(fifo)}.get(
                kind, lambda: os.symlink("/dev/null", fifo)
            )()
    assert len(held.restart()) == 1
    assert held.now.of(POD) == []


async def test_notes_without_a_fifo_are_removed(held: Held, fifo: str) -> None:
    os.unlink(fifo)
    assert held.restart() == []
    assert held.files() == []


async def test_there_is_a_bound(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    fds = [held.take(), held.take()]
    with pytest.raises(LimitExceeded, match="let one go"):
        held.take()
    for fd in fds:
        os.close(fd)
    await eventually(lambda: len(held.ended) == 2)
    os.close(held.take())


async def test_one_that_cannot_be_written_down_is_not_taken(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(small_file, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        held.take()
    assert (held.files(), held.now.of(POD)) == ([], [])
