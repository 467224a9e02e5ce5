from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostd.linux.small_file import read


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_it_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert read(str(tmp_path / "file"), 100_000) == b"x" * 100_000
    (tmp_path / "file").write_bytes(b"")
    assert read(str(tmp_path / "file"), 0) == b""


def test_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"here")
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert read("file", 10, directory) == b"here"
    finally:
        os.close(directory)


def test_one_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read(str(tmp_path / "file"), 4)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, make: Callable[[str], None]) -> None:
    make(str(tmp_path / "file"))
    with pytest.raises((OSError, ValueError), match=r"not a regular file|Too many levels"):
        read(str(tmp_path / "file"), 4)


def test_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read(str(tmp_path / "file"), 4)
    assert caught.value.errno == errno.ENOENT
