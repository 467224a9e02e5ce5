"""What an administrator or an agent may want otherwise: observe, keep, hold, grace, retain, lazily, from now on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from dbus_fast import Message, MessageType
from dbus_fast.aio import MessageBus

from tests.support.node import MANAGER, NAME, Node
from tests.support.qemu import FakeQemu
from tests.support.wait import eventually, holds_for, until
from tests.support.witness import full_pod, gone, in_state, layer_in, rows_of, stays

pytestmark = pytest.mark.usefixtures("root")


def test_observe_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    node.configure({"cleanup": {"mode": "observe"}})
    pod, leak = full_pod(node, "vm"), full_pod(node, "leak")
    leak.remove_cgroup()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    before = rows_of(node)
    assert node.get("Mode") == "observe"
    qemu.kill()
    in_state(node, pod, "exited")
    until(lambda: node.hostd.said(pod.uid, "would"), why=node.hostd.log)
    stays(node, pod, leak)
    assert rows_of(node) == before
    assert sorted(os.listdir(node.outside(pod.hotplug_disks))) == [b"data.img", b"dump", b"raw"]
    assert any("would" in row[3] for row in node.call("Sweep", "t", "1"))
    assert len(node.hostd.said(pod.uid)) <= 5, node.hostd.log()


@pytest.mark.parametrize("mode", ["observe", "keep"])
def test_what_the_agent_unmounts_is_seen_to_be_gone(node: Node, mode: str) -> None:
    """hostd itself does nothing then, and says that the VM is released all the same."""
    if mode == "observe":
        node.configure({"cleanup": {"mode": mode}})
    pod = node.pod()
    targets = [pod.containerdisk(), pod.hotplug_directory("dump")]
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    if mode == "keep":
        node.call("SetPolicy", "s", mode, path=node.vm(pod))
    qemu.kill()
    in_state(node, pod, "exited" if mode == "observe" else "held")
    for target in targets:
        stays(node, pod, seconds=0.3)
        pod.unmount(target)
    in_state(node, pod, "released")


def test_observe_becomes_enforce_by_sighup(node: Node) -> None:
    node.configure({"cleanup": {"mode": "observe"}})
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "exited")
    node.configure({"cleanup": {"mode": "enforce"}})
    node.hostd.send(signal.SIGHUP)
    gone(node, pod)
    in_state(node, pod, "released")
    assert "RELOADING=1" in node.hostd.notifications
    assert node.get("Mode") == "enforce"
    assert node.hostd.notifications.count("READY=1") == 2


@pytest.mark.parametrize(
    ("text", "word"),
    [("[cleanup]\nmode = 'maybe'\n", "cleanup.mode"), ("[host\n", "TOML"), ("[cleanup]\ngrase = '1s'\n", "grase")],
)
def test_a_bad_reload_changes_nothing(node: Node, text: str, word: str) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    with open(node.configuration, "w") as file:
        file.write(text)
    node.hostd.send(signal.SIGHUP)
    until(lambda: node.hostd.said(word), why=node.hostd.log)
    refused = node.busctl("call", NAME, MANAGER, NAME + ".Manager", "Reload", check=False)
    assert refused.returncode != 0
    assert word in refused.stderr
    qemu.kill()
    gone(node, pod)
    assert "Traceback" not in node.hostd.log()


def test_a_reload_cannot_change_where_things_are(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.configure({"host": {"kubelet-root": "/elsewhere"}})
    refused = node.busctl("call", NAME, MANAGER, NAME + ".Manager", "Reload", check=False)
    assert refused.returncode != 0
    assert "restart" in refused.stderr
    qemu.kill()
    gone(node, pod)


def test_a_longer_grace_by_reload_counts_at_once(node: Node) -> None:
    pod = node.pod()
    pod.hotplug_file("data")
    pod.launcher()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.configure({"cleanup": {"grace": "1h"}})
    node.call("Reload")
    qemu.kill()
    in_state(node, pod, "exited")
    stays(node, pod)
    node.configure({"cleanup": {"grace": "0s"}})
    node.call("Reload")
    gone(node, pod)


def test_a_vms_own_grace_is_its_own(node: Node) -> None:
    patient, other = node.pod(name="patient"), node.pod(name="other")
    for pod in (patient, other):
        pod.hotplug_file("data")
        pod.launcher()
    qemus = [pod.qemu(FakeQemu) for pod in (patient, other)]
    node.hostd.start()
    node.call("SetGrace", "t", "3600000000", path=node.vm(patient))
    for qemu in qemus:
        qemu.kill()
    gone(node, other)
    stays(node, patient)
    node.hostd.kill()
    node.hostd.start()
    stays(node, patient, seconds=0.5)
    assert node.get("GraceUSec", node.vm(patient)) == 3_600_000_000
    rows = node.call("Release", "st", patient.uid, "0")
    gone(node, patient)
    assert len(rows) == 1


def test_keep_keeps_until_it_is_clean_again(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.call("SetPolicy", "s", "keep", path=node.vm(pod))
    qemu.kill()
    in_state(node, pod, "held")
    stays(node, pod)
    node.hostd.kill()
    node.hostd.start()
    in_state(node, pod, "held")
    stays(node, pod, seconds=0.5)
    node.call("SetPolicy", "s", "clean", path=node.vm(pod))
    gone(node, pod)
    in_state(node, pod, "released")


def test_an_unknown_policy_is_refused(node: Node) -> None:
    pod = full_pod(node)
    pod.qemu(FakeQemu)
    node.hostd.start()
    path = node.vm(pod)
    refused = node.busctl("call", NAME, path, NAME + ".VM", "SetPolicy", "s", "perhaps", check=False)
    assert refused.returncode != 0
    assert "keep" in refused.stderr
    assert node.get("Policy", path) == "clean"


async def call(bus: MessageBus, member: str, signature: str, body: list[Any]) -> Message:
    """A call on the manager whose reply may carry descriptors."""
    reply = await bus.call(
        Message(
            destination=NAME,
            path=MANAGER,
            interface=NAME + ".Manager",
            member=member,
            signature=signature,
            body=body,
        )
    )
    assert reply is not None
    assert reply.message_type is MessageType.METHOD_RETURN, reply.body
    return reply


@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("restart", [False, True], ids=["up", "restart"])
async def test_an_inhibitor_holds_while_its_descriptor_is_open(node: Node, everything: bool, restart: bool) -> None:
    pod, other = full_pod(node, "one"), full_pod(node, "two")
    qemus = [each.qemu(FakeQemu) for each in (pod, other)]
    node.hostd.start()
    bus = await MessageBus(bus_address=node.bus.address, negotiate_unix_fd=True).connect()
    try:
        reply = await call(bus, "Inhibit", "sss", ["" if everything else pod.uid, "backup", "reads the disks"])
        [fd] = reply.unix_fds
        assert node.get("Inhibitors", node.vm(pod)) == [["backup", "reads the disks"]]
        for qemu in qemus:
            qemu.kill()
        await eventually(lambda: node.states()[pod.uid] == "held", why=node.hostd.log)
        if restart:
            node.hostd.kill()
            node.hostd.start()
        stays(node, pod, seconds=0.7)
        assert bool(other.mounted()) == everything
        os.close(fd)
        await eventually(lambda: not pod.mounted() and not other.mounted(), why=node.hostd.log)
        await eventually(lambda: node.states()[pod.uid] == "released", why=node.hostd.log)
        assert node.get("Inhibitors", node.vm(pod)) == []
    finally:
        bus.disconnect()


async def test_an_inhibitor_whose_owner_died_while_hostd_was_down_holds_nothing(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    bus = await MessageBus(bus_address=node.bus.address, negotiate_unix_fd=True).connect()
    try:
        reply = await call(bus, "Inhibit", "sss", [pod.uid, "backup", "why"])
        qemu.kill()
        await eventually(lambda: node.states()[pod.uid] == "held", why=node.hostd.log)
        node.hostd.kill()
        for fd in reply.unix_fds:
            os.close(fd)
        node.hostd.start()
        await eventually(lambda: not pod.mounted(), why=node.hostd.log)
    finally:
        bus.disconnect()


def test_a_released_vm_is_listed_for_its_time(node: Node) -> None:
    node.configure({"cleanup": {"retain": "1s"}})
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    until(lambda: node.states() == {}, why=lambda: str(node.states()))
    assert os.listdir(node.runtime_dir + "/vms") == []


def test_a_released_vm_is_forgotten_when_the_agent_says_so(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    node.call("UnregisterVM", "s", pod.uid)
    assert node.states() == {}
    pod.remove_cgroup()
    pod.vanish()
    node.call("Sweep", "t", "0")
    assert node.states() == {}, "the agent's record alone is no VM"


def test_a_living_vm_is_not_forgotten_by_unregistering(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.call("UnregisterVM", "s", pod.uid)
    stays(node, pod, seconds=0.5)
    assert node.states() == {pod.uid: "running"}
    qemu.kill()
    gone(node, pod)


def test_release_lazily_on_demand(node: Node) -> None:
    """An administrator may detach what policy would not; it is pinned all the same."""
    node.configure({"cleanup": {"lazy-after": {"containerdisk": "never", "hotplug": "never"}}})
    pod = node.pod()
    target = pod.hotplug_file("data", pvc="ext4")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    stays(node, pod, seconds=0.5)
    node.call("Release", "st", pod.uid, "2")
    gone(node, pod)
    layer_in(node, pod, target, "detached", words=str(holder.pid))
    holds_for(lambda: node.states()[pod.uid] != "released", 0.5)
    holder.end()
    in_state(node, pod, "released")


def test_a_dry_run_touches_nothing(node: Node) -> None:
    node.configure({"cleanup": {"grace": "1h"}})
    pod = node.pod()
    target = pod.hotplug_file("data")
    pod.launcher()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "exited")
    [row] = node.call("Release", "st", pod.uid, "1")
    assert row[0] == os.fsdecode(target)
    assert node.call("Sweep", "t", "1")
    stays(node, pod, seconds=0.3)
