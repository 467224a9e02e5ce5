"""What tests see and wait for on a node: the mount table, hostd's word for it, and processes that hold things.

    pod = full_pod(node)                       # every kind of target, with records
    gone(node, pod)                            # nothing of it is mounted any more
    layer = layer_in(node, pod, target, "busy")   # hostd says so, and with which words
    stays(node, pod)                              # and nothing changes for longer than any delay of the tests' nodes

Nothing here asks hostd's own files: what it says is what it says on the bus.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.wait import DEADLINE, holds_for, until

#: Longer than grace and settle of the tests' nodes together: what has not happened by then is not going to.
A_WHILE = 1.6
#: Mounts of a full pod.
FULL = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A layer as ListLayers has it."""

    kind: str
    volume: str
    state: str
    error: str
    attempts: int


def full_pod(node: Node, name: str = "vm", *, vmi_uid: str = "") -> Pod:
    """A pod with every kind of target, and virt-handler's records of them."""
    pod = node.pod(name=name, namespace="ns", vmi_uid=vmi_uid)
    pod.containerdisk(0)
    pod.kernel_boot()
    pod.hotplug_file("data")
    pod.hotplug_directory("dump")
    pod.hotplug_block("raw")
    pod.write_records()
    return pod


def shown(path: bytes) -> str:
    """A path as the bus has it: bytes that are no UTF-8, control characters and backslashes escaped."""
    return path.decode("utf-8", "backslashreplace")


def layer(node: Node, pod: Pod, target: bytes) -> Row | None:
    """What hostd says of a layer."""
    for uid, path, *rest in node.call("ListLayers", "a{sv}", "0"):
        if uid == pod.uid and path == shown(target):
            return Row(*rest)
    return None


def layer_in(node: Node, pod: Pod, target: bytes, *states: str, words: str = "", deadline: float = DEADLINE) -> Row:
    """Waits until hostd says that a layer is in one of these states (and its error contains `words`)."""

    def right() -> Row | None:
        found = layer(node, pod, target)
        return found if found and found.state in states and words in found.error else None

    found = until(right, deadline, why=lambda: f"{states} {words!r}; {layer(node, pod, target)}\n{node.hostd.log()}")
    assert found is not None
    return found


def gone(node: Node, *pods: Pod, deadline: float = DEADLINE) -> None:
    """Waits until nothing is mounted for these pods."""

    def why() -> str:
        rows = "\n".join(row for pod in pods for row in node.rows(pod.directory + b"/"))
        return f"the layers are gone; there are\n{rows}\nhostd's log:\n{node.hostd.log()}"

    until(lambda: not any(pod.mounted() for pod in pods), deadline, why=why)


def only(node: Node, pod: Pod, *targets: bytes) -> None:
    """Waits until just these are mounted in a pod."""
    until(
        lambda: sorted(pod.mounted()) == sorted(targets),
        why=lambda: f"{targets}; {pod.mounted()}\n{node.hostd.log()}",
    )


def in_state(node: Node, pod: Pod, *states: str, deadline: float = DEADLINE) -> None:
    """Waits until hostd says that the pod's VM is in one of these states."""
    until(
        lambda: node.states().get(pod.uid) in states,
        deadline,
        why=lambda: f"{states}; {node.states()}\n{node.hostd.log()}",
    )


def stays(node: Node, *pods: Pod, seconds: float = A_WHILE) -> None:
    """Asserts that nothing of these pods is unmounted for a while."""
    before = {pod.uid: pod.mounted() for pod in pods}
    assert all(before.values()), "there is nothing that could stay"
    holds_for(
        lambda: all(pod.mounted() == before[pod.uid] for pod in pods), seconds, f"mounts stay\n{node.hostd.log()}"
    )


def holders(node: Node, pod: Pod, target: bytes) -> list[tuple[int, str, str, str]]:
    """Pid, name, how and pod of each holder, by ListHolders."""
    return [tuple(row) for row in node.call("ListHolders", "ss", pod.uid, shown(target))]


def listed(node: Node, directory: bytes) -> list[bytes]:
    """What lies in a directory of the node."""
    return sorted(os.listdir(node.outside(directory)))


def rows_of(node: Node) -> Sequence[bytes]:
    """All rows of what the node mounted but those of pods' targets, sorted; not the machine's, which others change."""
    lines = [(line, line.split(b" ")[4]) for line in node.namespace.table().splitlines()]
    mine = [(line, target) for line, target in lines if target.startswith(node.namespace.base)]
    return sorted(line for line, target in mine if b"/volumes/kubernetes.io~empty-dir/" not in target)


def share_of_a_core(node: Node, seconds: float) -> float:
    """Which part of a core hostd uses over some time, by the kernel's own count (its workers included)."""
    before, begun = _usage(node), time.monotonic()
    holds_for(lambda: node.hostd.running, seconds, "hostd runs")
    return (_usage(node) - before) / (time.monotonic() - begun)


def _usage(node: Node) -> float:
    """Processor time of hostd with the children that it has and had."""
    ticks = sum(sum(map(int, _stat(pid)[11:15])) for pid in [node.hostd.pid, *workers(node)])
    return ticks / os.sysconf("SC_CLK_TCK")


def workers(node: Node) -> list[int]:
    """hostd's living worker processes."""
    with open(f"/proc/{node.hostd.pid}/task/{node.hostd.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 50
