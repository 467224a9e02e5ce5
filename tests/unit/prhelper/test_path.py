from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.prhelper import path as paths
from hostd.prhelper.listener import Listener
from hostd.prhelper.path import Kind, Ownership
from tests.support.prhelper import attributes

QEMU = Ownership((107, 107), 0o660)


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path / "pr.sock")


@pytest.fixture
def listener(path: bytes) -> Iterator[Listener]:
    made = Listener.create(path)
    yield made
    made.close()


def stale(path: bytes) -> paths.Inode:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
    found = paths.inode_at(path)
    assert found
    return found


def test_nothing_is_missing(path: bytes) -> None:
    assert paths.look(path).kind is Kind.MISSING
    assert paths.look(path + b"/below").kind is Kind.MISSING
    assert paths.inode_at(path) is None


def test_a_live_socket_names_who_listens(path: bytes, listener: Listener) -> None:
    sight = paths.look(path)
    assert (sight.kind, sight.inode, sight.pid) == (Kind.LIVE, listener.inode, os.getpid())


def test_one_with_a_full_queue_is_live(path: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(path)
        full.listen(0)
        first.connect(path)
        assert paths.look(path).kind is Kind.LIVE


def test_a_dead_one_is_stale(path: bytes) -> None:
    inode = stale(path)
    assert paths.look(path) == paths.Sight(Kind.STALE, inode)


def test_everything_else_is_an_obstacle(path: bytes, tmp_path: Path) -> None:
    os.mkdir(path)
    assert paths.look(path).kind is Kind.OBSTACLE
    os.rmdir(path)
    os.symlink(tmp_path / "elsewhere", path)
    assert "is no socket; remove it" in paths.look(path).why
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(path)
        assert paths.look(path).kind is Kind.OBSTACLE


def test_a_stale_socket_is_cleared(path: bytes) -> None:
    assert paths.clear_stale(path, stale(path))
    assert os.listdir(os.path.dirname(path)) == []
    assert paths.clear_stale(path, (1, 1)), "nothing there is clear, too"


def test_a_live_one_that_came_in_between_stays(path: bytes) -> None:
    inode = stale(path)
    os.unlink(path)
    other = Listener.create(path)
    try:
        # The file system may have given it the same inode number; what is live stays all the same.
        assert not paths.clear_stale(path, inode)
        assert paths.look(path).kind is Kind.LIVE
        assert os.listdir(os.path.dirname(path)) == [b"pr.sock"]
    finally:
        other.close()


def test_what_is_put_back_does_not_replace_a_newer_one(path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Listener.create(path)
    look = paths.look
    made: list[Listener] = []

    def faster(aside: bytes) -> paths.Sight:
        made.append(Listener.create(path))
        return look(aside)

    monkeypatch.setattr(paths, "look", faster)
    try:
        assert not paths.clear_stale(path, (1, 1))
        assert paths.inode_at(path) == made[0].inode
        assert os.listdir(os.path.dirname(path)) == [b"pr.sock"]
    finally:
        first.close()
        made[0].close()


def test_only_our_own_is_removed(path: bytes, listener: Listener) -> None:
    paths.remove(path, (1, 1))
    assert os.path.lexists(path)
    paths.remove(path, listener.inode)
    assert not os.path.lexists(path)


@pytest.mark.usefixtures("root")
class TestOwnership:
    @pytest.mark.usefixtures("listener")
    def test_a_new_socket_lets_nobody_in(self, path: bytes) -> None:
        assert attributes(path) == (0, 0, 0)

    def test_it_is_made_right_and_left_right(self, path: bytes, listener: Listener) -> None:
        assert paths.correct_socket(path, listener.inode, QEMU, "") == ["owner", "mode"]
        assert attributes(path) == (107, 107, 0o660)
        assert paths.correct_socket(path, listener.inode, QEMU, "") == []

    def test_the_label_is_set_only_where_it_differs(self, path: bytes, listener: Listener) -> None:
        label = "system_u:object_r:container_file_t:s0"
        assert "label" in paths.correct_socket(path, listener.inode, QEMU, label)
        assert os.getxattr(path, "security.selinux") == label.encode() + b"\0"
        assert paths.correct_socket(path, listener.inode, QEMU, label) == []

    def test_another_inode_is_not_touched(self, path: bytes, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.touch(0o600)
        for what in (os.link, os.symlink):
            what(victim, path)
            with pytest.raises(OSError, match="another socket") as caught:
                paths.correct_socket(path, (1, 1), QEMU, "")
            assert caught.value.errno == errno.ENOENT
            assert attributes(str(victim)) == (0, 0, 0o600)
            os.unlink(path)

    def test_a_directory_is_made_with_its_parents_and_only_itself_given_away(self, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path / "daemons/pr/pr.sock")
        assert paths.prepare_directory(path, QEMU, "") == ["owner"]
        assert attributes(str(tmp_path / "daemons/pr")) == (107, 107, 0o755)
        assert attributes(str(tmp_path / "daemons")) == (0, 0, 0o755)

    def test_one_that_is_there_is_kept_and_opened(self, tmp_path: Path) -> None:
        (tmp_path / "pr").mkdir(0o700)
        inode = (tmp_path / "pr").stat().st_ino
        assert paths.prepare_directory(os.fsencode(tmp_path / "pr/pr.sock"), QEMU, "") == ["owner", "mode"]
        assert attributes(str(tmp_path / "pr")) == (107, 107, 0o755)
        assert (tmp_path / "pr").stat().st_ino == inode

    @pytest.mark.parametrize("directory", ["/run", "/tmp", "/var/run"])
    def test_a_directory_of_all_is_left_alone(self, directory: str) -> None:
        before = attributes(os.path.realpath(directory))
        assert paths.prepare_directory(os.fsencode(directory) + b"/x.sock", QEMU, "") == []
        assert attributes(os.path.realpath(directory)) == before
