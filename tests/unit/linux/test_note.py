"""A worker's note, from both ends and by the next daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.linux.note import NONE, Left, Note, left

TARGETS = [b"pods/a", b"pods/b\xff", b"pods/c"]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "workers")


@pytest.fixture
def note(directory: str) -> Iterator[Note]:
    made = Note.create(directory)
    yield made
    made.remove()


def other_end(note: Note) -> Note:
    """As the worker has it: the descriptor that it inherited."""
    return Note(os.dup(note.fileno()))


def test_both_ends_see_what_the_other_one_says(note: Note) -> None:
    worker = other_end(note)
    assert worker.bound == NONE
    worker.at, note.bound = 7, 9
    assert (note.at, worker.bound) == (7, 9)
    worker.close()


def test_the_next_daemon_reads_what_a_living_worker_is_at(note: Note, directory: str) -> None:
    worker = other_end(note)
    assert left(directory) == []
    worker.write(TARGETS)
    worker.at = 1
    assert left(directory) == [Left(os.getpid(), TARGETS[1])]
    worker.write(TARGETS[:1])
    worker.at = 0
    assert left(directory) == [Left(os.getpid(), TARGETS[0])], "a shorter job, over what a longer one left"
    worker.write([])
    assert left(directory) == []
    worker.close()


def test_a_note_ends_with_who_holds_it(directory: str) -> None:
    daemon = Note.create(directory)
    worker = other_end(daemon)
    worker.write(TARGETS)
    daemon.close()
    assert left(directory) == [Left(os.getpid(), TARGETS[0])], "its daemon was killed, and it lives"
    worker.close()
    assert left(directory) == []
    assert os.listdir(directory) == []


def test_what_is_no_note_says_nothing(note: Note, directory: str) -> None:
    note.write(TARGETS)
    os.mkdir(os.path.join(directory, "a directory"))
    os.symlink("/etc/passwd", os.path.join(directory, "a link"))
    assert left(directory) == [Left(os.getpid(), TARGETS[0])]
    assert left(directory + "/none") == []


def test_without_a_directory_it_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for made in (Note.create(), Note.create(str(tmp_path / "file"))):
        made.at = 3
        made.write(TARGETS)
        assert made.at == 3
        made.remove()


def test_removed_it_leaves_nothing(directory: str) -> None:
    made = Note.create(directory)
    assert len(os.listdir(directory)) == 1
    made.remove()
    assert os.listdir(directory) == []
