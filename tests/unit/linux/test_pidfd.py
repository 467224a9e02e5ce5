from __future__ import annotations

import errno
import json
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from hostd.linux import libc, pidfd
from hostd.linux.clock import boot_id
from hostd.linux.pidfd import End, Identity, NotAPidfd, Process
from hostd.linux.process import read_stat
from tests.support.wait import until

ANONYMOUS_INODE = 0x09041934
UNKNOWN_QUESTION = 0xC040_FFEE
EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}
LEADER_GOES = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(7))).start()
ctypes.CDLL(None).syscall(int(sys.argv[1]), 9)
"""

PIDFS = libc.filesystem_type(_self := os.pidfd_open(os.getpid())) == libc.PIDFS_MAGIC
os.close(_self)


@pytest.fixture(params=["this kernel", "no PIDFD_INFO_EXIT", "no pidfs"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This kernel, and what an older one answers."""
    if request.param != "this kernel":
        monkeypatch.setattr(pidfd, "_PIDFD_GET_INFO", UNKNOWN_QUESTION)
    if request.param == "no pidfs":
        monkeypatch.setattr(libc, "filesystem_type", lambda _fd: ANONYMOUS_INODE)
    return str(request.param)


@pytest.fixture
def fds() -> Iterator[None]:
    """No descriptor is left behind."""
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


_forked: list[int] = []


@pytest.fixture(autouse=True)
def children() -> Iterator[None]:
    """A test that fails leaves no child behind."""
    yield
    for pid in _forked:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    _forked.clear()


def fork(body: Callable[[], object] = signal.pause) -> int:
    # The tests' own handler of SIGTERM would make a tidy exit of it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not pid:
        body()
        os._exit(0)
    _forked.append(pid)
    return pid


def wait_dead(process: Process) -> None:
    assert select.select([process.fd], [], [], 20)[0]


def reap(pid: int) -> None:
    os.waitpid(pid, 0)


ENDS: list[tuple[Callable[[int], None], End]] = [
    (lambda pid: os.kill(pid, signal.SIGUSR1), End(status=0)),
    (lambda pid: os.kill(pid, signal.SIGUSR2), End(status=3)),
    (lambda pid: os.kill(pid, signal.SIGKILL), End(signal=signal.SIGKILL)),
    (lambda pid: os.kill(pid, signal.SIGTERM), End(signal=signal.SIGTERM)),
]


def started() -> int:
    reader, writer = os.pipe()

    def body() -> None:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))
        os.write(writer, b"x")
        while True:
            signal.pause()

    pid = fork(body)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return pid


@pytest.mark.usefixtures("fds")
@pytest.mark.parametrize(("finish", "end"), ENDS, ids=["exit 0", "exit 3", "SIGKILL", "SIGTERM"])
def test_alive_zombie_reaped(kernel: str, finish: Callable[[int], None], end: End) -> None:
    pid = started()
    with Process.open(pid) as process, Process.open(pid) as late:
        assert process.alive()
        assert process.end() is None
        finish(pid)
        wait_dead(process)
        assert not process.alive()
        assert process.end() == end
        reap(pid)
        assert not process.alive()
        assert process.end() == end
        # Asked for the first time when it is reaped already: only newer kernels know.
        assert late.end() == (end if kernel == "this kernel" else End())


@pytest.mark.usefixtures("fds")
def test_whether_an_end_can_be_asked_for_later(kernel: str) -> None:
    pidfd.kernel_keeps_ends.cache_clear()
    pid = started()
    with Process.open(pid) as process:
        assert process.end_is_kept == (kernel == "this kernel")
        os.kill(pid, signal.SIGKILL)
        wait_dead(process)
        assert process.end() == End(signal=signal.SIGKILL)
        assert process.end_is_kept
    pidfd.kernel_keeps_ends.cache_clear()


@pytest.mark.usefixtures("fds")
@pytest.mark.parametrize("missing", ["posix_spawn", "pidfd_open"])
def test_an_end_is_taken_for_lost_where_that_cannot_be_found_out(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "none is left")

    monkeypatch.setattr(os, missing, fails)
    pidfd.kernel_keeps_ends.cache_clear()
    assert not pidfd.kernel_keeps_ends()
    pidfd.kernel_keeps_ends.cache_clear()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.usefixtures("fds")
def test_who_started_us_may_have_our_children_reaped_unseen() -> None:
    """SIG_IGN is inherited; what is not to be found out then is no reason not to start."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pidfd.kernel_keeps_ends.cache_clear()
        assert not pidfd.kernel_keeps_ends()
    finally:
        signal.signal(signal.SIGCHLD, before)
        pidfd.kernel_keeps_ends.cache_clear()


@pytest.mark.usefixtures("fds")
def test_reaped_by_another_parent() -> None:
    """The process is a grandchild, which its own parent reaps at once."""
    reader, writer = os.pipe()

    def parent() -> None:
        child = fork()
        os.write(writer, b"%d" % child)
        os.waitpid(child, 0)
        signal.pause()

    middle = fork(parent)
    pid = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    with Process.open(pid) as process:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert process.end() == End(signal=signal.SIGKILL)
    os.kill(middle, signal.SIGKILL)
    reap(middle)


def test_a_core_dump_is_a_signal() -> None:
    dumped = 0x80
    assert pidfd._end(dumped | signal.SIGSEGV) == End(signal=signal.SIGSEGV)


@pytest.mark.usefixtures("fds")
def test_a_group_lives_on_without_its_leader(kernel: str) -> None:
    number = str(EXIT_OF_A_THREAD[platform.machine()])
    with subprocess.Popen([sys.executable, "-c", LEADER_GOES, number], stdin=subprocess.PIPE) as child:
        until(lambda: read_stat(child.pid).state == "Z")
        with Process.open(child.pid) as process:
            assert process.alive()
            assert process.end() is None
            assert process.identity.start_time == read_stat(child.pid).start_time
            assert child.stdin is not None
            child.stdin.close()
            wait_dead(process)
            assert process.end() == End(status=7)
            assert child.wait() == 7
            assert process.end() == End(status=7)


@pytest.mark.usefixtures("fds")
def test_those_who_may_not_trace_are_not_told_zero() -> None:
    """The kernel shows them the exit code 0; taken at its word that would be a poweroff."""
    pid = fork(lambda: os._exit(3))
    with Process.adopt(os.pidfd_open(pid)) as process:
        wait_dead(process)

        def stranger() -> None:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            shown = read_stat(pid).exit_code
            os._exit(0 if (shown, process.end()) == (0, End()) else 1)

        assert os.waitpid(fork(stranger), 0)[1] == 0
        reap(pid)


@pytest.mark.usefixtures("fds")
def test_open_refuses_the_dead() -> None:
    pid = fork(lambda: None)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError, match=f"{pid}"):
        Process.open(pid)
    reap(pid)
    with pytest.raises(ProcessLookupError, match=f"{pid}"):
        Process.open(pid)


@pytest.mark.usefixtures("fds")
@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**64])
def test_open_refuses_what_is_no_pid(pid: int) -> None:
    with pytest.raises(ProcessLookupError, match=str(pid)):
        Process.open(pid)


@pytest.mark.usefixtures("fds")
def test_open_refuses_a_thread() -> None:
    code = "import threading, sys; threading.Thread(target=sys.stdin.read).start()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        tasks = until(lambda: [int(name) for name in os.listdir(f"/proc/{child.pid}/task") if int(name) != child.pid])
        with pytest.raises(ProcessLookupError, match=str(tasks[0])):
            Process.open(tasks[0])


@pytest.mark.usefixtures("fds")
def test_open_passes_on_what_is_not_about_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many"):
        Process.open(os.getpid())


@pytest.mark.usefixtures("fds")
def test_identity_is_never_of_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies, is reaped, and another has its pid by the time /proc is read."""
    pid = fork()
    real = read_stat

    def too_late(asked: int) -> object:
        assert asked == pid
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        return real(os.getpid())

    fd = os.pidfd_open(pid)
    monkeypatch.setattr(pidfd, "read_stat", too_late)
    with Process.adopt(fd) as process:
        assert (process.pid, process.identity.start_time) == (-1, 0)
        assert process.end() == End(signal=signal.SIGKILL)


@pytest.mark.usefixtures("fds")
def test_open_of_one_that_dies_while_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = fork()
    real = read_stat

    def dies(asked: int) -> object:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        return real(asked)

    monkeypatch.setattr(pidfd, "read_stat", dies)
    with pytest.raises(ProcessLookupError, match=str(pid)):
        Process.open(pid)


@pytest.mark.usefixtures("fds")
def test_an_end_is_not_taken_from_the_next_process_of_the_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = fork(lambda: os._exit(3))
    monkeypatch.setattr(pidfd, "_PIDFD_GET_INFO", UNKNOWN_QUESTION)
    with Process.adopt(os.pidfd_open(pid)) as process:
        wait_dead(process)
        real = read_stat

        def another(asked: int) -> object:
            reap(pid)
            return replace(real(os.getpid()), pid=asked, exit_code=5 << 8)

        monkeypatch.setattr(pidfd, "read_stat", another)
        assert process.end() == End()


@pytest.mark.usefixtures("fds")
def test_adopt_the_living() -> None:
    pid = fork()
    with Process.open(pid) as opened:
        copy = os.dup(opened.fd)
        os.set_inheritable(copy, True)
        with Process.adopt(copy) as adopted:
            assert adopted.fd == copy
            assert not os.get_inheritable(copy)
            assert adopted.identity == opened.identity
            assert adopted.alive()
            os.kill(pid, signal.SIGKILL)
            wait_dead(adopted)
            reap(pid)


@pytest.mark.usefixtures("fds")
@pytest.mark.skipif(not PIDFS, reason="this kernel has no pidfs")
def test_adopt_the_reaped() -> None:
    pid = fork()
    with Process.open(pid) as opened:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        with Process.adopt(os.dup(opened.fd)) as adopted:
            assert adopted.pid == -1
            assert adopted.identity == Identity(-1, 0, boot_id(), opened.identity.inode)
            assert adopted.identity.same_as(opened.identity)
            assert not adopted.alive()
            assert adopted.end() == End(signal=signal.SIGKILL)


@pytest.mark.usefixtures("fds")
def test_adopt_closes_what_it_refuses() -> None:
    reader, writer = os.pipe()
    epoll = select.epoll()
    others = [reader, writer, os.dup(epoll.fileno()), os.eventfd(0), os.open("/proc/self/stat", os.O_RDONLY)]
    epoll.close()
    for fd in others:
        with pytest.raises(NotAPidfd, match=str(fd)) as caught:
            Process.adopt(fd)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


@pytest.mark.usefixtures("fds")
@pytest.mark.parametrize("fd", [-1, 1_000_000, 2**40])
def test_adopt_refuses_an_fd_that_is_not_open(fd: int) -> None:
    with pytest.raises(NotAPidfd) as caught:
        Process.adopt(fd)
    assert caught.value.errno == errno.EBADF


@pytest.mark.usefixtures("fds")
def test_adopt_refuses_the_pidfd_of_a_thread() -> None:
    """It would read dead when that thread ends, while its QEMU lives."""
    try:
        fd = os.pidfd_open(os.getpid(), os.O_EXCL)
    except OSError:
        pytest.skip("this kernel has no pidfds of threads")
    with pytest.raises(NotAPidfd, match="thread"):
        Process.adopt(fd)


@pytest.mark.usefixtures("fds")
def test_pidfds_are_close_on_exec_and_closed_once() -> None:
    process = Process.open(os.getpid())
    assert not os.get_inheritable(process.fd)
    process.close()
    process.close()
    assert process.fd == -1


@pytest.mark.usefixtures("fds")
def test_identify(kernel: str) -> None:
    identity = pidfd.identify(os.getpid())
    assert identity.pid == os.getpid()
    assert identity.start_time == read_stat(os.getpid()).start_time
    assert identity.boot_id == boot_id()
    assert bool(identity.inode) == (PIDFS and kernel != "no pidfs")
    assert identity == pidfd.identify(os.getpid())
    assert not identity.same_as(pidfd.identify(os.getppid()))


def test_a_process_keeps_its_identity_over_exec() -> None:
    with subprocess.Popen(["sh", "-c", "read x; exec sleep 1000"], stdin=subprocess.PIPE) as child:
        before = pidfd.identify(child.pid)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        until(lambda: read_stat(child.pid).comm == b"sleep")
        assert pidfd.identify(child.pid) == before
        child.kill()


ONE = Identity(10, 500, "boot", 77)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (ONE, True),
        (replace(ONE, boot_id="another"), False),
        (replace(ONE, inode=78), False),
        (replace(ONE, inode=0), True),
        (replace(ONE, inode=0, start_time=501), False),
        (replace(ONE, inode=0, pid=11), False),
        (replace(ONE, pid=-1, start_time=0), True),
        (replace(ONE, pid=-1, start_time=0, inode=0), False),
    ],
)
def test_same_as(other: Identity, same: bool) -> None:
    assert ONE.same_as(other) is same
    assert other.same_as(ONE) is same


def test_two_of_whom_nothing_is_known_are_not_the_same() -> None:
    nobody = Identity(-1, 0, "boot")
    assert not nobody.same_as(nobody)


def test_identity_as_plain_data() -> None:
    assert Identity.from_dict(json.loads(json.dumps(ONE.to_dict()))) == ONE
    assert Identity.from_dict({"pid": 1, "start_time": 2, "boot_id": "b", "later": []}) == Identity(1, 2, "b")


@pytest.mark.parametrize(
    "broken",
    [
        {"pid": "1"},
        {"pid": True},
        {"pid": None},
        {"start_time": 1.5},
        {"boot_id": 3},
        {"boot_id": None},
        {"inode": "x"},
    ],
)
def test_identity_from_broken_data_names_the_key(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(broken))):
        Identity.from_dict({**ONE.to_dict(), **broken})
    for key in ("pid", "start_time", "boot_id"):
        with pytest.raises(ValueError, match=key):
            Identity.from_dict({other: value for other, value in ONE.to_dict().items() if other != key})
