"""What a full node costs: starting among many VMs, being idle among them, finding one more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tests.bench.figures import Figure
from tests.bench.scale import crowd, mount_foreign, running, start
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import until

_TICKS = os.sysconf("SC_CLK_TCK")


def starting(vms: int = 1000, foreign: int = 5000, rounds: int = 3) -> Iterator[Figure]:
    """hostd starts among so many living VMs: without memory of them, and again with it."""
    with Node() as node:
        node.namespace.call(mount_foreign, node.kubelet, foreign)
        qemus = [start(pod) for pod in crowd(node, vms, 1)]
        first, answers, again = [], [], []
        for _ in range(rounds):
            first.append(_timed_start(node))
            answers.append(_timed_answer(node, vms))
            node.hostd.stop()
            again.append(_timed_start(node))
            node.hostd.stop()
            for name in os.listdir(f"{node.runtime_dir}/vms"):
                os.unlink(f"{node.runtime_dir}/vms/{name}")
        for qemu in qemus:
            qemu.close()
    name = f"{vms} VMs, {foreign} foreign mounts"
    yield Figure(f"start among {name}: exec to READY", "ms", first)
    yield Figure(f"then the first ListVMs that has all of them running, by busctl: {name}", "ms", answers)
    yield Figure(f"restart among {name}: exec to READY", "ms", again)


def _timed_start(node: Node) -> float:
    begun = time.perf_counter()
    node.hostd.start()
    return (time.perf_counter() - begun) * 1000


def _timed_answer(node: Node, vms: int) -> float:
    begun = time.perf_counter()
    until(lambda: list(node.states().values()).count("running") == vms, why="ListVMs has all VMs running")
    return (time.perf_counter() - begun) * 1000


def idle(vms: int = 500, seconds: float = 20) -> Iterator[Figure]:
    """Nothing happens on a node with so many living VMs."""
    with Node() as node:
        qemus = [start(pod) for pod in crowd(node, vms, 3)]
        node.hostd.start()
        until(lambda: running(node) == vms, deadline=60, why="hostd finds them all")
        time.sleep(35)  # what hostd looks at once more some time after a VM was found is done by then
        cpu, wakes, begun = _cpu(node.hostd.pid), _wakes(node.hostd.pid), time.perf_counter()
        time.sleep(seconds)
        passed = time.perf_counter() - begun
        cpu, wakes = _cpu(node.hostd.pid) - cpu, _wakes(node.hostd.pid) - wakes
        memory, descriptors = node.hostd.memory() / (1 << 20), node.hostd.descriptors()
        for qemu in qemus:
            qemu.close()
    yield Figure(f"idle with {vms} VMs: share of a core", "%", [100 * cpu / passed])
    yield Figure(f"idle with {vms} VMs: wake-ups", "1/min", [60 * wakes / passed])
    yield Figure(f"idle with {vms} VMs: resident memory", "MiB", [memory])
    yield Figure(f"idle with {vms} VMs: descriptors", "", [float(descriptors)])


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _wakes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))


def detection(rounds: int = 10) -> Iterator[Figure]:
    """From a QEMU's start to `running`."""
    with Node() as node:
        node.hostd.start()
        samples = []
        for number in range(rounds):
            pod = node.pod(name=f"late-{number}")
            pod.containerdisk()
            with pod.qemu(FakeQemu):
                begun = time.perf_counter()
                until(lambda found=number: running(node) > found, why="hostd finds the QEMU")  # type: ignore[misc]
                samples.append((time.perf_counter() - begun) * 1000)
    yield Figure("detection: a QEMU's start to running", "ms", samples)
