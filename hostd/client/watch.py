"""Events from signals: a mirror of the node's VMs, kept up to date, that tells what changed in it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hostd.bus import names
from hostd.bus.stream import close_all
from hostd.client import events, model
from hostd.client.failures import Unreachable
from hostd.client.link import Gone, Here
from hostd.errors import UnknownObject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from hostd.bus.library import Message
    from hostd.client.link import Link

log = logging.getLogger(__name__)

#: Before a snapshot that failed is tried again, where hostd is still there (s).
_PAUSE = 0.5


async def watch(link: Link) -> AsyncIterator[events.Event]:
    """Every event from now on; see `hostd.client.events`. Raises AccessDenied."""
    feed = await link.listen()
    mirror, lost = Mirror(), ""
    try:
        while True:
            item = await feed.get()
            if isinstance(item, Gone):
                mirror.current = False
                if item.what != lost:
                    lost = item.what
                    yield events.Lost(item.what)
            elif isinstance(item, Here):
                lost = ""
                if (resync := await _resync(link, mirror, item)) is not None:
                    yield resync
            elif (event := mirror.take(item)) is not None:
                yield event
    finally:
        link.forget(feed)


async def _resync(link: Link, mirror: Mirror, here: Here) -> events.Resync | None:
    """How everything is; None where hostd is gone again, of which a mark will tell."""
    mirror.current = False
    while link.owner == here.owner:
        try:
            await mirror.load(link, here.owner)
        except Unreachable as reason:
            log.debug("no answer yet from %s: %s", here.owner, reason)
            await asyncio.sleep(_PAUSE)
        else:
            return events.Resync(here.reason, tuple(mirror.vms.values()), mirror.status, mirror.helper)
    return None


class Mirror:
    """hostd's state as the signals tell it. It is told nothing while it is not `current`."""

    def __init__(self) -> None:
        self.current = False
        self.vms: dict[str, model.VM] = {}
        self.status = model.Status()
        self.helper = model.Helper()
        self._serial = 0

    async def load(self, link: Link, owner: str) -> None:
        """Takes everything from hostd. Raises what the calls raise."""

        async def ask(path: str, interface: str, member: str, *body: str) -> Message:
            message, fds = await link.call(path, interface, member, "s" * len(body), *body, to=owner)
            close_all(fds)
            return message

        # The VMs are asked for first: what changes hostd or the helper after that is told by a signal all the same.
        objects = await ask(names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects")
        status = await ask(names.ROOT, names.PROPERTIES, "GetAll", names.MANAGER)
        helper = await ask(names.HELPER_PATH, names.PROPERTIES, "GetAll", names.HELPER)
        self.vms = {vm.pod_uid: vm for vm in vms_of(objects.body[0])}
        self.status = model.Status(**model.status_changes(status.body[0]))
        self.helper = model.Helper(**model.helper_changes(helper.body[0]))
        # Signals and answers of one connection are numbered in one order: what came before the answer is in it.
        self._serial = objects.serial
        self.current = True

    def take(self, message: Message) -> events.Event | None:
        """What a signal of hostd means, or None where it means nothing new."""
        if not self.current or message.serial <= self._serial:
            return None
        handler = self._HANDLERS.get((message.interface or "", message.member))
        try:
            return handler(self, message) if handler is not None else None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, UnknownObject) as reason:
            # A newer hostd may say it otherwise; one signal must not end the watch.
            log.warning("the signal %s is not understood: %s", message.member, reason)
            return None

    def _added(self, message: Message) -> events.Event | None:
        path, interfaces = message.body
        if names.VM not in interfaces:
            return None
        vm = model.vm_of(names.pod_uid_of(path), interfaces[names.VM])
        self.vms[vm.pod_uid] = vm
        return events.VMNew(vm)

    def _removed(self, message: Message) -> events.Event | None:
        path, interfaces = message.body
        vm = self.vms.pop(names.pod_uid_of(path), None) if names.VM in interfaces else None
        return events.VMRemoved(vm) if vm is not None else None

    def _properties(self, message: Message) -> events.Event | None:
        interface, values, _ = message.body
        if interface == names.MANAGER:
            changes = model.status_changes(values)
            self.status = replace(self.status, **changes)
            return events.StatusChanged(self.status, frozenset(changes))
        if interface == names.HELPER:
            changes = model.helper_changes(values)
            self.helper = replace(self.helper, **changes)
            return events.HelperChanged(self.helper, frozenset(changes))
        return self._vm_changed(names.pod_uid_of(message.path), values) if interface == names.VM else None

    def _vm_changed(self, pod_uid: str, values: dict[str, Any]) -> events.Event | None:
        before = self.vms.get(pod_uid)
        if before is None:
            return None
        changes = model.vm_changes(pod_uid, values)
        self.vms[pod_uid] = replace(before, **changes)
        return events.VMChanged(self.vms[pod_uid], frozenset(changes))

    def _exited(self, message: Message) -> events.Event | None:
        pod_uid, _, details = message.body
        said = {key: value.value for key, value in details.items()}
        return events.VMExited(
            self._vm(pod_uid), said.get("ExitStatus", -1), said.get("ExitSignal", -1), said.get("ExitReason", "unknown")
        )

    def _released(self, message: Message) -> events.Event | None:
        pod_uid, _, details = message.body
        said = {key: value.value for key, value in details.items()}
        return events.VMReleased(self._vm(pod_uid), said.get("Layers", 0), said.get("ElapsedUSec", 0))

    def _blocked(self, message: Message) -> events.Event | None:
        pod_uid, target, reason = message.body
        return events.LayerBlocked(self._vm(pod_uid), target, reason)

    def _conflict(self, message: Message) -> events.Event | None:
        return events.DeviceConflict(*message.body[:3])

    def _vm(self, pod_uid: str) -> model.VM:
        return self.vms.get(pod_uid) or model.VM(pod_uid)

    #: InterfacesAdded and InterfacesRemoved say all that VMNew and VMRemoved do, and more.
    _HANDLERS: ClassVar[Mapping[tuple[str, str], Callable[[Mirror, Message], events.Event | None]]] = {
        (names.OBJECT_MANAGER, "InterfacesAdded"): _added,
        (names.OBJECT_MANAGER, "InterfacesRemoved"): _removed,
        (names.PROPERTIES, "PropertiesChanged"): _properties,
        (names.MANAGER, "VMExited"): _exited,
        (names.MANAGER, "VMReleased"): _released,
        (names.MANAGER, "LayerBlocked"): _blocked,
        (names.MANAGER, "DeviceConflict"): _conflict,
    }


def vms_of(objects: dict[str, dict[str, dict[str, Any]]]) -> list[model.VM]:
    """The VMs in an answer of GetManagedObjects."""
    return [
        model.vm_of(names.pod_uid_of(path), interfaces[names.VM])
        for path, interfaces in objects.items()
        if names.VM in interfaces
    ]
