"""hostd ends, however and whenever: what lives keeps its layers, what died loses them, and nothing is mistaken."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.fdstore import StoringDaemon
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import holds_for, until
from tests.support.witness import full_pod, gone, in_state, layer_in, stays

pytestmark = pytest.mark.usefixtures("root")


ANOTHER_BOOT = "00000000-0000-4000-8000-000000000000"


def state_file(node: Node, pod: Pod) -> str:
    """Where hostd keeps what it knows of a pod."""
    return f"{node.runtime_dir}/vms/{pod.uid}.json"


def state(node: Node, pod: Pod) -> dict[str, object]:
    """What is in it; the format is hostd's own, and these tests make the files that it might find."""
    with open(state_file(node, pod)) as file:
        found: dict[str, object] = json.load(file)
    return found


def rewrite(node: Node, pod: Pod, change: object) -> None:
    """Another content of a state file, made from the one that is there."""
    plain = state(node, pod)
    change(plain)  # type: ignore[operator]
    with open(state_file(node, pod), "w") as file:
        json.dump(plain, file)


# -- killed at any moment


def test_hostd_is_killed_at_random_moments(node: Node) -> None:
    """Records were written after the act, or not at all, and what died meanwhile leaked. (`make chaos` kills it some
    two hundred times.)"""
    chance = random.Random(7)
    living = full_pod(node, "living")
    living.qemu(FakeQemu, disks=[])
    for number in range(25):
        pod = full_pod(node, f"vm-{number}")
        qemu = pod.qemu(FakeQemu)
        node.hostd.start(ready=chance.random() < 0.5)
        if chance.random() < 0.5:
            qemu.kill()
            pause(chance.uniform(0, 0.03))
            node.hostd.kill()
        else:
            pause(chance.uniform(0, 0.4))
            node.hostd.kill()
            qemu.kill()
        assert len(living.mounted()) == 5
    node.hostd.start()
    gone(node, *[pod for pod in node.pods if pod is not living])
    assert len(living.mounted()) == 5
    for pod in node.pods:
        in_state(node, pod, "running" if pod is living else "released")
    litter = [name for name in os.listdir(node.runtime_dir + "/vms") if not name.endswith(".json")]
    assert litter == []


def pause(seconds: float) -> None:
    """A moment that nothing announces: where in its work hostd is hit is up to chance."""
    select.select([], [], [], seconds)


def test_many_die_while_hostd_is_down(node: Node) -> None:
    pods = [full_pod(node, f"vm-{number}") for number in range(8)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    node.hostd.start()
    node.hostd.kill()
    for qemu in qemus[::2]:
        qemu.kill()
    node.hostd.start()
    gone(node, *pods[::2])
    stays(node, *pods[1::2], seconds=0.5)
    assert [node.states()[pod.uid] for pod in pods[1::2]] == ["running"] * 4


def test_zero_clean_ups_before_the_death_and_one_after(node: Node) -> None:
    """A manager's reload made all machines look terminated; after an upgrade their ends went unnoticed."""
    pods = [full_pod(node, f"vm-{number}") for number in range(3)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    node.hostd.start()
    for _ in range(3):
        node.hostd.send(signal.SIGHUP)
        assert node.hostd.stop() == 0
        node.hostd.start()
    stays(node, *pods, seconds=0.3)
    assert not node.hostd.said("QEMU ended")
    qemus[1].kill()
    gone(node, pods[1])
    in_state(node, pods[1], "released")
    stays(node, pods[0], pods[2], seconds=0.3)
    assert len(node.hostd.said("QEMU ended")) == 1
    assert len(node.hostd.said("released,")) == 1


def test_a_blocked_layer_is_remembered_and_its_holder_waited_for(node: Node) -> None:
    pod = node.pod()
    target = pod.containerdisk()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    qemu.kill()
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    node.hostd.kill()
    node.hostd.start()
    in_state(node, pod, "blocked")
    layer_in(node, pod, target, "busy", words=str(holder.pid))
    node.hostd.kill()
    holder.end()
    node.hostd.start()
    gone(node, pod)
    in_state(node, pod, "released")


def test_the_promise_of_a_detached_layer_survives(node: Node) -> None:
    """It is in no table any more: only hostd's own state knows that it is not released."""
    node.configure({"cleanup": {"lazy-after": {"containerdisk": "50ms", "hotplug": "50ms"}}})
    pod = node.pod()
    target = pod.hotplug_file("data", pvc="ext4")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    qemu.kill()
    layer_in(node, pod, target, "detached", words=str(holder.pid))
    for _ in range(2):
        node.hostd.kill()
        node.hostd.start()
        layer_in(node, pod, target, "detached", words=str(holder.pid))
        in_state(node, pod, "blocked")
    holder.end()
    in_state(node, pod, "released")


def test_a_released_vm_stays_listed_over_a_restart_and_is_not_cleaned_again(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    path = node.vm(pod)
    before = [node.get(name, path) for name in ("ExitedUSec", "ReleasedUSec", "ExitReason", "StartedUSec")]
    assert node.hostd.stop() == 0
    node.hostd.start()
    assert [node.get(name, path) for name in ("ExitedUSec", "ReleasedUSec", "ExitReason", "StartedUSec")] == before
    assert node.states() == {pod.uid: "released"}


# -- who is who


def reborn(pid: int, pod: Pod | None) -> FakeQemu | None:
    """A new process that has the pid of one that is dead, or None where that cannot be had."""
    if pod:
        _ = pod.place  # made before the pid is free to be taken: it takes a process to make it
    for _ in range(50):
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(pid - 1))
        except OSError:
            return None
        made = pod.qemu(FakeQemu, disks=[]) if pod else FakeQemu()
        if made.pid == pid:
            return made
        made.close()
    return None


def test_a_reused_pid_is_another_process(node: Node) -> None:
    """The dead QEMU's pid belongs to a QEMU of another pod when hostd comes back."""
    pod, other = full_pod(node, "one"), full_pod(node, "two")
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.kill()
    qemu.kill()
    successor = reborn(qemu.pid, other)
    if successor is None:
        pytest.skip("the pid cannot be had again here")
    node.hostd.start()
    gone(node, pod)
    stays(node, other, seconds=0.5)
    in_state(node, pod, "released")
    assert node.states() == {pod.uid: "released", other.uid: "running"}


def test_a_reused_pid_in_the_same_pod_is_a_new_qemu(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.kill()
    qemu.kill()
    successor = reborn(qemu.pid, pod)
    if successor is None:
        pytest.skip("the pid cannot be had again here")
    node.hostd.start()
    stays(node, pod, seconds=0.5)
    assert node.states() == {pod.uid: "running"}
    successor.kill()
    gone(node, pod)


def test_a_pid_that_belongs_to_no_qemu_now_is_no_reason_to_wait(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.kill()
    qemu.kill()

    def mistaken(plain: dict[str, dict[str, list[dict[str, object]]]]) -> None:
        for identity in (*plain["vm"]["qemus"], plain["vm"]["leader"]):
            identity["pid"] = os.getpid()  # type: ignore[index]

    rewrite(node, pod, mistaken)
    node.hostd.start()
    gone(node, pod)
    in_state(node, pod, "released")


def test_the_state_of_another_boot_says_nothing_of_this_one(node: Node) -> None:
    """Half of the records of a node were of another boot, and were found again for ever."""
    living, pods = full_pod(node, "living"), [node.pod(name=f"old-{number}") for number in range(10)]
    living.qemu(FakeQemu, disks=[])
    node.hostd.start()
    node.hostd.kill()
    with open(state_file(node, living)) as file:
        plain = json.load(file)
    for pod in pods:
        pod.remove_cgroup()
        pod.vanish()
        plain["boot"] = ANOTHER_BOOT
        plain["vm"]["pod_uid"] = pod.uid
        with open(state_file(node, pod), "w") as file:
            json.dump(plain, file)
    rewrite(node, living, lambda plain: plain.update(boot=ANOTHER_BOOT))
    node.hostd.start()
    assert node.states() == {living.uid: "running"}
    stays(node, living, seconds=0.5)
    assert os.listdir(node.runtime_dir + "/vms") == [living.uid + ".json"]
    assert not node.hostd.said("ERROR")


def test_states_of_vms_that_are_long_gone_are_pruned(node: Node) -> None:
    """Ghosts of a time when nobody looked, half of them of another boot, were found again every eleven seconds."""
    node.configure({"cleanup": {"retain": "0s"}})
    model = full_pod(node, "model")
    qemu = model.qemu(FakeQemu)
    node.hostd.start()
    node.hostd.kill()
    qemu.kill()
    plain = state(node, model)
    pods = [node.pod(name=f"ghost-{number}") for number in range(50)]
    for number, pod in enumerate(pods):
        if number == 25:
            plain["boot"] = ANOTHER_BOOT
        text = json.dumps(plain).replace(model.uid, pod.uid)
        with open(state_file(node, pod), "w") as file:
            file.write(text)
        pod.remove_cgroup()
        pod.vanish()
    model.remove_cgroup()
    node.hostd.start()
    until(lambda: node.states() == {}, why=lambda: f"{node.states()}\n{node.hostd.log()}")
    assert os.listdir(node.runtime_dir + "/vms") == []
    gone(node, model)
    assert all(len(node.hostd.said(pod.uid, "released")) <= 1 for pod in pods)
    before = node.hostd.processor_time()
    holds_for(lambda: node.hostd.running, 1.0)
    assert node.hostd.processor_time() - before <= 0.05


def test_a_stepped_clock_moves_nothing(node: Node) -> None:
    """Start times turned into wall-clock time made a live process look like another after a step of the clock."""
    living, dead = full_pod(node, "living"), full_pod(node, "dead")
    living.qemu(FakeQemu, disks=[])
    qemu = dead.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, dead, "released")
    node.hostd.kill()
    for pod, hours in ((living, 9000), (dead, -9000)):

        def stepped(plain: dict[str, dict[str, int]], hours: int = hours) -> None:
            vm = plain["vm"]
            for name in ("started_usec", "exited_usec", "released_usec"):
                vm[name] = max(0, vm[name] + hours * 3_600_000_000)

        rewrite(node, pod, stepped)
    node.hostd.start()
    stays(node, living, seconds=0.5)
    assert node.states() == {living.uid: "running", dead.uid: "released"}


# -- with systemd's store


@pytest.fixture
def storing(node: Node) -> Iterator[StoringDaemon]:
    """hostd under a service manager that keeps descriptors."""
    with StoringDaemon(node) as made:
        yield made


def test_the_store_has_the_pidfd_of_every_living_qemu(node: Node, storing: StoringDaemon) -> None:
    pods = [full_pod(node, f"vm-{number}") for number in range(3)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    storing.start()
    until(lambda: len(storing.stored) == 3, why=lambda: str(storing.stored))
    assert {pidfd_of(fd) for fds in storing.stored.values() for fd in fds} == {qemu.pid for qemu in qemus}
    qemus[0].kill()
    gone(node, pods[0])
    until(lambda: len(storing.stored) == 2, why=lambda: str(storing.stored))
    for _ in range(3):
        storing.kill()
        storing.start()
        assert sorted(len(fds) for fds in storing.stored.values()) == [1, 1], "no restart adds to the store"
    assert storing.stop() == 0


def pidfd_of(fd: int) -> int:
    """Whose pidfd it is."""
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


@pytest.mark.parametrize("reap", [True, False], ids=["reaped", "zombie"])
def test_how_a_qemu_ended_meanwhile_is_known_by_the_store(node: Node, storing: StoringDaemon, reap: bool) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    storing.start()
    until(lambda: storing.stored)
    storing.kill()
    qemu.poweroff(3, reap=reap)
    storing.start()
    gone(node, pod)
    in_state(node, pod, "released")
    path = node.vm(pod)
    assert (node.get("ExitReason", path), node.get("ExitStatus", path)) == ("error", 3)
    until(lambda: storing.stored == {}, why=lambda: str(storing.stored))


def test_what_nobody_knows_in_the_store_is_closed(node: Node, storing: StoringDaemon) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    storing.start()
    until(lambda: storing.stored)
    storing.kill()
    [name] = storing.stored
    storing.put("unknown", os.pidfd_open(os.getpid()))
    storing.put("qemu.no-such-pod.1", os.pidfd_open(os.getpid()))
    storing.put("stored", os.open("/dev/null", os.O_RDONLY))
    storing.put("qemu.torn", os.open("/dev/null", os.O_RDONLY))
    storing.start()
    until(lambda: set(storing.stored) == {name}, why=lambda: str(storing.stored))
    assert node.states() == {pod.uid: "running"}
    fds = [os.readlink(f"/proc/{storing.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{storing.pid}/fd")]
    assert len([link for link in fds if "pidfd" in link]) <= 1 + 3, "the QEMU's own and those of the workers"
    qemu.kill()
    gone(node, pod)


def test_a_stored_pidfd_tells_a_reused_pid(node: Node, storing: StoringDaemon) -> None:
    pod, other = full_pod(node, "one"), full_pod(node, "two")
    qemu = pod.qemu(FakeQemu)
    storing.start()
    until(lambda: storing.stored)
    storing.kill()
    qemu.kill()
    successor = reborn(qemu.pid, other)
    if successor is None:
        pytest.skip("the pid cannot be had again here")
    storing.start()
    gone(node, pod)
    stays(node, other, seconds=0.5)
    in_state(node, pod, "released")
    assert node.states() == {pod.uid: "released", other.uid: "running"}


def test_the_store_without_the_state_files(node: Node, storing: StoringDaemon) -> None:
    """Whoever lost the files has the descriptors still: the VM is found by looking."""
    pod, dead = full_pod(node, "living"), full_pod(node, "dead")
    pod.qemu(FakeQemu, disks=[])
    qemu = dead.qemu(FakeQemu)
    storing.start()
    until(lambda: len(storing.stored) == 2)
    storing.kill()
    for each in (pod, dead):
        os.unlink(state_file(node, each))
    qemu.kill()
    storing.start()
    gone(node, dead)
    stays(node, pod, seconds=0.5)
    assert node.states()[pod.uid] == "running"
    until(lambda: len(storing.stored) == 1, why=lambda: str(storing.stored))


def test_descriptors_are_back_where_they_were_after_many_vms(node: Node) -> None:
    """A pidfd leaked for each process whose watching failed."""
    node.configure({"cleanup": {"retain": "0s"}})
    node.hostd.start()
    settled = node.hostd.descriptors()
    for number in range(15):
        pod = node.pod(name=f"vm-{number}")
        pod.hotplug_file("data")
        qemu = pod.qemu(FakeQemu)
        in_state(node, pod, "running")
        qemu.kill(reap=bool(number % 2))
        gone(node, pod)
        pod.remove_cgroup()
    until(lambda: node.states() == {}, why=lambda: str(node.states()))
    until(lambda: node.hostd.descriptors() <= settled, why=lambda: f"{node.hostd.descriptors()} > {settled}")


def test_few_descriptors_are_no_reason_to_lose_a_death(node: Node) -> None:
    """At the limit a caller gets an error, and no watch is lost."""
    node.configure({"cleanup": {"settle": "3s"}})
    hostd = node.hostd
    hostd._command = ["prlimit", "--nofile=40:40", *hostd._command]
    pods = [full_pod(node, f"vm-{number}") for number in range(4)]
    qemus = [pod.qemu(FakeQemu) for pod in pods]
    hostd.start()
    late, more = [], []
    for number in range(30):
        late.append(node.pod(name=f"late-{number}"))
        late[-1].hotplug_directory("dump")
        more.append(late[-1].qemu(FakeQemu, disks=[]))
    begun = time.monotonic()
    until(lambda: len(node.states()) > 4 or time.monotonic() > begun + 3)
    holds_for(lambda: hostd.running and all(len(pod.mounted()) == 1 for pod in late), 1.0, hostd.log())
    for qemu in (*qemus, *more):
        qemu.kill()
    gone(node, *pods, *late)
