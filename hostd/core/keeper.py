"""The keeper: it owns the VMs, and is woken to look, decide, save, act and tell.

    event ─▶ wake(pod) ─▶ look ─▶ decide ─▶ commit (save, tell) ─▶ a pass, if something is due ─▶ wake(pod)

Events (a pidfd, the mount table, the bus, a timer) only say when to look. Everything here runs in one event loop;
between the last look at a pod and the sending of its umounts nothing else can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from hostd.core import passes, transitions
from hostd.core.decision import Decision, Facts, decide, lazily, sooner
from hostd.core.model import VM, Exit, Holder, Inhibitor, Layer, LayerState, State
from hostd.core.service import Event, LayerBlocked, VMExited, VMReleased
from hostd.core.watchers import FdStore, HolderWatch
from hostd.errors import LimitExceeded
from hostd.kubevirt.pods import is_launcher
from hostd.kubevirt.targets import Kind
from hostd.linux.cgroup import Population
from hostd.linux.clock import boottime_usec, realtime_usec
from hostd.linux.pool import Hung, PoolExhausted, WorkerError, WorkerPool
from hostd.log import Message, event, plain

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable

    from hostd.config import Config
    from hostd.core.inhibitors import Inhibitors
    from hostd.core.mounts import NodeMounts
    from hostd.core.qemus import Qemus
    from hostd.core.registry import Registry
    from hostd.core.survey import Survey
    from hostd.linux.pidfd import Process

log = logging.getLogger(__name__)


class Keeper:
    """Keeps every VM's layers while a QEMU of it lives, and takes them away afterwards."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        qemus: Qemus,
        mounts: NodeMounts,
        pool: WorkerPool,
        survey: Survey,
        inhibitors: Inhibitors,
        fds: FdStore,
    ) -> None:
        self.config = config
        self.registry = registry
        self.qemus = qemus
        self.mounts = mounts
        self.pool = pool
        self.survey = survey
        self.inhibitors = inhibitors
        self.inspector = passes.Inspector(pool)
        self._fds = fds
        self._holders = HolderWatch(self._on_holder_death)
        self._passes: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Pods whose candidates are being identified.
        self._identifying: set[str] = set()
        #: Pods whose device nodes were looked for since their VM's death.
        self._surveyed: set[str] = set()
        #: Pods whose device nodes could not be looked for, and when that is tried again (CLOCK_BOOTTIME, µs).
        self._unseen: dict[str, int] = {}
        #: No worker was to be had, which was said.
        self._starved = False
        #: VMs that somebody asked to release, so that grace is not waited for.
        self.hurried: set[str] = set()
        self.lazy: set[str] = set()
        #: By layer: errno and holders as they were told last, and when (CLOCK_BOOTTIME, µs).
        self._blocked_told: dict[tuple[str, bytes], tuple[int, tuple[Holder, ...], int]] = {}
        pool.on_unhung(self._on_unhung)

    # --- events ---

    def wake(self, pod_uid: str) -> None:
        """Looks at a VM and does what is to be done; nothing where none is known."""
        vm = self.registry.get(pod_uid)
        if vm is not None:
            self._step(vm)

    def wake_all(self) -> None:
        """Looks at all VMs."""
        for vm in self.registry:
            self._step(vm)

    def on_death(self, pod_uid: str, process: Process) -> None:
        """A followed QEMU is dead."""
        vm = self.registry.get(pod_uid)
        if vm is not None:
            was_leader = vm.leader is not None and vm.leader.same_as(process.identity)
            vm.qemus = [identity for identity in vm.qemus if not identity.same_as(process.identity)]
            if not vm.qemus:
                vm.exit = self._exit_of(vm, process)
            elif was_leader:
                vm.leader = vm.qemus[0]
            self._step(vm)
        # Only now: until how it ended is saved, the next hostd may have to ask.
        self._fds.drop(process.identity)

    def _exit_of(self, vm: VM, process: Process) -> Exit:
        try:
            end = process.end()
            killed = end is not None and end.signal > 0
            oom = killed and vm.oom_kills >= 0 and self.qemus.oom_kills(vm.pod_uid) > vm.oom_kills
        except OSError as error:  # no descriptor is left to look with: dead it is all the same
            log.warning("%s: how process %d ended cannot be told: %s", title(vm), process.pid, error)
            return Exit()
        return transitions.exit_of(end, oom=oom)

    def on_mounts(self, pod_uids: Iterable[str]) -> None:
        """The mounts of these pods changed."""
        for pod_uid in pod_uids:
            vm = self.registry.get(pod_uid)
            if vm is None:
                self.start_task(self._meet_later(pod_uid), f"meet {pod_uid}")
                continue
            # What is refused because of another mount may be free now.
            for layer in vm.layers.values():
                if layer.state is LayerState.BUSY and layer.attempts > 1:
                    layer.retry_at = sooner(layer, boottime_usec() + _SOON)
            self._step(vm)

    def _on_unhung(self, hung: Hung) -> None:
        for vm in self.registry:
            for layer in vm.layers.values():
                if layer.target.relative == hung.what and layer.state is LayerState.HUNG:
                    self._retry(vm, layer)

    def _on_holder_death(self, pod_uid: str, path: bytes) -> None:
        vm = self.registry.get(pod_uid)
        layer = vm.layers.get(path) if vm else None
        if vm is not None and layer is not None:
            self._retry(vm, layer)

    def _retry(self, vm: VM, layer: Layer) -> None:
        layer.retry_at = sooner(layer, boottime_usec())
        if layer.state is LayerState.HUNG:
            layer.retry_at = 0
            layer.worker, layer.holders = None, ()
            layer.state = LayerState.MOUNTED
            if layer.target.path not in self.mounts.of(vm.pod_uid).targets and layer.source[0]:
                transitions.see_unmounted(layer, boottime_usec())
        self._step(vm)

    # --- getting to know ---

    async def meet(self, pod_uid: str, qemus: Collection[int] = (), *, look: bool = True) -> VM | None:
        """Takes up a pod that was not known, if it is a VM's. `qemus`: processes in it that look like one.

        Without `look` it is the caller who looks at it, and wakes it then.
        """
        is_vm = bool(qemus) or any(
            target.kind in {Kind.CONTAINERDISK, Kind.KERNEL_BOOT}
            for target, _ in self.mounts.of(pod_uid).targets.values()
        )
        if not is_vm:
            empty_dirs = await self.survey.empty_dirs(pod_uid)
            if empty_dirs is None:
                asyncio.get_running_loop().call_later(_EXHAUSTED / 1e6, self.on_pod, pod_uid)
            if not is_launcher(empty_dirs or ()) and not await self._is_rest_of_launcher(pod_uid):
                return None
        vm = self.registry.get(pod_uid)
        if vm is None:
            vm = VM(pod_uid, first_seen_at=boottime_usec())
            transitions.see_mounts(vm, self.mounts.of(pod_uid), vm.first_seen_at)
            try:
                self.registry.add(vm)
            except LimitExceeded as error:
                log.error("pod %s is not followed: %s", pod_uid, error)  # noqa: TRY400 - a bound, not a fault
                return None
            log.info(
                "pod %s: found, with %d layers", pod_uid, len(vm.layers), extra=event(Message.VM_FOUND, pod_uid=pod_uid)
            )
        if look:
            self._step(vm)
        return vm

    async def _is_rest_of_launcher(self, pod_uid: str) -> bool:
        return bool(self.mounts.of(pod_uid).targets) and await self.survey.is_rest_of_launcher(pod_uid)

    def follow(self, vm: VM, process: Process) -> None:
        """A QEMU of this VM lives: from now on the kernel tells of its death. Takes the process over."""
        identity = process.identity
        if not self.qemus.follow(vm.pod_uid, process):
            return
        self._fds.keep(vm.pod_uid, process)
        vm.qemus.append(identity)
        if vm.leader is None or not any(vm.leader.same_as(known) for known in vm.qemus):
            vm.leader = identity
        vm.had_qemu = True
        with contextlib.suppress(OSError):  # what cannot be read was not seen
            vm.cgroup_seen |= identity.pid in self.qemus.cgroups.processes(vm.pod_uid)
        vm.oom_kills = self.qemus.oom_kills(vm.pod_uid)

    def on_pod(self, pod_uid: str) -> None:
        """A pod has come, or the first container of one; perhaps a VM's."""
        if self.registry.get(pod_uid) is None:
            self.start_task(self._meet_later(pod_uid), f"meet {pod_uid}")
        else:
            self.wake(pod_uid)

    async def _meet_later(self, pod_uid: str) -> None:
        await self.meet(pod_uid)

    def adopt_hung(self, vm: VM) -> None:
        """Waits for the workers of an earlier hostd that may still hang in an umount, known to hang or not."""
        mounted = self.mounts.of(vm.pod_uid).targets
        for path, layer in vm.layers.items():
            if layer.state is LayerState.HUNG and layer.worker is None:
                # Who hung in it was never known, so nobody would tell of its end: it is tried again.
                layer.state, layer.retry_at = LayerState.MOUNTED, 0
            if layer.state is LayerState.HUNG or layer.worker is None:
                continue
            if path not in mounted and layer.source[0] and passes.is_at_work(layer):
                sentence = f"worker {layer.worker.pid} of an earlier hostd is at it still, and does not come back"
                transitions.see_hung(layer, layer.worker, sentence)
            else:
                layer.worker = None
        self._holders.watch(vm.pod_uid, [layer for layer in vm.layers.values() if layer.state is LayerState.HUNG])

    async def identify(self, vm: VM, candidates: list[Process]) -> None:
        """Finds out which of the processes are QEMUs, and of which VM. Takes them over."""
        others = self.qemus.launchers(vm.pod_uid)
        pids = [process.identity.pid for process in candidates]
        try:
            commands = await self.survey.commands(pids + others)
        except BaseException:
            for process in candidates:
                process.close()
            raise
        for process in candidates:
            command = commands[process.identity.pid]
            if not process.alive():
                process.close()
            elif command.probe or (command.known and command.guest is None):
                self.qemus.is_other(vm.pod_uid, process.identity)
                process.close()
            else:
                # One whose command line cannot be read counts as well: not knowing is not death.
                self.follow(vm, process)
                if command.guest and not vm.name:
                    vm.namespace, vm.name = command.guest.namespace, command.guest.name
        for pid in others:
            launcher = commands[pid].launcher
            if launcher and not vm.vmi_uid:
                vm.vmi_uid, vm.namespace, vm.name = launcher.uid, launcher.namespace, launcher.name

    async def look_for_nodes(self, vm: VM) -> bool:
        """Brings the VM's device nodes up to date; False where they cannot be looked at now."""
        nodes = await self.survey.block_nodes(vm.pod_uid)
        if nodes is not None:
            transitions.see_block_nodes(vm, nodes, boottime_usec())
        return nodes is not None

    async def _identify_and_wake(self, vm: VM, candidates: list[Process]) -> None:
        try:
            await self.identify(vm, candidates)
            await self.look_for_nodes(vm)
        finally:
            self._identifying.discard(vm.pod_uid)
        self.wake(vm.pod_uid)

    # --- look, decide, enter ---

    def look(self, vm: VM) -> Facts:
        """What is seen of the pod now; candidates for its QEMU are identified meanwhile."""
        facts, candidates = self.qemus.look(vm)
        if candidates and vm.pod_uid not in self._identifying:
            self._identifying.add(vm.pod_uid)
            self.start_task(self._identify_and_wake(vm, candidates), f"identify {vm.pod_uid}")
        else:
            for process in candidates:
                process.close()
        vm.cgroup_seen |= facts.cgroup in {Population.POPULATED, Population.EMPTY}
        return dataclasses.replace(facts, inhibited=bool(self.inhibitors.of(vm.pod_uid)))

    def decide(self, vm: VM) -> Decision:
        """Looks at the VM and decides what follows."""
        now = boottime_usec()
        transitions.see_mounts(vm, self.mounts.of(vm.pod_uid), now, read_at=self.mounts.read_at)
        facts = self.look(vm)
        if vm.had_qemu and not vm.exited_at and not facts.qemu and not facts.doubt:
            self._note_death(vm, now)
        decision = decide(vm, facts, self.config.cleanup, now, hurry=vm.pod_uid in self.hurried)
        if decision.dead and not vm.exited_at:
            vm.exited_at = now
        return decision

    @staticmethod
    def _note_death(vm: VM, now: int) -> None:
        vm.exited_at, vm.exited_usec = now, realtime_usec()

    def _step(self, vm: VM) -> None:
        """Whoever wakes a VM may be told of an event that does not come again, and wake others after it: so a fault of
        ours costs this VM a moment, and the others nothing."""
        try:
            self._take_step(vm)
        except Exception:
            log.exception("%s: a look at it failed and is tried again", title(vm))
            self._set_timer(vm, boottime_usec() + _EXHAUSTED)

    def _take_step(self, vm: VM) -> None:
        decision = self.decide(vm)
        if decision.state is State.RELEASED and vm.state is not State.RELEASED and vm.pod_uid not in self._surveyed:
            # Device nodes are no mounts: nobody tells of them, so they are looked for before "released" is said.
            again_at = self._unseen.get(vm.pod_uid, 0)
            decision = Decision(State.CLEANING, dead=True, look_at=again_at or None, why=_UNSEEN if again_at else "")
            if again_at <= boottime_usec():
                decision = dataclasses.replace(decision, look_at=None)
                self._start_pass(vm)
        self._enter(vm, decision)
        if decision.forget:
            self.forget(vm)
            return
        self._set_timer(vm, decision.look_at)
        if decision.due:
            self._start_pass(vm)

    def _enter(self, vm: VM, decision: Decision) -> None:
        """Brings the VM into the state that was decided, saves that, and tells it."""
        events: list[Event] = []
        before = vm.state
        told_exit = before in {State.PENDING, State.RUNNING}
        error_before, vm.state = vm.error, decision.state
        if decision.state is not State.CLEANING or before is not State.BLOCKED:
            # While a blocked layer is tried once more, what is known of it stays true.
            vm.error = decision.why
        if decision.state in {State.PENDING, State.RUNNING} and before is not decision.state:
            self._come_to_life(vm)
        if decision.state is State.RUNNING:
            self._enter_running(vm, before)
        elif decision.dead and told_exit and vm.had_qemu:
            events.append(VMExited(vm, vm.exit))
            self._log_exit(vm)
        # Of a blocked VM the layers are told one by one, and a pod that has not begun is nothing to tell.
        if vm.error not in {"", error_before} and decision.state not in {State.PENDING, State.BLOCKED}:
            log.warning("%s: %s: %s", title(vm), vm.state, vm.error, extra=about(Message.VM_STUCK, vm))
        if decision.state is State.RELEASED and before is not State.RELEASED:
            events.append(self._enter_released(vm))
        if decision.state in {State.EXITED, State.HELD, State.RELEASED}:
            self.qemus.watch(vm.pod_uid)
        else:
            self.qemus.unwatch(vm.pod_uid)
        events += self._newly_blocked(vm)
        self.registry.commit(vm, *events)

    def _come_to_life(self, vm: VM) -> None:
        """A QEMU, or a pod that has only now begun: what was found out about the end before this life is void."""
        vm.exited_at = vm.exited_usec = vm.released_at = vm.released_usec = 0
        vm.exit = Exit()
        self._surveyed.discard(vm.pod_uid)
        self._unseen.pop(vm.pod_uid, None)
        self.hurried.discard(vm.pod_uid)
        self.lazy.discard(vm.pod_uid)
        for layer in vm.layers.values():
            transitions.see_wanted(layer)

    def _enter_running(self, vm: VM, before: State) -> None:
        if before is State.RUNNING:
            return
        vm.started_usec = realtime_usec()
        pid = vm.leader.pid if vm.leader else 0
        log.info("%s: running, QEMU is process %d", title(vm), pid, extra=about(Message.VM_RUNNING, vm, leader=pid))

    def _log_exit(self, vm: VM) -> None:
        how = {"status": vm.exit.status, "signal": vm.exit.signal, "reason": vm.exit.reason}
        log.info(
            "%s: QEMU ended (%s), %d layers to go", title(vm), exit_words(vm.exit), _left(vm),
            extra=about(Message.VM_EXITED, vm, **how),
        )  # fmt: skip

    def _enter_released(self, vm: VM) -> VMReleased:
        vm.released_at, vm.released_usec = boottime_usec(), realtime_usec()
        elapsed = max(0, max((layer.gone_at for layer in vm.layers.values()), default=0) - vm.exited_at)
        self.hurried.discard(vm.pod_uid)
        self.lazy.discard(vm.pod_uid)
        log.info(
            "%s: released, %d layers gone %.1f ms after the death", title(vm), len(vm.layers), elapsed / 1000,
            extra=about(Message.VM_RELEASED, vm, layers=len(vm.layers), elapsed_usec=elapsed),
        )  # fmt: skip
        for path in self.mounts.of(vm.pod_uid).foreign:
            log.warning(
                "%s: %s is mounted below its directories and is no layer, so it is left", title(vm), plain(path),
                extra=about(Message.FOREIGN_MOUNT, vm, target=path),
            )  # fmt: skip
        return VMReleased(vm, len(vm.layers), elapsed)

    def _newly_blocked(self, vm: VM) -> Iterable[Event]:
        """Layers that cannot be had, told once a spell and again, not too often, when the reason changes."""
        now = boottime_usec()
        for path, layer in vm.layers.items():
            key = (vm.pod_uid, path)
            # A first refusal is no news: what a dying process still holds is free in milliseconds.
            stuck = layer.state in {LayerState.BUSY, LayerState.DETACHED} and layer.attempts > 1
            remounted = layer.state is LayerState.MOUNTED and layer.error == transitions.REMOUNTED
            if vm.state in {State.RUNNING, State.RELEASED}:
                self._blocked_told.pop(key, None)
            if vm.state is State.RUNNING or not (stuck or remounted or layer.state is LayerState.HUNG):
                continue
            number, named, told_at = self._blocked_told.get(key, (-1, (), 0))
            if (number, named) == (layer.errno, layer.holders) or (named and now < told_at + _TELL_AGAIN):
                continue
            self._blocked_told[key] = (layer.errno, layer.holders, now)
            message = Message.LAYER_REMOUNTED if remounted else _TOLD_AS.get(layer.state, Message.LAYER_BLOCKED)
            log.warning(
                "%s: %s is %s: %s", title(vm), plain(path), layer.state, layer.error or "no reason is known",
                extra=about(message, vm, target=path, errno=layer.errno),
            )  # fmt: skip
            yield LayerBlocked(vm, layer, layer.holders)

    def _set_timer(self, vm: VM, look_at: int | None) -> None:
        timer = self._timers.pop(vm.pod_uid, None)
        if timer:
            timer.cancel()
        if look_at is not None:
            loop = asyncio.get_running_loop()
            delay = max(0, look_at - boottime_usec()) / 1e6
            self._timers[vm.pod_uid] = loop.call_later(delay, self.wake, vm.pod_uid)

    # --- acting ---

    def _start_pass(self, vm: VM) -> None:
        if vm.pod_uid not in self._passes:
            task = self.start_task(self._pass(vm), f"pass {vm.pod_uid}")
            self._passes[vm.pod_uid] = task
            task.add_done_callback(lambda task: self._end_pass(vm, task))

    def _end_pass(self, vm: VM, task: asyncio.Task[None]) -> None:
        self._passes.pop(vm.pod_uid, None)
        if task.cancelled():
            return
        if task.exception() is None:
            self.wake(vm.pod_uid)
        else:  # it is logged; a fault of ours must not become a busy loop
            self._set_timer(vm, boottime_usec() + _EXHAUSTED)

    def pass_of(self, pod_uid: str) -> asyncio.Task[None] | None:
        """The pass under way for a VM, for those who want to wait for its end."""
        return self._passes.get(pod_uid)

    async def _pass(self, vm: VM) -> None:
        """Looks once more, then unmounts what is due, then finds out what came of it."""
        try:
            async with self.pool.worker() as worker:
                # From here to the sending of the job nothing is awaited: no QEMU can start unseen by this look.
                self._starved = False
                now = boottime_usec()
                decision = self.decide(vm)
                due = [layer for layer in decision.due if layer.state is not LayerState.DETACHED]
                if due:
                    asked = vm.pod_uid in self.lazy
                    passes.intend(worker, due)
                    self.registry.commit(vm)
                    await passes.unmount(worker, due, lazily(due, vm, self.config.cleanup, now, asked=asked), now)
        except (PoolExhausted, WorkerError) as error:
            if not self._starved:  # all VMs that wait would say the same
                log.error("%s: no worker is left to unmount with: %s", title(vm), error)  # noqa: TRY400
            self._starved = True
            for layer in vm.layers.values():
                layer.retry_at = max(layer.retry_at, boottime_usec() + _EXHAUSTED)
                if layer.state is LayerState.MOUNTED:
                    layer.error = str(error)
            await asyncio.sleep(_EXHAUSTED / 1e6)  # a VM without layers would ask for the next pass at once
            return
        await self._settle(vm)

    async def _settle(self, vm: VM) -> None:
        await self.mounts.fresh()
        transitions.see_mounts(vm, self.mounts.of(vm.pod_uid), boottime_usec(), read_at=self.mounts.read_at)
        if await self.look_for_nodes(vm):
            self._surveyed.add(vm.pod_uid)
            self._unseen.pop(vm.pod_uid, None)
        else:  # until it can be told, "released" would be a guess
            self._unseen[vm.pod_uid] = boottime_usec() + _EXHAUSTED
        await self.inspector.settle(vm.layers.values())
        self._holders.watch(vm.pod_uid, vm.layers.values())

    # --- the end ---

    def forget(self, vm: VM) -> None:
        """Drops a VM from the list."""
        self._set_timer(vm, None)
        self.qemus.forget(vm.pod_uid)
        self._holders.watch(vm.pod_uid, ())
        self._surveyed.discard(vm.pod_uid)
        self._unseen.pop(vm.pod_uid, None)
        self.hurried.discard(vm.pod_uid)
        for path in vm.layers:
            self._blocked_told.pop((vm.pod_uid, path), None)
        log.info("%s: forgotten", title(vm), extra=about(Message.VM_FORGOTTEN, vm))
        self.registry.remove(vm)

    def on_inhibitor_end(self, inhibitor: Inhibitor) -> None:
        """An inhibitor was let go."""
        if inhibitor.pod_uid:
            self.wake(inhibitor.pod_uid)
        else:
            self.wake_all()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs something beside the loop and keeps hold of it; what it fails with is logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())

    async def close(self) -> None:
        """Stops acting; what is mounted stays for the next hostd."""
        for timer in self._timers.values():
            timer.cancel()
        # First nothing more comes in, so that no new work begins while the old is being cancelled.
        self._holders.close()
        self.qemus.close()
        self.inhibitors.close()
        self.mounts.close()
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


_TOLD_AS = {LayerState.DETACHED: Message.LAYER_DETACHED}
#: How soon a busy layer is tried again after its pod's mounts changed, and when no worker is to be had (µs).
_SOON = 200_000
_EXHAUSTED = 5_000_000
#: How long nothing new is said of a layer whose holders were named: they may change many times a second (µs).
_TELL_AGAIN = 30_000_000
_UNSEEN = "whether device nodes are left cannot be told: their directory cannot be looked at"


def title(vm: VM) -> str:
    """How the log calls a VM."""
    return f"{vm.namespace}/{vm.name} (pod {vm.pod_uid})" if vm.name else f"pod {vm.pod_uid}"


def about(message: Message, vm: VM, **fields: object) -> dict[str, object]:
    """The log's fields of a VM's event."""
    return event(message, pod_uid=vm.pod_uid, vmi_uid=vm.vmi_uid, namespace=vm.namespace, vm=vm.name, **fields)


def exit_words(end: Exit) -> str:
    """How a QEMU ended, in words."""
    if end.signal > 0:
        return f"{end.reason}, signal {end.signal}"
    return f"{end.reason}, status {end.status}" if end.status >= 0 else str(end.reason)


def _left(vm: VM) -> int:
    return sum(layer.state is not LayerState.GONE for layer in vm.layers.values())
