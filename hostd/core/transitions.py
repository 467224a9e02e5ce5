"""What a sight of a pod changes in the model of its VM: no decisions, no acts, no clock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.core.decision import NEVER, retry_delay
from hostd.core.model import VM, Exit, ExitReason, Holder, Layer, LayerState
from hostd.kubevirt.targets import Kind, Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostd.core.pod_mounts import PodMounts
    from hostd.linux.mount_table import Mount
    from hostd.linux.pidfd import End, Identity

REMOUNTED = "mounted again by another process after it had been unmounted"
#: What a worker of hostd's is called as a holder, as in its /proc/PID/comm.
WORKER = "hostd-worker"
#: Whoever mounts again does so in a loop: the first attempt waits a second, the others longer.
_REMOUNT_STEP = 3
#: Holders of a layer that are kept, of any number that there are: the state is saved with them at each change.
_MOST_HOLDERS = 64
#: Mounts of a layer that were detached before it was mounted again, of any number that there are.
_MOST_PINNED = 64
#: SIGKILL, which is what the kernel's OOM killer sends.
_SIGKILL = 9


def see_mounts(vm: VM, seen: PodMounts, now: int, *, read_at: int | None = None) -> None:
    """Brings the VM's layers into line with the mount table, as it was read at `read_at` (None = just now).

    A layer of a living VM that is no longer mounted was taken away by the agent and is forgotten, but for one that was
    detached while the pod had no QEMU, and is pinned since. One of a dead VM is `detached` until it is known that
    nothing pins it.
    """
    for path, (target, stack) in seen.targets.items():
        layer = vm.layers.get(path)
        if layer is None:
            layer = vm.layers[path] = Layer(target, seen_at=now)
        if read_at is None or layer.gone_at <= read_at:
            # Else it was unmounted since, and the table that was read shows it still.
            _see_mounted(vm, layer, stack, now)
    for path, layer in list(vm.layers.items()):
        if path in seen.targets or layer.target.kind is Kind.HOTPLUG_BLOCK:
            continue
        if not vm.exited_at and not layer.tracked and not _is_pinned(layer):
            del vm.layers[path]
        elif layer.state not in {LayerState.GONE, LayerState.HUNG} and layer.worker is None and layer.source[0]:
            # An umount that hangs has left the table long before it comes back: only its worker can say "unmounted".
            see_unmounted(layer, now)


def _see_mounted(vm: VM, layer: Layer, stack: list[Mount], now: int) -> None:
    source = (stack[-1].device, stack[-1].root)
    if layer.state in {LayerState.GONE, LayerState.DETACHED}:
        if layer.holders:
            layer.pinned_ids = (*layer.pinned_ids, *layer.mount_ids)[-_MOST_PINNED:]
        layer.state, layer.seen_at = LayerState.MOUNTED, now
        layer.remounts += 1
        layer.gone_at = 0
        layer.error = REMOUNTED
        layer.retry_at = now + retry_delay(layer.remounts + _REMOUNT_STEP)
        layer.holders = ()
    elif layer.source[0] and source != layer.source and not vm.exited_at:
        layer.error = f"source changed: {source[0]} is mounted here now, {layer.source[0]} was before"
    layer.source, layer.fstype = source, stack[-1].fstype
    layer.mount_ids = tuple(mount.mount_id for mount in stack)


def _is_pinned(layer: Layer) -> bool:
    """It was detached in an earlier life of its VM, and that is not over while somebody pins it."""
    return layer.state is LayerState.DETACHED and bool(layer.holders)


def see_unmounted(layer: Layer, now: int) -> None:
    """The layer is in PID 1's table no more; whether something still pins it is to be looked at."""
    if layer.state is not LayerState.DETACHED:
        layer.state, layer.gone_at = LayerState.DETACHED, now
        layer.error, layer.errno, layer.retry_at, layer.worker = "", 0, 0, None


def see_wanted(layer: Layer) -> None:
    """Its VM lives again, so nobody is about to unmount it."""
    layer.retry_at, layer.attempts, layer.remounts = 0, 0, 0
    if layer.state in {LayerState.BUSY, LayerState.MOUNTED}:
        layer.state = LayerState.MOUNTED
        layer.error, layer.errno, layer.holders = "", 0, ()


def see_gone(layer: Layer, now: int) -> None:
    """Nothing that can be seen keeps the layer."""
    layer.gone_at = layer.gone_at or now
    layer.state = LayerState.GONE
    layer.error, layer.errno, layer.holders, layer.retry_at, layer.pinned_ids = "", 0, (), 0, ()


def see_busy(layer: Layer, number: int, error: str, now: int) -> None:
    """An attempt to unmount it failed."""
    layer.state = LayerState.BUSY
    layer.attempts += 1
    layer.errno = number
    if not layer.holders:
        # Who held it last says more; the next look at the holders says it anew.
        layer.error = error
    layer.tried_at, layer.retry_at = now, now + retry_delay(layer.attempts)


def see_hung(layer: Layer, worker: Identity | None, error: str) -> None:
    """The umount does not come back; it is left alone until the worker that hangs in it is free or dead."""
    layer.state = LayerState.HUNG
    layer.attempts += 1
    layer.worker, layer.error, layer.retry_at = worker, error, NEVER
    layer.holders = (Holder(worker.pid, WORKER, "umount", ""),) if worker else ()


def see_holders(layer: Layer, holders: Iterable[Holder], now: int) -> None:
    """Who keeps a busy or detached layer."""
    layer.held_at = now
    # Those that forbid to detach it come first, so that what is kept of many tells that.
    every = sorted(holders, key=lambda holder: not (holder.qemu or holder.how == "mount"))
    layer.holders = tuple(every[:_MOST_HOLDERS])
    if layer.holders:
        named = ", ".join(str(holder) for holder in layer.holders[:4])
        more = f" and {len(every) - 4} more" if len(every) > 4 else ""
        verb = "still pinned by" if layer.state is LayerState.DETACHED else "held by"
        layer.error = f"{verb} {named}{more}"


def see_pinned(layer: Layer, holders: Iterable[Holder], now: int) -> None:
    """The layer left PID 1's table, and somebody still pins it."""
    layer.state, layer.gone_at = LayerState.DETACHED, 0
    layer.attempts += 1
    layer.tried_at, layer.retry_at = now, now + retry_delay(layer.attempts)
    see_holders(layer, holders, now)


def see_block_nodes(vm: VM, nodes: Iterable[Target], now: int) -> None:
    """Brings the layers that are device nodes, not mounts, into line with the directory."""
    present = {node.path: node for node in nodes}
    for path, node in present.items():
        if path not in vm.layers:
            vm.layers[path] = Layer(node)
        elif vm.layers[path].state is LayerState.GONE:
            vm.layers[path] = Layer(node, remounts=vm.layers[path].remounts + 1)
    for path, layer in list(vm.layers.items()):
        if layer.target.kind is Kind.HOTPLUG_BLOCK and path not in present and not layer.tracked:
            if vm.exited_at:
                see_gone(layer, now)
            else:
                del vm.layers[path]


def exit_of(end: End | None, *, oom: bool) -> Exit:
    """Why a QEMU ended. It exits with 0 when the guest powers off and when it is told to by SIGTERM."""
    if end is None or (end.status < 0 and end.signal < 0):
        return Exit()
    if end.signal > 0:
        return Exit(-1, end.signal, ExitReason.OOM if oom and end.signal == _SIGKILL else ExitReason.SIGNAL)
    return Exit(end.status, -1, ExitReason.ERROR if end.status else ExitReason.POWEROFF)
