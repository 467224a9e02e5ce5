"""A fault that shows once in a thousand times, and a leak that shows after as many: short lives, one by one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.support.bus import Client, Failed
from tests.support.mountns import MS_BIND, mount
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import PROGRAM, FakeQemu, Guest
from tests.support.wait import eventually, until
from tests.support.witness import in_state

pytestmark = pytest.mark.usefixtures("root")

#: Lives at a time, rounds of them, and after how many of these all that grows once has grown.
AT_A_TIME, ROUNDS, WARM = 25, 24, 6


class Crowd:
    """Pods in which QEMUs live for a moment, again and again: the cheapest ones that hostd takes for such."""

    def __init__(self, node: Node, count: int) -> None:
        self.node = node
        self.source = node.image("tmpfs")
        self.pods = [node.pod(name=f"vm-{number}") for number in range(count)]
        self.targets = [pod.hotplug_disks + b"/data.img" for pod in self.pods]
        self._program = os.path.join(node.directory, PROGRAM)
        os.symlink("/bin/sh", self._program)
        self._zombies: list[subprocess.Popen[bytes]] = []
        self._rounds = 0
        #: Nothing ever comes out of it, so long as it is open: what they wait for.
        self._silence = os.pipe()

    def live(self) -> None:
        """One life in each pod: a layer comes, the VM runs, dies, and the layer goes."""
        self._rounds += 1
        qemus = [self._start(pod) for pod in self.pods]
        self.node.namespace.call(self._mount)
        self._wait_until_all("running, QEMU")
        for qemu in qemus:
            qemu.kill()
        # Who reaps them is not hostd's business, nor when.
        self.reap()
        for qemu in qemus[::2]:
            qemu.wait()
        self._zombies = qemus[1::2]
        self._wait_until_all("forgotten")
        assert not self.node.mounts(self.node.kubelet + b"/pods/")
        assert self.node.hostd.ready, "the manager listens: what it does not take waits in hostd"

    def _start(self, pod: Pod) -> subprocess.Popen[bytes]:
        command = [self._program, "-c", "read nothing", *Guest("ns", pod.guest.name).arguments]
        qemu = subprocess.Popen(command, stdin=self._silence[0])
        for cgroup in pod.cgroups:
            with open(f"{cgroup}/cgroup.procs", "w") as file:
                file.write(str(qemu.pid))
        return qemu

    def _mount(self) -> None:
        for target in self.targets:
            os.close(os.open(target, os.O_CREAT))
            mount(self.source, target, b"", MS_BIND)

    def _wait_until_all(self, words: str) -> None:
        """Until hostd has said so of all, in its log: to ask it again and again would cost more than all else."""
        count = self._rounds * len(self.pods)
        until(lambda: self.node.hostd.log().count(words) == count, why=self.node.hostd.log)

    def reap(self) -> None:
        """Those of the last round whose parent was slow."""
        for qemu in self._zombies:
            qemu.wait()

    def close(self) -> None:
        """What lives still ends."""
        for fd in self._silence:
            os.close(fd)
        self.reap()


@pytest.fixture
def crowd(node: Node) -> Iterator[Crowd]:
    """On a node whose hostd forgets what is released."""
    node.configure({"cleanup": {"retain": "0s"}})
    made = Crowd(node, AT_A_TIME)
    yield made
    made.close()


def test_hundreds_of_short_lives_leave_nothing_behind(node: Node, crowd: Crowd) -> None:
    """A pidfd leaked where waiting failed, and tasks that nobody kept were lost with what they waited for."""
    node.hostd.start()
    for _ in range(WARM):
        crowd.live()
    descriptors, memory = node.hostd.descriptors(), node.hostd.memory()
    for _ in range(ROUNDS - WARM):
        crowd.live()
    until(lambda: node.hostd.descriptors() <= descriptors, why=lambda: f"{node.hostd.descriptors()} > {descriptors}")
    grown = node.hostd.memory() - memory
    assert grown < (ROUNDS - WARM) * AT_A_TIME * 1024, f"{grown} bytes more"
    assert len(node.hostd.said("released, 1 layers")) == ROUNDS * AT_A_TIME
    assert node.states() == {}
    assert os.listdir(node.runtime_dir + "/vms") == []


async def registered(client: Client, pod_uid: str, leader: subprocess.Popen[bytes]) -> str:
    """Registers a VM with this leader; the name of the error, or nothing."""
    pidfd = os.pidfd_open(leader.pid)
    try:
        await client.manager("RegisterVM", "sa{sv}", pod_uid, {"LeaderPIDFD": client.variant("h", 0)}, unix_fds=[pidfd])
    except Failed as error:
        return error.name.rpartition(".")[2]
    finally:
        os.close(pidfd)
    return ""


async def test_a_thousand_leaders_that_die_while_they_are_registered(node: Node) -> None:
    """A machine whose leader died before its registration ended was kept for ever."""
    node.configure({"cleanup": {"retain": "0s"}})
    node.hostd.start()
    answers = []
    async with await Client.connect(node.bus.address) as client:
        for _ in range(1000):
            leader = subprocess.Popen(["/bin/true"])
            answers.append(await registered(client, str(uuid.uuid4()), leader))
            leader.wait()
        assert set(answers) <= {"", "NoSuchProcess"}
        assert "" in answers, "none was quick enough to prove anything"
        await eventually(lambda: not node.states(), why=node.hostd.log)
    assert "Traceback" not in node.hostd.log()


async def test_at_the_limit_of_descriptors_the_caller_is_told_and_no_death_is_lost(node: Node) -> None:
    node.configure({"cleanup": {"retain": "1h"}})
    node.hostd._command = ["prlimit", "--nofile=64:64", *node.hostd._command]
    node.hostd.start()
    leaders = [subprocess.Popen(["/bin/sleep", "300"]) for _ in range(80)]
    try:
        async with await Client.connect(node.bus.address) as client:
            pods = [str(uuid.uuid4()) for _ in leaders]
            answers = [await registered(client, pod, leader) for pod, leader in zip(pods, leaders, strict=True)]
            assert set(answers) == {"", "LimitExceeded"}
    finally:
        for leader in leaders:
            leader.kill()
            leader.wait()
    taken = {pod for pod, answer in zip(pods, answers, strict=True) if not answer}
    until(lambda: {uid for uid, state in node.states().items() if state == "released"} == taken, why=node.hostd.log)


async def test_a_target_that_is_named_ten_thousand_times_is_one(node: Node) -> None:
    """Every failed sync appended the same target to the record again, and rewrote all of it."""
    pod = node.pod()
    target = pod.containerdisk().decode()
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    in_state(node, pod, "running")
    state = f"{node.runtime_dir}/vms/{pod.uid}.json"
    before = os.stat(state)
    spellings = [target, target.replace("/volumes/", "//volumes/./"), target + "/", "/proc/1/root" + target]
    async with await Client.connect(node.bus.address) as client:
        for _ in range(500):
            calls = [client.manager("TrackLayer", "ssa{sv}", pod.uid, spellings[one % 4], {}) for one in range(20)]
            assert await asyncio.gather(*calls) == [[True]] * 20
    now = os.stat(state)
    assert (now.st_ino, now.st_size) == (before.st_ino, before.st_size), "it was not written once"
    assert list(node.layers(pod)) == [target]
    qemu.kill()
    in_state(node, pod, "released")
