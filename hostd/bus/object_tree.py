"""Which objects there are, and what each can do. VMs come from the service at every look: nothing is kept in step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.bus import names
from hostd.errors import NoSuchVM, UnknownObject

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.bus.interface import Exported
    from hostd.core.model import VM
    from hostd.core.service import VMService


class ObjectTree:
    """`fixed` are the objects that are always there; `vm` makes the interfaces of a VM's object."""

    def __init__(
        self, service: VMService, fixed: dict[str, list[Exported]], vm: Callable[[str], list[Exported]]
    ) -> None:
        self._service = service
        self._fixed = fixed
        self._vm = vm
        self._inner = _ancestors([*fixed, f"{names.VM_PREFIX}/_"])

    def interfaces(self, path: str) -> list[Exported]:
        """What an object has; an inner node has nothing. Raises UnknownObject."""
        if path in self._fixed:
            return self._fixed[path]
        if path in self._inner:
            return []
        try:
            return self._vm(self._service.vm(names.pod_uid_of(path)).pod_uid)
        except NoSuchVM:
            raise UnknownObject(f"nothing lives at {path} (any more)") from None

    def children(self, path: str) -> list[str]:
        """The last elements of the paths right below a node."""
        below = self._inner.get(path, set())
        if path == names.VM_PREFIX:
            below = {names.escape_label(vm.pod_uid) for vm in self._service.vms()}
        return sorted(below)

    def managed(self) -> list[tuple[str, list[Exported]]]:
        """The objects that the ObjectManager has besides the VMs: those below it."""
        return [(path, exported) for path, exported in self._fixed.items() if path.startswith(f"{names.ROOT}/")]

    def of_vm(self, vm: VM) -> list[Exported]:
        """What a VM's object has."""
        return self._vm(vm.pod_uid)


def _ancestors(paths: list[str]) -> dict[str, set[str]]:
    """Inner node → labels of its children."""
    found: dict[str, set[str]] = {}
    for path in paths:
        labels = path.strip("/").split("/")
        for depth, label in enumerate(labels):
            found.setdefault("/" + "/".join(labels[:depth]), set()).add(label)
    return found
