"""What callers ask of the keeper: the VMs as the bus knows them. Implements `hostd.core.service.VMService`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING

from hostd.config import Mode
from hostd.core.decision import NEVER
from hostd.core.model import VM, Holder, Inhibitor, Layer, LayerState, Policy, State
from hostd.core.qemus import pods_of
from hostd.core.service import ENDED, Listener, Registration, ReleaseRow, SweepRow
from hostd.core.start import look_around
from hostd.errors import (
    ConfigError,
    HostdError,
    InvalidArgs,
    LimitExceeded,
    NoSuchProcess,
    NoSuchVM,
    NotATarget,
    NotSupported,
    ProcessMismatch,
    VMAlive,
    VMExists,
)
from hostd.kubevirt.targets import Kind, Target, target
from hostd.linux.clock import boottime_usec
from hostd.linux.pidfd import NotAPidfd, Process
from hostd.log import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hostd.config import Config
    from hostd.core.keeper import Keeper
    from hostd.core.pod_mounts import KubeletRoot

#: Layers that an agent may name for one VM: more than any VM can have.
_MOST_TRACKED = 1024
#: How long an answer on the host's cgroups holds (µs).
_UNDERSTOOD_FOR = 10_000_000
#: How long Release waits for umounts before it answers with what is known (seconds).
_PATIENCE = 20.0
#: How long an inhibitor's taker waits for the umounts that are under way (seconds): a worker that takes longer hangs.
_A_PASS = 3.0


class Requests:
    """The callers' side of the keeper. `reload_config` reads the configuration again and raises ConfigError."""

    def __init__(self, keeper: Keeper, root: KubeletRoot, reload_config: Callable[[], Config]) -> None:
        self._keeper = keeper
        self._registry = keeper.registry
        self._root = root
        self._reload_config = reload_config
        self.problems: dict[str, str] = {}
        #: What is wrong with a part at the moment, in words, by part; empty while nothing is.
        self.complaints: dict[str, Callable[[], str]] = {}
        #: Told of a configuration that was read again and taken.
        self.reloaded: Callable[[Config], None] = lambda _: None
        self._understood_at = -_UNDERSTOOD_FOR
        self._was_understood = True

    @property
    def mode(self) -> str:
        """`enforce` or `observe`."""
        return self._keeper.config.cleanup.mode

    @property
    def config_files(self) -> tuple[str, ...]:
        """The files that the configuration was read from, the least important first."""
        return tuple(map(os.path.abspath, self._keeper.config.sources))

    @property
    def health(self) -> Mapping[str, str]:
        """What is wrong with hostd's own parts, by part."""
        found = self.problems | {part: words for part, ask in self.complaints.items() if (words := ask())}
        if self._keeper.pool.hung:
            names = ", ".join(f"{plain(hung.what)} in worker {hung.pid}" for hung in self._keeper.pool.hung)
            found["workers"] = f"{len(self._keeper.pool.hung)} hang: {names}"
        if self._registry.unsaved:
            found["state"] = f"the state of {len(self._registry.unsaved)} VMs cannot be saved: is the disk full?"
        # Before kubelet's first pod there are none, and nobody misses them.
        if len(self._registry) and not self._understood():
            found["cgroups"] = "no pod cgroups are found: a pod that never had a QEMU is left alone"
        return found

    def _understood(self) -> bool:
        """Whether pod cgroups are found; looked at seldom, for it costs something for each pod of the node."""
        now = boottime_usec()
        if now - self._understood_at > _UNDERSTOOD_FOR:
            self._understood_at, self._was_understood = now, False
            with contextlib.suppress(OSError):
                self._was_understood = self._keeper.qemus.cgroups.understood
        return self._was_understood

    def vms(self) -> Iterable[VM]:
        """All VMs, oldest first."""
        return self._registry

    def vm(self, pod_uid: str) -> VM:
        """Raises NoSuchVM."""
        return self._registry[pod_uid]

    def vm_by_pid(self, pid: int) -> VM:
        """Raises NoSuchProcess, NoSuchVM."""
        with _open(pid):
            uids = pods_of(pid)
        for vm in self._registry:
            if vm.pod_uid in uids or any(identity.pid == pid for identity in vm.qemus):
                return vm
        raise NoSuchVM(f"process {pid} is in no VM's pod")

    def vms_by_vmi(self, vmi_uid: str) -> list[VM]:
        """May be empty."""
        return [vm for vm in self._registry if vm.vmi_uid == vmi_uid]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` for each event from now on; the result ends it."""
        return self._registry.subscribe(listener)

    # --- registration ---

    async def register(self, pod_uid: str, said: Registration) -> tuple[VM, bool]:
        """Takes an agent's word for a VM, where nothing that is known speaks against it."""
        process = _leader(pod_uid, said)
        try:
            vm, existing = self._register(pod_uid, said, process)
        except BaseException:
            if process is not None:
                process.close()
            raise
        self._keeper.wake(pod_uid)
        return vm, existing

    def _register(self, pod_uid: str, said: Registration, process: Process | None) -> tuple[VM, bool]:
        vm = self._registry.get(pod_uid)
        if vm is None:
            vm = VM(pod_uid, first_seen_at=boottime_usec())
            self._take_word(vm, said)
            self._registry.add(vm, must_save=True)
            same = False
        else:
            self._keeper.conclude(vm)
            self._refuse_contradiction(vm, said, process)
            same = vm.registered and _says_nothing_new(vm, said)
            self._take_word(vm, said)
        if process is not None:
            same = same and vm.leader is not None and vm.leader.same_as(process.identity)
            vm.leader, vm.had_qemu = process.identity, True
        self._registry.commit(vm, must_save=True)
        if process is not None:
            # Only now: what could not be saved must leave nothing behind.
            self._keeper.follow(vm, process)
        return vm, same

    @staticmethod
    def _take_word(vm: VM, said: Registration) -> None:
        vm.registered = True
        vm.vmi_uid = said.vmi_uid or vm.vmi_uid
        vm.namespace = said.namespace or vm.namespace
        vm.name = said.name or vm.name
        vm.grace_usec = vm.grace_usec if said.grace_usec is None else said.grace_usec
        vm.policy = said.policy or vm.policy

    def _refuse_contradiction(self, vm: VM, said: Registration, process: Process | None) -> None:
        if vm.registered and said.vmi_uid and vm.vmi_uid and said.vmi_uid != vm.vmi_uid:
            raise VMExists(f"pod {vm.pod_uid} is registered as VMI {vm.vmi_uid}; UnregisterVM withdraws that")
        if process is None or vm.leader is None or vm.leader.same_as(process.identity):
            return
        leader_lives = any(vm.leader.same_as(p.identity) and p.alive() for p in self._keeper.qemus.followed(vm.pod_uid))
        if vm.registered and leader_lives:
            raise VMExists(
                f"pod {vm.pod_uid} is registered with process {vm.leader.pid}, which lives; UnregisterVM withdraws that"
            )

    async def unregister(self, pod_uid: str) -> None:
        """Acknowledges a released VM; of others it withdraws what was registered."""
        vm = self._registry[pod_uid]
        self._keeper.conclude(vm)
        vm.registered = False
        if vm.state is State.RELEASED:
            self._keeper.forget(vm)
            return
        vm.grace_usec, vm.policy = None, Policy.CLEAN
        known_by_looking = vm.layers or vm.qemus or self._keeper.qemus.cgroups.paths(pod_uid)
        if known_by_looking or vm.state in ENDED:
            self._registry.commit(vm)
            self._keeper.wake(pod_uid)
        else:
            self._keeper.forget(vm)

    async def track_layer(self, pod_uid: str, path: bytes) -> bool:
        """Whether the layer was known already."""
        vm = self._registry[pod_uid]
        meant = self._target_of(pod_uid, path)
        if meant.path in vm.layers:
            return True
        if len(vm.layers) >= _MOST_TRACKED:
            raise LimitExceeded(f"pod {pod_uid} has {len(vm.layers)} layers already")
        self._keeper.conclude(vm)
        vm.layers[meant.path] = Layer(meant, seen_at=boottime_usec(), tracked=True)
        self._registry.commit(vm, must_save=True)
        self._keeper.wake(pod_uid)
        return False

    def _target_of(self, pod_uid: str, path: bytes) -> Target:
        meant = target(self._root.path, path)
        if meant.pod_uid != pod_uid:
            raise NotATarget(f"{meant.path!r} belongs to pod {meant.pod_uid}, not to {pod_uid}")
        return meant

    # --- asking and acting ---

    async def holders(self, pod_uid: str, path: bytes) -> list[Holder]:
        """Who holds this layer now, by a look of its own."""
        vm = self._registry[pod_uid]
        meant = self._target_of(pod_uid, path)
        layer = vm.layers.get(meant.path)
        if layer is None:
            raise NotATarget(f"pod {pod_uid} has no layer at {meant.path!r}; ListLayers shows those that it has")
        if layer.worker is not None and layer.state is LayerState.HUNG:
            return list(layer.holders)
        found = await self._keeper.inspector.holders([layer])
        if found is None:
            raise HostdError(f"who holds {meant.path!r} cannot be told now: the look at all processes hangs; try again")
        return found.get(meant.path, [])

    async def release(self, pod_uid: str, *, dry_run: bool, lazy: bool) -> list[ReleaseRow]:
        """Cleans without waiting for grace, and says what came of each layer."""
        vm = self._registry[pod_uid]
        await self._refuse_living(vm)
        left = [layer for layer in vm.layers.values() if layer.state is not LayerState.GONE]
        if dry_run or self.mode == Mode.OBSERVE:
            return [ReleaseRow(layer.target.path, action_of(layer), self._would(layer)) for layer in left]
        self._keeper.hurried.add(pod_uid)
        if lazy:
            self._keeper.lazy.add(pod_uid)
        try:
            await self._clean_now(vm, left)
        finally:
            self._keeper.lazy.discard(pod_uid)
        self._keeper.conclude(vm)
        return [ReleaseRow(layer.target.path, action_of(layer), _result(vm, layer)) for layer in left]

    def _would(self, layer: Layer) -> str:
        would = "would be tried" if self.mode == Mode.ENFORCE else "observe mode: would be tried"
        return f"{would}; {layer.error}" if layer.error else would

    async def _refuse_living(self, vm: VM) -> None:
        """VMAlive while a QEMU lives, or while nobody knows, or while the pod may yet start one."""
        self._keeper.conclude(vm)
        decision = self._keeper.decide(vm)
        self._registry.commit(vm)  # what was seen stays true whatever follows from it
        if decision.state is State.RUNNING:
            pids = ", ".join(str(identity.pid) for identity in vm.qemus)
            raise VMAlive(f"pod {vm.pod_uid} is alive: QEMU is process {pids}; its layers stay while it lives")
        if not decision.dead:
            raise VMAlive(f"pod {vm.pod_uid} may yet start a QEMU: {decision.why or 'it was found only now'}")
        if decision.why and decision.state is vm.state and not decision.due and decision.state not in ENDED:
            raise VMAlive(f"whether pod {vm.pod_uid} lives cannot be told: {decision.why}")

    async def _clean_now(self, vm: VM, layers: list[Layer]) -> None:
        """Joins the pass under way, then has one more begin after this call, within the patience of a caller."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        under_way = self._keeper.cleaning.of(vm.pod_uid)
        for layer in layers:
            if layer.retry_at < NEVER:
                layer.retry_at = 0
        for _ in range(3):  # one to be refused, one to learn by whom, and one to detach, where that is allowed
            if under_way is None:
                self._keeper.wake(vm.pod_uid)
                under_way = self._keeper.cleaning.of(vm.pod_uid)
            if under_way is not None:
                await asyncio.wait({under_way}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
            if all(layer.state is LayerState.GONE for layer in layers):
                break
            for layer in layers:
                if layer.retry_at < NEVER:
                    layer.retry_at = 0
            under_way = None

    async def sweep(self, *, dry_run: bool) -> list[SweepRow]:
        """Looks at everything now, and says of each dead VM's layer what is (or would be) done."""
        await look_around(self._keeper)
        rows: list[SweepRow] = []
        for vm in self._registry:
            self._keeper.conclude(vm)
            decision = self._keeper.decide(vm)
            for layer in vm.layers.values():
                if decision.dead and layer.state is not LayerState.GONE:
                    doing = "due now" if layer in decision.due else decision.why or str(decision.state)
                    rows.append(SweepRow(vm.pod_uid, layer.target.path, action_of(layer), doing))
            foreign = self._keeper.mounts.of(vm.pod_uid).foreign
            rows += [SweepRow(vm.pod_uid, path, "leave", "a mount that is no layer") for path in foreign]
            if dry_run and decision.due:
                # What was seen is told; what follows from it is not done by this call.
                self._registry.commit(vm)
                self._keeper.wake_later(vm.pod_uid)
            else:
                self._keeper.wake(vm.pod_uid)
                self._keeper.conclude(vm)
        return rows

    # --- policy ---

    async def set_policy(self, pod_uid: str, policy: Policy) -> None:
        """Durable on return."""
        vm = self._registry[pod_uid]
        self._keeper.conclude(vm)
        vm.policy = policy
        self._registry.commit(vm, must_save=True)
        self._keeper.wake(pod_uid)

    async def set_grace(self, pod_uid: str, grace_usec: int) -> None:
        """Durable on return."""
        if not 0 <= grace_usec < NEVER:
            raise InvalidArgs(f"a grace of {grace_usec} µs is none: from 0 up")
        vm = self._registry[pod_uid]
        self._keeper.conclude(vm)
        vm.grace_usec = grace_usec
        self._registry.commit(vm, must_save=True)
        self._keeper.wake(pod_uid)

    async def inhibit(self, pod_uid: str, who: str, why: str) -> int:
        """An fd for the caller: clean-up waits while any copy of it is open."""
        if pod_uid:
            _ = self._registry[pod_uid]
        try:
            fd = self._keeper.inhibitors.take(pod_uid, who, why)
        except OSError as error:
            raise LimitExceeded(f"no inhibitor can be made: {error.strerror}") from error
        if pod_uid:
            self._keeper.wake(pod_uid)
        else:
            self._keeper.wake_all()
        try:
            await self._passes_end(pod_uid)
        except BaseException:
            os.close(fd)
            raise
        return fd

    async def _passes_end(self, pod_uid: str) -> None:
        """Until what was begun before is done, or hangs: after it nothing is touched any more."""
        uids = [pod_uid] if pod_uid else [vm.pod_uid for vm in self._registry]
        passes = {task for uid in uids if (task := self._keeper.cleaning.of(uid)) is not None}
        if passes:
            await asyncio.wait(passes, timeout=_A_PASS)

    def inhibitors(self, pod_uid: str) -> list[Inhibitor]:
        """Those that hold this VM."""
        return self._keeper.inhibitors.of(pod_uid)

    async def reload(self) -> None:
        """Reads the configuration again; what only a restart can change is named and refused."""
        try:
            config = self._reload_config()
        except ConfigError as error:
            raise InvalidArgs(str(error)) from None
        if config.host != self._keeper.config.host:
            raise InvalidArgs("a change of [host] needs a restart of hostd: systemctl restart hostd")
        self._keeper.config = config
        self.reloaded(config)
        self._keeper.wake_all()


def _open(pid: int) -> Process:
    try:
        return Process.open(pid)
    except ProcessLookupError:
        raise NoSuchProcess(f"no process {pid} lives; pids are the host's, an agent in a pod passes a pidfd") from None
    except OSError as error:
        raise _no_descriptor(error) from error


def _no_descriptor(error: OSError) -> HostdError:
    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return LimitExceeded(f"no descriptor is left to follow the process with: {error.strerror}; raise LimitNOFILE=")
    return HostdError(f"the process cannot be followed: {error.strerror}")


def _leader(pod_uid: str, said: Registration) -> Process | None:
    """The process that was named, open and checked."""
    if said.leader_pidfd is not None:
        process = _adopt(said.leader_pidfd)
    elif said.leader_pid is not None:
        process = _open(said.leader_pid)
    else:
        return None
    try:
        _check_leader(pod_uid, said, process)
    except BaseException:
        process.close()
        raise
    return process


def _adopt(fd: int) -> Process:
    try:
        return Process.adopt(fd)
    except NotAPidfd as error:
        raise InvalidArgs(f"LeaderPIDFD is no pidfd: {error.strerror}") from None
    except OSError as error:
        raise _no_descriptor(error) from error


def _check_leader(pod_uid: str, said: Registration, process: Process) -> None:
    found = process.identity
    if said.leader_start_time is not None and said.leader_start_time != found.start_time:
        raise ProcessMismatch(
            f"process {found.pid} started at tick {found.start_time}, not {said.leader_start_time}: its pid was reused"
        )
    if said.leader_pidfd_id is not None and not found.inode:
        raise NotSupported("this kernel's pidfds have no ids (before Linux 6.9): name the leader by LeaderStartTime")
    if said.leader_pidfd_id is not None and said.leader_pidfd_id != found.inode:
        raise ProcessMismatch(
            f"process {found.pid} has the pidfd id {found.inode}, not {said.leader_pidfd_id}: its pid was reused"
        )
    if not process.alive():
        raise NoSuchProcess(f"the process to register for pod {pod_uid} is dead already")
    uids = pods_of(found.pid)
    if uids and pod_uid not in uids:
        raise ProcessMismatch(f"process {found.pid} belongs to pod {', '.join(sorted(uids))}, not to {pod_uid}")


def _says_nothing_new(vm: VM, said: Registration) -> bool:
    pairs = (
        (said.vmi_uid, vm.vmi_uid),
        (said.namespace, vm.namespace),
        (said.name, vm.name),
        (said.grace_usec, vm.grace_usec),
        (said.policy, vm.policy),
    )
    return all(new is None or new == known for new, known in pairs)


def action_of(layer: Layer) -> str:
    """What is done to take a layer away."""
    return "unlink" if layer.target.kind is Kind.HOTPLUG_BLOCK else "unmount"


def _result(vm: VM, layer: Layer) -> str:
    why = layer.error or (vm.error if layer.state is not LayerState.GONE else "")
    return f"{layer.state}: {why}" if why else str(layer.state)
