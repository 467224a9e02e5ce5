"""A VM dies, its layers go: the whole way, on real mounts, cgroups and processes, with nobody's help.

What is mounted is always read from the node's own mount table, never from hostd.
"""

from __future__ import annotations

import os
import platform
import re
import signal

import pytest

from tests.support.bus import Client, Failed
from tests.support.cgroups import LAYOUTS, Layout, Unavailable, Uninterruptible
from tests.support.node import MANAGER, NAME, Node
from tests.support.qemu import FakeQemu, RealQemu
from tests.support.wait import holds_for, until
from tests.support.witness import FULL, full_pod, gone, in_state, listed, stays

pytestmark = pytest.mark.usefixtures("root")

Kind = type[FakeQemu | RealQemu]
KINDS: list[Kind] = [FakeQemu, RealQemu]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> Kind:
    """The real QEMU and the stand-in."""
    found: Kind = request.param
    return found


# -- the story


def test_a_vm_that_nobody_registered_dies_and_its_layers_go(kind: Kind, dbus_library: str) -> None:
    with Node() as node:
        pod = full_pod(node)
        qemu = pod.qemu(kind)
        node.hostd.start()

        [row] = node.call("ListVMs")
        assert row == [pod.uid, pod.vmi_uid, "ns", "vm", "running", qemu.pid, node.vm(pod)]
        layers = node.layers(pod)
        assert set(layers) == {os.fsdecode(target) for target in [*pod.targets, *pod.blocks]}
        assert set(layers.values()) == {"mounted"}
        assert len(pod.mounted()) == len(pod.targets) == FULL

        qemu.kill()
        gone(node, pod)
        in_state(node, pod, "released")
        assert listed(node, pod.hotplug_disks) == []
        assert listed(node, pod.container_disks) == [b"disk_0.sock", b"kernel-boot"]
        assert listed(node, pod.container_disks + b"/kernel-boot") == []
        assert set(node.layers(pod).values()) <= {"gone"}
        path = node.vm(pod)
        assert node.get("State", path) == "released"
        assert (node.get("ExitReason", path), node.get("ExitSignal", path)) in known_exit("signal", signal.SIGKILL)
        assert node.get("ReleasedUSec", path) >= node.get("ExitedUSec", path) > 0
        assert node.hostd.said(pod.uid)
        assert node.hostd.stop() == 0


def known_exit(reason: str, number: int) -> list[tuple[str, int]]:
    """What hostd may say of an exit: older kernels do not tell of a process that is reaped."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    assert release
    told = (int(release[1]), int(release[2])) >= (6, 15)
    return [(reason, number)] if told else [(reason, number), ("unknown", -1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_in_every_cgroup_layout(layout: Layout) -> None:
    try:
        node = Node(layout)
    except Unavailable as error:
        pytest.skip(str(error))
    with node:
        dying, living = full_pod(node, "dying"), full_pod(node, "living")
        qemu = dying.qemu(FakeQemu)
        living.qemu(FakeQemu)
        node.hostd.start()
        assert node.states() == {dying.uid: "running", living.uid: "running"}
        qemu.kill()
        gone(node, dying)
        assert len(living.mounted()) == FULL


def test_from_a_mount_namespace_of_its_own() -> None:
    with Node(inside=False) as node:
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        assert node.states() == {pod.uid: "running"}
        qemu.kill()
        gone(node, pod)


def test_below_a_kubelet_root_that_is_a_link() -> None:
    with Node(kubelet_is_a_link=True) as node:
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        qemu.kill()
        gone(node, pod)


def test_a_vm_that_comes_while_hostd_runs_is_found(node: Node) -> None:
    node.hostd.start()
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")
    pod.hotplug_file("later")
    until(lambda: len([s for s in node.layers(pod).values() if s == "mounted"]) == 7, why="the new layer is seen")
    qemu.kill()
    gone(node, pod)


def test_with_a_launcher_that_lingers_the_layers_go_after_grace(node: Node) -> None:
    pod = full_pod(node)
    pod.launcher()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")


def test_a_poweroff_is_told_from_a_kill(node: Node, kind: Kind) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(kind)
    node.hostd.start()
    qemu.poweroff()
    in_state(node, pod, "released")
    path = node.vm(pod)
    assert node.get("ExitReason", path) in {reason for reason, _ in known_exit("poweroff", -1)}


def test_what_other_mounts_there_are_stays(node: Node) -> None:
    pod = full_pod(node)
    attachment = pod.attachment("data")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    others = [point for point in node.mounts(b"/") if point not in pod.targets]
    assert attachment.target in others
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert node.mounts(b"/") == others


# -- what lives keeps its layers


def test_a_living_qemu_keeps_its_layers_whatever_else_happens(node: Node, kind: Kind) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(kind)
    node.hostd.start()
    node.call("Sweep", "t", "0")
    refused = node.busctl("call", NAME, MANAGER, NAME + ".Manager", "Release", "st", pod.uid, "0", check=False)
    assert refused.returncode != 0
    os.unlink(node.outside(pod.record()))
    node.hostd.kill()
    node.hostd.start()
    node.call("Sweep", "t", "0")
    assert node.hostd.stop() == 0
    node.hostd.start()
    stays(node, pod)
    assert qemu.alive


def test_a_second_qemu_in_the_pod_keeps_the_layers_too(node: Node, kind: Kind) -> None:
    pod = full_pod(node)
    first, second = pod.qemu(kind), pod.qemu(FakeQemu)
    node.hostd.start()
    first.kill()
    stays(node, pod)
    assert node.states() == {pod.uid: "running"}
    second.kill()
    gone(node, pod)


def test_a_qemu_that_was_killed_and_cannot_die_yet_keeps_its_layers(node: Node, kind: Kind) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(kind)
    node.hostd.start()
    try:
        frozen = Uninterruptible(qemu.pid)
    except Unavailable as error:
        pytest.skip(str(error))
    with frozen:
        qemu.send(signal.SIGKILL)
        stays(node, pod)
        assert node.states() == {pod.uid: "running"}
    gone(node, pod)


def test_a_vm_that_is_about_to_start_keeps_its_layers(node: Node) -> None:
    pod = full_pod(node)
    pod.launcher()
    node.hostd.start()
    stays(node, pod)
    qemu = pod.qemu(FakeQemu)
    in_state(node, pod, "running")
    qemu.kill()
    gone(node, pod)


def test_what_leaked_before_hostd_was_there_goes(node: Node) -> None:
    empty, removed = full_pod(node, "empty"), full_pod(node, "removed")
    living = full_pod(node, "living")
    living.qemu(FakeQemu)
    removed.remove_cgroup()
    node.hostd.start()
    gone(node, empty, removed)
    assert len(living.mounted()) == FULL


# -- hostd itself


@pytest.mark.parametrize("down", [True, False], ids=["down", "starting"])
def test_hostd_is_killed_while_the_qemu_dies(node: Node, kind: Kind, down: bool) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(kind)
    node.hostd.start()
    node.hostd.kill()
    if down:
        qemu.kill()
        assert len(pod.mounted()) == FULL
    node.hostd.start(ready=False)
    if not down:
        qemu.kill()
    gone(node, pod)
    node.hostd.wait_ready()
    in_state(node, pod, "released")


def test_hostd_is_killed_while_the_qemu_dies_and_the_launcher_lingers(node: Node) -> None:
    """The pod looks like one whose QEMU is yet to start: only hostd's own state says that it had one."""
    pod = full_pod(node)
    pod.launcher()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    in_state(node, pod, "running")
    node.hostd.kill()
    qemu.kill()
    node.hostd.start()
    gone(node, pod)


def test_how_a_vm_ended_outlives_hostd(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.poweroff(3)
    in_state(node, pod, "released")
    names = ["State", "ExitReason", "ExitStatus", "ExitSignal", "ExitedUSec", "ReleasedUSec", "VMIUID", "Name"]
    before = [node.get(name, node.vm(pod)) for name in names]
    assert before[:3] in [["released", "error", 3], ["released", "unknown", -1]]
    node.hostd.kill()
    node.hostd.start()
    assert [node.get(name, node.vm(pod)) for name in names] == before
    node.call("UnregisterVM", "s", pod.uid)
    assert node.states() == {}


def test_hostd_is_killed_before_it_knows_that_the_qemu_died(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.send(signal.SIGSTOP)
    qemu.kill()
    node.hostd.kill()
    assert len(pod.mounted()) == FULL
    node.hostd.start()
    gone(node, pod)


def test_two_hostds_side_by_side_do_not_touch_each_others_vms() -> None:
    with Node() as one, Node() as other:
        mine, theirs = full_pod(one), full_pod(other)
        dying, also_dying = mine.qemu(FakeQemu), theirs.qemu(FakeQemu)
        one.hostd.start()
        other.hostd.start()
        assert one.states() == {mine.uid: "running"}
        assert other.states() == {theirs.uid: "running"}
        other.hostd.send(signal.SIGSTOP)
        also_dying.kill()
        dying.kill()
        gone(one, mine)
        stays(other, theirs, seconds=0.5)
        other.hostd.send(signal.SIGCONT)
        gone(other, theirs)
        assert theirs.uid not in one.hostd.log()
        assert mine.uid not in other.hostd.log()


@pytest.mark.parametrize("bus", [True, False], ids=["bus", "no-bus"])
def test_a_second_instance_is_refused_before_it_touches_anything(node: Node, bus: bool) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.send(signal.SIGSTOP)
    qemu.kill()
    environment = {} if bus else {"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nowhere"}
    second = node.daemon(environment=environment)
    before = sorted(os.listdir(node.runtime_dir))
    assert second.run_to_its_end() > 0
    assert second.said("another hostd") or second.said("already")
    assert "Traceback" not in second.log()
    assert len(pod.mounted()) == FULL
    assert sorted(os.listdir(node.runtime_dir)) == before
    node.hostd.send(signal.SIGCONT)
    gone(node, pod)


def test_without_a_bus_the_layers_go_all_the_same(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    hostd = node.daemon(environment={"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={node.directory}/nothing"})
    hostd.start(ready=False)
    until(lambda: os.path.exists(f"{node.runtime_dir}/vms/{pod.uid}.json"), why=hostd.log)
    qemu.kill()
    gone(node, pod)
    assert hostd.running


# -- bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host]\nkubelet-rot = '/x'\n", ["kubelet-rot", "kubelet-root"]),
        ("[cleanup]\ngrace = 7\n", ["cleanup.grace"]),
        ("[cleanup]\nmode = 'maybe'\n", ["cleanup.mode", "enforce", "observe"]),
        ("[host\n", ["not TOML"]),
        (None, ["cannot be read"]),
    ],
)
def test_a_bad_configuration_is_an_error_that_names_it(node: Node, text: str | None, words: list[str]) -> None:
    file = os.path.join(node.directory, "bad.toml")
    if text is not None:
        with open(file, "w") as stream:
            stream.write(text)
    hostd = node.daemon(config=file)
    assert hostd.run_to_its_end() > 0
    assert hostd.said(file, *words)
    assert "Traceback" not in hostd.log()


NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("member", "signature", "body", "error"),
    [
        ("GetVM", "s", [NOBODY], "io.kubevirt.hostd1.Error.NoSuchVM"),
        ("GetVM", "s", ["../../etc/passwd"], "org.freedesktop.DBus.Error.InvalidArgs"),
        ("GetVMByPID", "u", [4194304], "io.kubevirt.hostd1.Error.NoSuchProcess"),
        ("Release", "st", [NOBODY, 0], "io.kubevirt.hostd1.Error.NoSuchVM"),
        ("Sweep", "t", [1 << 63], "org.freedesktop.DBus.Error.InvalidArgs"),
        ("Sweep", "s", ["everything"], "org.freedesktop.DBus.Error.InvalidArgs"),
        ("RegisterVM", "sa{sv}", ["not a uid", {}], "org.freedesktop.DBus.Error.InvalidArgs"),
        ("RegisterVM", "sa{sv}", [NOBODY, {"Colour": "red"}], "org.freedesktop.DBus.Error.InvalidArgs"),
        ("Dance", "", [], "org.freedesktop.DBus.Error.UnknownMethod"),
    ],
)
async def test_a_bad_argument_on_the_bus_is_a_named_error(
    node: Node, member: str, signature: str, body: list[object], error: str
) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    name, text = await bus_error(node, member, signature, body)
    assert name == error
    assert text
    assert "Traceback" not in text + node.hostd.log()
    assert node.states() == {pod.uid: "running"}
    qemu.kill()
    gone(node, pod)


async def bus_error(node: Node, member: str, signature: str, body: list[object]) -> tuple[str, str]:
    """The name and the text of the error that a call is answered with: busctl shows only the text."""
    async with await Client.connect(node.bus.address) as client:
        words = {
            key: client.variant("s", text) for each in body if isinstance(each, dict) for key, text in each.items()
        }
        with pytest.raises(Failed) as refused:
            await client.manager(member, signature, *(words if isinstance(each, dict) else each for each in body))
    return refused.value.name, refused.value.text


BROKEN = {
    "empty": b"",
    "nul": bytes(64),
    "truncated": b'{"mountTargetEntries":[{"targetFile":"/var/lib',
    "null": b"null",
    "list": b"[]",
    "garbage-after": b'{"mountTargetEntries":[],"usesSafePaths":true}}}',
    "wrong-types": b'{"mountTargetEntries":[{"targetFile":7}],"usesSafePaths":"yes"}',
    "foreign-path": b'{"mountTargetEntries":[{"targetFile":"/etc/passwd","socketFile":""}],"usesSafePaths":true}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_record_costs_nobody_anything(node: Node, content: bytes) -> None:
    broken, whole = full_pod(node, "broken"), full_pod(node, "whole")
    for path in (broken.record(), broken.record("hotplug-volume"), broken.ghost):
        broken.write(path, content)
    qemus = [pod.qemu(FakeQemu) for pod in (broken, whole)]
    node.hostd.start()
    for qemu in qemus:
        qemu.kill()
    gone(node, broken, whole)
    for path in (broken.record(), broken.record("hotplug-volume"), broken.ghost):
        with open(node.outside(path), "rb") as file:
            assert file.read() == content, "virt-handler's records are never written"
    assert "Traceback" not in node.hostd.log()


def test_a_pod_directory_that_vanished_is_the_end_of_its_layers(node: Node) -> None:
    vanished, whole = full_pod(node, "vanished"), full_pod(node, "whole")
    qemus = [pod.qemu(FakeQemu) for pod in (vanished, whole)]
    node.hostd.start()
    for target in vanished.mounted():
        vanished.unmount(target)
    vanished.vanish()
    for qemu in qemus:
        qemu.kill()
    gone(node, whole)
    in_state(node, whole, "released")
    until(lambda: node.states().get(vanished.uid) in (None, "released"), why=lambda: str(node.states()))
    assert "Traceback" not in node.hostd.log()


def test_the_daemon_is_small_and_idle_it_is_still(node: Node) -> None:
    for number in range(5):
        pod = full_pod(node, f"vm-{number}")
        pod.qemu(FakeQemu)
    node.hostd.start()
    assert node.hostd.memory() < 40 << 20
    before = node.hostd.processor_time()
    holds_for(lambda: node.hostd.running, 1.0)
    assert node.hostd.processor_time() - before <= 0.05
