"""Random lives of VMs and of hostd on a simulated kernel: the promises P1, P2 and P3 of the design, after every step.

HOSTD_MODEL_EXAMPLES=5000 raises the number of lives.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostd.config import Cleanup, Config, LazyAfter, Mode
from hostd.core.model import VM, Layer, LayerState, Policy, State
from hostd.core.service import Event, Registration, VMExited, VMReleased
from hostd.core.store import Store, vm_to_plain
from hostd.linux.cgroup import Population
from hostd.linux.pidfd import End
from tests.support.simulation import BOUND, Hostd, Kernel, SimMount, Task, pod_of, target_of

SECOND = 1_000_000
PODS = [f"00000000-0000-4000-8000-{number:012}" for number in range(2)]
NAMES = [
    b"container-disks/disk_0.img",
    b"container-disks/kernel-boot/vmlinuz",
    b"hotplug-disks/data.img",
    b"hotplug-disks/dump",
]
BLOCK = b"hotplug-disks/block"
#: Longer than the longest back-off, the settling and the lazy detach together (seconds).
QUIET = 100.0
#: Longer than an inhibitor waits for what has begun (seconds).
A_PASS = 3.1
#: Turns of the loop that a second with all pods in trouble may take, and that any step may.
TURNS_A_SECOND, TURNS_A_STEP = 60, 1500

pods = st.sampled_from(PODS)
names = st.sampled_from(NAMES)
targets = st.builds(target_of, pods, names)
#: One of the mounts that there are, if there are any.
picks = st.integers(0, 15)
ends = st.one_of(
    st.builds(End, status=st.sampled_from([0, 1, 255])), st.builds(End, signal=st.sampled_from([6, 9, 11, 15]))
)


class Life(RuleBasedStateMachine):
    """Up to two pods of one node, and one hostd after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="hostd-model-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.config = Config(cleanup=Cleanup(retain_usec=60 * SECOND, lazy_after=LazyAfter(30 * SECOND, None)))
        self.kernel = Kernel()
        self.hostd: Hostd | None = None
        self.fd_store = self.mount_events = True
        self.holders: list[tuple[Task, SimMount]] = []
        self.inhibitors: list[tuple[str, int]] = []
        self.witnessed: set[str] = set()
        self.exits: dict[str, int] = dict.fromkeys(PODS, 0)
        self.was_blind = False
        self.node_since: dict[bytes, int] = {}

    @initialize(
        pidfs=st.booleans(),
        keeps_exit=st.booleans(),
        fd_store=st.booleans(),
        mount_events=st.booleans(),
        early=st.booleans(),
    )
    def begin(self, pidfs: bool, keeps_exit: bool, fd_store: bool, mount_events: bool, early: bool) -> None:
        self.kernel = Kernel(pidfs=pidfs, keeps_exit=keeps_exit)
        self.kernel.__enter__()
        self.fd_store, self.mount_events = fd_store, mount_events
        if early:
            self.start_hostd()

    # -- hostd

    @precondition(lambda self: self.hostd is None)
    @rule()
    def start_hostd(self) -> None:
        self.hostd = Hostd(
            self.kernel, self.directory, self.config, fd_store=self.fd_store, mount_events=self.mount_events
        )
        self.hostd.told = self.hear
        if not self.fd_store:
            self.kernel.stored.clear()

    @precondition(lambda self: self.hostd is not None)
    @rule(turns=st.integers(0, 12))
    def kill_hostd(self, turns: int) -> None:
        assert self.hostd is not None
        self.hostd.tick(turns)
        self.hostd.kill()
        self.hostd = None

    @precondition(lambda self: self.up is not None)
    @rule()
    def stop_hostd(self) -> None:
        assert self.hostd is not None
        self.hostd.stop()
        self.hostd = None

    @property
    def up(self) -> Hostd | None:
        """hostd, when it has started and answers."""
        return self.hostd if self.hostd is not None and self.hostd.ready else None

    def vm(self, pod: str) -> VM | None:
        return self.up.keeper.registry.get(pod) if self.up else None

    @rule(turns=st.integers(1, 10))
    def turn(self, turns: int) -> None:
        if self.hostd:
            self.hostd.tick(turns)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0, 2.1, 5.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        if self.hostd is None:
            end = self.kernel.now + round(seconds * SECOND)
            while self.kernel.now < end:
                self.kernel.pass_time(end)
            return
        turns = self.hostd.advance(seconds)
        assert turns < TURNS_A_STEP + TURNS_A_SECOND * seconds, f"{turns} turns of the loop in {seconds} s"

    # -- pods

    @rule(pod=pods, layers=st.lists(names, min_size=1, max_size=3))
    def vm_runs(self, pod: str, layers: list[bytes]) -> None:
        """All of it at once, as on a good day."""
        self.pod_appears(pod)
        for name in layers:
            self.kernel.mount(target_of(pod, name))
        self.kernel.qemu(pod)
        self.advance(1.0)

    @rule(pod=pods, end=ends, held=st.booleans(), pick=picks, turns=st.integers(0, 8))
    def vm_ends(self, pod: str, end: End, held: bool, pick: int, turns: int) -> None:
        """All its QEMUs at once; perhaps somebody has a layer open."""
        if held:
            self.somebody_opens(pick, False)
        for task in self.kernel.vms(pod):
            self.kernel.die(task, end)
        self.turn(turns)

    @rule(pod=pods)
    def pod_appears(self, pod: str) -> None:
        self.kernel.spawn(
            pod, b"virt-launcher", [b"virt-launcher", b"--name", b"vm", b"--uid", b"u", b"--namespace", b"n"]
        )

    @rule(path=targets, depth=st.integers(1, 2))
    def mounted(self, path: bytes, depth: int) -> None:
        for _ in range(depth):
            self.kernel.mount(path)

    @rule(pod=pods)
    def block_node_made(self, pod: str) -> None:
        self.kernel.directories.add(pod)
        self.kernel.nodes.add(target_of(pod, BLOCK))
        self.node_since[target_of(pod, BLOCK)] = self.kernel.now

    @rule(pod=pods, guest=st.sampled_from([True, True, True, False]), mute=st.sampled_from([False, False, True]))
    def qemu_starts(self, pod: str, guest: bool, mute: bool) -> None:
        self.kernel.qemu(pod, guest=guest).mute = mute and guest

    @rule(pod=pods, end=ends, reap=st.booleans(), turns=st.integers(0, 3))
    def qemu_dies(self, pod: str, end: End, reap: bool, turns: int) -> None:
        for task in self.kernel.living(pod):
            if task.comm == b"qemu-system-x86":
                self.kernel.die(task, end, reap=reap)
                break
        self.turn(turns + 1)

    @rule(pod=pods, guest=st.booleans())
    def qemu_is_replaced(self, pod: str, guest: bool) -> None:
        """One dies and the next one takes its pid, all at once."""
        for task in self.kernel.vms(pod)[:1]:
            self.kernel.die(task, End(signal=9))
        self.kernel.qemu(pod, guest=guest)

    @rule()
    def zombies_are_reaped(self) -> None:
        for task in [task for task in self.kernel.tasks.values() if not task.alive]:
            self.kernel.reap(task)

    @rule(pod=pods, remove=st.booleans())
    def pod_ends(self, pod: str, remove: bool) -> None:
        for task in self.kernel.living(pod):
            self.kernel.die(task, End(signal=15))
        if remove and pod in self.kernel.cgroups:
            self.kernel.remove_cgroup(pod)

    @rule(pod=pods)
    def cgroup_cannot_be_read(self, pod: str) -> None:
        self.kernel.unreadable.symmetric_difference_update({pod})

    @rule(understood=st.booleans())
    def host_is_strange(self, understood: bool) -> None:
        self.kernel.understood = understood

    # -- others

    def pick(self, number: int) -> bytes:
        """The target of one of the mounts that there are."""
        every = [mount.target for mount in self.kernel.mounts] or [target_of(PODS[0], NAMES[0])]
        return every[number % len(every)]

    @rule(pick=picks, stray_qemu=st.booleans())
    def somebody_opens(self, pick: int, stray_qemu: bool) -> None:
        """A backup, or a QEMU that is in nobody's cgroup."""
        for mount in self.kernel.stack(self.pick(pick))[-1:]:
            task = self.kernel.spawn("", b"qemu-system-x86" if stray_qemu else b"backup", [b"x", b"-name"])
            mount.openers.add(task.start_time)
            self.holders.append((task, mount))

    @precondition(lambda self: self.holders)
    @rule(die=st.booleans())
    def somebody_lets_go(self, die: bool) -> None:
        task, mount = self.holders.pop()
        if die and task.alive:
            self.kernel.die(task, End(status=0))
        else:
            self.kernel.release(mount, task.start_time)

    @rule(pick=picks, left=st.booleans())
    def file_system_hangs(self, pick: int, left: bool) -> None:
        self.kernel.hang(self.pick(pick), left=left)

    @precondition(lambda self: self.kernel.hanging)
    @rule()
    def file_system_answers(self) -> None:
        self.kernel.unhang(next(iter(self.kernel.hanging)))

    @rule(blind=st.booleans())
    def processes_cannot_be_looked_at(self, blind: bool) -> None:
        self.kernel.blind = blind
        self.was_blind |= blind

    @rule(pick=picks, lazy=st.booleans())
    def agent_unmounts(self, pick: int, lazy: bool) -> None:
        self.kernel.umount(self.pick(pick), lazy=lazy)

    @rule(path=targets, times=st.integers(1, 4))
    def somebody_mounts_in_a_loop(self, path: bytes, times: int) -> None:
        for _ in range(times):
            if not self.kernel.stack(path):
                self.kernel.mount(path)
            self.advance(0.2)

    @rule(usec=st.sampled_from([0, 0, 50_000, 3 * SECOND]))
    def notices_come_late(self, usec: int) -> None:
        self.kernel.lateness = usec

    @rule(usec=st.sampled_from([-86_400 * SECOND, -1, 3600 * SECOND]))
    def clock_is_set(self, usec: int) -> None:
        self.kernel.offset += usec

    # -- requests

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods, all_vms=st.booleans())
    def inhibitor_is_taken(self, pod: str, all_vms: bool) -> None:
        assert self.up is not None
        task = self.up.ask(self.up.requests.inhibit("" if all_vms else pod, "who", "why"))
        self.up.tick(2)
        if not task.done():  # it waits for a pass that is under way, which may hang
            self.advance(A_PASS)
        if isinstance(fd := task.result(), int):
            self.inhibitors.append(("" if all_vms else pod, fd))

    @precondition(lambda self: self.inhibitors)
    @rule()
    def inhibitor_is_let_go(self) -> None:
        os.close(self.inhibitors.pop()[1])

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods, policy=st.sampled_from(Policy), turns=st.integers(1, 4))
    def policy_is_set(self, pod: str, policy: Policy, turns: int) -> None:
        assert self.up is not None
        self.up.ask(self.up.requests.set_policy(pod, policy))
        self.up.tick(turns)

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods, grace=st.sampled_from([0, SECOND, 20 * SECOND]))
    def grace_is_set(self, pod: str, grace: int) -> None:
        assert self.up is not None
        self.up.ask(self.up.requests.set_grace(pod, grace))
        self.up.tick(2)

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods, lazy=st.booleans(), dry_run=st.booleans(), turns=st.integers(1, 10))
    def release_is_asked(self, pod: str, lazy: bool, dry_run: bool, turns: int) -> None:
        assert self.up is not None
        self.up.ask(self.up.requests.release(pod, dry_run=dry_run, lazy=lazy))
        self.up.tick(turns)

    @precondition(lambda self: self.up is not None)
    @rule(dry_run=st.booleans(), turns=st.integers(1, 10))
    def sweep_is_asked(self, dry_run: bool, turns: int) -> None:
        assert self.up is not None
        self.up.ask(self.up.requests.sweep(dry_run=dry_run))
        self.up.tick(turns)

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods)
    def vm_is_registered(self, pod: str) -> None:
        assert self.up is not None
        pid = next((task.pid for task in self.kernel.vms(pod)), None)
        self.up.ask(self.up.requests.register(pod, Registration(vmi_uid="u", leader_pid=pid)))
        self.up.tick(2)

    @precondition(lambda self: self.up is not None)
    @rule(pod=pods)
    def vm_is_unregistered(self, pod: str) -> None:
        assert self.up is not None
        self.up.ask(self.up.requests.unregister(pod))
        self.up.tick(2)

    @precondition(lambda self: self.up is not None)
    @rule(mode=st.sampled_from(Mode))
    def mode_is_set(self, mode: Mode) -> None:
        assert self.up is not None
        self.config = dataclasses.replace(self.config, cleanup=dataclasses.replace(self.config.cleanup, mode=mode))
        self.up._config = self.config
        self.up.ask(self.up.requests.reload())
        self.up.tick(2)

    # -- what must hold

    def hear(self, event: Event) -> None:
        complain = self.kernel.violations.append
        match event:
            case VMExited(vm=vm):
                self.exits[vm.pod_uid] += 1
                # It may be told when the next QEMU lives already.
                if self.exits[vm.pod_uid] > self.kernel.runs[vm.pod_uid] - bool(self.kernel.vms(vm.pod_uid)):
                    complain("VMExited was told twice of one death")
            case VMReleased(vm=vm):
                if self.kernel.vms(vm.pod_uid):
                    complain("VMReleased was told of a VM that lives")
                left = [m.target for m in self.kernel.mounts if m.number in self.kernel.read_last]
                left += [n for n in self.kernel.nodes if self.node_since[n] < vm.exited_at]
                if not self.was_blind:
                    left += [m.target for m in self.kernel.detached if m.number in self.kernel.known_pinned]
                if any(pod_of(target) == vm.pod_uid for target in left):
                    complain(f"VMReleased was told though there are {left}")
            case _:
                pass

    @invariant()
    def no_promise_was_broken(self) -> None:
        assert not self.kernel.violations, "\n".join(self.kernel.violations)

    @invariant()
    def running_means_that_a_qemu_lives_or_has_just_died(self) -> None:
        for pod in PODS:
            vm = self.vm(pod)
            if vm and vm.state is State.RUNNING and self.kernel.vms(pod):
                self.witnessed.add(pod)

    @rule()
    def all_is_quiet(self) -> None:
        """P2, and with the deaths of hostd among the rules P3: in the end all that may go is gone, or named."""
        self.kernel.lateness = 0
        if self.hostd is None:
            self.start_hostd()
        self.advance(QUIET)
        self.no_promise_was_broken()
        assert self.up is not None, "hostd does not come up"
        self.running_means_that_a_qemu_lives_or_has_just_died()
        for pod in PODS:
            self.check_pod(self.up, pod)
        self.check_store(self.up)

    def check_pod(self, hostd: Hostd, pod: str) -> None:
        vm = hostd.keeper.registry.get(pod)
        mounts = [mount for mount in self.kernel.mounts if pod_of(mount.target) == pod]
        if pod in self.kernel.unreadable:
            return
        if self.kernel.vms(pod):
            if vm is None:
                assert not mounts, f"{pod} has a QEMU and {mounts}, and is not known"
                return
            hung = any(layer.state is LayerState.HUNG for layer in vm.layers.values())
            assert vm.state is State.RUNNING or hung, f"a QEMU lives, and it is not running: {shown(vm)}"
        elif mounts and self.must_go(pod, vm) and len(hostd.pool.hung) < BOUND:
            assert vm is not None, f"{mounts} are left and no VM is known"
            for mount in mounts:
                self.check_mount(vm, mount)

    def must_go(self, pod: str, vm: VM | None) -> bool:
        """The pod is dead for all to see, and nobody wants its layers to stay."""
        held = any(uid in {"", pod} for uid, _ in self.inhibitors) or (vm is not None and vm.policy is Policy.KEEP)
        muted = any(task.mute and task.comm == b"qemu-system-x86" for task in self.kernel.living(pod))
        population = self.kernel.cgroups.get(pod)
        evidence = population is Population.EMPTY or (population is None and self.kernel.understood)
        known = pod in self.witnessed and vm is not None and vm.had_qemu
        return not held and not muted and (evidence or known) and self.config.cleanup.mode is Mode.ENFORCE

    def check_mount(self, vm: VM, mount: SimMount) -> None:
        layer = vm.layers.get(mount.target)
        assert layer is not None, f"{mount} is no layer of {shown(vm)}"
        if self.waits_for_others(layer):
            return
        if mount.target in self.kernel.hanging:
            assert layer.state is LayerState.HUNG, f"{mount} hangs, and {layer} is not hung"
        else:
            held = any(each.openers for each in self.kernel.stack(mount.target))
            assert held, f"nothing keeps {mount}, and it is still there: {shown(vm)}"
            assert layer.state in {LayerState.BUSY, LayerState.DETACHED}, f"{mount} is held, and {layer} is not busy"
            assert layer.error, f"nothing says why {layer} is busy"

    def waits_for_others(self, layer: Layer) -> bool:
        """So many umounts of its kind hang that it is not tried."""
        return layer.state is LayerState.BUSY and layer.errno == errno.EAGAIN and bool(self.kernel.stuck)

    def check_store(self, hostd: Hostd) -> None:
        store = Store(self.directory)
        try:
            saved, bad = store.load()
        finally:
            store.close()
        assert not bad
        known = {vm.pod_uid: plain_of(vm) for vm in hostd.keeper.registry}
        for vm in (vm for vm in saved if not hostd.keeper.cleaning.of(vm.pod_uid)):
            plain = plain_of(vm)
            unsaved = {
                name: (plain[name], value) for name, value in known.pop(vm.pod_uid, {}).items() if plain[name] != value
            }
            assert not unsaved, f"not saved of {vm.pod_uid}: {unsaved}"
        assert all(hostd.keeper.cleaning.of(uid) for uid in known), f"no files of {known}"

    def teardown(self) -> None:
        try:
            self.all_is_quiet()
            self.stop_hostd()
            self.no_promise_was_broken()
        finally:
            if self.hostd:
                self.hostd.kill()
            for _, fd in self.inhibitors:
                os.close(fd)
            self.kernel.__exit__(None, None, None)
            shutil.rmtree(self.directory)


def plain_of(vm: VM) -> dict[str, Any]:
    """As it is saved, without what each start sets anew."""
    plain = vm_to_plain(vm)
    for layer in plain["layers"]:
        del layer["retry_at"]
    return plain


def shown(vm: VM) -> str:
    layers = [(layer.target.path[-20:], str(layer.state), layer.error, layer.retry_at) for layer in vm.layers.values()]
    return f"{vm.pod_uid} {vm.state} error={vm.error!r} exited={vm.exited_at} had_qemu={vm.had_qemu} {layers}"


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("HOSTD_MODEL_EXAMPLES", "500")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="HOSTD_MODEL_EXAMPLES" not in os.environ,
    database=None,
    print_blob=True,
)
