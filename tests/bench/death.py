"""From SIGKILL to the last layer gone: hostd, and beside it the floor, a bare loop of poll and umount2."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from tests.bench.figures import Figure
from tests.support.mountns import Child, enter, umount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import until


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
    elapsed = until_gone(node, pod.uid.encode(), lambda: os.kill(qemu.pid, signal.SIGKILL))
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
        elapsed = until_gone(node, pod.uid.encode(), lambda: os.kill(qemu.pid, signal.SIGKILL))
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


def until_gone(node: Node, needle: bytes, kill: Callable[[], None]) -> float:
    """Milliseconds from `kill` until the kernel's own table of the node says nothing of `needle` any more."""
    fd = os.open(f"/proc/{node.namespace.pid}/mountinfo", os.O_RDONLY)
    poll = select.poll()
    poll.register(fd, select.POLLPRI)
    poll.poll(0)
    begun = time.perf_counter()
    kill()
    while needle in _read(fd):
        if not poll.poll(10_000):
            raise TimeoutError(f"what is mounted at {needle!r} does not go")
    elapsed = time.perf_counter() - begun
    os.close(fd)
    return elapsed * 1000


def _read(fd: int) -> bytes:
    data, offset = b"", 0
    while chunk := os.pread(fd, 1 << 16, offset):
        data += chunk
        offset += len(chunk)
    return data
