"""What became of a VM, told: in the log, one line an event, and to those who listen."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from hostd.core import transitions
from hostd.core.model import VM, Exit, Holder, LayerState, State
from hostd.core.service import Event, LayerBlocked, VMExited, VMReleased
from hostd.linux.clock import boottime_usec
from hostd.log import Message, event, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostd.core.mounts import NodeMounts
    from hostd.core.registry import Registry

log = logging.getLogger(__name__)

_TOLD_AS = {LayerState.DETACHED: Message.LAYER_DETACHED}
#: How long nothing new is said of a layer whose holders were named: they may change many times a second (µs).
_TELL_AGAIN = 30_000_000
#: States before a VM's death.
ALIVE = frozenset({State.PENDING, State.RUNNING})


class Before(NamedTuple):
    """How a VM was when it was told of last."""

    state: State
    error: str


class Teller:
    """Tells of VMs. Nothing waits for it: what is told is saved, and the umounts that follow from it are under way."""

    def __init__(self, registry: Registry, mounts: NodeMounts) -> None:
        self._registry = registry
        self._mounts = mounts
        #: By layer: errno and holders as they were told last, and when (CLOCK_BOOTTIME, µs).
        self._blocked: dict[tuple[str, bytes], tuple[int, tuple[Holder, ...], int]] = {}

    def tell(self, vm: VM, before: Before, saved: Iterable[Event], *, under_way: bool) -> None:
        """What changed, as it was saved, and what that means. While its layers are being tried (`under_way`), it is not
        known yet who holds those that were refused: of them is told then."""
        blocked = () if under_way else self._newly_blocked(vm)
        self._registry.tell(*saved, *self._happened(vm, before), *blocked)

    def forget(self, vm: VM) -> None:
        """It is gone from the list."""
        for path in vm.layers:
            self._blocked.pop((vm.pod_uid, path), None)
        log.info("%s: forgotten", title(vm), extra=about(Message.VM_FORGOTTEN, vm))

    def _happened(self, vm: VM, before: Before) -> list[Event]:
        events: list[Event] = []
        if vm.state is State.RUNNING and before.state is not State.RUNNING:
            pid = vm.leader.pid if vm.leader else 0
            log.info("%s: running, QEMU is process %d", title(vm), pid, extra=about(Message.VM_RUNNING, vm, leader=pid))
        elif before.state in ALIVE and vm.state not in ALIVE and vm.had_qemu:
            events.append(_exited(vm))
        # Of a blocked VM the layers are told one by one, and a pod that has not begun is nothing to tell.
        if vm.error not in {"", before.error} and vm.state not in {State.PENDING, State.BLOCKED}:
            log.warning("%s: %s: %s", title(vm), vm.state, vm.error, extra=about(Message.VM_STUCK, vm))
        if vm.state is State.RELEASED and before.state is not State.RELEASED:
            events.append(self._released(vm))
        return events

    def _released(self, vm: VM) -> VMReleased:
        elapsed = max(0, max((layer.gone_at for layer in vm.layers.values()), default=0) - vm.exited_at)
        log.info(
            "%s: released, %d layers gone %.1f ms after the death", title(vm), len(vm.layers), elapsed / 1000,
            extra=about(Message.VM_RELEASED, vm, layers=len(vm.layers), elapsed_usec=elapsed),
        )  # fmt: skip
        for path in self._mounts.of(vm.pod_uid).foreign:
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
                self._blocked.pop(key, None)
            if vm.state is State.RUNNING or not (stuck or remounted or layer.state is LayerState.HUNG):
                continue
            number, named, told_at = self._blocked.get(key, (-1, (), 0))
            if (number, named) == (layer.errno, layer.holders) or (named and now < told_at + _TELL_AGAIN):
                continue
            self._blocked[key] = (layer.errno, layer.holders, now)
            message = Message.LAYER_REMOUNTED if remounted else _TOLD_AS.get(layer.state, Message.LAYER_BLOCKED)
            log.warning(
                "%s: %s is %s: %s", title(vm), plain(path), layer.state, layer.error or "no reason is known",
                extra=about(message, vm, target=path, errno=layer.errno),
            )  # fmt: skip
            yield LayerBlocked(vm, layer, layer.holders)


def _exited(vm: VM) -> VMExited:
    left = sum(layer.state is not LayerState.GONE for layer in vm.layers.values())
    how = {"status": vm.exit.status, "signal": vm.exit.signal, "reason": vm.exit.reason}
    log.info(
        "%s: QEMU ended (%s), %d layers to go", title(vm), exit_words(vm.exit), left,
        extra=about(Message.VM_EXITED, vm, **how),
    )  # fmt: skip
    return VMExited(vm, vm.exit)


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
