"""Many VMs at once: all die together; hostd, and beside it the bare umounts of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

from tests.bench.death import until_gone
from tests.bench.figures import Figure
from tests.support.mountns import MS_BIND, Child, enter, mount, umount
from tests.support.neighbours import doing
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu, Place, readable
from tests.support.wait import until

#: Until the last QEMU of a crowd has been started, the others' pods are no dead ones.
_PATIENT = {"cleanup": {"settle": "60s"}}
#: Between two looks at what is left (s): of what is measured a hundredth, and little work beside it.
_NAP = 0.0005
#: How often somebody else mounts and unmounts in the scene with others (seconds).
_EVERY = 0.01

Unmount = Callable[[Sequence[bytes]], None]


def all_die(
    vms: int = 200, layers: int = 3, foreign: int = 0, rounds: int = 5, *, others: bool = False, peer: bool = False
) -> Iterator[Figure]:
    """So many VMs with so many layers each are killed at once, on a node with so many other mounts; perhaps `others`
    mount and unmount all the while."""
    with Node(settings=_PATIENT) as node, _others(node) if others else contextlib.nullcontext():
        node.namespace.call(mount_foreign, node.kubelet, foreign)
        node.hostd.start()
        ours = [_round(node, vms, layers) for _ in range(rounds)]
        node.hostd.stop()
        floor = [_round(node, vms, layers, unmount_all) for _ in range(rounds)]
        commands = [_round(node, vms, layers, _by_commands)] if peer else []
    name = f"{vms} VMs of {layers} layers die at once" + (f", {foreign} foreign mounts" if foreign else "")
    name += ", others mount and unmount" if others else ""
    yield Figure(name, "ms", ours, "bare umount2", floor)
    if peer:
        yield Figure(name, "ms", ours, "umount(8) for each", commands)


def crowds() -> Iterator[Figure]:
    """The sizes that matter; then with as many other mounts as a full node has, and with work going on in them."""
    yield from all_die(200, 3, peer=True)
    yield from all_die(200, 3, foreign=5000)
    yield from all_die(200, 3, foreign=5000, others=True)
    yield from all_die(1000, 4, rounds=3, peer=True)


def _others(node: Node) -> Child:
    place = node.namespace.mkdir(node.namespace.base + b"/others")

    def step() -> None:
        mount(b"others", place, b"tmpfs")
        umount(place)

    return doing(node, step, _EVERY)


def unmount_all(targets: Sequence[bytes]) -> None:
    """The floor: the bare system calls."""
    for target in targets:
        umount(target)


def _by_commands(targets: Sequence[bytes]) -> None:
    for target in targets:
        subprocess.run(["umount", target], check=True)


def _round(node: Node, vms: int, layers: int, unmount: Unmount | None = None) -> float:
    """Milliseconds by hostd, or by somebody who waits for all deaths and then unmounts."""
    found_before = running(node)
    pods = crowd(node, vms, layers)
    qemus = [start(pod) for pod in pods]
    if unmount is None:
        until(lambda: running(node) - found_before == len(pods), deadline=60, why="hostd finds them all")
        elapsed = _kill_all(node, pods, qemus)
        # What is done for them afterwards is not to be in the next round.
        until(lambda: _said(node, ": released, ") == running(node), deadline=60, why="hostd has released them all")
    else:
        elapsed = _without_hostd(node, pods, qemus, unmount)
    for qemu in qemus:
        qemu.close()
    return elapsed


def _without_hostd(node: Node, pods: Sequence[Pod], qemus: Sequence[FakeQemu], unmount: Unmount) -> float:
    targets = [target for pod in pods for target in pod.targets]

    def wait_and_unmount(tell: Callable[[object], None]) -> None:
        fds = [os.pidfd_open(qemu.pid) for qemu in qemus]
        enter(node.namespace.path)
        tell("ready")
        for fd in fds:
            readable(fd, 60)
        unmount(targets)

    with Child(wait_and_unmount) as child:
        child.hear()
        return _kill_all(node, pods, qemus)


def _kill_all(node: Node, pods: Sequence[Pod], qemus: Sequence[FakeQemu]) -> float:
    def kill() -> None:
        for qemu in qemus:
            os.kill(qemu.pid, signal.SIGKILL)

    return until_gone(node, [target for pod in pods for target in pod.targets], kill, _NAP)


def start(pod: Pod) -> FakeQemu:
    """A QEMU of this pod, in the node's own mount namespace: no container's view is measured along."""
    return FakeQemu(pod.guest, place=Place(pod.cgroups))


def crowd(node: Node, vms: int, layers: int) -> list[Pod]:
    """So many launcher pods, each with so many hotplugged files out of one PVC."""
    image = node.pvc() + b"/disk.img"
    pods = [node.pod(name=f"vm-{number}") for number in range(vms)]
    for pod in pods:
        pod.targets += [pod.hotplug_disks + b"/volume-%d.img" % number for number in range(layers)]
        for target in pod.targets:
            os.close(os.open(node.outside(target), os.O_CREAT | os.O_WRONLY, 0o644))
    node.namespace.call(_bind_all, image, [target for pod in pods for target in pod.targets])
    return pods


def _bind_all(image: bytes, targets: Sequence[bytes]) -> None:
    for target in targets:
        mount(image, target, b"", MS_BIND)


def mount_foreign(kubelet: bytes, count: int) -> None:
    for number in range(count):
        # As many as all pods of a full node have: token, config map and CSI mounts below their directories.
        path = kubelet + b"/pods/%08d-0000-4000-8000-000000000000/volumes/kubernetes.io~projected/token" % number
        os.makedirs(path)
        mount(b"foreign", path, b"tmpfs")


def running(node: Node) -> int:
    """QEMUs that hostd said it has found."""
    return _said(node, ": running, QEMU is")


def _said(node: Node, words: str) -> int:
    return node.hostd.log().count(words)
