from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostd.linux.small_file import read, replace


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


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_it_is_replaced_whole_and_for_root_alone(tmp_path: Path, directory: int) -> None:
    for data in (b"x" * 100_000, b""):
        replace(directory, "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_what_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, directory: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replace(directory, "file", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space"):
            replace(directory, "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_in_its_way_is_not_followed(tmp_path: Path, directory: int) -> None:
    (tmp_path / "other").write_bytes(b"kept")
    os.symlink("other", tmp_path / ".file.new")
    with pytest.raises(OSError, match="Too many levels"):
        replace(directory, "file", b"new")
    assert (tmp_path / "other").read_bytes() == b"kept"
