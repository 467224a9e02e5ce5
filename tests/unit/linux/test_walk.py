"""Walking beneath a directory, with and without openat2."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from hostd.linux import libc, walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["openat2", "by steps"])
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"x")
    (root / "a" / "link").symlink_to("b")
    (root / "a" / "out").symlink_to(tmp_path / "outside")
    (root / "a" / "filelink").symlink_to("b/file")
    if request.param == "by steps":

        def hidden(*_: object) -> int:
            raise OSError(errno.ENOSYS, "hidden")

        monkeypatch.setattr(libc, "openat2", hidden)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        (b"a", (b".", b"a")),
        (b"a/b", (b"a", b"b")),
        (b"a//./b/", (b"a", b"b")),
        (b"a b/c\n\\d\xff", (b"a b", b"c\n\\d\xff")),
        (b"...", (b".", b"...")),
    ],
)
def test_split(relative: bytes, expected: tuple[bytes, bytes]) -> None:
    assert walk.split(relative) == expected


@pytest.mark.parametrize(
    ("relative", "number"),
    [
        (b"", errno.EINVAL),
        (b".", errno.EINVAL),
        (b"./", errno.EINVAL),
        (b"a\0b", errno.EINVAL),
        (b"..", errno.EXDEV),
        (b"a/..", errno.EXDEV),
        (b"a/../b", errno.EXDEV),
        (b"/a", errno.EXDEV),
    ],
)
def test_split_refuses(relative: bytes, number: int) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        walk.split(relative)
    assert caught.value.errno == number


@pytest.mark.parametrize("relative", [b"a/b", b"a", b".", b"a//b/.", b"a/b/file"])
def test_opens(tree: int, relative: bytes) -> None:
    fd = walk.open_beneath(tree, relative, os.O_PATH)
    try:
        assert os.path.samestat(os.fstat(fd), os.stat(relative, dir_fd=tree))
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_PATH | os.O_DIRECTORY, os.O_RDONLY])
@pytest.mark.parametrize("relative", [b"a/link", b"a/link/file", b"a/out", b"a/out/secret", b"a/filelink"])
def test_follows_no_symlink(tree: int, relative: bytes, flags: int) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        walk.open_beneath(tree, relative, flags)
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)


@pytest.mark.parametrize(
    ("relative", "number"),
    [(b"..", errno.EXDEV), (b"/etc", errno.EXDEV), (b"a/x", errno.ENOENT), (b"a\0", errno.EINVAL)],
)
def test_refuses(tree: int, relative: bytes, number: int) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        walk.open_beneath(tree, relative, os.O_PATH)
    assert caught.value.errno == number


def test_leaves_no_descriptor_behind(tree: int) -> None:
    before = os.listdir("/proc/self/fd")
    for relative in (b"a/b/file", b"a/link", b"a/out/secret", b"a/x/y", b"a/filelink"):
        with contextlib.suppress(OSError):
            os.close(walk.open_beneath(tree, relative, os.O_PATH))
    assert os.listdir("/proc/self/fd") == before


def test_a_component_that_is_swapped_all_the_time(tree: int, tmp_path: Path) -> None:
    """Whatever the walk opens, it is never what lies behind the attacker's symlink."""
    parent = tmp_path / "root" / "a"
    (parent / "evil").symlink_to(tmp_path / "outside")
    (parent / "good").mkdir()
    (parent / "good" / "secret").write_bytes(b"")
    secret = os.stat(tmp_path / "outside" / "secret")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(parent / "good", parent / "dir")
            os.rename(parent / "dir", parent / "good")
            os.rename(parent / "evil", parent / "dir")
            os.rename(parent / "dir", parent / "evil")

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes = set()
    try:
        for _ in range(3000):
            try:
                fd = walk.open_beneath(tree, b"a/dir/secret", os.O_PATH)
            except OSError as error:
                outcomes.add(error.errno)
            else:
                found = os.fstat(fd)
                os.close(fd)
                assert not os.path.samestat(found, secret)
                assert stat.S_ISREG(found.st_mode)
                outcomes.add(0)
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {0, errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EAGAIN}
