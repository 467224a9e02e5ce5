"""The simulated kernel beside the real one: the same tests on both, so that what the model test learns is true."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

import hostd.core
from hostd.linux.mount_table import parse
from hostd.linux.pidfd import End, Process
from hostd.linux.umount import Outcome
from tests.support import simulation, umounts
from tests.support.core import POD
from tests.support.mountns import MountNamespace, umount
from tests.support.simulation import KUBELET, Kernel, SimProcess, Task, target_of
from tests.support.wait import until

NAME = b"hotplug-disks/dump"


class Side(Protocol):
    """What both kernels can be asked here."""

    def start(self) -> int: ...
    def kill(self, pid: int) -> None: ...
    def reap(self, pid: int) -> None: ...
    def open(self, pid: int) -> Any: ...
    def mount(self) -> None: ...
    def hold(self) -> Callable[[], object]: ...
    def agent_unmounts(self, *, lazy: bool) -> None: ...
    def unmount(self, *, lazy: bool = False) -> Outcome: ...
    def mounted(self) -> int: ...


class Simulated:
    """The simulated kernel."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.tasks: dict[int, Task] = {}
        self.target = target_of(POD, NAME)

    def start(self) -> int:
        task = self.kernel.spawn("", b"sleep")
        self.tasks[task.pid] = task
        return task.pid

    def kill(self, pid: int) -> None:
        self.kernel.die(self.tasks[pid], End(signal=9), reap=False)

    def reap(self, pid: int) -> None:
        self.kernel.reap(self.tasks[pid])

    def open(self, pid: int) -> SimProcess:
        return SimProcess.open(self.kernel, pid)

    def mount(self) -> None:
        self.kernel.mount(self.target)

    def hold(self) -> Callable[[], object]:
        mount = self.kernel.stack(self.target)[-1]
        mount.openers.add(1 << 40)
        return lambda: self.kernel.release(mount, 1 << 40)

    def agent_unmounts(self, *, lazy: bool) -> None:
        if number := self.kernel.umount(self.target, lazy=lazy):
            raise OSError(number, os.strerror(number))

    def unmount(self, *, lazy: bool = False) -> Outcome:
        return self.kernel.unmount(self.target.removeprefix(KUBELET + b"/"), lazy=lazy, block_node=False)

    def mounted(self) -> int:
        return sum(row.target == self.target for row in parse(self.kernel.table()))


def _unmount(root: bytes, relative: bytes, lazy: bool) -> Outcome:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    return umounts.unmount(fd, relative, lazy=lazy, block_node=False)


class Real:
    """This machine's kernel, in a namespace of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self.namespace = stack.enter_context(MountNamespace("private"))
        self.root = self.namespace.base + KUBELET
        self.target = self.root + target_of(POD, NAME).removeprefix(KUBELET)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        stack.callback(self.end)

    def start(self) -> int:
        process = subprocess.Popen(["sleep", "100"])
        self.processes[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> None:
        self.processes[pid].kill()
        until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))

    def reap(self, pid: int) -> None:
        self.processes[pid].wait()

    def open(self, pid: int) -> Process:
        return Process.open(pid)

    def mount(self) -> None:
        self.namespace.tmpfs(self.target)

    def hold(self) -> Callable[[], object]:
        return self.namespace.hold(os.open, self.target, os.O_RDONLY).end

    def agent_unmounts(self, *, lazy: bool) -> None:
        self.namespace.call(umount, self.target, 2 if lazy else 0)

    def unmount(self, *, lazy: bool = False) -> Outcome:
        return self.namespace.call(_unmount, self.root, self.target.removeprefix(self.root + b"/"), lazy)

    def mounted(self) -> int:
        return self.namespace.targets().count(self.target)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(params=["simulated", "real"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    if request.param == "simulated":
        yield Simulated()
        return
    request.getfixturevalue("root")
    with ExitStack() as stack:
        yield Real(stack)


def test_a_process_lives_and_dies_and_is_never_another(side: Side) -> None:
    pid = side.start()
    process, again, other = side.open(pid), side.open(pid), side.open(side.start())
    assert process.alive()
    assert process.end() is None
    assert process.identity.same_as(again.identity)
    assert not process.identity.same_as(other.identity)
    side.kill(pid)
    assert not process.alive()
    assert process.end() == End(signal=9)
    with pytest.raises(ProcessLookupError):
        side.open(pid)
    side.reap(pid)
    assert process.end() == End(signal=9)
    with pytest.raises(ProcessLookupError):
        side.open(pid)
    for each in (process, again, other):
        each.close()


def test_a_stack_goes_whole_and_again_is_no_error(side: Side) -> None:
    for _ in range(3):
        side.mount()
    assert side.mounted() == 3
    outcome = side.unmount()
    assert (outcome.done, outcome.errno, outcome.mounted, side.mounted()) == (3, 0, False, 0)
    outcome = side.unmount()
    assert (outcome.done, outcome.errno, outcome.mounted) == (0, 0, False)


def test_what_is_open_is_busy_until_it_is_let_go(side: Side) -> None:
    side.mount()
    let_go = side.hold()
    outcome = side.unmount()
    assert (outcome.done, outcome.errno, outcome.mounted, side.mounted()) == (0, errno.EBUSY, True, 1)
    let_go()
    assert side.unmount().errno == 0
    assert side.mounted() == 0


def test_of_a_stack_only_what_is_open_stays(side: Side) -> None:
    side.mount()
    let_go = side.hold()
    side.mount()
    outcome = side.unmount()
    assert (outcome.done, outcome.errno, side.mounted()) == (1, errno.EBUSY, 1)
    let_go()


def test_lazily_it_leaves_the_table_though_it_is_open(side: Side) -> None:
    side.mount()
    let_go = side.hold()
    outcome = side.unmount(lazy=True)
    assert (outcome.done, outcome.errno, outcome.mounted, side.mounted()) == (1, 0, False, 0)
    let_go()


def test_the_agents_umount_takes_the_topmost_only(side: Side) -> None:
    side.mount()
    side.mount()
    side.agent_unmounts(lazy=True)
    assert side.mounted() == 1
    let_go = side.hold()
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        side.agent_unmounts(lazy=False)
    let_go()
    side.agent_unmounts(lazy=False)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        side.agent_unmounts(lazy=False)


def test_no_part_of_the_core_looks_at_another_clock() -> None:
    names = [name for _, name, _ in pkgutil.iter_modules(hostd.core.__path__, "hostd.core.")]
    modules = [importlib.import_module(name) for name in names]
    assert [module for module in modules if hasattr(module, "boottime_usec")] == list(simulation._TIMED)
