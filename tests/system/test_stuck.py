"""Whatever keeps a VM from being released costs little while it does, and is told once: all kinds of it together."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.fuse import DeadFileSystem
from tests.support.neighbours import remounting
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.stuck import StuckQemu
from tests.support.wait import until
from tests.support.witness import in_state, share_of_a_core

pytestmark = pytest.mark.usefixtures("root")

#: How long it is watched (s), what all together may cost (of a core; one alone 0.05), and what may be said of each VM:
#: in all, and while it is watched.
WATCHED, SHARE, LINES, MORE = 12.0, 0.1, 8, 2


class Stuck:
    """A node with a VM for each reason to be stuck; `states` says in what state each one stays."""

    def __init__(self, node: Node, stack: ExitStack) -> None:
        self.node = node
        self._stack = stack
        self.states: dict[str, tuple[Pod, str]] = {}
        self.ends: list[Callable[[], object]] = []

    def vm(self, name: str, state: str = "blocked") -> Pod:
        """A VM whose QEMU dies by and by."""
        pod = self.node.pod(name=name)
        self.states[name] = pod, state
        return pod

    def dying(self, pod: Pod) -> None:
        """Its QEMU has nothing open, so that it holds nothing up."""
        qemu = pod.qemu(FakeQemu, disks=[])
        self.ends.append(qemu.kill)

    def copied(self) -> None:
        """Another namespace keeps a private copy, and the mountpoint stays. The first, so that it has no other's."""
        pod = self.vm("copied")
        directory = pod.hotplug_disks + b"/dump"
        self.node.namespace.write(directory + b"/below-the-mount", b"x")
        pod.hotplug_directory("dump")
        self._stack.enter_context(self.node.namespace.copy("private"))
        self.dying(pod)

    def busy(self) -> None:
        """Somebody has a file open."""
        pod = self.vm("busy")
        self.node.namespace.hold(os.open, pod.hotplug_file("data"), os.O_RDONLY)
        self.dying(pod)

    def nested(self) -> None:
        """A mount that is nobody's layer lies on one that is."""
        pod = self.vm("nested")
        self.node.namespace.tmpfs(pod.hotplug_directory("dump") + b"/nested")
        self.dying(pod)

    def detached(self) -> None:
        """Somebody detached it, and somebody has it open."""
        pod = self.vm("detached")
        target = pod.hotplug_file("data", pvc="ext4")
        self.node.namespace.hold(os.open, target, os.O_RDONLY)
        self.dying(pod)
        self.ends.append(lambda: pod.unmount(target))

    def hung(self) -> None:
        """The umount does not come back."""
        pod = self.vm("hung")
        target = pod.hotplug_disks + b"/bad"
        self.node.namespace.mkdir(target)
        self._stack.callback(DeadFileSystem(self.node.namespace, target, block=True).end)
        self.dying(pod)

    def unseen(self) -> None:
        """Its directories do not answer, so nobody knows whether device nodes are left."""
        pod = self.vm("unseen", "cleaning")
        self._stack.callback(DeadFileSystem(self.node.namespace, pod.empty_dir).end)
        self.dying(pod)

    def remounted(self) -> None:
        """Somebody mounts it again every 200 ms."""
        pod = self.vm("remounted")
        target = pod.hotplug_directory("dump")
        source = self.node.pvc()
        self._stack.callback(remounting(self.node, source, target).end)
        self.dying(pod)

    def refused(self) -> None:
        """A symlink stands on the way to a target that an agent named."""
        pod = self.vm("refused")
        self.dying(pod)
        target = os.fsdecode(pod.hotplug_disks + b"/data.img")

        def named_and_swapped() -> None:
            self.node.call("TrackLayer", "ssa{sv}", pod.uid, target, "0")
            shutil.rmtree(self.node.outside(pod.hotplug_disks))
            os.symlink(self.node.namespace.base, self.node.outside(pod.hotplug_disks))

        self.ends.insert(0, named_and_swapped)

    def kept(self) -> None:
        """Its policy is `keep`."""
        pod = self.vm("kept", "held")
        pod.hotplug_directory("dump")
        self.dying(pod)
        self.ends.insert(0, lambda: self.node.call("SetPolicy", "s", "keep", path=self.node.vm(pod)))

    def undead(self) -> None:
        """SIGKILL does not end its QEMU."""
        pod = self.vm("undead", "running")
        pod.hotplug_directory("dump")
        qemu = StuckQemu(pod)
        self._stack.callback(qemu.close)
        self.ends.append(lambda: qemu.send(signal.SIGKILL))

    def pending(self) -> None:
        """Its containers run, and its QEMU does not come."""
        pod = self.vm("pending", "pending")
        pod.hotplug_directory("dump")
        pod.launcher()

    def lines(self, pod: Pod) -> int:
        """What was said of a VM."""
        return len(self.node.hostd.said(pod.uid))


@pytest.fixture
def stuck(node: Node) -> Iterator[Stuck]:
    """All kinds."""
    with ExitStack() as stack:
        made = Stuck(node, stack)
        for kind in (made.copied, made.busy, made.nested, made.detached, made.hung, made.unseen, made.remounted,
                     made.refused, made.kept, made.undead, made.pending):  # fmt: skip
            kind()
        yield made


def test_what_is_stuck_costs_little_and_is_told_once(node: Node, stuck: Stuck) -> None:
    node.hostd.start()
    for pod, _ in stuck.states.values():
        in_state(node, pod, "running", "pending")
    for end in stuck.ends:
        end()
    for pod, state in stuck.states.values():
        in_state(node, pod, state)
    until(lambda: len(node.hostd.said("WARNING")) >= 8, why=node.hostd.log)
    before = {name: stuck.lines(pod) for name, (pod, _) in stuck.states.items()}
    assert share_of_a_core(node, WATCHED) < SHARE
    for name, (pod, state) in stuck.states.items():
        said = "\n".join(node.hostd.said(pod.uid))
        assert stuck.lines(pod) <= LINES, said
        assert stuck.lines(pod) - before[name] <= MORE, said
        assert node.states()[pod.uid] == state, name
