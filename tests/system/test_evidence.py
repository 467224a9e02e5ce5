"""Pods that never had a QEMU: not knowing is not death, and a node full of old leaks is cleaned all the same."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.support.cgroups import LAYOUTS, V2_CGROUPFS, V2_SYSTEMD, Layout, Unavailable
from tests.support.node import MANAGER, NAME, Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import full_pod, gone, in_state, stays

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.label)
def any_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of each cgroup layout."""
    layout: Layout = request.param
    try:
        node = Node(layout)
    except Unavailable as error:
        pytest.skip(str(error))
    with node:
        yield node


def test_old_leaks_go_when_hostd_first_starts(any_node: Node) -> None:
    """A node on which agents have leaked for months, and one VM lives and one is about to start."""
    node = any_node
    empty, removed = full_pod(node, "empty"), full_pod(node, "removed")
    removed.remove_cgroup()
    living, starting = full_pod(node, "living"), full_pod(node, "starting")
    living.qemu(FakeQemu, disks=[])
    launcher = starting.launcher()
    node.hostd.start()
    gone(node, empty, removed)
    stays(node, living, starting)
    in_state(node, empty, "released")
    in_state(node, removed, "released")
    assert (node.states()[living.uid], node.states()[starting.uid]) == ("running", "pending")
    launcher.kill()
    gone(node, starting)
    in_state(node, starting, "released")


def test_a_vm_dies_in_any_layout(any_node: Node) -> None:
    node = any_node
    dying, living = full_pod(node, "dying"), full_pod(node, "living")
    dying.launcher()
    qemu = dying.qemu(FakeQemu)
    living.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    gone(node, dying)
    in_state(node, dying, "released")
    assert len(living.mounted()) == 5
    assert node.states()[living.uid] == "running"


def test_a_vm_starts_in_any_layout_while_hostd_runs(any_node: Node) -> None:
    node = any_node
    full_pod(node, "first").qemu(FakeQemu)
    node.hostd.start()
    pod = full_pod(node, "second")
    launcher = pod.launcher()
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")
    qemu.kill()
    launcher.kill()
    gone(node, pod)


def test_settle_is_waited_for(node: Node) -> None:
    """Its cgroup is empty for a moment before the first container starts."""
    node.configure({"cleanup": {"settle": "1h"}})
    pod = full_pod(node)
    node.hostd.start()
    stays(node, pod)
    assert node.states() == {pod.uid: "pending"}


def test_without_any_pod_cgroup_nobody_knows(node: Node) -> None:
    """A host whose cgroups are laid out as nobody thought of: hostd waits, and says so."""
    node.configure({"host": {"cgroup-root": node.directory}})
    pod = full_pod(node)
    node.hostd.start()
    stays(node, pod)
    assert node.states()[pod.uid] == "pending"
    assert "nobody knows" in node.get("Error", node.vm(pod))
    assert "cgroups" in node.get("Health")


def test_pods_of_strange_names_prove_nothing(node: Node) -> None:
    """The directories of pods are there, and no known scheme names them."""
    root = os.path.join(node.cgroups.root, *V2_SYSTEMD.parents())
    strange = os.path.join(root, "tenant-7.partition")
    os.mkdir(strange)
    pod = full_pod(node)
    pod.remove_cgroup()
    try:
        node.hostd.start()
        stays(node, pod)
        assert node.states()[pod.uid] == "pending"
    finally:
        os.rmdir(strange)


def test_a_process_that_names_the_pod_keeps_it(node: Node) -> None:
    """Its cgroup lies where hostd does not look; what runs in it says so by itself."""
    pod = full_pod(node)
    pod.remove_cgroup()
    other = full_pod(node, "known")
    other.launcher()
    parent = os.path.dirname(node.cgroups.root)
    hidden = os.path.join(parent, f"hostd-test-elsewhere-{uuid.uuid4().hex}")
    inner = os.path.join(hidden, "kubepods", f"pod{pod.uid}", "c")
    os.makedirs(inner)
    try:
        holder = node.namespace.hold()
        with open(inner + "/cgroup.procs", "w") as file:
            file.write(str(holder.pid))
        node.hostd.start()
        stays(node, pod)
        assert node.states()[pod.uid] == "pending"
        holder.end()
        gone(node, pod)
    finally:
        for directory in (inner, os.path.dirname(inner), os.path.join(hidden, "kubepods"), hidden):
            os.rmdir(directory)


def test_a_prepared_migration_target_that_dies(node: Node) -> None:
    """A migration that failed or was cancelled left the target's mounts for ever: no QEMU had ever run there."""
    vmi_uid = str(uuid.uuid4())
    source, target = full_pod(node, vmi_uid=vmi_uid), full_pod(node, vmi_uid=vmi_uid)
    qemu = source.qemu(FakeQemu, disks=[])
    launcher = target.launcher()
    node.hostd.start()
    stays(node, source, target)
    launcher.kill()
    gone(node, target)
    in_state(node, target, "released")
    stays(node, source, seconds=0.3)
    assert node.states()[source.uid] == "running"
    qemu.kill()
    gone(node, source)


@pytest.mark.parametrize("dying", [0, 1], ids=["source", "incoming"])
def test_the_two_pods_of_a_migrating_vm_are_told_apart(node: Node, dying: int) -> None:
    """One VMI, one name, one firmware UUID, and two pods on one node; the record is of the later one alone."""
    vmi_uid = str(uuid.uuid4())
    pods = [full_pod(node, "vm", vmi_uid=vmi_uid) for _ in range(2)]
    qemus = [pod.qemu(FakeQemu, disks=[]) for pod in pods]
    node.hostd.start()
    assert {row[0] for row in node.call("ListVMs")} == {pod.uid for pod in pods}
    qemus[dying].kill()
    gone(node, pods[dying])
    stays(node, pods[1 - dying], seconds=0.5)
    in_state(node, pods[dying], "released")
    in_state(node, pods[1 - dying], "running")
    qemus[1 - dying].kill()
    gone(node, *pods)


def end(pod: Pod) -> None:
    """The last process of the pod ends, and kubelet removes the cgroup."""
    pod.close()
    pod.remove_cgroup()


def empty(pod: Pod) -> None:
    """The last process of the pod ends."""
    pod.close()


@pytest.mark.parametrize("how", [end, empty], ids=["removed", "empty"])
@pytest.mark.parametrize("when", ["running", "down"])
def test_the_end_of_a_pods_last_process_is_evidence(node: Node, how: Callable[[Pod], None], when: str) -> None:
    pod = full_pod(node)
    pod.launcher()
    node.hostd.start()
    in_state(node, pod, "pending")
    if when == "down":
        node.hostd.kill()
    how(pod)
    if when == "down":
        node.hostd.start()
    gone(node, pod)
    in_state(node, pod, "released")


def test_a_dead_vms_cgroup_that_stays_populated_is_given_its_grace(node: Node) -> None:
    """A launcher lingers for 45 seconds, and with --keep-after-failure for good."""
    node.configure({"cleanup": {"grace": "700ms"}})
    pod = full_pod(node)
    directory = pod.hotplug_disks + b"/dump"
    pod.launcher()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    until(lambda: directory not in pod.mounted(), why="directory binds go without grace")
    assert len(pod.mounted()) == 4
    holds_for(lambda: len(pod.mounted()) == 4, 0.2)
    gone(node, pod)


def test_a_qemu_that_is_written_to_no_cgroup_by_hostd(node: Node) -> None:
    """Device rules were once written into the root cgroup, and broke every VM that came later."""
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    before = writable(node.cgroups.root)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    assert writable(node.cgroups.root) == before


def writable(root: str) -> dict[str, str]:
    """What could be changed in a cgroup tree: membership apart, which ends with the processes."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if name in {"cgroup.subtree_control", "cgroup.type", "cgroup.freeze", "cgroup.max.depth"}:
                with open(path) as file:
                    found[path] = file.read()
    return found


def test_a_pod_that_was_registered_and_never_ran(node: Node) -> None:
    """An agent's word makes a VM known; it makes nobody dead."""
    node.hostd.start()
    pod = full_pod(node)
    pod.launcher()
    node.busctl("call", NAME, MANAGER, NAME + ".Manager", "RegisterVM", "sa{sv}", pod.uid, "0")
    stays(node, pod)
    refused = node.busctl("call", NAME, MANAGER, NAME + ".Manager", "Release", "st", pod.uid, "0", check=False)
    assert refused.returncode != 0
    assert len(pod.mounted()) == 5


def test_a_registered_pod_without_a_cgroup_yet_is_left_until_settled() -> None:
    """The agent may know a pod before the kubelet has made its cgroup."""
    with Node(V2_CGROUPFS, settings={"cleanup": {"settle": "1h"}}) as node:
        other = full_pod(node, "other")
        other.launcher()
        pod = full_pod(node)
        pod.remove_cgroup()
        node.hostd.start()
        node.busctl("call", NAME, MANAGER, NAME + ".Manager", "RegisterVM", "sa{sv}", pod.uid, "0")
        stays(node, pod)


def test_what_kubelet_left_of_a_launcher_is_known_by_its_mounts(node: Node) -> None:
    """Kubelet has removed all emptyDirs but the one that it could not: it looks like an attachment pod's."""
    pod = node.pod()
    pod.hotplug_file("data")
    pod.hotplug_directory("dump")
    for name in os.listdir(node.outside(pod.empty_dir)):
        if name != b"hotplug-disks":
            shutil.rmtree(node.outside(pod.empty_dir + b"/" + name))
    pod.remove_cgroup()
    node.hostd.start()
    gone(node, pod)
    in_state(node, pod, "released")
