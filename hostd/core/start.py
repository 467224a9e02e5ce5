"""Taking up the work: what an earlier hostd knew, what is mounted, who lives."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from hostd.core import transitions
from hostd.core.model import VM, LayerState
from hostd.core.qemus import qemu_pids_by_pod
from hostd.errors import NotATarget
from hostd.kubevirt.targets import Kind, target
from hostd.linux.clock import boottime_usec
from hostd.linux.pidfd import Identity, Process, kernel_keeps_ends
from hostd.log import Message, event

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from hostd.core.keeper import Keeper
    from hostd.core.pod_mounts import KubeletRoot
    from hostd.core.survey import Records
    from hostd.core.watchers import FdStore

log = logging.getLogger(__name__)


async def start(keeper: Keeper, root: KubeletRoot, fds: FdStore, stored: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Brings the keeper from nothing to a true picture of the node, and starts what is due.

    Returns the state files that could not be used, with the reason of each.
    """
    kernel_keeps_ends()  # so that the first death need not wait for the answer
    vms, bad = keeper.registry.store.load()
    for file in bad:
        log.error(
            "state file %s cannot be used (%s); it is kept as %s, and what it was about is found again by looking",
            file.name, file.why, file.kept_as, extra=event(Message.BAD_STATE_FILE, file=file.kept_as),
        )  # fmt: skip
    adopted = fds.adopt(stored)
    left = {b"/".join((root.path, relative)): worker for relative, worker in keeper.pool.left_at_work().items()}
    # What is mounted still is not what an earlier hostd's worker hangs in.
    keeper.mounts.read()
    for vm in vms:
        for path in vm.layers.keys() & left.keys():
            vm.layers[path].worker = left[path]
        _restore(keeper, vm, root.path, fds, adopted.pop(vm.pod_uid, []))
    for processes in adopted.values():
        for process in processes:
            fds.drop(process.identity)
            process.close()
    for complaint in keeper.inhibitors.restore():
        log.warning("%s", complaint)
    await look_around(keeper)
    keeper.wake_all()
    return {file.kept_as: file.why for file in bad}


def _restore(keeper: Keeper, vm: VM, kubelet_root: bytes, fds: FdStore, stored: list[Process]) -> None:
    """Takes up one VM. A QEMU that is not the one that was known is dead, whatever has its pid now."""
    vm.layers = {path: layer for path, layer in vm.layers.items() if _is_target(kubelet_root, path, layer.target.kind)}
    known, vm.qemus = vm.qemus, []
    for layer in vm.layers.values():
        if layer.state is LayerState.BUSY:
            layer.retry_at = 0
    keeper.registry.restore(vm)
    living = [process for process in stored if process.alive()]
    dead = [process for process in stored if process not in living]
    missing = [identity for identity in known if not _is_among(identity, (process.identity for process in stored))]
    living += [process for identity in missing if (process := _open(identity)) is not None]
    for process in living:
        keeper.follow(vm, process)
    ended = [process for process in dead if _is_among(process.identity, known)]
    if not vm.qemus and ended and not vm.exited_at:
        vm.exit = transitions.exit_of(ended[-1].end(), oom=keeper.qemus.oom_kills(vm.pod_uid) > vm.oom_kills >= 0)
    for process in dead:
        fds.drop(process.identity)
        process.close()
    if (known or vm.had_qemu) and not vm.qemus and not vm.exited_at:
        # Before its layers are looked for: the earlier hostd may have been at them already.
        keeper.note_death(vm, boottime_usec())
    keeper.adopt_hung(vm)


def _is_among(identity: Identity, known: Iterable[Identity]) -> bool:
    return any(identity.same_as(one) for one in known)


def _open(identity: Identity) -> Process | None:
    """The process itself if it lives; one that only has its pid now is another."""
    try:
        process = Process.open(identity.pid)
    except ProcessLookupError:
        return None
    if process.identity.same_as(identity):
        return process
    process.close()
    return None


def _is_target(kubelet_root: bytes, path: bytes, kind: Kind) -> bool:
    """The state directory is root's alone; still, nothing is unmounted on the word of a file."""
    try:
        return target(kubelet_root, path, block=kind is Kind.HOTPLUG_BLOCK).path == path
    except NotATarget:
        return False


async def look_around(keeper: Keeper) -> None:
    """Looks at the whole node: mounts, records, pods, QEMUs. For a start and for Sweep."""
    keeper.qemus.cgroups.look()
    changed = keeper.mounts.read()
    try:
        await _take_up_all(keeper)
    except Exception:
        _tell(keeper, changed)
        raise
    _tell(keeper, changed)


def _tell(keeper: Keeper, changed: set[str]) -> None:
    """Nobody else is told of the changes that this read was the first to see."""
    for pod_uid in changed:
        keeper.on_pod(pod_uid)


async def _take_up_all(keeper: Keeper) -> None:
    """Looks at every pod that anything tells of."""
    records = await keeper.survey.records()
    living = qemu_pids_by_pod()
    cgroups = keeper.qemus.cgroups
    pods = keeper.mounts.pods() | cgroups.pods().keys() | records.vmi_uids.keys()
    if not cgroups.understood:
        # Nothing else tells of a VM without layers here. Elsewhere a QEMU outside the cgroup root is another hostd's.
        pods |= living.keys()
    # All at once: each waits for a worker most of the time, and one that hangs delays itself alone.
    uids = sorted(pods)
    work = (_take_up(keeper, pod_uid, living.get(pod_uid, ()), records) for pod_uid in uids)
    for pod_uid, failure in zip(uids, await asyncio.gather(*work, return_exceptions=True), strict=True):
        if failure is not None:
            log.error("pod %s cannot be looked at: %s", pod_uid, failure, exc_info=failure)


async def _take_up(keeper: Keeper, pod_uid: str, qemus: Collection[int], records: Records) -> None:
    """Looks at one pod. `qemus`: processes in it that look like one."""
    vm = keeper.registry.get(pod_uid) or await keeper.meet(pod_uid, qemus=qemus, look=False)
    if vm is None:
        return
    candidates = keeper.qemus.unidentified(pod_uid, qemus)
    if not vm.had_qemu:
        # Those that an earlier hostd could not ask what they are.
        candidates += keeper.qemus.followed_once_more(pod_uid)
    if candidates and not await keeper.identification.identify(vm, candidates):
        return
    _name(vm, records)
    await keeper.nodes.look(vm)
    transitions.see_mounts(vm, keeper.mounts.of(pod_uid), boottime_usec(), read_at=keeper.mounts.read_at)


def _name(vm: VM, records: Records) -> None:
    """Gives a VM the names that virt-handler's records have for it, where its own processes told none."""
    vm.vmi_uid = vm.vmi_uid or records.vmi_uids.get(vm.pod_uid, "")
    ghost = records.ghosts.get(vm.vmi_uid)
    if ghost is not None and not vm.name:
        vm.namespace, vm.name = ghost.namespace, ghost.name
