"""A file system that never answers delays nobody but its own VM."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.fuse import DeadFileSystem
from tests.support.mountns import MS_BIND, mount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu, Qemu
from tests.support.wait import holds_for, until
from tests.support.witness import full_pod, gone, in_state, layer_in, only, workers

pytestmark = pytest.mark.usefixtures("root")


class Hung:
    """A pod of which one layer's umount never comes back."""

    def __init__(self, node: Node, name: str = "hung") -> None:
        self.pod = node.pod(name=name)
        self.good = self.pod.containerdisk()
        self.target = self.pod.hotplug_disks + b"/bad"
        node.namespace.mkdir(self.target)
        self.file_system = DeadFileSystem(node.namespace, self.target, block=True)
        self.qemu: Qemu = self.pod.qemu(FakeQemu, disks=[])


@pytest.fixture
def several(node: Node) -> Iterator[list[Hung]]:
    """Five of them: more than hostd unmounts at a time."""
    with ExitStack() as stack:
        made = []
        for number in range(5):
            made.append(Hung(node, f"hung-{number}"))
            stack.callback(made[-1].file_system.end)
        yield made


@pytest.fixture
def hung(node: Node) -> Iterator[Hung]:
    """One of them."""
    made = Hung(node)
    yield made
    made.file_system.end()


def test_the_hung_layer_is_named_and_the_others_of_its_vm_go(node: Node, hung: Hung) -> None:
    node.hostd.start()
    hung.qemu.kill()
    layer_in(node, hung.pod, hung.target, "hung")
    until(lambda: hung.good not in hung.pod.mounted(), why=node.hostd.log)
    in_state(node, hung.pod, "blocked")
    said = node.hostd.said(hung.pod.uid, "bad", "hung")
    assert len(said) == 1, node.hostd.log()
    hung.file_system.end()
    gone(node, hung.pod)
    in_state(node, hung.pod, "released")


def test_health_names_what_hangs(node: Node, hung: Hung) -> None:
    node.hostd.start()
    assert "workers" not in node.get("Health")
    hung.qemu.kill()
    layer_in(node, hung.pod, hung.target, "hung")
    assert hung.pod.uid in str(node.get("Health")["workers"])
    hung.file_system.end()
    in_state(node, hung.pod, "released")
    until(lambda: "workers" not in node.get("Health"), why=lambda: str(node.get("Health")))


def test_other_vms_do_not_wait(node: Node, several: list[Hung]) -> None:
    """More hang than hostd has workers at a time, and before any of them is known to hang another VM dies."""
    good = full_pod(node, "good")
    qemu = good.qemu(FakeQemu)
    late = full_pod(node, "late")
    another = late.qemu(FakeQemu)
    node.hostd.start()
    for each in several:
        each.qemu.kill()
    qemu.kill()
    gone(node, good)
    in_state(node, good, "released")
    for each in several:
        layer_in(node, each.pod, each.target, "hung")
    another.kill()
    gone(node, late)
    in_state(node, late, "released")
    assert {node.states()[each.pod.uid] for each in several} == {"blocked"}
    for each in several:
        each.file_system.end()
    gone(node, *[each.pod for each in several])
    for each in several:
        in_state(node, each.pod, "released")


def test_the_bus_is_answered_meanwhile(node: Node, several: list[Hung]) -> None:
    node.hostd.start()
    for each in several:
        each.qemu.kill()
    for _ in range(20):
        begun = time.monotonic()
        node.call("ListVMs")
        node.call("ListLayers", "a{sv}", "0")
        assert time.monotonic() - begun < 1.5
    layer_in(node, several[0].pod, several[0].target, "hung")
    node.call("Sweep", "t", "0")
    node.call("Release", "st", several[0].pod.uid, "0")


def test_hostd_stops_and_starts_meanwhile(node: Node, several: list[Hung]) -> None:
    """Neither the exit waits for what hangs, nor does the next start; and what hung is known to the next one."""
    node.hostd.start()
    for each in several:
        each.qemu.kill()
    for each in several:
        layer_in(node, each.pod, each.target, "hung")
    assert node.hostd.stop() == 0
    node.hostd.start()
    for each in several:
        layer_in(node, each.pod, each.target, "hung")
        in_state(node, each.pod, "blocked")
    node.hostd.kill()
    node.hostd.start()
    good = full_pod(node, "good")
    qemu = good.qemu(FakeQemu)
    in_state(node, good, "running")
    qemu.kill()
    gone(node, good)
    for each in several:
        each.file_system.end()
    for each in several:
        in_state(node, each.pod, "released")


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_hostd_ends_before_it_knows_that_they_hang(node: Node, several: list[Hung], kill: bool) -> None:
    """The mounts have left the table, and nothing but the intent that was saved says that they are not gone."""
    node.hostd.start()
    for each in several:
        each.qemu.kill()
    until(lambda: any(each.target not in each.pod.mounted() for each in several), why=node.hostd.log)
    begun = time.monotonic()
    if kill:
        node.hostd.kill()
    else:
        assert node.hostd.stop() == 0
    assert time.monotonic() - begun < 3
    node.hostd.start()
    for each in several:
        layer_in(node, each.pod, each.target, "hung")
    holds_for(lambda: "released" not in node.states().values(), 0.5, "what hangs is not released")
    for each in several:
        each.file_system.end()
    for each in several:
        in_state(node, each.pod, "released")


def test_what_hangs_is_not_tried_again_and_costs_no_more_workers(node: Node, hung: Hung) -> None:
    node.hostd.start()
    before = len(workers(node))
    hung.qemu.kill()
    layer_in(node, hung.pod, hung.target, "hung")
    until(lambda: len(workers(node)) == before + 1, why=lambda: str(workers(node)))
    for _ in range(3):
        node.call("Sweep", "t", "0")
        node.call("Release", "st", hung.pod.uid, "0")
    holds_for(lambda: len(workers(node)) <= before + 1, 0.5)


def test_the_watchdog_is_fed_meanwhile(node: Node, hung: Hung) -> None:
    hostd = node.daemon(environment={"WATCHDOG_USEC": "400000"})
    hostd.start()
    hung.qemu.kill()
    until(lambda: hung.good not in hung.pod.mounted(), why=hostd.log)
    for _ in range(8):
        count = hostd.notifications.count("WATCHDOG=1")
        until(lambda count=count: hostd.notifications.count("WATCHDOG=1") > count, deadline=2)  # type: ignore[misc]
    assert hostd.stop() == 0


def test_a_frozen_loop_does_not_feed_the_watchdog(node: Node) -> None:
    """The heart beats in the loop that does the work."""
    hostd = node.daemon(environment={"WATCHDOG_USEC": "200000"})
    hostd.start()
    until(lambda: "WATCHDOG=1" in hostd.notifications)
    hostd.send(signal.SIGSTOP)
    count = hostd.notifications.count("WATCHDOG=1")
    holds_for(lambda: hostd.notifications.count("WATCHDOG=1") <= count + 1, 0.5)
    hostd.send(signal.SIGCONT)
    until(lambda: hostd.notifications.count("WATCHDOG=1") > count + 1)


def dead_source(node: Node, pod: Pod) -> tuple[bytes, DeadFileSystem]:
    """A bind of a file system of which every look at it hangs, though its umount does not."""
    mounted = node.namespace.mkdir(node.namespace.base + b"/dead")
    file_system = DeadFileSystem(node.namespace, mounted)
    target = pod.hotplug_disks + b"/utility"
    node.namespace.mkdir(target)
    node.namespace.call(mount, mounted, target, b"", MS_BIND)
    return target, file_system


def test_a_layer_that_nobody_can_look_at_goes_all_the_same(node: Node) -> None:
    pod = node.pod()
    disk = pod.containerdisk()
    target, file_system = dead_source(node, pod)
    with file_system as _:
        qemu = pod.qemu(FakeQemu, disks=[])
        node.hostd.start()
        assert set(pod.mounted()) == {disk, target}
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")


def open_without_waiting(path: bytes) -> int:
    """An O_PATH descriptor needs no answer of the file system."""
    return os.open(path, os.O_PATH)


def test_the_look_for_holders_passes_by_what_does_not_answer(node: Node) -> None:
    """Every process with a file of a dead file system is looked at on the way to the one that holds the layer."""
    pod = node.pod()
    disk = pod.containerdisk()
    other = node.namespace.mkdir(node.namespace.base + b"/elsewhere")
    with DeadFileSystem(node.namespace, other):
        node.namespace.hold(open_without_waiting, other)
        holder = node.namespace.hold(open_without_waiting, disk)
        qemu = pod.qemu(FakeQemu, disks=[])
        node.hostd.start()
        qemu.kill()
        layer_in(node, pod, disk, "busy", words=str(holder.pid))
        holder.end()
        gone(node, pod)


def test_a_pod_directory_that_does_not_answer_harms_no_other(node: Node) -> None:
    """The emptyDir itself lies on a file system that is dead: nothing of the pod can be listed."""
    bad, good = node.pod(name="bad"), full_pod(node, "good")
    with DeadFileSystem(node.namespace, bad.empty_dir):
        bad_qemu, good_qemu = bad.qemu(FakeQemu, disks=[]), good.qemu(FakeQemu)
        node.hostd.start()
        in_state(node, good, "running")
        bad_qemu.kill()
        good_qemu.kill()
        gone(node, good)
        in_state(node, good, "released")


def test_a_pod_directory_that_does_not_answer_costs_no_more_workers(node: Node) -> None:
    """It is asked about again and again; a worker that hangs in it already is answer enough, and it is told once."""
    bad = node.pod(name="bad")
    with DeadFileSystem(node.namespace, bad.empty_dir):
        qemu = bad.qemu(FakeQemu, disks=[])
        node.hostd.start()
        in_state(node, bad, "running")
        qemu.kill()
        in_state(node, bad, "cleaning")
        until(lambda: "device nodes" in node.get("Error", node.vm(bad)), why=node.hostd.log)
        hanging = len(workers(node))
        holds_for(lambda: len(workers(node)) <= hanging, 6.5)
        assert len(node.hostd.said("bad", "device nodes")) == 1, node.hostd.log()
    # What hung in it holds it until it has ended.
    until(lambda: unmounts(node, bad.empty_dir))
    in_state(node, bad, "released")


def unmounts(node: Node, path: bytes) -> bool:
    """Whether an umount of it succeeds now."""
    try:
        node.namespace.umount(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_the_kubelets_root_may_hang_while_hostd_starts() -> None:
    """Nothing is known of the node then; all of it is found as soon as the root answers."""
    with Node(kubelet_is_a_link=True) as node:
        pod = full_pod(node)
        above = os.path.dirname(node.kubelet)
        with DeadFileSystem(node.namespace, above):
            node.hostd.start()
            assert node.states() == {}
            holds_for(lambda: node.hostd.running, 5)
        # Who hung in it lets go of it in a moment.
        until(lambda: unmounts(node, above), why="nobody is in it any more")
        gone(node, pod, deadline=40)
        in_state(node, pod, "released")


def test_a_dead_record_directory_harms_nobody(node: Node) -> None:
    pod = full_pod(node)
    directory = os.path.dirname(pod.record())
    with DeadFileSystem(node.namespace, directory):
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        in_state(node, pod, "running")
        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")


def test_hung_workers_die_with_their_file_system_after_hostds_death(node: Node, hung: Hung) -> None:
    node.hostd.start()
    hung.qemu.kill()
    layer_in(node, hung.pod, hung.target, "hung")
    left = [os.pidfd_open(pid) for pid in workers(node)]
    try:
        node.hostd.kill()
        hung.file_system.end()
        for fd in left:
            assert select.select([fd], [], [], 10)[0], "a worker outlives hostd"
    finally:
        for fd in left:
            os.close(fd)


def test_only_the_hung_layer_is_left_in_the_table(node: Node, hung: Hung) -> None:
    """The kernel takes the mount out of the table before it waits, and so that table proves nothing."""
    node.hostd.start()
    hung.qemu.kill()
    layer_in(node, hung.pod, hung.target, "hung")
    only(node, hung.pod)
    in_state(node, hung.pod, "blocked")
    holds_for(lambda: node.states()[hung.pod.uid] == "blocked", 0.5, "a layer that hangs is not gone")
