from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hostd.linux import libc
from hostd.linux.process import read_stat
from tests.support.mountns import MountNamespace

BENEATH = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS


@pytest.fixture
def tree(tmp_path: Path) -> int:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "out").symlink_to("/etc")
    return os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)


def test_openat2_opens_close_on_exec(tree: int) -> None:
    fd = libc.openat2(tree, b"a/b/file", os.O_RDONLY, BENEATH)
    assert os.read(fd, 100) == b"content"
    assert not os.get_inheritable(fd)
    os.close(fd)
    os.close(tree)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (b"link/b/file", errno.ELOOP),
        (b"a/out/passwd", errno.ELOOP),
        (b"../x", errno.EXDEV),
        (b"/etc/passwd", errno.EXDEV),
        (b"a/missing", errno.ENOENT),
        (b"a/b/file/x", errno.ENOTDIR),
    ],
)
def test_openat2_tells_why_not_and_where(tree: int, path: bytes, number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        libc.openat2(tree, path, os.O_RDONLY, BENEATH)
    os.close(tree)
    assert caught.value.errno == number
    assert caught.value.filename == path


def test_openat2_goes_on_after_a_signal(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader, writer = os.pipe()
    previous = signal.signal(signal.SIGUSR1, lambda *_: os.write(writer, b"x"))
    directory = os.open(tmp_path, os.O_PATH)
    parent = os.getpid()
    child = os.fork()
    if not child:
        # The parent hangs in the open of a FIFO that nobody reads: signal it there, then let it through.
        while read_stat(parent).state != "S":
            time.sleep(0.001)
        os.kill(parent, signal.SIGUSR1)
        os.read(reader, 1)
        os.open(fifo, os.O_RDONLY)
        signal.pause()
    try:
        os.close(libc.openat2(directory, b"fifo", os.O_WRONLY, libc.RESOLVE_BENEATH))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        signal.signal(signal.SIGUSR1, previous)
        for fd in (directory, reader, writer):
            os.close(fd)


def test_a_nul_is_refused_and_not_taken_for_the_end() -> None:
    fd = os.open("/", os.O_PATH)
    calls: tuple[Callable[[], object], ...] = (
        lambda: libc.umount2(b"/nowhere\0/x", libc.UMOUNT_NOFOLLOW),
        lambda: libc.openat2(fd, b"etc\0x", os.O_PATH, 0),
        lambda: libc.filesystem_type(b"/\0x"),
        lambda: libc.inotify_add_watch(fd, b"/\0x", libc.IN_CREATE),
    )
    for call in calls:
        with pytest.raises(ValueError, match="NUL"):
            call()
    os.close(fd)


def test_umount2_of_what_is_no_mountpoint(tmp_path: Path) -> None:
    assert libc.umount2(os.fsencode(tmp_path), libc.UMOUNT_NOFOLLOW) == errno.EINVAL
    assert libc.umount2(os.fsencode(tmp_path / "missing"), libc.UMOUNT_NOFOLLOW) == errno.ENOENT


def test_umount2_and_setns_in_another_namespace() -> None:
    with MountNamespace() as host:
        target = host.tmpfs(host.base + b"/t")
        link = host.base + b"/link"
        host.call(os.symlink, target, link)

        def unmount() -> int:
            assert libc.umount2(link, libc.UMOUNT_NOFOLLOW) == errno.EINVAL
            assert os.path.ismount(target)
            assert libc.umount2(target, libc.UMOUNT_NOFOLLOW) == 0
            return os.getpid()

        assert host.call(unmount) != os.getpid()
        assert target not in host.targets()
        assert host.call(_enter, host.path) == os.stat(host.path).st_ino


def _enter(path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    libc.setns(fd, libc.CLONE_NEWNS)
    return os.stat("/proc/self/ns/mnt").st_ino


def test_setns_wants_a_namespace() -> None:
    fd = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
        libc.setns(fd, libc.CLONE_NEWNS)
    os.close(fd)


def test_a_descriptor_of_another_process() -> None:
    reader, writer = os.pipe()
    pidfd = os.pidfd_open(os.getpid())
    copy = libc.pidfd_getfd(pidfd, reader)
    os.write(writer, b"x")
    assert os.read(copy, 1) == b"x"
    assert not os.get_inheritable(copy)
    os.close(copy)
    os.close(reader)
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.pidfd_getfd(pidfd, reader)
    for fd in (writer, pidfd):
        os.close(fd)


def test_filesystem_type() -> None:
    tmpfs_magic, proc_magic = 0x01021994, 0x9FA0
    assert libc.filesystem_type(b"/proc/self") == proc_magic
    fd = os.open("/dev/shm", os.O_PATH) if os.path.ismount("/dev/shm") else os.memfd_create("x")
    assert libc.filesystem_type(fd) == tmpfs_magic
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        libc.filesystem_type(b"/nowhere/at/all")


def test_the_name_of_a_process() -> None:
    child = os.fork()
    if not child:
        libc.set_process_name(b"hostd-worker-with-a-long-name")
        os._exit(0 if Path("/proc/self/comm").read_bytes() == b"hostd-worker-wi\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
