"""The daemon's end of one worker: its process, its socket and the job that it is at.

A worker that makes no progress for a while is *hung*: nothing waits for it any more. From that moment the daemon's
end sends nothing more, which tells the worker, should it ever come back, to stop before the next target and to end.
The same is done when the task that waits for a job is cancelled. So no answer can ever be taken for another job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import marshal
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hostd.errors import HostdError
from hostd.linux import clock, worker
from hostd.linux.note import Note

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.linux.pidfd import Identity
    from hostd.linux.umount import Outcome

_PACKAGES: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: The same interpreter without `site`, which would cost half of the start, and whatever PYTHON… is in the environment.
_PROGRAM: Final = "import sys; sys.path.append(sys.argv[2]); from hostd.linux.worker import main; main()"
#: s: for the interpreter's start, which is slow on a loaded node and touches nothing that hangs.
_START_AFTER: Final = 10.0
#: s: outcomes of a job whose worker has not rung are looked for after so long.
_FIRST_LOOK: Final = 0.05


_T = TypeVar("_T")


def _shown(what: bytes) -> str:
    return what.decode("utf-8", "backslashreplace")


class WorkerError(HostdError):
    """A worker process did not do a job; the message says which and why."""


class WorkerHung(WorkerError):
    """A worker makes no progress: it hangs in the kernel on `relative` (the target or path that it is at).

    `done`: the outcomes of an umount job that were told before. What comes after `relative` in the job is untouched.
    """

    def __init__(self, relative: bytes, pid: int, seconds: float) -> None:
        super().__init__(
            f"worker {pid} hangs on {_shown(relative)} since {seconds:g} s: its file system does not answer"
        )
        self.relative = relative
        self.pid = pid
        self.done: list[Outcome] = []


class WorkerDied(WorkerError):
    """A worker process ended in the middle of a job, at `relative`. `done` as for WorkerHung."""

    def __init__(self, relative: bytes, pid: int, why: str) -> None:
        super().__init__(f"worker {pid} ended while at {_shown(relative)}: {why}")
        self.relative = relative
        self.pid = pid
        self.done: list[Outcome] = []


class State(Enum):
    """Where a worker is."""

    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    #: Its job was given up by the caller; it ends when it has answered.
    LEAVING = auto()
    HUNG = auto()
    DEAD = auto()


@dataclass(slots=True)
class Job:
    """One request under way. `name(n)` says what the part number n is about; `on_end` is called once, with what the
    answer ends with, or with the error."""

    name: Callable[[int], bytes]
    on_part: Callable[[object], None]
    on_end: Callable[[object, Exception | None], None]
    progress_at: float
    progress_usec: int
    parts: int = 0
    timer: asyncio.TimerHandle | None = field(default=None)

    ended: bool = False

    @property
    def what(self) -> bytes:
        """What the worker is at."""
        return self.name(self.parts)

    def end(self, answer: object, error: Exception | None) -> None:
        """Calls `on_end`, unless that was done."""
        if not self.ended:
            self.ended = True
            self.on_end(answer, error)


class Link:
    """One worker process. `on_change(link)` is called when it became hung or dead."""

    def __init__(
        self, hung_after: float, on_change: Callable[[Link], None], inotify: int = -1, notes: str | None = None
    ) -> None:
        """Starts the process, which inherits `inotify` and a note in the directory `notes`; raises OSError when that
        fails."""
        self._loop = asyncio.get_running_loop()
        self._hung_after = hung_after
        self._on_change = on_change
        self.state = State.STARTING
        self.job: Job | None = None
        #: It is in the host's mount namespace.
        self.joined = False
        #: It came up: its hello was answered.
        self.ready = False
        #: Who it is, for another hostd; None where that could not be found out.
        self.identity: Identity | None = None
        with contextlib.ExitStack() as undo:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._socket.close)
            with theirs:
                for end in (self._socket, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * worker.MESSAGE_MAX)
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                undo.callback(os.close, self._bell)
                self.note = Note.create(notes)
                undo.callback(self.note.remove)
                self._process = _start(theirs.fileno(), self._bell, self.note.fileno(), inotify)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self.pid = self._process.pid
        self._socket.setblocking(False)
        self._loop.add_reader(self._bell, self._rung)
        self._loop.add_reader(self._pidfd, self._ended)

    # -- jobs

    async def call(
        self,
        op: str,
        *arguments: object,
        name: Callable[[int], bytes],
        on_part: Callable[[object], None] = lambda _: None,
    ) -> object:
        """The END of the answer to a request that is sent before the first suspension.

        Raises WorkerHung, WorkerDied, WorkerError, or the OSError that the worker met.
        """
        answer: asyncio.Future[object] = self._loop.create_future()
        job = self.send(op, *arguments, name=name, on_part=on_part, on_end=lambda *end: settle(answer, *end))
        return await self.answer(job, answer)

    async def answer(self, job: Job, answer: asyncio.Future[_T]) -> _T:
        """Waits for a job's answer; nobody else does, so when that is cancelled the job is given up."""
        try:
            return await answer
        except asyncio.CancelledError:
            if self.job is job:
                self.give_up()
            raise

    def send(
        self,
        op: str,
        *arguments: object,
        name: Callable[[int], bytes],
        on_part: Callable[[object], None] = lambda _: None,
        on_end: Callable[[object, Exception | None], None],
    ) -> Job:
        """A request, sent on return. What `on_part` raises ends the worker; `on_end` does not raise.

        Raises OSError ENAMETOOLONG for one that no message holds.
        """
        request = marshal.dumps((op, arguments))  # type: ignore[arg-type]
        if len(request) > worker.MESSAGE_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name(0)[:4096])
        assert self.job is None, self.job
        assert self.state in (State.STARTING, State.BUSY), self.state
        now = self._loop.time()
        self.job = job = Job(name, on_part, on_end, now, clock.boottime_usec())
        try:
            self._socket.send(request)
        except OSError:
            # It died a moment ago; how, the pidfd tells.
            self.kill()
        else:
            job.timer = self._loop.call_at(now + min(_FIRST_LOOK, self._hung_after), self._look)
        return job

    def give_up(self) -> None:
        """Nobody waits any more: the worker ends after the target that it is at."""
        if self.job:
            self.job.ended = True
        self.state = State.LEAVING
        self._hang_up()
        self._on_change(self)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _look(self) -> None:
        """The timer's: hung, unless there was progress. A part that waits to be read is progress."""
        self._receive()
        job = self.job
        if job is None or self.state is State.DEAD:
            return
        due = job.progress_at + (self._hung_after if self.joined else max(self._hung_after, _START_AFTER))
        if (now := self._loop.time()) < due:
            job.timer = self._loop.call_at(min(due, now + self._hung_after), self._look)
            return
        self.state = State.HUNG
        self._hang_up()
        what = job.what
        job.name = lambda _: what  # whatever its note says by the time that somebody asks again
        error = WorkerHung(what, self.pid, self._hung_after)
        # First that it hangs: whoever hears that its job failed looks who does.
        self._on_change(self)
        job.end(None, error)

    # -- messages

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._receive()

    def _receive(self) -> None:
        while self.state is not State.DEAD:
            try:
                data = self._socket.recv(worker.MESSAGE_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It died with a request unread. What it said before is still to be read.
                continue
            if not data:
                # Its end is closed; how the process ended, the pidfd tells at once.
                return
            try:
                if self._take(*marshal.loads(data)):  # noqa: S302  our own process wrote it; the shape is checked
                    return
            except Exception as error:  # noqa: BLE001  whatever it is, this answer cannot be trusted
                self._lost(error)
                return

    def _take(self, kind: int, *value: Any) -> bool:  # noqa: ANN401  what came is looked at by the operation
        """Handles one message; whether it was the job's last."""
        job = self.job
        if job is None:
            raise ValueError("an answer without a request")
        if kind == worker.PART:
            if self.state is not State.HUNG and self.state is not State.LEAVING:
                job.on_part(value[0])
            job.parts += 1
            job.progress_at, job.progress_usec = self._loop.time(), clock.boottime_usec()
            return False
        answer, error = (value[0], None) if kind == worker.END else (None, self._error(*value))
        # Only now: whatever is wrong with the answer must have come out while the job is still to be failed.
        self._finish(job)
        job.end(answer, error)
        return True

    def _error(self, number: int, text: str) -> Exception:
        if not isinstance(text, str):
            raise TypeError("an error without words")
        return OSError(number, text) if number else WorkerError(f"worker {self.pid}: {text}")

    def _finish(self, job: Job) -> None:
        self.job = None
        if job.timer:
            job.timer.cancel()

    # -- the end

    def _lost(self, why: Exception) -> None:
        """What it says cannot be trusted: it is killed, and nobody waits for it."""
        self.kill()
        if self.job:
            self.job.end(None, why)

    @property
    def alive(self) -> bool:
        """Whether the process runs, as of now: the loop may not have heard of its end yet."""
        return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """SIGKILL. A worker that hangs in the kernel stays for as long as the kernel wants."""
        if self.state is not State.DEAD:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self) -> None:
        """The pidfd's: the process is a zombie. What it said before is heard first."""
        self._receive()
        status = self._process.wait()
        self._close(f"exit status {status}" if status >= 0 else f"signal {-status}", Note.remove)
        self._on_change(self)

    def close(self) -> None:
        """Lets go of the process without waiting for it; kill it first."""
        self._close("hostd has let go of it", Note.close)

    def _close(self, why: str, let_go: Callable[[Note], None]) -> None:
        if self.state is State.DEAD:
            return
        self.state = State.DEAD
        self._loop.remove_reader(self._bell)
        self._loop.remove_reader(self._pidfd)
        self._socket.close()
        os.close(self._bell)
        os.close(self._pidfd)
        if self._process.poll() is None:
            # It may never end; subprocess shall not watch it nor warn.
            self._process.returncode = -signal.SIGKILL
        if job := self.job:
            self._finish(job)
            job.end(None, WorkerDied(job.what, self.pid, why))
        let_go(self.note)


def settle(future: asyncio.Future[_T], answer: _T, error: Exception | None) -> None:
    """Ends the waiting for it, unless nobody waits any more."""
    if future.done():
        return
    if error:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _start(fd: int, bell: int, note_fd: int, inotify: int = -1) -> subprocess.Popen[bytes]:
    fds = (fd, bell, note_fd, inotify)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, "hostd-worker", _PACKAGES, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[each for each in fds if each >= 0],
        process_group=0,
    )
