"""The core's events as signals, in the order in which they happen. What cannot be told is logged, never raised."""

from __future__ import annotations

import logging
from functools import singledispatchmethod
from typing import TYPE_CHECKING, Any, Protocol

from hostd.bus import library, names, rows
from hostd.bus.contract import contract
from hostd.bus.protocols import DeviceConflict
from hostd.bus.standard import described, only_marshalling
from hostd.bus.text import escape, sentence
from hostd.bus.vm_object import SHOWN_BY, VMObject
from hostd.core.service import (
    LayerBlocked,
    VMChanged,
    VMExited,
    VMNew,
    VMReleased,
    VMRemoved,
    VMService,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostd.bus.interface import Exported

log = logging.getLogger(__name__)


class Outlet(Protocol):
    """Where signals go: a connection, or nowhere while there is none."""

    def signal(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> None:
        """Raises what marshalling raises."""
        ...


class Signals:
    """Tells everybody on `outlet` (None: nobody is there to be told)."""

    def __init__(self, service: VMService) -> None:
        self._service = service
        self.outlet: Outlet | None = None

    @singledispatchmethod
    def tell(self, event: object) -> None:
        """One event of the core."""
        log.error("an event that the bus does not know: %s", type(event).__name__)

    @tell.register
    def _(self, event: VMNew) -> None:
        path = names.vm_path(event.vm.pod_uid)
        interfaces = described([VMObject(self._service, event.vm.pod_uid)])
        self._emit(names.ROOT, names.OBJECT_MANAGER, "InterfacesAdded", [path, interfaces])
        self._manager("VMNew", [event.vm.pod_uid, path])

    @tell.register
    def _(self, event: VMChanged) -> None:
        # The order of the contract, and each property once.
        changed = {name for field in event.fields for name in SHOWN_BY.get(field, ())}
        exported = VMObject(self._service, event.vm.pod_uid)
        self.properties_changed(
            names.vm_path(event.vm.pod_uid),
            exported,
            [name for name in exported.contract.properties if name in changed],
        )

    @tell.register
    def _(self, event: VMExited) -> None:
        details = {
            "ExitStatus": library.variant("i", event.exit.status),
            "ExitSignal": library.variant("i", event.exit.signal),
            "ExitReason": library.variant("s", event.exit.reason.value),
            "LeaderPID": library.variant("u", rows.leader_pid(event.vm)),
        }
        self._manager("VMExited", [event.vm.pod_uid, names.vm_path(event.vm.pod_uid), details])

    @tell.register
    def _(self, event: VMReleased) -> None:
        details = {
            "Layers": library.variant("u", event.layers),
            "ElapsedUSec": library.variant("t", max(event.elapsed_usec, 0)),
            "ExitReason": library.variant("s", event.vm.exit.reason.value),
        }
        self._manager("VMReleased", [event.vm.pod_uid, names.vm_path(event.vm.pod_uid), details])

    @tell.register
    def _(self, event: VMRemoved) -> None:
        path = names.vm_path(event.vm.pod_uid)
        self._emit(names.ROOT, names.OBJECT_MANAGER, "InterfacesRemoved", [path, [names.VM]])
        self._manager("VMRemoved", [event.vm.pod_uid, path])

    @tell.register
    def _(self, event: LayerBlocked) -> None:
        held = ", ".join(
            f"{each.name} ({each.pid}, {each.how})" if each.pid else f"{each.name} ({each.how})"
            for each in event.holders
        )
        reason = event.layer.error + (f"; held by {held}" if held else "")
        self._manager("LayerBlocked", [event.vm.pod_uid, escape(event.layer.target.path), sentence(reason)])

    @tell.register
    def _(self, event: DeviceConflict) -> None:
        self._manager("DeviceConflict", [sentence(each) for each in (event.device, event.vm, event.reason)])

    def properties_changed(self, path: str, exported: Exported, changed: Iterable[str]) -> None:
        """One PropertiesChanged with the values that a Get gives now; each in one of the two lists."""
        if self.outlet is None:
            return
        given, unreadable = {}, []
        for name in changed:
            try:
                given[name] = exported.get(name)
            except Exception:
                # The edge of the bus: a value that cannot be had is told as invalid, and its readers get the error.
                log.exception("property %s of %s cannot be read", name, path)
                unreadable.append(name)
        if not given and not unreadable:
            return
        try:
            self.outlet.signal(
                path, names.PROPERTIES, "PropertiesChanged", "sa{sv}as", [exported.contract.name, given, unreadable]
            )
        except Exception:
            # The edge of the bus: one value that cannot travel must not keep the others back.
            log.exception("a change of %s cannot travel as it is", path)
            good = only_marshalling(given)
            unreadable += [name for name in given if name not in good]
            self._emit(path, names.PROPERTIES, "PropertiesChanged", [exported.contract.name, good, unreadable])

    def _manager(self, member: str, body: list[Any]) -> None:
        self._emit(names.ROOT, names.MANAGER, member, body)

    def _emit(self, path: str, interface: str, member: str, body: list[Any]) -> None:
        if self.outlet is None:
            return
        try:
            self.outlet.signal(path, interface, member, contract()[interface].signals[member].signature, body)
        except Exception:
            # The edge of the bus: state is saved already, and whoever missed this can ask.
            log.exception("signal %s could not be sent", member)
