"""Private mount namespaces for tests: mounts that nobody else sees and that vanish with the test.

    with MountNamespace("shared") as host:            # plays the part of PID 1's namespace
        host.write(host.base + b"/image", b"data")
        host.bind(host.base + b"/image", host.touch(host.base + b"/disk.img"))
        assert host.base + b"/disk.img" in host.targets()
        with host.copy("slave") as pod:               # what a container runtime makes of it
            holder = pod.hold(lambda: os.open(host.base + b"/disk.img", os.O_RDONLY))
            ...
            holder.end()
        WorkerPool(host.path, host.base + b"/kubelet")

Each namespace is kept by one child process (`pid`); `path` names it for setns. `base` is a directory on a tmpfs that
exists only in there (and in its copies): all files live on it. From outside it is reached as `outside(path)`.

`call(function, *arguments)` forks, enters the namespace and runs the function there; what it returns or raises comes
back (pickled), what it changes in memory does not. Nothing here needs nsenter or mount(8). All paths are bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

T = TypeVar("T")
Propagation = Literal["private", "shared", "slave"]

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 1, 32, 4096, 8192, 16384
MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 17, 1 << 18, 1 << 19, 1 << 20
MNT_FORCE, MNT_DETACH, MNT_EXPIRE, UMOUNT_NOFOLLOW = 1, 2, 4, 8
_CLONE_NEWNS = 0x20000
_PR_SET_PDEATHSIG = 1
_KINDS = {"private": MS_PRIVATE, "shared": MS_SHARED, "slave": MS_SLAVE}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, *what: bytes) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *what[:1])


def mount(source: bytes, target: bytes, fstype: bytes = b"", flags: int = 0, data: bytes | None = None) -> None:
    """mount(2) in the namespace of the caller."""
    result = _libc.mount(source, target, fstype or None, ctypes.c_ulong(flags), data)
    _check(result, target)


def umount(target: bytes, flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2) in the namespace of the caller."""
    _check(_libc.umount2(target, flags), target)


def enter(path: str) -> None:
    """setns(2) of the calling (single-threaded) process into the mount namespace `path`; changes cwd and root."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNS))
    finally:
        os.close(fd)


def wait_for(condition: Callable[[], T], what: str = "condition", seconds: float = 10) -> T:
    """The first true value of `condition`, polled; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {seconds} s")
        time.sleep(0.005)
    return value


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A forked process that the test owns. It dies with the test process, whatever happens.

    It has the test's memory, but none of its descriptors except 0 to 2.
    """

    def __init__(self, body: Callable[[Callable[[object], None]], None]) -> None:
        """Forks; the child runs `body(tell)`. What it tells, or raises, `hear` gives to the parent."""
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._child(body, writer)
        os.close(writer)
        self.pidfd = os.pidfd_open(self.pid)

    @staticmethod
    def _child(body: Callable[[Callable[[object], None]], None], writer: int) -> NoReturn:
        def tell(value: object) -> None:
            data = pickle.dumps(value)
            os.write(writer, len(data).to_bytes(4, "big"))
            for start in range(0, len(data), 4096):
                os.write(writer, data[start : start + 4096])

        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            _die_with_parent()
            # What the test has open would otherwise live on in here: sockets, locks, FIFOs that never end.
            os.closerange(3, writer)
            os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
            body(tell)
        except BaseException as error:  # noqa: BLE001  the parent raises it again
            tell(_Raised(error))
        finally:
            os._exit(0)

    def hear(self) -> Any:
        """The next value that the child tells; raises what it raised, EOFError when it died silently."""
        value = pickle.loads(self._read(int.from_bytes(self._read(4), "big")))
        if isinstance(value, _Raised):
            raise value.error
        return value

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(self._reader, count - len(data))
            if not more:
                raise EOFError(f"the child {self.pid} died without a word")
            data += more
        return data

    @property
    def alive(self) -> bool:
        """Whether it runs still (a zombie does not)."""
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; a dead process is fine."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end(self) -> None:
        """Kills and reaps it. May be called again."""
        if self.pidfd < 0:
            return
        self.kill()
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        os.close(self._reader)
        self.pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:  # noqa: BLE001  an error that does not travel is told in words
            return _Raised, (RuntimeError(repr(self.error)),)
        return _Raised, (self.error,)


def _forever() -> NoReturn:
    while True:
        signal.pause()


class MountNamespace:
    """A mount namespace with a keeper process, and helpers that act inside it. See the module's text."""

    def __init__(self, propagation: Propagation = "private", *, of: MountNamespace | None = None) -> None:
        """Copies `of` (or the test's own namespace, whose propagation is cut first) and marks all mounts."""
        self._children: list[Child] = []
        self._copies: list[MountNamespace] = []
        self._directory = tempfile.mkdtemp(prefix="hostd-test-") if of is None else ""
        self.base: bytes = of.base if of else os.fsencode(self._directory)

        def body(tell: Callable[[object], None]) -> None:
            if of is not None:
                enter(of.path)
            _check(_libc.unshare(_CLONE_NEWNS))
            if of is None:
                mount(b"none", b"/", flags=MS_REC | MS_PRIVATE)
                mount(b"hostd-test", self.base, b"tmpfs", data=b"mode=0755")
            mount(b"none", b"/", flags=MS_REC | _KINDS[propagation])
            tell(None)
            _forever()

        self.keeper = Child(body)
        try:
            self.keeper.hear()
        except BaseException:
            self.close()
            raise
        self.pid = self.keeper.pid

    @property
    def path(self) -> str:
        """The namespace's name for setns."""
        return f"/proc/{self.keeper.pid}/ns/mnt"

    @property
    def mountinfo(self) -> str:
        """The namespace's mount table."""
        return f"/proc/{self.keeper.pid}/mountinfo"

    def outside(self, path: bytes) -> bytes:
        """A path by which the test process reaches `path` without entering the namespace."""
        return b"/proc/%d/root%s" % (self.keeper.pid, path)

    # -- acting inside

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs `function` inside and gives what it returns; what it raises is raised here."""
        with Child(lambda tell: self._inside(tell, function, arguments)) as child:
            return child.hear()  # type: ignore[no-any-return]

    def _inside(self, tell: Callable[[object], None], function: Callable[..., object], arguments: Any) -> None:
        enter(self.path)
        tell(function(*arguments))

    def hold(self, function: Callable[..., object] = lambda: None, *arguments: Any) -> Child:
        """A process inside that has run `function` and then stays until its `end` or the namespace's close."""

        def body(tell: Callable[[object], None]) -> None:
            kept = []
            enter(self.path)
            kept.append(function(*arguments))
            tell(None)
            _forever()

        child = Child(body)
        self._children.append(child)
        child.hear()
        return child

    def run(self, argv: Sequence[str | bytes], **more: Any) -> subprocess.CompletedProcess[bytes]:
        """Runs a command inside, captured; raises CalledProcessError."""
        return self.call(lambda: subprocess.run(argv, check=True, capture_output=True, **more))

    def popen(self, argv: Sequence[str | bytes], *, cwd: bytes = b"/") -> Child:
        """Starts a command inside as a process of the test's (`pid` is the command's own)."""

        def body(tell: Callable[[object], None]) -> None:
            enter(self.path)
            os.chdir(cwd)
            tell(None)
            os.execvp(argv[0], list(argv))

        child = Child(body)
        self._children.append(child)
        child.hear()
        return child

    def copy(self, propagation: Propagation) -> MountNamespace:
        """A namespace made from this one: `slave` as for containers, or `private`. Closed with this one."""
        copied = MountNamespace(propagation, of=self)
        self._copies.append(copied)
        return copied

    # -- files and mounts inside

    def mkdir(self, path: bytes) -> bytes:
        """Makes a directory with its parents; gives the path back."""
        self.call(os.makedirs, path, 0o755, True)
        return path

    def write(self, path: bytes, data: bytes = b"") -> bytes:
        """Makes a file with its parent directories; gives the path back."""
        os.makedirs(self.outside(os.path.dirname(path)), exist_ok=True)
        with open(self.outside(path), "wb") as file:
            file.write(data)
        return path

    def touch(self, path: bytes) -> bytes:
        """An empty file, as a mountpoint is; gives the path back."""
        return self.write(path)

    def exists(self, path: bytes) -> bool:
        """Whether something (also a dangling symlink) is at the path."""
        return self.call(os.path.lexists, path)

    def mount(
        self, source: bytes, target: bytes, fstype: bytes = b"", flags: int = 0, data: bytes | None = None
    ) -> None:
        """mount(2) inside."""
        self.call(mount, source, target, fstype, flags, data)

    def bind(self, source: bytes, target: bytes, *, recursive: bool = False) -> None:
        """A bind mount inside; both ends exist already."""
        self.mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))

    def tmpfs(self, target: bytes) -> bytes:
        """A tmpfs on a directory, which is made; gives the path back."""
        self.mkdir(target)
        self.mount(b"hostd-test", target, b"tmpfs")
        return target

    def mark(self, target: bytes, propagation: Propagation) -> None:
        """Changes the propagation of one mount."""
        self.mount(b"none", target, flags=_KINDS[propagation])

    def umount(self, target: bytes, flags: int = UMOUNT_NOFOLLOW) -> None:
        """umount2(2) inside."""
        self.call(umount, target, flags)

    def table(self) -> bytes:
        """The raw mountinfo of the namespace."""
        with open(self.mountinfo, "rb") as file:
            return file.read()

    def targets(self) -> list[bytes]:
        """The mountpoints below `base`, unescaped, in the order of the table; stacked ones appear often."""
        points = (line.split(b" ")[4] for line in self.table().splitlines())
        found = (re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), point) for point in points)
        return [point for point in found if point.startswith(self.base + b"/")]

    # -- the end

    def close(self) -> None:
        """Ends every process that was started inside, the copies and the namespace itself. May be called again."""
        for copied in self._copies:
            copied.close()
        for child in self._children:
            child.end()
        # To remove a directory on which another namespace has a mount takes that mount away, with all below it left
        # connected: an ext4 in a loop device in a file of it would pin itself for ever. The last process goes first.
        others = self._others() if self._directory else []
        self.keeper.end()
        for pidfd in others:
            # Whoever is in here was started by the test; most are ending just now.
            if not select.select([pidfd], [], [], 2)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                assert select.select([pidfd], [], [], 10)[0], f"a process stays in the namespace of {self._directory!r}"
            os.close(pidfd)
        if self._directory:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._directory)

    def _others(self) -> list[int]:
        """pidfds of the processes in the namespace beside its keeper: of a daemon's workers, say, that end just now."""
        if not self.keeper.alive:
            return []
        own = os.stat(self.path).st_ino
        pidfds = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != self.keeper.pid]:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/mnt").st_ino == own:
                    pidfds.append(os.pidfd_open(pid))
        return pidfds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
