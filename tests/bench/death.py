"""From SIGKILL to the last layer gone: hostd, and beside it the floor, a bare loop of poll and umount2."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from hostd.linux.mount_events import MountEvents
from hostd.linux.statmount import MountRows
from tests.bench.figures import Figure
from tests.support.mountns import Child, enter, umount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import until

#: Between two looks at a target (s): little beside what is measured, and the looks take a small part of a core.
_NAP = 0.0001
#: What takes longer does not come (s): four thousand processes, one after the other, take a minute.
_PATIENCE = 300.0


def one_vm() -> Iterator[Figure]:
    """From one layer to as many as a large VM has."""
    for layers in (1, 3, 16):
        yield from dying(layers)


def dying(layers: int = 3, rounds: int = 40) -> Iterator[Figure]:
    """One VM with so many file binds, whose cgroup is empty once its QEMU is dead."""
    with Node() as node:
        node.hostd.start()
        ours = [hostd_round(node, layers) for _ in range(rounds)]
        memory = node.hostd.memory() / (1 << 20)
        node.hostd.stop()
        floor = [_floor_round(node, layers) for _ in range(rounds)]
    yield Figure(f"one VM, {layers} layers: SIGKILL to last layer gone", "ms", ours, "poll + umount2", floor)
    yield Figure("resident memory of the daemon after that", "MiB", [memory])


def hostd_round(node: Node, layers: int) -> float:
    """Milliseconds from a VM's death to the end of its layers, by hostd."""
    pod = _pod(node, layers)
    qemu = pod.qemu(FakeQemu, disks=pod.targets[:6])  # more a shell cannot hold
    until(lambda: _state(node, pod) == "running", why="hostd finds the QEMU")
    elapsed = until_gone(node, pod.targets, lambda: os.kill(qemu.pid, signal.SIGKILL))
    pod.close()
    return elapsed


def _floor_round(node: Node, layers: int) -> float:
    pod = _pod(node, layers)
    qemu = pod.qemu(FakeQemu, disks=pod.targets[:6])  # more a shell cannot hold

    def wait_and_unmount(tell: Callable[[object], None]) -> None:
        pidfd = os.pidfd_open(qemu.pid)
        enter(node.namespace.path)
        tell("ready")
        select.select([pidfd], [], [])
        for target in pod.targets:
            umount(target)

    with Child(wait_and_unmount) as child:
        child.hear()
        elapsed = until_gone(node, pod.targets, lambda: os.kill(qemu.pid, signal.SIGKILL))
    pod.close()
    return elapsed


def _pod(node: Node, layers: int) -> Pod:
    pod = node.pod()
    image = node.pvc() + b"/disk.img"
    for number in range(layers):
        target = pod.hotplug_disks + b"/volume-%d.img" % number
        os.close(os.open(node.outside(target), os.O_CREAT | os.O_WRONLY, 0o644))
        pod.bind(image, target)
    return pod


def _state(node: Node, pod: Pod) -> str:
    with contextlib.suppress(FileNotFoundError), open(f"{node.runtime_dir}/vms/{pod.uid}.json") as file:
        return str(json.load(file)["vm"]["state"])
    return ""


def until_gone(node: Node, targets: Sequence[bytes], kill: Callable[[], None], nap: float = _NAP) -> float:
    """Milliseconds from `kill` until none of the targets is a mountpoint any more.

    Looked at with naps (seconds) between, by what the kernel tells of mounts that went: who reads the table at each
    change holds up the very umounts that are measured, and who looks at a target pins it for a moment. The table has
    the last word.
    """
    with contextlib.ExitStack() as end:
        gone = _gone(node, targets, end)
        deadline = time.perf_counter() + _PATIENCE
        begun = time.perf_counter()
        kill()
        while not gone():
            if time.perf_counter() > deadline:
                raise TimeoutError("not all layers go")
            time.sleep(nap)
        elapsed = time.perf_counter() - begun
    assert not _mounted(node).intersection(targets)
    return elapsed * 1000


def _gone(node: Node, targets: Sequence[bytes], end: contextlib.ExitStack) -> Callable[[], bool]:
    """Says whether all of them are."""
    wanted = set(targets)
    try:
        rows = end.enter_context(MountRows(node.namespace.path))
        events = end.enter_context(MountEvents(rows.fileno()))
    except OSError:  # a kernel before 6.15
        return lambda: not _mounted(node).intersection(wanted)
    left = {number for number in rows.numbers() if (row := rows.row(number, b"-disks/")) and row.target in wanted}
    assert len(left) == len(targets)

    def gone() -> bool:
        told = events.read()
        assert told is not None
        left.difference_update(number for number, came in told.items() if not came)
        return not left

    return gone


def _mounted(node: Node) -> set[bytes]:
    with open(f"/proc/{node.namespace.pid}/mountinfo", "rb") as table:
        return set(table.read().split())
