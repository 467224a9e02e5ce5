"""The pool of workers: always a ready one, a bound on the hung ones, and nothing that ever waits for those.

`size` jobs run at a time; one worker more is kept warm, so that a hung one is replaced at once. A job is sent
without a suspension after the caller got an idle worker: what the caller saw just before is as fresh as can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hostd.errors import LimitExceeded
from hostd.linux import note, worker
from hostd.linux.inotify import Inotify
from hostd.linux.jobs import Item, Worker
from hostd.linux.link import Link, State, WorkerDied, WorkerError, WorkerHung
from hostd.linux.pidfd import identify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hostd.linux.pidfd import Identity

__all__ = ["Hung", "Item", "PoolExhausted", "Worker", "WorkerDied", "WorkerError", "WorkerHung", "WorkerPool"]

log = logging.getLogger(__name__)

#: s: how long `close` waits for workers that are not hung.
_CLOSE_WAIT: Final = 0.5
#: s: before a worker is started again after one did not come up; doubled each time up to the second.
_RETRY_FIRST, _RETRY_MAX = 0.1, 30.0


class PoolExhausted(LimitExceeded):
    """As many workers hang as the pool may have; the message names the bound and what they hang on."""


@dataclass(frozen=True, slots=True)
class Hung:
    """A worker that hangs: on what, its pid, and since when (CLOCK_BOOTTIME µs)."""

    what: bytes
    pid: int
    since_usec: int


class WorkerPool:
    """Workers in the mount namespace of the file `mount_namespace`. One event loop; `start` first, `close` last."""

    def __init__(
        self,
        mount_namespace: str,
        kubelet_root: bytes,
        *,
        size: int = 2,
        bound: int = 32,
        hung_after: float = 2.0,
        notes: str | None = None,
    ) -> None:
        """`size` jobs at a time; at most `bound` processes, the hung ones included; `hung_after` seconds. `notes`: a
        directory for what they are at, for the next daemon."""
        self._namespace = mount_namespace
        self._notes = notes
        self._kubelet_root = kubelet_root
        self._size = size
        self._bound = bound
        self._hung_after = hung_after
        self._links: list[Link] = []
        self._idle: list[Link] = []
        self._waiters: deque[asyncio.Future[Link]] = deque()
        self._unhung: list[Callable[[Hung], None]] = []
        #: Called when a worker may have come free for one who `take`s it, and when none will.
        self.on_free: Callable[[], None] = lambda: None
        #: Asked where a worker cannot be started whether it is worth trying again at once.
        self.relieve: Callable[[OSError], bool] = lambda _: False
        self._umounts_first = False
        self._hung: dict[Link, Hung] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._failures = 0
        self._closed = False
        self._all_gone = asyncio.Event()
        #: What the workers add watches to, for the namespace's directories (`list_block_nodes`); None if there is none.
        self.inotify = _inotify()
        #: The kubelet's root as it is in the namespace, symlinks resolved; None while it does not exist (`refresh`).
        self.root: bytes | None = None
        #: Why there is no root, or why no worker comes up; empty while all is well.
        self.problem = ""

    # -- for the callers

    async def start(self) -> None:
        """Returns when the first worker is ready, or hangs already (then `root` is None and `hung` names it).

        Raises WorkerError when none comes up: no such namespace, no permission, another version.
        """
        self._replenish()
        while self._greetings and not self._idle and not self._hung:
            await asyncio.wait(self._greetings, return_when=asyncio.FIRST_COMPLETED)
        if not self._idle and not self._hung:
            raise WorkerError(self.problem)

    def take(self) -> Worker | None:
        """An idle worker now, to be given back; None while all are at work."""
        link = self._occupy()
        return Worker(link) if link else None

    def give_back(self, taken: Worker) -> None:
        """Done with a worker that was taken; a job of it that nobody waits for any more is given up."""
        self._release(taken.link)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A ready worker; at once when one is idle and nobody waits. Raises PoolExhausted, WorkerError."""
        link = None if self._waiters else self._occupy()
        taken = Worker(link or await self._wait())
        try:
            yield taken
        finally:
            self.give_back(taken)

    async def run(self, op: str, *arguments: Any) -> Any:  # noqa: ANN401  as the operation has it
        """One operation of `Worker`, by its name, on any worker."""
        async with self.worker() as one:
            return await getattr(one, op)(*arguments)

    async def refresh(self) -> bytes | None:
        """Looks for the kubelet's root again: `root`."""
        self.root, self.problem = await self.run("resolve_root")
        return self.root

    @property
    def hung(self) -> list[Hung]:
        """The workers that hang now, the longest first."""
        return list(self._hung.values())

    @property
    def left(self) -> int:
        """How many more may hang until there is no worker any more."""
        return self._bound - len(self._hung)

    def on_unhung(self, callback: Callable[[Hung], None]) -> Callable[[], None]:
        """Calls `callback` when a hung worker has come back (and ended); the result ends that."""
        self._unhung.append(callback)
        return lambda: self._unhung.remove(callback)

    def left_at_work(self) -> dict[bytes, Identity]:
        """The workers of earlier daemons that live still, by the targets (relative to the kubelet's root) that they are
        at."""
        found: dict[bytes, Identity] = {}
        for left in note.left(self._notes) if self._notes else ():
            with contextlib.suppress(OSError):  # it is gone, or no descriptor is left to look with
                found[left.target] = identify(left.pid)
        return found

    @property
    def mountinfo_path(self) -> str:
        """The host namespace's mount table as a living worker has it: open it and keep the fd."""
        return f"/proc/{self._inside()}/mountinfo"

    @property
    def namespace_path(self) -> str:
        """The host's mount namespace itself, likewise."""
        return f"/proc/{self._inside()}/ns/mnt"

    def _inside(self) -> int:
        for link in self._links:
            if link.joined and link.state is not State.DEAD:
                return link.pid
        raise WorkerError(f"no worker is in the mount namespace {self._namespace}: {self.problem or 'starting'}")

    async def close(self) -> None:
        """Kills all workers. Waits a moment for those that do not hang, for hung ones never."""
        self._closed = True
        if self._retry:
            self._retry.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(WorkerError("hostd is stopping"))
        for link in self._links:
            link.kill()
        self._look_who_is_left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WAIT):
                await self._all_gone.wait()
        for link in self._links:
            link.close()
        await asyncio.gather(*self._greetings)
        self._links.clear()
        self._hung.clear()
        if self.inotify:
            self.inotify.close()

    def _look_who_is_left(self) -> None:
        if all(link.state is State.HUNG for link in self._links):
            self._all_gone.set()

    # -- who gets which worker

    def _occupy(self) -> Link | None:
        while self._idle and self._busy < self._size:
            link = self._idle.pop()  # the one whose memory is warm
            # One that was killed a moment ago: its end is still to be heard of.
            if link.alive:
                link.state = State.BUSY
                return link
        return None

    @property
    def _busy(self) -> int:
        return sum(link.state is State.BUSY for link in self._links)

    async def _wait(self) -> Link:
        if error := self.hopeless:
            raise error
        waiter: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        # Those before this one may all have been cancelled, with a worker idle.
        self._serve_waiters()
        try:
            return await waiter
        except BaseException:
            # One that was served is in the queue no more.
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled() and not waiter.exception():
                self._release(waiter.result())
            raise

    def _release(self, link: Link) -> None:
        if link.state is State.BUSY:
            if link.job:
                link.give_up()
            else:
                self._free(link)

    def _free(self, link: Link) -> None:
        link.state = State.IDLE
        self._idle.append(link)
        # Now these first, now those: neither wait for the end of the others' queue.
        self._umounts_first = not self._umounts_first
        self._serve_waiters()

    def _serve_waiters(self) -> None:
        if self._umounts_first:
            self.on_free()
            self._serve_looks()
        else:
            self._serve_looks()
            self.on_free()

    def _serve_looks(self) -> None:
        while self._waiters:
            if self._waiters[0].done():  # cancelled, and its task has not heard of it yet
                self._waiters.popleft()
            elif link := self._occupy():
                self._waiters.popleft().set_result(link)
            else:
                return

    @property
    def hopeless(self) -> WorkerError | PoolExhausted | None:
        """Why no worker is to be had, now or soon; None while one may come."""
        if self._closed:
            return WorkerError("hostd is stopping")
        if any(link.state not in (State.HUNG, State.DEAD) for link in self._links):
            return None
        if len(self._hung) >= self._bound:
            on = ", ".join(sorted({os.fsdecode(hung.what) for hung in self._hung.values()})[:3])
            return PoolExhausted(f"all {self._bound} worker processes hang (on {on}): nothing more can be unmounted")
        return WorkerError(f"no worker process comes up: {self.problem}")

    # -- keeping up the number

    def _replenish(self) -> None:
        while not self._closed and not self._retry:
            living = sum(link.state in (State.STARTING, State.IDLE, State.BUSY) for link in self._links)
            if living > self._size or len(self._links) >= self._bound:
                return
            try:
                link = Link(self._hung_after, self._changed, self.inotify.fileno() if self.inotify else -1, self._notes)
            except OSError as error:
                if self.relieve(error):
                    continue
                self._failed(f"cannot start a worker process: {error}")
                return
            self._links.append(link)
            task = asyncio.get_running_loop().create_task(self._greet(link))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, link: Link) -> None:
        try:
            root, problem = await self._hello(link)
        except (WorkerError, OSError) as error:
            self._failed(f"mount namespace {self._namespace}: {error}")
            if link.state is not State.HUNG:  # else it is in the namespace, and all that is to be had for now
                link.kill()
            return
        link.ready = True
        with contextlib.suppress(OSError):  # it is gone, or no descriptor is left to look with
            link.identity = identify(link.pid)
        self._failures = 0
        self.root, self.problem = root, problem
        self._free(link)

    async def _hello(self, link: Link) -> tuple[bytes | None, str]:
        def joined(_: object) -> None:
            link.joined = True

        ours = (worker.PROTOCOL, self._namespace, self._kubelet_root)
        match await link.call("hello", *ours, name=lambda _: self._kubelet_root, on_part=joined):
            case (worker.PROTOCOL, bytes() | None as root, str() as problem):
                return root, problem
        raise WorkerError("the worker program is another version's: hostd was upgraded and must be restarted")

    def _failed(self, why: str) -> None:
        """A worker did not come up: the next is tried later."""
        self.problem = why
        if self._retry or self._closed:
            return
        delay = min(_RETRY_FIRST * 2.0**self._failures, _RETRY_MAX)
        self._failures = min(self._failures + 1, 16)
        self._retry = asyncio.get_running_loop().call_later(delay, self._try_again)
        self._tell_waiters()

    def _try_again(self) -> None:
        self._retry = None
        self._replenish()

    def _changed(self, link: Link) -> None:
        """A link became hung, leaving or dead."""
        hung = None
        if link.state is State.HUNG and link.job:
            self._hung[link] = Hung(link.job.what, link.pid, link.job.progress_usec)
        elif link.state is State.DEAD:
            hung = self._hung.pop(link, None)
            self._links.remove(link)
            with contextlib.suppress(ValueError):
                self._idle.remove(link)
        if not link.ready:
            self._failed(self.problem or "a worker process does not come up")
        self._replenish()
        self._serve_waiters()
        self._tell_waiters()
        self._look_who_is_left()
        if hung:
            for callback in tuple(self._unhung):
                callback(hung)

    def _tell_waiters(self) -> None:
        if error := self.hopeless:
            self.on_free()
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_exception(error)


def _inotify() -> Inotify | None:
    try:
        return Inotify()
    except OSError as error:  # all of root's programs share what there is of them
        log.warning("there is no inotify (fs.inotify.max_user_instances): device nodes are seen late: %s", error)
        return None
