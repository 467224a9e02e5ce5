"""`make chaos`: kills VMs, hostd and the bus at random moments, and holds the outcome against the kernel's own word.

P1  no target leaves the mount table while a QEMU of its pod lives (watched all the time, beside hostd)
P2  when all is quiet, nothing of a dead pod is mounted, and hostd says so
P3  whatever was killed meanwhile: hostd some two hundred times, at last as fast as it starts

Prints the seed and what it counted; exit 0 only if all of it was true. Options: --seconds, --seed.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu, Launcher, Qemu, RealQemu
from tests.support.wait import until

#: VMs alive at one time: each real QEMU takes some 60 MiB and a good part of a second to start.
MOST_ALIVE = 6
#: How often a hostd that was killed and started is killed again.
AGAIN = 0.85
#: Which part of the time goes into killing it over and over, and when that is enough.
HAMMERED, KILLS = 0.35, 220
#: Pods of one run: their directories and namespaces stay until the end.
MOST_PODS = 250
_QUIET = 60.0


@dataclass(slots=True)
class Guarded:
    """A living QEMU and what must stay mounted while it lives."""

    pod: Pod
    qemu: Qemu
    targets: frozenset[bytes]


@dataclass
class Witness:
    """Watches P1 from beside: a target that is missing from a table read while the QEMU lived is a violation."""

    node: Node
    guarded: dict[int, Guarded] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    looks: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """The thread's work."""
        while not self._stop.is_set():
            before = list(self.guarded.values())
            mounted = set(self.node.mounts(self.node.kubelet + b"/pods/"))
            for one in before:
                missing = one.targets - mounted
                # Still alive after the table was read: so it lived while the target was missing.
                if missing and one.qemu.pid in self.guarded and one.qemu.pidfd >= 0 and one.qemu.alive:
                    self.violations.append(f"pod {one.pod.uid}, QEMU {one.qemu.pid} alive: {sorted(missing)}")
            self.looks += 1
            time.sleep(0.002)

    def stop(self) -> None:
        """Ends the watch."""
        self._stop.set()


class Chaos:
    """One run."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.count: collections.Counter[str] = collections.Counter()
        self.witness = Witness(node)
        self.pods: list[Pod] = []
        self._revivals: list[tuple[float, Callable[[], object]]] = []
        self._holders: list[tuple[float, int]] = []
        self._launchers: dict[str, Launcher] = {}
        #: Real QEMUs take too long to start.
        self._in_a_hurry = False

    def mix(self, end: float) -> None:
        """Random events until then."""
        while time.monotonic() < end:
            self.step()
            time.sleep(self.random.uniform(0, 0.15))

    def hammer(self, end: float) -> None:
        """hostd is killed as it starts, as it looks around, as it acts, and VMs come and go meanwhile."""
        self._in_a_hurry = True
        while time.monotonic() < end and self.count["hostd killed"] < KILLS:
            if not self.node.hostd.running:
                self.node.hostd.start(ready=False)
            if self.random.random() < 0.4:
                self.random.choice([self.start_vm, self.end_vm])()
            time.sleep(self.random.uniform(0, 0.3))
            self.node.hostd.kill()
            self.count["hostd killed"] += 1

    def step(self) -> None:
        """One random event, and what is due of earlier ones."""
        now = time.monotonic()
        for due, revive in [one for one in self._revivals if one[0] <= now]:
            self._revivals.remove((due, revive))
            revive()
        for due, fd in [one for one in self._holders if one[0] <= now]:
            self._holders.remove((due, fd))
            os.close(fd)
        actions: list[tuple[int, Callable[[], None]]] = [
            (30, self.start_vm),
            (25, self.end_vm),
            (6, self.second_qemu),
            (8, self.hold),
            (5, self.agent_unmounts),
            (8, self.kill_hostd),
            (2, self.stop_hostd),
            (3, self.kill_bus),
        ]
        weights, doing = zip(*actions, strict=True)
        self.random.choices(doing, weights)[0]()

    def start_vm(self) -> None:
        """A pod with a random set of layers, and its QEMU."""
        if len(self.witness.guarded) >= MOST_ALIVE or len(self.pods) >= MOST_PODS:
            return
        pod = self.node.pod(name=f"vm-{len(self.pods)}")
        self.pods.append(pod)
        pod.containerdisk(self.random.randrange(4))
        if self.random.random() < 0.3:
            pod.kernel_boot()
        for number in range(self.random.randrange(3)):
            pod.hotplug_file(f"disk-{number}")
        if self.random.random() < 0.5:
            pod.hotplug_directory("dump")
        if self.random.random() < 0.3:
            pod.hotplug_block("raw")
        if self.random.random() < 0.4:
            self._launchers[pod.uid] = pod.launcher()
        pod.write_records()
        self._start(pod, frozenset(pod.targets))
        self.count["VMs started"] += 1

    def _start(self, pod: Pod, targets: frozenset[bytes] | None) -> None:
        disks = [target for target in pod.targets if target.endswith(b".img") and target in pod.mounted()]
        disks = [disk for disk in disks if b"kernel-boot" not in disk]
        fake = self._in_a_hurry or self.random.random() < 0.5
        qemu: Qemu = pod.qemu(FakeQemu, disks=disks) if fake else pod.qemu(RealQemu, disks=disks)
        guarded = frozenset(pod.mounted()) if targets is None else targets
        self.witness.guarded[qemu.pid] = Guarded(pod, qemu, guarded)

    def end_vm(self) -> None:
        """Some QEMU dies, by a signal or by itself."""
        if not self.witness.guarded:
            return
        pid = self.random.choice(list(self.witness.guarded))
        guarded = self.witness.guarded[pid]
        how = self.random.choice(["kill", "kill", "term", "poweroff"])
        self.count[f"QEMUs ended by {how}"] += 1
        # Before it dies: from here on its layers may go.
        del self.witness.guarded[pid]
        if how == "kill":
            guarded.qemu.kill(reap=self.random.random() < 0.8)
        elif how == "term":
            guarded.qemu.send(signal.SIGTERM)
        else:
            guarded.qemu.poweroff()
        if not any(other.pod is guarded.pod for other in self.witness.guarded.values()):
            self._end_launcher_later(guarded.pod)

    def _end_launcher_later(self, pod: Pod) -> None:
        """virt-launcher outlives its QEMU. A VM that lived and died unseen is known to be dead only after it."""
        launcher = self._launchers.pop(pod.uid, None)
        if launcher is not None:
            self._revivals.append((time.monotonic() + self.random.uniform(0, 4), launcher.close))

    def second_qemu(self) -> None:
        """Another QEMU in a pod that has one."""
        if self.witness.guarded and len(self.witness.guarded) < MOST_ALIVE:
            guarded = self.random.choice(list(self.witness.guarded.values()))
            self._start(guarded.pod, guarded.targets)
            self.count["second QEMUs in a pod"] += 1

    def hold(self) -> None:
        """Somebody opens a layer of some pod for a while."""
        files = [target for pod in self.pods[-8:] for target in pod.mounted() if target.endswith(b".img")]
        if files:
            try:
                fd = os.open(self.node.outside(self.random.choice(files)), os.O_RDONLY)
            except OSError:
                return
            self._holders.append((time.monotonic() + self.random.uniform(0.1, 3), fd))
            self.count["holders"] += 1

    def agent_unmounts(self) -> None:
        """virt-handler is there as well and takes a dead pod's layer away."""
        living = {guarded.pod.uid for guarded in self.witness.guarded.values()}
        dead = [pod for pod in self.pods[-8:] if pod.uid not in living and pod.mounted()]
        if dead:
            pod = self.random.choice(dead)
            try:
                pod.unmount(self.random.choice(pod.mounted()))
            except (OSError, IndexError):
                return
            self.count["layers unmounted by the agent"] += 1

    def kill_hostd(self) -> None:
        """SIGKILL at any moment; back after a while, and as a rule killed again: as it starts, or soon after."""
        if self.node.hostd.running:
            self.node.hostd.kill()
            self._revive(self._start_hostd, within=0.3)
            self.count["hostd killed"] += 1

    def _start_hostd(self) -> None:
        self.node.hostd.start(ready=False)
        if self.random.random() < AGAIN:
            self._revive(self.kill_hostd, within=0.8)

    def stop_hostd(self) -> None:
        """SIGTERM, as for an upgrade."""
        if self.node.hostd.running:
            self.node.hostd.stop()
            self._revive(lambda: self.node.hostd.start(ready=False))
            self.count["hostd stopped"] += 1

    def kill_bus(self) -> None:
        """The bus dies; back after a while."""
        self.node.bus.stop()
        self._revive(self._start_bus)
        self.count["bus killed"] += 1

    def _start_bus(self) -> None:
        self.node.bus.stop()
        self.node.bus.start_now()

    def _revive(self, how: Callable[[], object], within: float = 1.5) -> None:
        self._revivals.append((time.monotonic() + self.random.uniform(0, within), how))

    def settle(self) -> list[str]:
        """Lets everything come to rest; what is not as it should be, in words."""
        for _, revive in list(self._revivals):
            revive()
        if not self.node.hostd.running:
            self.node.hostd.start(ready=False)
        for _, fd in self._holders:
            os.close(fd)
        self._revivals, self._holders = [], []
        self.node.hostd.wait_ready()
        living = {guarded.pod.uid for guarded in self.witness.guarded.values()}
        dead = [pod for pod in self.pods if pod.uid not in living]
        try:
            until(lambda: not any(pod.mounted() for pod in dead), deadline=_QUIET, why="dead pods' layers go")
            until(lambda: self._told(dead), deadline=_QUIET, why="hostd says that they are released")
        except AssertionError as error:
            left = [f"pod {pod.uid}: {pod.mounted()} {self.node.layers(pod)}" for pod in dead if pod.mounted()]
            return [str(error), *left]
        return [f"pod {uid} is {state}, not running" for uid, state in self.node.states().items() if
                uid in living and state != "running"]  # fmt: skip

    def _told(self, dead: list[Pod]) -> bool:
        states = self.node.states()
        return all(states.get(pod.uid, "released") == "released" for pod in dead)


def run(seconds: float, seed: int) -> int:
    """The whole run; the exit code."""
    print(f"chaos for {seconds:g} s, seed {seed}")
    # A pod here has nothing in its cgroup until its QEMU starts, which may take seconds on a busy machine.
    with Node(settings={"cleanup": {"settle": "8s"}}) as node:
        node.hostd.start()
        chaos = Chaos(node, seed)
        watching = threading.Thread(target=chaos.witness.run)
        watching.start()
        try:
            now = time.monotonic()
            chaos.mix(now + seconds * (1 - HAMMERED))
            chaos.hammer(now + seconds)
            troubles = chaos.settle()
        finally:
            chaos.witness.stop()
            watching.join()
        tracebacks = node.hostd.log().count("Traceback")
        log = node.hostd.log()
    troubles += chaos.witness.violations[:10]
    if tracebacks:
        troubles.append(f"{tracebacks} tracebacks in hostd's log")
    print("\n".join(f"{count:6} {what}" for what, count in sorted(chaos.count.items())))
    print(f"{chaos.witness.looks:6} looks at the mount table, {len(chaos.witness.violations)} violations of P1")
    print(f"{len(chaos.pods):6} pods, all layers of the dead ones gone" if not troubles else "FAILED:")
    for trouble in troubles:
        print(f"  {trouble}")
    if troubles:
        with open("build/chaos.log", "w") as file:
            file.write(log)
        print("hostd's log: build/chaos.log")
    return 1 if troubles else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Kills VMs, hostd and the bus at random moments.")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    chosen = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    return run(chosen.seconds, chosen.seed)


if __name__ == "__main__":
    sys.exit(main())
