"""While a QEMU of a pod lives its layers stay: attempts to make hostd believe otherwise.

The layers are directory binds wherever that is possible: no process has them open, so the kernel's EBUSY does not
guard them and only hostd's own judgement does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.cgroups import unified_mount
from tests.support.leaderless import LeaderlessQemu
from tests.support.mountns import MountNamespace
from tests.support.node import MANAGER, NAME, Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu, Place, Program, RealQemu
from tests.support.stuck import StuckQemu
from tests.support.wait import until
from tests.support.witness import A_WHILE, full_pod, gone, in_state, only, stays, workers

pytestmark = pytest.mark.usefixtures("root")


def bare_pod(node: Node, name: str = "vm") -> Pod:
    """A pod whose layers nothing holds: only judgement keeps them."""
    pod = node.pod(name=name)
    for volume in ("one", "two"):
        pod.hotplug_directory(volume)
    pod.hotplug_file("three")
    return pod


def idle_qemu(pod: Pod) -> FakeQemu:
    """A QEMU that has no layer open."""
    return pod.qemu(FakeQemu, disks=[])


@pytest.fixture
def closing() -> Iterator[Callable[[Program], Program]]:
    """Closes programs that no pod owns."""
    with ExitStack() as stack:
        yield stack.enter_context


def killed_and_started(node: Node) -> None:
    """hostd, killed and started again."""
    node.hostd.kill()
    node.hostd.start()


def started_without_memory(node: Node) -> None:
    """hostd, started as on a node where it never was."""
    node.hostd.kill()
    for name in os.listdir(node.runtime_dir + "/vms"):
        os.unlink(f"{node.runtime_dir}/vms/{name}")
    node.hostd.start()


def stopped_and_started(node: Node) -> None:
    """hostd, stopped and started again."""
    assert node.hostd.stop() == 0
    node.hostd.start()


def left_alone(node: Node) -> None:
    """Nothing happens to hostd."""


def long_enough(event: Callable[[Node], None]) -> float:
    """How long nothing may happen: a pod that hostd does not know is judged only when it has settled."""
    return A_WHILE if event is started_without_memory else 0.5


EVENTS = [left_alone, killed_and_started, stopped_and_started, started_without_memory]
events = pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)


@events
def test_layers_that_nothing_holds_stay(node: Node, event: Callable[[Node], None]) -> None:
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    event(node)
    in_state(node, pod, "running")
    stays(node, pod, seconds=long_enough(event))
    qemu.kill()
    gone(node, pod)


@events
@pytest.mark.parametrize("first_dies", [True, False], ids=["first", "second"])
def test_either_of_two_qemus_keeps_them(node: Node, event: Callable[[Node], None], first_dies: bool) -> None:
    """virt-launcher starts a domain that went down a second time: two QEMUs in one pod, for a moment or for good."""
    pod = bare_pod(node)
    qemus = [idle_qemu(pod), idle_qemu(pod)]
    node.hostd.start()
    dying, living = qemus if first_dies else qemus[::-1]
    dying.kill()
    event(node)
    stays(node, pod, seconds=long_enough(event))
    in_state(node, pod, "running")
    living.kill()
    gone(node, pod)


def test_a_qemu_that_starts_just_as_the_other_dies_keeps_them(node: Node) -> None:
    """Between the look and the umount nothing may start unseen. A QEMU that was there first is never too late."""
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    for _ in range(15):
        successor = idle_qemu(pod)
        qemu.kill()
        assert len(pod.mounted()) == 3
        qemu = successor
    stays(node, pod, seconds=0.8)
    qemu.kill()
    gone(node, pod)


def test_one_that_starts_within_the_grace_keeps_what_is_no_directory(node: Node) -> None:
    node.configure({"cleanup": {"grace": "1min"}})
    pod = node.pod()
    pod.hotplug_file("data")
    pod.launcher()
    qemu = idle_qemu(pod)
    node.hostd.start()
    for _ in range(3):
        qemu.kill()
        in_state(node, pod, "exited")
        qemu = idle_qemu(pod)
        in_state(node, pod, "running")
    assert len(pod.mounted()) == 1


@events
def test_one_that_was_moved_to_the_root_cgroup_keeps_them(node: Node, event: Callable[[Node], None]) -> None:
    """An escaped process once had its cgroup resolved to `/`, and device rules were written there."""
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    with open(f"{unified_mount()}/cgroup.procs", "w") as file:
        file.write(str(qemu.pid))
    until(lambda: not node.cgroups.processes(pod.uid), why="the pod's cgroup is empty")
    # As its container has it: the pod's own volume, under another path.
    view = pod.launcher_namespace
    view.bind(pod.hotplug_disks, view.mkdir(view.base + b"/run/kubevirt/hotplug-disks"))
    event(node)
    stays(node, pod, seconds=long_enough(event))
    qemu.kill()
    gone(node, pod)


@events
def test_one_whose_leader_has_left_keeps_them(
    node: Node, event: Callable[[Node], None], closing: Callable[[Program], Program]
) -> None:
    """/proc shows a zombie, and a process that lives."""
    pod = bare_pod(node)
    qemu = LeaderlessQemu(pod)
    closing(qemu)
    node.hostd.start()
    event(node)
    stays(node, pod, seconds=long_enough(event))
    qemu.leave()
    gone(node, pod)


@events
def test_one_that_does_not_die_of_sigkill_keeps_them(
    node: Node, event: Callable[[Node], None], closing: Callable[[Program], Program]
) -> None:
    """A process in state D has its death before it: until then it may write."""
    pod = bare_pod(node)
    qemu = StuckQemu(pod)
    closing(qemu)
    node.hostd.start()
    qemu.send(signal.SIGKILL)
    until(lambda: qemu.state == "D", why="not even SIGKILL ends it")
    event(node)
    stays(node, pod, seconds=long_enough(event))
    assert qemu.alive
    qemu.let_go()
    qemu.wait_dead()
    gone(node, pod)


def test_one_that_is_stopped_keeps_them(node: Node) -> None:
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    qemu.send(signal.SIGSTOP)
    node.hostd.start()
    stays(node, pod)
    qemu.kill()
    gone(node, pod)


def test_a_zombie_that_nobody_reaps_keeps_nothing(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill(reap=False)
    assert qemu.state == "Z"
    gone(node, pod)
    in_state(node, pod, "released")
    killed_and_started(node)
    in_state(node, pod, "released")
    assert qemu.state == "Z"


def test_a_zombie_that_was_there_before_hostd_keeps_nothing(node: Node) -> None:
    """A zombie is in its pod's cgroup no more, and has no pod by /proc."""
    pod = full_pod(node)
    pod.qemu(FakeQemu).kill(reap=False)
    node.hostd.start()
    gone(node, pod)


def test_a_child_of_the_qemu_is_no_qemu(node: Node) -> None:
    """What a QEMU leaves behind in its pod may hold what it holds; it is not the VM."""
    pod = bare_pod(node)
    qemu = pod.qemu(FakeQemu, disks=[])
    with FakeQemu(pod.guest, place=pod.place, children=2) as parent:
        node.hostd.start()
        qemu.kill()
        stays(node, pod, seconds=0.5)
        parent.kill()
        gone(node, pod)
        assert node.states()[pod.uid] in {"released", "cleaning", "exited"}


def test_libvirts_probe_is_no_vm_and_no_reason_to_wait(node: Node) -> None:
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()

    class Probe(FakeQemu):
        """A QEMU that is asked for its capabilities: -machine none, no guest."""

    class NoGuest:
        arguments = ("-S", "-no-user-config", "-nodefaults", "-machine", "none,accel=tcg")

    with Probe(NoGuest(), place=pod.place):  # type: ignore[arg-type]
        qemu.kill()
        gone(node, pod)


def test_a_qemu_that_is_in_no_pod_is_nobodys(node: Node) -> None:
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    with FakeQemu(pod.guest, place=Place()):
        qemu.kill()
        gone(node, pod)


def test_the_real_qemu_keeps_its_directory_binds(node: Node) -> None:
    pod = bare_pod(node)
    qemu, second = pod.qemu(RealQemu), pod.qemu(RealQemu)
    node.hostd.start()
    qemu.kill()
    stays(node, pod, seconds=0.8)
    second.poweroff()
    gone(node, pod)


def test_asking_for_the_release_of_a_living_vm_is_refused(node: Node) -> None:
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    for flags in ("0", "2"):
        refused = node.busctl("call", NAME, MANAGER, NAME + ".Manager", "Release", "st", pod.uid, flags, check=False)
        assert refused.returncode != 0
        assert str(qemu.pid) in refused.stderr
    stays(node, pod, seconds=0.5)


def test_the_end_of_its_mounts_elsewhere_is_not_its_end(node: Node) -> None:
    """A helper pod that was killed took the staging mount away under a guest that still used the bind of it."""
    pod = node.pod()
    target = pod.hotplug_file("data")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    staging = next(row.split()[4] for row in node.rows(b"/") if "globalmount" in row).encode()
    for _ in range(2):
        node.namespace.umount(staging)
        node.namespace.mount(b"pvc", staging, b"tmpfs")
    stays(node, pod, seconds=0.5)
    in_state(node, pod, "running")
    qemu.kill()
    only(node, pod)
    assert target not in node.mounts(b"/")


def test_a_source_that_changed_under_a_living_vm_is_told(node: Node) -> None:
    pod = node.pod()
    target = pod.hotplug_file("data")
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    other = node.image("tmpfs")
    pod.bind(other, target)
    until(lambda: any("source changed" in row[5] for row in node.call("ListLayers", "a{sv}", "0")), why=node.hostd.log)
    in_state(node, pod, "running")
    qemu.kill()
    gone(node, pod)


def test_one_that_sees_no_more_of_its_mounts_keeps_them(node: Node) -> None:
    """What a pod does in a mount namespace of its own says nothing about the node's."""
    pod = bare_pod(node)
    qemu = idle_qemu(pod)
    node.hostd.start()
    view: MountNamespace = pod.launcher_namespace
    for target in pod.targets:
        view.umount(target)
    stays(node, pod, seconds=0.8)
    qemu.kill()
    gone(node, pod)


def test_a_worker_that_comes_too_late_touches_nothing(node: Node) -> None:
    """A worker that got no processor since the QEMU's death is told to go on when another QEMU has started: what was
    seen of the pod before is not true any more."""
    pod = bare_pod(node)
    pod.launcher()
    first = idle_qemu(pod)
    node.hostd.start()
    in_state(node, pod, "running")
    stopped = workers(node)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    first.kill()
    in_state(node, pod, "cleaning")
    idle_qemu(pod)
    until(lambda: set(workers(node)) - set(stopped), why="the stopped worker was set aside")
    in_state(node, pod, "running")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    until(lambda: len(set(workers(node)) & set(stopped)) < len(stopped), why="the one that is too late ends")
    assert sorted(pod.mounted()) == sorted(pod.targets)
    stays(node, pod)
