"""The interfaces that every D-Bus service answers: Introspectable, Peer, Properties, ObjectManager."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hostd.bus import library, names
from hostd.bus.contract import contract, introspection
from hostd.bus.interface import Exported, method
from hostd.bus.marshal import Elements
from hostd.errors import HostdError, NotSupported, UnknownInterface

if TYPE_CHECKING:
    from hostd.bus.call import Call
    from hostd.bus.library import Value
    from hostd.bus.long_answer import LongAnswers
    from hostd.bus.object_tree import ObjectTree
    from hostd.core.model import VM

log = logging.getLogger(__name__)

ON_ALL = (names.PEER, names.INTROSPECTABLE)
_MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")


class Peer(Exported, interface=names.PEER):
    """Answers at any path, as the specification wants."""

    @method("Ping")
    def ping(self) -> None:
        """Answers."""

    @method("GetMachineId")
    def get_machine_id(self) -> str:
        """The host's machine id."""
        for path in _MACHINE_ID_FILES:
            try:
                with open(path, encoding="ascii") as file:
                    return file.read(64).strip()
            except OSError as reason:
                log.debug("no machine id: %s", reason)
        raise NotSupported("this host has no /etc/machine-id; systemd-machine-id-setup makes one")


class Introspectable(Exported, interface=names.INTROSPECTABLE):
    """Answers for objects and for the nodes between them."""

    def __init__(self, tree: ObjectTree) -> None:
        self._tree = tree

    @method("Introspect")
    def introspect(self, call: Call) -> str:
        """The object's XML."""
        exported = self._tree.interfaces(call.path)
        own = [each.contract for each in exported]
        standard = list(ON_ALL)
        if any(interface.properties for interface in own):
            standard.append(names.PROPERTIES)
        if call.path == names.ROOT:
            standard.append(names.OBJECT_MANAGER)
        shown = [contract()[name] for name in standard] + own
        return introspection(shown, self._tree.children(call.path))


class Properties(Exported, interface=names.PROPERTIES):
    """Reads the interfaces of one object; setting goes through `dispatch`, for it asks for more access."""

    def __init__(self, tree: ObjectTree) -> None:
        self._tree = tree

    @method("Get")
    def get_one(self, call: Call, interface_name: str, property_name: str) -> Value:
        """One property."""
        exported = self.find(call.path, interface_name, property_name)
        if exported is None:
            raise UnknownInterface(f"{call.path} has no interface {interface_name}")
        exported.find_property(property_name)
        return exported.get(property_name)

    @method("GetAll")
    def get_all(self, call: Call, interface_name: str) -> dict[str, Any]:
        """All properties that can be read now."""
        exported = self.find(call.path, interface_name)
        return {} if exported is None else values(exported)

    @method("Set")
    def set_one(self, call: Call, interface_name: str, property_name: str, value: Value) -> None:
        """Sets one property."""
        exported = self.find(call.path, interface_name, property_name)
        if exported is None:
            raise UnknownInterface(f"{call.path} has no interface {interface_name}")
        exported.find_writable(property_name, value.signature)
        exported.set(property_name, value.value)

    def find(self, path: str, interface: str, member: str = "") -> Exported | None:
        """The object's side of an interface; with an empty name, of the interface that has the property.

        None for a standard interface (those have no properties). Raises UnknownObject, UnknownInterface.
        """
        for exported in self._tree.interfaces(path):
            if exported.contract.name == interface or (not interface and member in exported.contract.properties):
                return exported
        if interface in contract() and interface.startswith(f"{names.DBUS}."):
            return None
        if not interface and not member:
            return None
        raise UnknownInterface(f"{path} has no interface {interface or 'with a property ' + member}")


class ObjectManager(Exported, interface=names.OBJECT_MANAGER):
    """At the manager's own path, as in udisks2 (`/org/freedesktop/UDisks2`).

    Its objects then are those below the service's root: `/` would do for a bus name that is all of a connection, but a
    client that looks for the manager finds this one on the object that it has anyway, and `busctl tree` shows both.
    """

    def __init__(self, tree: ObjectTree, answers: LongAnswers) -> None:
        self._tree = tree
        self._answers = answers

    @method("GetManagedObjects")
    async def get_managed_objects(self) -> Elements:
        """All VMs, and the helper."""
        others = [_entry(path, exported) for path, exported in self._tree.managed()]
        vms = await self._answers.of_vms(self._entries_of)
        return Elements([*others, *vms.parts])

    def _entries_of(self, vm: VM) -> list[bytes]:
        return [_entry(names.vm_path(vm.pod_uid), self._tree.of_vm(vm))]


def _entry(path: str, exported: list[Exported]) -> bytes:
    """One of the managed objects."""
    found = described(exported)
    try:
        return library.element("(oa{sa{sv}})", [path, found])
    except Exception:  # noqa: BLE001 - a source gave a property what its type cannot hold: the others still go out
        return library.element("(oa{sa{sv}})", [path, {name: only_marshalling(has) for name, has in found.items()}])


def described(exported: list[Exported]) -> dict[str, dict[str, Any]]:
    """The interfaces of an object with their properties."""
    return {each.contract.name: values(each) for each in exported}


def values(exported: Exported) -> dict[str, Any]:
    """All properties; one whose source fails is left out, and said in the log."""
    found = {}
    for name in exported.contract.properties:
        try:
            found[name] = exported.get(name)
        except HostdError as reason:
            log.debug("%s is left out: %s", name, reason)
        except Exception:
            # The edge of the bus: one source that fails must not take the others' values from a caller.
            log.exception("property %s of %s cannot be read", name, exported.contract.name)
    return found


def only_marshalling(given: dict[str, Any]) -> dict[str, Any]:
    """Those of an object's values that can travel; for when all of them together could not."""
    good = {name: value for name, value in given.items() if library.marshals("v", value)}
    for name in given.keys() - good.keys():
        log.error("property %s has a value that cannot travel: %r", name, given[name].value)
    return good
