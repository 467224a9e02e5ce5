"""A simulated kernel, and a hostd core that runs on it in simulated time: for tests that need thousands of lives.

    with Kernel() as kernel:
        hostd = Hostd(kernel, directory, Config())
        hostd.advance(1.0)                     # a second passes, as far as hostd can tell
        hostd.tick(3)                          # three turns of the loop, and no time
        hostd.kill()                           # SIGKILL, at whatever it was waiting for

What is simulated is what `hostd.linux` tells and does: processes and pidfds, the mount table, cgroups, umount workers,
clocks. Everything above is the real thing: Keeper, Qemus, NodeMounts, Survey, Inhibitors (on real FIFOs), Registry,
Store (on real files), Requests, decisions and transitions. `tests/unit/core/test_simulation.py` runs the same tests on
this kernel's processes and mounts and on real ones.
"""

# ruff: noqa: PLW0108  the lambdas name what is made, or replaced, later

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import itertools
import logging
import math
import os
import select
import selectors
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from unittest import mock

from hostd.config import Config
from hostd.core import (
    cleaning,
    keeper,
    mount_source,
    mounts,
    nodes,
    passes,
    qemus,
    requests,
    start,
    teller,
    watchers,
)
from hostd.core.inhibitors import Inhibitors
from hostd.core.pod_mounts import KubeletRoot
from hostd.core.registry import Registry
from hostd.core.service import Event
from hostd.core.store import Store
from hostd.core.survey import Survey
from hostd.errors import HostdError
from hostd.kubevirt.pods import empty_dir
from hostd.kubevirt.targets import EMPTY_DIRS, HOTPLUG_DISKS
from hostd.linux.cgroup import Population
from hostd.linux.clock import boot_id
from hostd.linux.holders import Held, Wanted
from hostd.linux.link import WorkerHung
from hostd.linux.mount_table import Mount, escape
from hostd.linux.pidfd import End, Identity, NotAPidfd
from hostd.linux.pool import Hung, PoolExhausted
from hostd.linux.umount import Outcome

KUBELET = b"/var/lib/kubelet"
#: Simulated descriptors start here; those below are real.
SIMULATED_FD = 1_000_000
#: Turns of the loop at one moment of simulated time: more is a busy loop.
MOST_TURNS = 5_000
#: How long a worker may be silent before it counts as hung (µs), and how many there may be.
HUNG_AFTER, WORKERS, BOUND = 2_000_000, 2, 4
#: Mount events that wait before some are lost.
QUEUE = 8
#: What of the core looks at the clock.
_TIMED = (cleaning, keeper, mounts, nodes, passes, requests, start, teller)


class BusyLoop(AssertionError):
    """The loop turns and turns while no time passes."""


@dataclass
class Task:
    """A process."""

    pid: int
    start_time: int
    inode: int
    comm: bytes
    argv: list[bytes]
    pod_uid: str
    end: End | None = None
    reaped: bool = False
    #: Its command line cannot be read: the worker that tries hangs.
    mute: bool = False

    @property
    def alive(self) -> bool:
        return self.end is None

    @property
    def vm(self) -> bool:
        """A QEMU that runs a VM: no probe, no other tool."""
        return self.alive and self.comm.startswith(b"qemu-system") and b"-name" in self.argv


@dataclass
class SimMount:
    """One mount; it may be in the table, or detached and pinned."""

    number: int
    target: bytes
    source: tuple[str, bytes]
    fstype: bytes = b"tmpfs"
    openers: set[int] = field(default_factory=set)


@dataclass
class _Stuck:
    """A umount that does not come back."""

    worker: Task
    relative: bytes
    lazy: bool
    back: Callable[[Outcome], None]
    since: int


class Kernel:
    """Processes, cgroups, mounts, descriptors and time."""

    def __init__(self, *, pidfs: bool = True, keeps_exit: bool = True) -> None:
        #: CLOCK_BOOTTIME and what CLOCK_REALTIME is ahead of it (µs).
        self.now, self.offset = 1_000_000_000, 1_700_000_000_000_000
        self.pidfs, self.keeps_exit = pidfs, keeps_exit
        self.tasks: dict[int, Task] = {}
        self.mounts: list[SimMount] = []
        self.detached: list[SimMount] = []
        self.nodes: set[bytes] = set()
        self.directories: set[str] = set()
        self.cgroups: dict[str, Population] = {}
        self.unreadable: set[str] = set()
        self.understood = True
        #: Targets whose umount hangs; True = it has left the table before.
        self.hanging: dict[bytes, bool] = {}
        self.stuck: list[_Stuck] = []
        #: The look at all processes hangs.
        self.blind = False
        #: How late notices of the mount table and of cgroups come (µs).
        self.lateness = 0
        self.stored: dict[str, Task] = {}
        #: What the workers note that they are at, by start time.
        self.notes: dict[int, tuple[Task, bytes]] = {}
        self.read_last: frozenset[int] = frozenset()
        #: Mounts of which hostd knows that they are pinned: it was told so, or it detached them itself.
        self.known_pinned: set[int] = set()
        #: How often a QEMU began to live in a pod where none did.
        self.runs: Counter[str] = Counter()
        self.violations: list[str] = []
        #: Told of each pod whose first container comes, as Discovery is.
        self.on_pod: Callable[[str], None] = lambda _: None
        self._fds: dict[int, Any] = {}
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._watches: list[_Watch] = []
        self._patches = contextlib.ExitStack()

    # -- time

    def boottime(self) -> int:
        return self.now

    def realtime(self) -> int:
        return self.now + self.offset

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), what))

    def pass_time(self, until: int) -> None:
        """Goes on to the next thing that happens, or to `until`."""
        if self._agenda and self._agenda[0][0] <= until:
            when, _, what = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            what()
        else:
            self.now = max(self.now, until)

    # -- processes

    def spawn(self, pod_uid: str, comm: bytes, argv: Sequence[bytes] = ()) -> Task:
        """A new process; pids are reused as soon as they can be. A QEMU opens all layers that are files."""
        pid = next(pid for pid in itertools.count(100) if pid not in self.tasks)
        number = next(self._numbers)
        task = Task(pid, number, number if self.pidfs else 0, comm, list(argv), pod_uid)
        self.tasks[pid] = task
        if pod_uid:
            self._populate(pod_uid)
        if task.vm:
            self.runs[pod_uid] += len(self.vms(pod_uid)) == 1
            for mount in self.mounts:
                if pod_of(mount.target) == pod_uid and not is_directory(mount.target):
                    mount.openers.add(number)
        return task

    def qemu(self, pod_uid: str, *, guest: bool = True) -> Task:
        name = [b"-name", b"guest=default_vm"] if guest else [b"-machine", b"none"]
        return self.spawn(pod_uid, b"qemu-system-x86", [b"qemu-system-x86_64", *name])

    def die(self, task: Task, end: End, *, reap: bool = True) -> None:
        task.end = end
        for mount in [*self.mounts, *self.detached]:
            mount.openers.discard(task.start_time)
        if reap:
            self.reap(task)
        self._sweep()
        if task.pod_uid and not self.living(task.pod_uid) and task.pod_uid in self.cgroups:
            self.cgroups[task.pod_uid] = Population.EMPTY
            self.notice()

    def reap(self, task: Task) -> None:
        task.reaped = True
        self.tasks.pop(task.pid, None)

    def living(self, pod_uid: str) -> list[Task]:
        return [task for task in self.tasks.values() if task.pod_uid == pod_uid and task.alive]

    def vms(self, pod_uid: str) -> list[Task]:
        """The QEMUs that live in a pod now."""
        return [task for task in self.living(pod_uid) if task.vm]

    def about_to_start(self, pod_uid: str) -> bool:
        """Containers run in the pod, and no QEMU ever did: "not knowing is not death"."""
        return bool(self.living(pod_uid)) and not self.runs[pod_uid]

    def _populate(self, pod_uid: str) -> None:
        if pod_uid not in self.cgroups:
            self.directories.add(pod_uid)
            self.on_pod(pod_uid)
        if self.cgroups.get(pod_uid) is not Population.POPULATED:
            self.cgroups[pod_uid] = Population.POPULATED
            self.notice()

    def remove_cgroup(self, pod_uid: str) -> None:
        """The kubelet removes the cgroup of a pod in which nothing lives."""
        assert not self.living(pod_uid)
        self.cgroups.pop(pod_uid, None)
        self.notice()

    # -- descriptors

    def new_fd(self, what: Any) -> int:
        fd = SIMULATED_FD + next(self._numbers)
        self._fds[fd] = what
        return fd

    def close_fd(self, fd: int) -> None:
        del self._fds[fd]

    def behind(self, fd: int) -> Any:
        return self._fds.get(fd)

    def readable(self, fd: int) -> bool:
        what = self._fds[fd]
        return not what.alive if isinstance(what, Task) else bool(what.noticed)

    def notice(self) -> None:
        """Something changed that mount and cgroup watches tell of, sooner or later."""
        watches = list(self._watches)

        def arrive() -> None:
            for watch in watches:
                watch.noticed = True

        self.at(self.now + self.lateness, arrive) if self.lateness else arrive()

    # -- mounts

    def mount(self, target: bytes, source: tuple[str, bytes] | None = None) -> SimMount:
        number = next(self._numbers)
        made = SimMount(number, target, source or (f"0:{number}", b"/disk.img"))
        self.mounts.append(made)
        self._tell_of_mount(made, came=True)
        self.directories.add(pod_of(target))
        self.notice()
        return made

    def _tell_of_mount(self, mount: SimMount, *, came: bool) -> None:
        """A mount event: it is in the queue at once, however late who waits for it is woken."""
        for watch in self._watches:
            if isinstance(watch, SimMountEvents):
                watch.add(mount.number, came)

    def stack(self, target: bytes) -> list[SimMount]:
        return [mount for mount in self.mounts if mount.target == target]

    def umount(self, target: bytes, *, lazy: bool = False) -> int:
        """One umount2(2); the errno."""
        stack = self.stack(target)
        if not stack:
            return errno.EINVAL
        top = stack[-1]
        if top.openers and not lazy:
            return errno.EBUSY
        self.mounts.remove(top)
        self._tell_of_mount(top, came=False)
        if top.openers:
            self.detached.append(top)
        self.notice()
        return 0

    def _sweep(self) -> None:
        self.detached = [mount for mount in self.detached if mount.openers]

    def release(self, mount: SimMount, opener: int) -> None:
        mount.openers.discard(opener)
        self._sweep()

    def unmount(self, relative: bytes, *, lazy: bool, block_node: bool) -> Outcome:
        """What `hostd.linux.umount` does to one target."""
        target, done = KUBELET + b"/" + relative, 0
        while self.stack(target):
            number = self.umount(target)
            if number and lazy:
                held_by_qemu = [pid for pid in self.stack(target)[-1].openers if self._is_vm(pid)]
                if held_by_qemu:
                    self.violations.append(f"P1: {target!r} was detached from under a living QEMU")
                self.known_pinned.add(self.stack(target)[-1].number)
                number = self.umount(target, lazy=True)
            if number:
                return Outcome(relative, done, number, os.strerror(number), removed=False, mounted=True)
            done += 1
        if block_node:
            self.nodes.discard(target)
        return Outcome(relative, done, 0, "", removed=True, mounted=False)

    def _is_vm(self, number: int) -> bool:
        return any(task.start_time == number and task.vm for task in self.tasks.values())

    def hang(self, target: bytes, *, left: bool) -> None:
        self.hanging[target] = left

    def unhang(self, target: bytes) -> None:
        """The file system answers again: whatever waited for it goes on."""
        self.hanging.pop(target, None)
        for stuck in [each for each in self.stuck if KUBELET + b"/" + each.relative == target]:
            self.stuck.remove(stuck)
            outcome = self.unmount(stuck.relative, lazy=stuck.lazy, block_node=False)
            stuck.back(outcome)

    def looked_at(self) -> None:
        """hostd sees the mounts as they are now."""
        self.read_last = frozenset(mount.number for mount in self.mounts)

    def table(self) -> bytes:
        """/proc/1/mountinfo."""
        self.looked_at()
        rows = [b"21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
        for mount in self.mounts:
            device, root = mount.source
            words = (mount.number, device.encode(), escape(root), escape(mount.target), mount.fstype)
            rows.append(b"%d 21 %s %s %s rw,relatime shared:1 - %s tmpfs rw" % words)
        return b"\n".join(rows) + b"\n"

    # -- hostd.linux, as the core imports it

    def __enter__(self) -> Self:
        process = SimpleNamespace(
            open=lambda pid: SimProcess.open(self, pid), adopt=lambda fd: SimProcess.adopt(self, fd)
        )
        replaced: list[tuple[Any, dict[str, Any]]] = [
            *((module, {"boottime_usec": self.boottime}) for module in _TIMED),
            (keeper, {"realtime_usec": self.realtime}),
            (passes, {"identify": self._identify}),
            (requests, {"Process": process}),
            (start, {"Process": process}),
            (watchers, {"Process": process}),
            (mount_source, {"MountWatch": lambda _: _Watch(self)}),
            (mounts, {"time": SimpleNamespace(monotonic=lambda: self.now / 1e6)}),
            (
                qemus,
                {
                    "Process": process,
                    "PopulationWatch": lambda _: _Watch(self),
                    "oom_kills": lambda _: None,
                    "proc": SimpleNamespace(
                        read_comm=self._comm, pids=lambda: sorted(self.tasks), cgroup_paths=self._cgroup_paths
                    ),
                },
            ),
        ]
        for module, names in replaced:
            for name, value in names.items():
                self._patches.enter_context(mock.patch.object(module, name, value))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    def _identify(self, pid: int) -> Identity:
        with SimProcess.open(self, pid) as process:
            return process.identity

    def _comm(self, pid: int) -> bytes:
        try:
            return self.tasks[pid].comm
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "no such process") from None

    def _cgroup_paths(self, pid: int) -> list[tuple[str, bytes]]:
        self._comm(pid)
        pod_uid = self.tasks[pid].pod_uid
        return [("", b"/kubepods/pod%s/c" % pod_uid.encode() if pod_uid else b"/init.scope")]


class _Watch:
    """Stands in for MountWatch and PopulationWatch: told of everything, now or late."""

    def __init__(self, kernel: Kernel) -> None:
        self.noticed = False
        self._kernel = kernel
        self._fd = kernel.new_fd(self)
        kernel._watches.append(self)

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        self.noticed = False

    def close(self) -> None:
        self._kernel._watches.remove(self)
        self._kernel.close_fd(self._fd)


class SimProcess:
    """Stands in for `hostd.linux.pidfd.Process`."""

    def __init__(self, kernel: Kernel, task: Task, fd: int) -> None:
        self._kernel, self._task, self._fd = kernel, task, fd
        self._end: End | None = None
        pid, began = (-1, 0) if task.reaped else (task.pid, task.start_time)
        self.identity = Identity(pid, began, boot_id(), task.inode)

    @classmethod
    def open(cls, kernel: Kernel, pid: int) -> Self:
        task = kernel.tasks.get(pid)
        if task is None or not task.alive:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
        return cls(kernel, task, kernel.new_fd(task))

    @classmethod
    def adopt(cls, kernel: Kernel, fd: int) -> Self:
        task = kernel.behind(fd)
        if not isinstance(task, Task):
            raise NotAPidfd(errno.EINVAL, "not a pidfd")
        return cls(kernel, task, fd)

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def pid(self) -> int:
        return self.identity.pid

    def alive(self) -> bool:
        return self._task.alive

    def end(self) -> End | None:
        if self._end is None and (not self._task.reaped or self._kernel.keeps_exit):
            self._end = self._task.end
        return self._end or (None if self._task.alive else End())

    @property
    def end_is_kept(self) -> bool:
        return self._kernel.keeps_exit

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            self._kernel.close_fd(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimTable:
    """Stands in for MountTable."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def read(self) -> bytes:
        return self._kernel.table()

    def close(self) -> None:
        """Nothing is open."""


class SimMountRows:
    """Stands in for MountRows."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def numbers(self) -> list[int]:
        self._kernel.looked_at()
        return sorted(mount.number for mount in self._kernel.mounts)

    def row(self, number: int, *naming: bytes) -> Mount | None:
        for mount in self._kernel.mounts:
            if mount.number == number and (not naming or any(needle in mount.target for needle in naming)):
                return Mount(number, 21, *mount.source, mount.target, mount.fstype, b"tmpfs", 1, 0)
        return None

    def close(self) -> None:
        """Nothing is open."""


class SimMountEvents(_Watch):
    """Stands in for MountEvents, with a queue that is soon full."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._queue: dict[int, bool] = {}
        self._room = QUEUE

    def add(self, number: int, came: bool) -> None:
        self._room -= 1
        self._queue[number] = came

    def read(self) -> dict[int, bool] | None:
        self.drain()
        self._kernel.looked_at()
        told, lost = self._queue, self._room < 0
        self._queue, self._room = {}, QUEUE
        return None if lost else told


class SimCgroups:
    """Stands in for PodCgroups: one directory a pod."""

    trouble = ""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def understood(self) -> bool:
        return self._kernel.understood

    def look(self) -> None:
        """Nothing has moved."""

    def parents(self) -> list[bytes]:
        return [b"/sys/fs/cgroup/kubepods"]

    def pods(self) -> dict[str, list[bytes]]:
        return {uid: self.paths(uid) for uid in self._kernel.cgroups}

    def paths(self, pod_uid: str) -> list[bytes]:
        return [b"/sys/fs/cgroup/kubepods/pod" + pod_uid.encode()] if pod_uid in self._kernel.cgroups else []

    def population(self, pod_uid: str) -> Population | None:
        if pod_uid in self._kernel.unreadable:
            return Population.UNREADABLE
        return self._kernel.cgroups.get(pod_uid)

    def remember(self, pod_uid: str) -> None:
        """There is one."""

    def forget(self, pod_uid: str) -> None:
        """There is one."""

    def close(self) -> None:
        """Nothing is open."""

    def census(self, pod_uid: str) -> tuple[Population | None, list[int]]:
        return self.population(pod_uid), self.processes(pod_uid)

    def processes(self, pod_uid: str) -> list[int]:
        if pod_uid in self._kernel.unreadable:
            raise PermissionError(errno.EACCES, "permission denied")
        return sorted(task.pid for task in self._kernel.living(pod_uid))


class SimWorker:
    """Stands in for a worker during a job. Each target takes a millisecond, unless it hangs."""

    def __init__(self, pool: SimPool, task: Task) -> None:
        self._pool, self._kernel = pool, pool.kernel
        self.task = task
        self.at, self.bound = 0, 1 << 30

    @property
    def pid(self) -> int:
        return self.task.pid

    @property
    def identity(self) -> Identity:
        return self._kernel._identify(self.pid)

    def unmount(self, items: Sequence[tuple[bytes, bool, bool]], *, not_after: int) -> SimUmounts:
        # Nothing was awaited since the caller looked: from here on the kernel's own EBUSY is the only guard.
        for relative, _, _ in items:
            if living := self._kernel.vms(pod_of(relative)):
                self._kernel.violations.append(f"P1: {relative!r} is to be unmounted while {living} live")
            if self._kernel.about_to_start(pod_of(relative)):
                self._kernel.violations.append(f"{relative!r} is to be unmounted though its pod has only begun")
        self._pool.jobs += 1
        job = self._pool.at_work[self.task.pid] = asyncio.ensure_future(self._unmount(items, not_after))
        return SimUmounts(self, job)

    async def _unmount(self, items: Sequence[tuple[bytes, bool, bool]], not_after: int) -> list[Outcome]:
        done: list[Outcome] = []
        for self.at, (relative, lazy, block_node) in enumerate(items):
            self._kernel.notes[self.task.start_time] = self.task, relative
            await asyncio.sleep(0.001)
            if self._kernel.now > not_after or self.at >= self.bound:
                break
            if KUBELET + b"/" + relative in self._kernel.hanging:
                done.append(await self._hang(relative, lazy, done))
            else:
                done.append(self._kernel.unmount(relative, lazy=lazy, block_node=block_node))
        self._kernel.notes.pop(self.task.start_time, None)
        await asyncio.sleep(0.000_01)  # until hostd hears of it
        return done

    async def _hang(self, relative: bytes, lazy: bool, done: list[Outcome]) -> Outcome:
        target, came_back = KUBELET + b"/" + relative, asyncio.get_running_loop().create_future()
        if self._kernel.hanging[target]:
            self._kernel.umount(target)
        stuck = self._pool.hang(self.task, relative, lazy, came_back)
        await asyncio.wait({came_back}, timeout=HUNG_AFTER / 1e6)
        if came_back.done():
            return came_back.result()  # type: ignore[no-any-return]
        hung = WorkerHung(relative, stuck.worker.pid, HUNG_AFTER / 1e6)
        hung.done = done[:-1]  # of the last one it was about to tell
        self._pool.set_aside(stuck)
        raise hung


class SimUmounts:
    """Stands in for an umount job under way."""

    def __init__(self, worker: SimWorker, job: asyncio.Future[list[Outcome]]) -> None:
        self._worker, self._job = worker, job

    @property
    def at(self) -> int:
        return self._worker.at

    def take_back(self, number: int) -> None:
        self._worker.bound = number

    def on_end(self, callback: Callable[[list[Outcome], Exception | None], None]) -> None:
        def ended(job: asyncio.Future[list[Outcome]]) -> None:
            if job.cancelled():
                return
            error = job.exception()
            assert error is None or isinstance(error, WorkerHung), error
            callback(error.done if error else job.result(), error)

        self._job.add_done_callback(ended)


class SimPool:
    """Stands in for WorkerPool."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.root = KUBELET
        self.inotify = None
        self.jobs = 0
        self.dead = False
        self._idle: list[Task] = []
        self._tasks: list[Task] = []
        self.on_free: Callable[[], None] = lambda: None
        #: Umounts under way, by worker.
        self.at_work: dict[int, asyncio.Future[list[Outcome]]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._hung: dict[int, tuple[_Stuck, Hung]] = {}
        self._unhung: list[Callable[[Hung], None]] = []

    @property
    def hung(self) -> list[Hung]:
        return [hung for _, hung in self._hung.values()]

    @property
    def left(self) -> int:
        return BOUND - len(self._hung)

    def on_unhung(self, callback: Callable[[Hung], None]) -> Callable[[], None]:
        self._unhung.append(callback)
        return lambda: self._unhung.remove(callback)

    def tell_unhung(self, hung: Hung) -> None:
        """A worker that hung has come back."""
        for callback in self._unhung:
            callback(hung)

    def take(self) -> SimWorker | None:
        if not self._idle:
            if len(self._tasks) >= min(WORKERS, BOUND - len(self._hung)):
                return None
            self._tasks.append(self.kernel.spawn("", b"hostd-worker"))
            self._idle.append(self._tasks[-1])
        return SimWorker(self, self._idle.pop())

    def give_back(self, taken: SimWorker) -> None:
        job = self.at_work.pop(taken.task.pid, None)
        if job and not job.done():  # given up: it ends after the target that it is at
            job.cancel()
            self._tasks.remove(taken.task)
            self.kernel.die(taken.task, End(status=0))
        elif taken.task in self._tasks:
            self._idle.append(taken.task)
        self._wake_one()

    @property
    def hopeless(self) -> PoolExhausted | None:
        return PoolExhausted(f"all {BOUND} worker processes hang") if len(self._hung) >= BOUND else None

    def left_at_work(self) -> dict[bytes, Identity]:
        return {
            relative: self.kernel._identify(task.pid) for task, relative in self.kernel.notes.values() if task.alive
        }

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[SimWorker]:
        while (taken := self.take()) is None:
            if error := self.hopeless:
                raise error
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        try:
            yield taken
        finally:
            self.give_back(taken)

    def kill(self) -> None:
        """The workers see that their socket is closed, all but those that hang."""
        self.dead, self.on_free = True, lambda: None
        stuck = [each.worker for each in self.kernel.stuck]
        for task in self._tasks:
            if task not in stuck:
                self.kernel.die(task, End(status=0))

    def _wake_one(self) -> None:
        self.on_free()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
                return

    def hang(self, worker: Task, relative: bytes, lazy: bool, came_back: asyncio.Future[Outcome]) -> _Stuck:
        def back(outcome: Outcome) -> None:
            _, hung = self._hung.pop(worker.pid, (None, None))
            if self.dead or hung:
                self.kernel.die(worker, End(status=0))
            if self.dead:
                return
            self._wake_one()
            if hung:
                for callback in self._unhung:
                    came_back.get_loop().call_soon(callback, hung)
            elif not came_back.done():
                came_back.set_result(outcome)

        stuck = _Stuck(worker, relative, lazy, back, self.kernel.now)
        self.kernel.stuck.append(stuck)
        return stuck

    def set_aside(self, stuck: _Stuck) -> None:
        self._tasks.remove(stuck.worker)
        self.at_work.pop(stuck.worker.pid, None)
        self._hung[stuck.worker.pid] = (stuck, Hung(stuck.relative, stuck.worker.pid, stuck.since))

    async def run(self, op: str, *arguments: Any) -> Any:
        async with self.worker():
            await asyncio.sleep(0.001)
            return await getattr(self, f"_{op}")(*arguments)

    async def _list_directory(self, path: bytes) -> list[tuple[bytes, int]]:
        pod = pod_of(path + b"/") if path.startswith(b"pods/") else ""
        if pod not in self.kernel.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory")
        if path == empty_dir(pod):
            return [(b"container-disks", 4), (b"hotplug-disks", 4), (b"sockets", 4)]
        return []

    async def _list_block_nodes(self, path: bytes) -> tuple[list[bytes], int]:
        if pod_of(path + b"/") not in self.kernel.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory")
        prefix = KUBELET + b"/" + path + b"/"
        return [node.removeprefix(prefix) for node in self.kernel.nodes if node.startswith(prefix)], -1

    async def _command_lines(self, pids: Sequence[int]) -> Mapping[int, list[bytes] | None]:
        tasks = {pid: self.kernel.tasks.get(pid) for pid in pids}
        if mute := [pid for pid, task in tasks.items() if task and task.mute]:
            await asyncio.sleep(HUNG_AFTER / 1e6)
            raise WorkerHung(b"/proc/%d/cmdline" % mute[0], 1, HUNG_AFTER / 1e6)
        return {pid: task.argv if task and task.alive else None for pid, task in tasks.items()}

    async def _holders(self, wanted: Sequence[Wanted]) -> list[Held]:
        if self.kernel.blind:
            await asyncio.sleep(HUNG_AFTER / 1e6)
            raise WorkerHung(b"/proc", 1, HUNG_AFTER / 1e6)
        await asyncio.sleep(0.01)
        self.kernel.known_pinned |= {
            mount.number for one in wanted for mount in self.kernel.detached if mount.number in one.mount_ids
        }
        return [
            Held(one.target, task.pid, task.comm.decode(), "open", (self.kernel._cgroup_paths(task.pid)[0][1],))
            for one in wanted
            for mount in self._mounts_of(one)
            for task in list(self.kernel.tasks.values())
            if task.start_time in mount.openers
        ]

    def _mounts_of(self, wanted: Wanted) -> list[SimMount]:
        detached = [mount for mount in self.kernel.detached if mount.number in wanted.mount_ids]
        return [*self.kernel.stack(wanted.target), *detached]


class _Manager:
    """Stands in for systemd's fd store."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def store(self, name: str, fd: int) -> None:
        self._kernel.stored[name] = self._kernel.behind(fd)

    def drop(self, name: str) -> None:
        self._kernel.stored.pop(name, None)


class NoManager:
    """No fd store."""

    def store(self, name: str, fd: int) -> None:
        """Nobody keeps it."""

    def drop(self, name: str) -> None:
        """Nobody has it."""


class _Selector(selectors.BaseSelector):
    """Waits for simulated descriptors, and for real ones as far as they are ready, in simulated time."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.turns = 0
        self._turns_now, self._moment = 0, 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count()
        assert timeout is not None, "nothing will ever happen"
        end = self._kernel.now + max(0, math.ceil(timeout * 1_000_000))
        while not (ready := self._ready()) and self._kernel.now < end:
            self._kernel.pass_time(end)
        return ready

    def _count(self) -> None:
        self.turns += 1
        if self._moment != self._kernel.now:
            self._moment, self._turns_now = self._kernel.now, 0
        self._turns_now += 1
        if self._turns_now > MOST_TURNS:
            self._turns_now = 0
            raise BusyLoop(f"{MOST_TURNS} turns of the loop and no time passes")

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        poll = select.poll()
        ready = []
        for fd, key in self._keys.items():
            if fd >= SIMULATED_FD:
                if self._kernel.readable(fd):
                    ready.append((key, selectors.EVENT_READ))
            else:
                poll.register(fd, select.POLLIN)
        return ready + [(self._keys[fd], selectors.EVENT_READ) for fd, _ in poll.poll(0)]


class Loop(asyncio.SelectorEventLoop):
    """An event loop in the kernel's time."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.selector = _Selector(kernel)
        super().__init__(self.selector)

    def time(self) -> float:
        return self._kernel.now / 1e6


class _Complaints(logging.Handler):
    """Takes what hostd logs as its own fault."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(logging.ERROR)
        self._kernel = kernel

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0]:
            text = logging.Formatter().formatException(record.exc_info)
            self._kernel.violations.append(f"hostd failed: {record.getMessage()}: {text}")


def _nothing(_: object) -> None:
    """Nobody hears it."""


class Hostd:
    """The core of one hostd, from its start to its end."""

    def __init__(
        self, kernel: Kernel, directory: str, config: Config, *, fd_store: bool = True, mount_events: bool = True
    ) -> None:
        self.kernel, self._config = kernel, config
        self.loop = Loop(kernel)
        self.loop.set_exception_handler(self._on_exception)
        self.ready = False
        self.events: list[Event] = []
        self.told: Callable[[Event], None] = self.events.append
        self._complaints = _Complaints(kernel)
        logging.getLogger("hostd").addHandler(self._complaints)
        self._manager = _Manager(kernel) if fd_store else NoManager()
        self._directory = directory
        self._mount_events = mount_events
        self._closed = False
        kernel.on_pod = self._on_pod
        self._main = self.loop.create_task(self._start())

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.kernel.violations.append(f"the loop: {context.get('message')}: {context.get('exception')!r}")

    async def _start(self) -> None:
        self.pool = SimPool(self.kernel)
        root = KubeletRoot(KUBELET, found=True)
        fds = watchers.FdStore(self._manager)
        self.store = Store(self._directory)
        self.inhibitors = Inhibitors(self._directory, lambda inhibitor: self.keeper.on_inhibitor_end(inhibitor))
        node_mounts = mounts.NodeMounts(self._mount_source(), root, lambda pods: self.keeper.on_mounts(pods))
        cgroups = SimCgroups(self.kernel)
        self.keeper = keeper.Keeper(
            self._config,
            Registry(self.store),
            qemus.Qemus(
                cgroups,  # type: ignore[arg-type]
                lambda uid, process: self.keeper.on_death(uid, process),
                lambda uid: self.keeper.wake(uid),
            ),
            node_mounts,
            self.pool,  # type: ignore[arg-type]
            Survey(self.pool, root, b"/var/run/kubevirt-private"),  # type: ignore[arg-type]
            self.inhibitors,
            fds,
        )
        self.keeper.registry.subscribe(lambda event: self.told(event))
        node_mounts.start()
        self.requests = requests.Requests(self.keeper, root, lambda: self._config)
        stored = [(name, self.kernel.new_fd(task)) for name, task in self.kernel.stored.items()]
        try:
            await start.start(self.keeper, root, fds, stored)
        except Exception:
            logging.getLogger("hostd").exception("hostd does not come up")
            raise
        self.ready = True

    def _mount_source(self) -> mount_source.MountSource:
        if not self._mount_events:
            return mount_source.WholeTable(SimTable(self.kernel))  # type: ignore[arg-type]
        return mount_source.ChangedRows(SimMountRows(self.kernel), SimMountEvents(self.kernel))  # type: ignore[arg-type]

    # -- its life

    def _on_pod(self, pod_uid: str) -> None:
        """What Discovery tells, also while hostd starts."""
        if hasattr(self, "keeper"):
            self.loop.call_soon(self.keeper.on_pod, pod_uid)

    def ask(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """A request from the bus; HostdErrors are its answer."""

        async def answer() -> object:
            try:
                return await work
            except HostdError as error:
                return error

        return self.loop.create_task(answer())

    def tick(self, turns: int = 1) -> None:
        """Turns of the loop; no time passes."""
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def advance(self, seconds: float) -> int:
        """Lets time pass; the turns of the loop that it took."""
        before = self.loop.selector.turns
        self.loop.run_until_complete(asyncio.sleep(seconds))
        return self.loop.selector.turns - before

    def until_ready(self) -> None:
        self.loop.run_until_complete(self._main)

    def stop(self) -> None:
        """SIGTERM. What it does not close itself is a leak, unless a task was cut off in which it was about to."""
        busy = len(asyncio.all_tasks(self.loop)) > 0
        self.loop.run_until_complete(self.keeper.close())
        self.store.close()
        if self.kernel._fds and not busy and not self.keeper._identifying:
            self.kernel.violations.append(f"descriptors are left open: {self.kernel._fds}")
        self._closed = True
        self.kill()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more, and the kernel closes its descriptors."""
        self.told, self.kernel.on_pod = _nothing, _nothing
        logging.getLogger("hostd").removeHandler(self._complaints)
        if hasattr(self, "pool"):
            self.pool.kill()
        with mock.patch.object(Store, "save"), mock.patch.object(Store, "remove"):
            for task in asyncio.all_tasks(self.loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):
                    task.get_coro().close()
        if hasattr(self, "keeper") and not self._closed:
            for taken in self.inhibitors._taken.values():
                os.close(taken.fd)
            for fd in (self.inhibitors._fd, self.store._fd):
                os.close(fd)
        self.kernel._watches.clear()
        self.kernel._fds.clear()
        self.loop.close()


def pod_of(path: bytes) -> str:
    """The pod of a target."""
    return path.partition(b"pods/")[2].partition(b"/")[0].decode()


def is_directory(target: bytes) -> bool:
    """Whether a hotplugged volume is bound as a directory."""
    return os.path.basename(os.path.dirname(target)) == HOTPLUG_DISKS and not target.endswith(b".img")


def target_of(pod_uid: str, name: bytes) -> bytes:
    """`container-disks/disk_0.img` of a pod, say, as an absolute path."""
    return b"/".join((KUBELET, b"pods", pod_uid.encode(), b"volumes", EMPTY_DIRS, name))
