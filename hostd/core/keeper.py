"""The keeper: it owns the VMs, and is woken to look, decide, act, save and tell.

    event ─▶ wake(pod) ─▶ look ─▶ decide ─▶ send the umounts that are due ─▶ await them ─▶ wake(pod)
                                     └─▶ afterwards: save ─▶ tell

Events (a pidfd, the mount table, the bus, a timer) only say when to look. Everything here runs in one event loop;
between the last look at a pod and the sending of its umounts nothing else can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from hostd.core import passes, transitions
from hostd.core.afterwards import Afterwards
from hostd.core.cleaning import Cleaning, hangs, worth_trying
from hostd.core.decision import Decision, Facts, decide, lazily, sooner
from hostd.core.identification import Identification
from hostd.core.lingering import Lingering
from hostd.core.model import VM, Exit, Inhibitor, Layer, LayerState, State
from hostd.core.nodes import BlockNodes
from hostd.core.passes import Due
from hostd.core.teller import ALIVE, Before, Teller, title
from hostd.core.watchers import FdStore, HolderWatch
from hostd.errors import LimitExceeded
from hostd.kubevirt.pods import is_launcher
from hostd.kubevirt.targets import Kind
from hostd.linux.cgroup import Population
from hostd.linux.clock import boottime_usec, realtime_usec
from hostd.log import Message, event

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Sequence

    from hostd.config import Config
    from hostd.core.inhibitors import Inhibitors
    from hostd.core.mounts import NodeMounts
    from hostd.core.qemus import Qemus
    from hostd.core.registry import Registry
    from hostd.core.survey import Survey
    from hostd.linux.pidfd import End, Process
    from hostd.linux.pool import Hung, WorkerPool

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
        self.identification = Identification(registry, qemus, survey, self.follow)
        self.nodes = BlockNodes(survey, pool.inotify, self._on_nodes)
        self._fds = fds
        self._teller = Teller(registry, mounts)
        self.cleaning = Cleaning(pool, self)
        self._afterwards = Afterwards(lambda: self.cleaning.busy, self._conclude)
        self.inspector = passes.Inspector(pool, self._afterwards.quiet)
        self._holders = HolderWatch(self._on_holder_death)
        self._lingering = Lingering(qemus, self.on_pod)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Pods whose candidates are being identified.
        self._identifying: set[str] = set()
        #: Pods that are being met, and whether more came of them meanwhile.
        self._meeting: dict[str, bool] = {}
        #: They wait for a worker, to be looked at then, and died before that (CLOCK_BOOTTIME, µs).
        self._unlooked: dict[str, int] = {}
        #: By pod: QEMUs whose end is not saved yet.
        self._dead: dict[str, list[Process]] = {}
        #: Pods whose device nodes were looked for since their VM's death.
        self._surveyed: set[str] = set()
        #: Pods whose device nodes could not be looked for, and when that is tried again (CLOCK_BOOTTIME, µs).
        self._unseen: dict[str, int] = {}
        #: VMs that somebody asked to release, so that grace is not waited for.
        self.hurried: set[str] = set()
        self.lazy: set[str] = set()
        registry.relieve = pool.relieve = qemus.relieve
        pool.on_unhung(self._on_unhung)
        mounts.when_quiet = self._afterwards.then

    # --- events ---

    def wake(self, pod_uid: str) -> None:
        """Looks at a VM and does what is to be done; nothing where none is known."""
        vm = self.registry.get(pod_uid)
        if vm is not None:
            self._step(vm)

    def wake_later(self, pod_uid: str) -> None:
        """The same in a moment, unless it will be looked at anyway."""
        vm = self.registry.get(pod_uid)
        if vm is not None and not self.cleaning.of(pod_uid) and pod_uid not in self._timers:
            self._set_timer(vm, boottime_usec() + _AGAIN)

    def wake_all(self) -> None:
        """Looks at all VMs."""
        for vm in self.registry:
            self._step(vm)

    def on_death(self, pod_uid: str, process: Process) -> None:
        """A followed QEMU is dead. Takes the process over: until its end is saved, that may have to be asked again."""
        vm = self.registry.get(pod_uid)
        if vm is None:
            self._fds.drop(process.identity)
            process.close()
            return
        self._dead.setdefault(pod_uid, []).append(process)
        was_leader = vm.leader is not None and vm.leader.same_as(process.identity)
        vm.qemus = [identity for identity in vm.qemus if not identity.same_as(process.identity)]
        if was_leader and vm.qemus:
            vm.leader = vm.qemus[0]
        if vm.qemus or not self.cleaning.crowded or self.cleaning.of(pod_uid):
            self._step(vm)
        else:
            # It is looked at when its turn comes: what is seen before would have to be seen again.
            self._unlooked[pod_uid] = boottime_usec()
            self.cleaning.start(vm, None, 0)
            self._afterwards.add(vm, Before(vm.state, vm.error))
        if process.fileno() >= 0 and not process.end_is_kept:  # closed, it was told already
            self._end_of(vm, process)  # now, for the kernel forgets it when the process is reaped

    def on_mounts(self, pod_uids: Iterable[str]) -> None:
        """The mounts of these pods changed."""
        for pod_uid in pod_uids:
            vm = self.registry.get(pod_uid)
            if vm is None:
                self.on_pod(pod_uid)
                continue
            # What is refused because of another mount may be free now.
            for layer in vm.layers.values():
                if layer.state is LayerState.BUSY and layer.attempts > 1:
                    layer.retry_at = sooner(layer, boottime_usec() + _SOON)
            if not self.cleaning.of(pod_uid):  # else it is most likely our own work, and is looked at when that is done
                self._step(vm)

    def _on_unhung(self, hung: Hung) -> None:
        for vm in self.registry:
            if not vm.had_qemu and any(hung.what == b"/proc/%d/cmdline" % identity.pid for identity in vm.qemus):
                self._start_to_identify(vm, self.qemus.followed_once_more(vm.pod_uid))
            for layer in list(vm.layers.values()):  # a look may find more, or fewer
                waits = layer.state is LayerState.BUSY and layer.errno == errno.EAGAIN
                if waits or (layer.target.relative == hung.what and hangs(layer)):
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
                self._meet_again(pod_uid)
            if not is_launcher(empty_dirs or ()) and not await self._is_rest_of_launcher(pod_uid):
                return None
        vm = self.registry.get(pod_uid)
        if vm is None:
            vm = VM(pod_uid, first_seen_at=boottime_usec())
            transitions.see_mounts(vm, self.mounts.of(pod_uid), vm.first_seen_at)
            if self.registry.full:
                self._make_room()
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

    def _make_room(self) -> None:
        """With a released VM only words are lost; a death that nobody sees loses layers."""
        if over := next((vm for vm in self.registry if vm.state is State.RELEASED), None):
            self.forget(over)

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
        with contextlib.suppress(OSError):  # what cannot be read was not seen
            vm.cgroup_seen |= identity.pid in self.qemus.cgroups.processes(vm.pod_uid)
        vm.oom_kills = self.qemus.oom_kills(vm.pod_uid)

    def on_pod(self, pod_uid: str) -> None:
        """A pod has come, or the first container of one; perhaps a VM's."""
        if self.registry.get(pod_uid) is not None:
            self.wake(pod_uid)
        elif pod_uid in self._meeting:
            self._meeting[pod_uid] = True
        else:
            self._meeting[pod_uid] = False
            self.start_task(self._keep_meeting(pod_uid), f"meet {pod_uid}")

    async def _keep_meeting(self, pod_uid: str) -> None:
        """Once at a time, however often the mounts of a pod change that is no VM's."""
        try:
            await self.meet(pod_uid)
        finally:
            more = self._meeting.pop(pod_uid)
        if more:
            self.on_pod(pod_uid)

    def _meet_again(self, pod_uid: str) -> None:
        """Later, for it could not be told what the pod is."""
        if pod_uid not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[pod_uid] = loop.call_later(_AGAIN / 1e6, self._on_pod_again, pod_uid)

    def _on_pod_again(self, pod_uid: str) -> None:
        self._timers.pop(pod_uid)
        self.on_pod(pod_uid)

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

    def _start_to_identify(self, vm: VM, candidates: list[Process]) -> None:
        if candidates and vm.pod_uid not in self._identifying:
            self._identifying.add(vm.pod_uid)
            self.start_task(self._identify_and_wake(vm, candidates), f"identify {vm.pod_uid}")
        else:
            for process in candidates:
                process.close()

    async def _identify_and_wake(self, vm: VM, candidates: list[Process]) -> None:
        try:
            if await self.identification.identify(vm, candidates):
                await self.nodes.look(vm)
        finally:
            self._identifying.discard(vm.pod_uid)
        self.on_pod(vm.pod_uid)  # one that was forgotten meanwhile is met again

    def _on_nodes(self, pod_uid: str) -> None:
        if vm := self.registry.get(pod_uid):
            self.start_task(self._look_for_nodes(vm), f"look for device nodes of {pod_uid}")

    async def _look_for_nodes(self, vm: VM) -> None:
        await self.nodes.look(vm)
        self.wake(vm.pod_uid)

    # --- look, decide, enter ---

    def look(self, vm: VM) -> Facts:
        """What is seen of the pod now; candidates for its QEMU are identified meanwhile."""
        facts, candidates = self.qemus.look(vm)
        self._start_to_identify(vm, candidates)
        vm.cgroup_seen |= facts.cgroup in {Population.POPULATED, Population.EMPTY}
        return dataclasses.replace(facts, inhibited=True) if self.inhibitors.of(vm.pod_uid) else facts

    def decide(self, vm: VM) -> Decision:
        """Looks at the VM and decides what follows."""
        now, facts = boottime_usec(), self.look(vm)
        # What is mounted was there when a VM died that had to wait for this look, for all that is known.
        seen_at = self._unlooked.get(vm.pod_uid, now)
        if vm.had_qemu and not vm.exited_at and not facts.qemu and not facts.doubt:
            self.note_death(vm, seen_at)
        # Only now: what a living VM has no more, the agent took away; of a dead one it is told what became of it.
        transitions.see_mounts(vm, self.mounts.of(vm.pod_uid), seen_at, read_at=self.mounts.read_at)
        decision = decide(vm, facts, self.config.cleanup, now, hurry=vm.pod_uid in self.hurried)
        if decision.dead and not vm.exited_at:
            vm.exited_at = now
        return decision

    @staticmethod
    def note_death(vm: VM, at: int) -> None:
        """No QEMU of the VM lives since then (CLOCK_BOOTTIME, µs)."""
        vm.exited_at, vm.exited_usec = at, realtime_usec() - (boottime_usec() - at)

    def _step(self, vm: VM) -> None:
        """Whoever wakes a VM may be told of an event that does not come again, and wake others after it: so a fault of
        ours costs this VM a moment, and the others nothing."""
        try:
            self._take_step(vm)
        except Exception:
            log.exception("%s: a look at it failed and is tried again", title(vm))
            self._set_timer(vm, boottime_usec() + _AGAIN)

    def _take_step(self, vm: VM) -> None:
        now = boottime_usec()
        decision = self._look_and_enter(vm)
        if decision.forget:
            self.forget(vm)
            return
        self._set_timer(vm, decision.look_at)
        if (decision.due or _is_to_look(decision)) and not self.cleaning.of(vm.pod_uid):
            self.cleaning.start(vm, self._due(vm, decision, now), now)

    def see_due(self, vm: VM, now: int) -> Due | None:
        """Its turn has come; nothing is due for one that was forgotten meanwhile."""
        if self._is_forgotten(vm):
            return None
        return self._due(vm, self._look_and_enter(vm), now)

    def _look_and_enter(self, vm: VM) -> Decision:
        """Looks, decides, and enters what was decided, to be saved and told afterwards. From the look at the pod to the
        sending of umounts nothing is awaited: no QEMU can start unseen by it."""
        decision = self._look_for_nodes_first(vm, self.decide(vm))
        self._unlooked.pop(vm.pod_uid, None)
        before = Before(vm.state, vm.error)
        if (decision.state in ALIVE) != (vm.state in ALIVE) != (self._afterwards.before(vm, before).state in ALIVE):
            self._afterwards.do(vm.pod_uid)  # else of an end that a life follows, or of a short life, nothing is told
        self._enter(vm, decision)
        self._afterwards.add(vm, before)
        return decision

    def _due(self, vm: VM, decision: Decision, now: int) -> Due | None:
        # What was detached is only to be looked at.
        layers = [layer for layer in decision.due if layer.state is not LayerState.DETACHED]
        layers = worth_trying(layers, self.pool, self.registry, now)
        return Due(vm, layers, self._lazily(vm, layers, now)) if layers else None

    def _look_for_nodes_first(self, vm: VM, decision: Decision) -> Decision:
        """Device nodes are no mounts: nobody tells of them, so a pass looks for them before "released" is said."""
        if decision.state is not State.RELEASED or vm.state is State.RELEASED or vm.pod_uid in self._surveyed:
            return decision
        again_at = self._unseen.get(vm.pod_uid, 0)
        look_at = again_at if again_at > boottime_usec() else None
        return Decision(State.CLEANING, dead=True, look_at=look_at, why=_UNSEEN if again_at else "")

    def _conclude(self, vm: VM, before: Before) -> None:
        """Saves what became of a VM, and tells of it."""
        try:
            if vm.pod_uid in self._unlooked:
                self._step(vm)
                self._afterwards.drop(vm.pod_uid)  # what the step has to tell is told here
            dead = self._dead.pop(vm.pod_uid, [])
            try:
                if dead and not vm.qemus:
                    vm.exit = self._exit_of(vm, dead[-1])
                under_way = self.cleaning.of(vm.pod_uid) is not None
                self._teller.tell(vm, before, self.registry.save(vm), under_way=under_way)
            finally:
                for process in dead:
                    self._fds.drop(process.identity)
                    process.close()
        except Exception:
            log.exception("%s: what became of it cannot be saved or told, which is tried again", title(vm))
            self._set_timer(vm, boottime_usec() + _AGAIN)

    def _exit_of(self, vm: VM, process: Process) -> Exit:
        end, oom = self._end_of(vm, process), False
        with contextlib.suppress(OSError):  # no more than a word hangs on this
            oom = end is not None and end.signal > 0 and self.qemus.oom_kills(vm.pod_uid) > vm.oom_kills >= 0
        return transitions.exit_of(end, oom=oom)

    def _end_of(self, vm: VM, process: Process) -> End | None:
        try:
            return process.end()
        except OSError as error:  # no descriptor is left to look with: dead it is all the same
            if self.qemus.relieve(error):
                return self._end_of(vm, process)
            log.warning("%s: how process %d ended cannot be told: %s", title(vm), process.pid, error)
            return None

    def conclude(self, vm: VM) -> None:
        """What became of a VM is saved and told on return: before a request changes it, lest half a death is saved."""
        self._afterwards.do(vm.pod_uid)

    def _enter(self, vm: VM, decision: Decision) -> None:
        """Brings the VM into the state that was decided."""
        before, vm.state = vm.state, decision.state
        if decision.state is not State.CLEANING or before is not State.BLOCKED:
            # While a blocked layer is tried once more, what is known of it stays true.
            vm.error = decision.why
        if decision.state in {State.PENDING, State.RUNNING} and before is not decision.state:
            self._come_to_life(vm)
        if decision.state is State.RUNNING and before is not State.RUNNING:
            vm.started_usec = realtime_usec()
        if decision.state is State.RELEASED and before is not State.RELEASED:
            vm.released_at, vm.released_usec = boottime_usec(), realtime_usec()
            self.hurried.discard(vm.pod_uid)
            self.lazy.discard(vm.pod_uid)
        if decision.state in {State.EXITED, State.HELD, State.RELEASED}:
            self.qemus.watch(vm.pod_uid)
        else:
            self.qemus.unwatch(vm.pod_uid)

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

    def _set_timer(self, vm: VM, look_at: int | None) -> None:
        timer = self._timers.pop(vm.pod_uid, None)
        if timer:
            timer.cancel()
        if look_at is not None:
            loop = asyncio.get_running_loop()
            delay = max(0, look_at - boottime_usec()) / 1e6
            self._timers[vm.pod_uid] = loop.call_later(delay, self.wake, vm.pod_uid)

    # --- acting ---

    def _lazily(self, vm: VM, layers: Iterable[Layer], now: int) -> set[bytes]:
        return lazily(layers, vm, self.config.cleanup, now, asked=vm.pod_uid in self.lazy)

    def find_out(self, vm: VM, tried: Due | None) -> None:
        """What came of an umount is found out once nobody's umounts wait for that."""

        def start() -> None:
            task = self.start_task(self._see_outcome(vm, tried), f"see what came of {vm.pod_uid}")
            task.add_done_callback(partial(self._on_outcome, vm))

        self._afterwards.then(start)

    def _on_outcome(self, vm: VM, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.cleaning.end(vm, failed=task.exception() is not None)

    def on_end(self, vm: VM, *, failed: bool) -> None:
        """It is known what came of its layers, but for a fault, which was logged."""
        if failed:  # it must not become a busy loop
            self._set_timer(vm, boottime_usec() + _AGAIN)
        else:
            self.wake(vm.pod_uid)

    async def _see_outcome(self, vm: VM, tried: Due | None) -> None:
        await self._settle(vm)
        if tried:
            # Who holds them is known just now, and it may have allowed what the job was not allowed.
            self._retry_lazily(vm, [layer for layer in tried.layers if layer.target.path not in tried.lazy])

    def _retry_lazily(self, vm: VM, layers: Sequence[Layer]) -> None:
        now = boottime_usec()
        may_go = self._lazily(vm, layers, now)
        for layer in layers:
            if layer.target.path in may_go:
                layer.retry_at = now

    async def _settle(self, vm: VM) -> None:
        await self.mounts.fresh(vm.pod_uid)
        if self._is_forgotten(vm):
            return
        transitions.see_mounts(vm, self.mounts.of(vm.pod_uid), boottime_usec(), read_at=self.mounts.read_at)
        seen = await self.nodes.look(vm)
        if self._is_forgotten(vm):
            return
        if seen:
            if vm.exited_at:
                self._surveyed.add(vm.pod_uid)
            self._unseen.pop(vm.pod_uid, None)
        else:  # until it can be told, "released" would be a guess
            self._unseen[vm.pod_uid] = boottime_usec() + _AGAIN
        await self.inspector.settle(vm.layers.values())
        if not self._is_forgotten(vm):
            self._holders.watch(vm.pod_uid, vm.layers.values())

    def _is_forgotten(self, vm: VM) -> bool:
        return self.registry.get(vm.pod_uid) is not vm

    # --- the end ---

    def forget(self, vm: VM) -> None:
        """Drops a VM from the list."""
        self._afterwards.do(vm.pod_uid)
        self._set_timer(vm, None)
        self.qemus.forget(vm.pod_uid)
        self.nodes.forget(vm.pod_uid)
        self._holders.watch(vm.pod_uid, ())
        self._surveyed.discard(vm.pod_uid)
        self._unlooked.pop(vm.pod_uid, None)
        self._unseen.pop(vm.pod_uid, None)
        self.hurried.discard(vm.pod_uid)
        self._teller.forget(vm)
        self.registry.remove(vm)
        self._lingering.watch(vm.pod_uid)

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
        self._lingering.close()
        self.cleaning.close()
        self._afterwards.close()
        self.inspector.close()
        self.nodes.close()
        self.qemus.close()
        self.inhibitors.close()
        self.mounts.close()
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


#: How soon a busy layer is tried again after its pod's mounts changed, and what failed or could not be seen (µs).
_SOON = 200_000
_AGAIN = 5_000_000
_UNSEEN = "whether device nodes are left cannot be told: their directory cannot be looked at"


def _is_to_look(decision: Decision) -> bool:
    """Nothing is to be unmounted, and a pass is to look whether that is all."""
    return decision.state is State.CLEANING and decision.look_at is None
