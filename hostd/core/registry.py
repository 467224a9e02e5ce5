"""All VMs of the node: kept in memory, saved, and told of.

Every change of a VM goes through `commit`: what differs from what was saved last is saved, then told as one event.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hostd.core.service import Event, Listener, VMChanged, VMNew, VMRemoved
from hostd.core.store import Store, vm_from_plain, vm_to_plain
from hostd.errors import HostdError, LimitExceeded, NoSuchVM
from hostd.log import Message, event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostd.core.model import VM

log = logging.getLogger(__name__)

#: More VMs than any node can run; a bound for what callers can make hostd remember.
MOST = 4096
#: What of a layer is told; the rest (attempts, times) is only saved.
_TOLD = ("path", "kind", "volume", "state", "error")


class Registry:
    """VMs by pod UID, oldest first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._vms: dict[str, VM] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self._unsaved: set[str] = set()
        self._listeners: list[Listener] = []
        #: Makes room where something failed for want of it: whether it is worth trying again.
        self.relieve: Callable[[OSError], bool] = lambda _: False

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` for each event from now on; the result ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self, *events: Event) -> None:
        """Tells all who listen; one that fails does not keep it from the others."""
        for what in events:
            for listener in list(self._listeners):
                try:
                    listener(what)
                except Exception:
                    log.exception("a listener failed on %s", type(what).__name__)

    def __iter__(self) -> Iterator[VM]:
        # Over a copy: VMs come and go while somebody looks at them.
        return iter(list(self._vms.values()))

    def __len__(self) -> int:
        return len(self._vms)

    def get(self, pod_uid: str) -> VM | None:
        """The VM, if it is known."""
        return self._vms.get(pod_uid)

    def __getitem__(self, pod_uid: str) -> VM:
        try:
            return self._vms[pod_uid]
        except KeyError:
            raise NoSuchVM(f"no VM of pod {pod_uid} is known; ListVMs shows those that are") from None

    @property
    def unsaved(self) -> frozenset[str]:
        """The VMs whose state could not be saved when it last changed."""
        return frozenset(self._unsaved)

    @property
    def full(self) -> bool:
        """No VM can be added any more."""
        return len(self._vms) >= MOST

    def restore(self, vm: VM) -> None:
        """Takes up a VM from the store, and tells nobody."""
        self._vms[vm.pod_uid] = vm
        self._saved[vm.pod_uid] = vm_to_plain(vm)

    def add(self, vm: VM, *, must_save: bool = False) -> None:
        """A new VM. Raises LimitExceeded, and with `must_save` HostdError where it cannot be saved."""
        if self.full:
            raise LimitExceeded(f"{MOST} VMs are known already; acknowledge released ones with UnregisterVM")
        plain = vm_to_plain(vm)
        self._save(vm, plain, must_save=must_save)
        self._vms[vm.pod_uid] = vm
        self._saved[vm.pod_uid] = plain
        self.tell(VMNew(vm))

    def commit(self, vm: VM, *events: Event, must_save: bool = False) -> None:
        """Saves what changed, then tells it and the events."""
        self.tell(*self.save(vm, must_save=must_save), *events)

    def save(self, vm: VM, *, must_save: bool = False) -> list[Event]:
        """Saves what changed since the last time, and gives what is to be told of it: soon, before it changes again.

        With `must_save` a VM that cannot be saved is put back to what was saved last and HostdError is raised. Without,
        hostd goes on without the file (it would find all of it again by looking) and tries again at the next commit.
        """
        plain, before = vm_to_plain(vm), self._saved.get(vm.pod_uid, {})
        if plain == before and vm.pod_uid not in self._unsaved:
            return []
        try:
            self._save(vm, plain, must_save=must_save)
        except HostdError:
            self._put_back(vm, before)
            raise
        self._saved[vm.pod_uid] = plain
        fields = frozenset(name for name in plain if _differs(name, plain, before))
        return [VMChanged(vm, fields)] if fields else []

    def remove(self, vm: VM) -> None:
        """Forgets a VM."""
        del self._vms[vm.pod_uid]
        self._saved.pop(vm.pod_uid, None)
        self._unsaved.discard(vm.pod_uid)
        try:
            self.store.remove(vm.pod_uid)
        except OSError as error:
            log.warning("the state file of pod %s stays behind: %s", vm.pod_uid, error)
        self.tell(VMRemoved(vm))

    def _save(self, vm: VM, plain: dict[str, Any], *, must_save: bool) -> None:
        try:
            self._store(vm, plain)
            self._unsaved.discard(vm.pod_uid)
        except OSError as error:
            sentence = f"the state of pod {vm.pod_uid} cannot be saved in {self.store.directory}: {error.strerror}"
            if must_save:
                raise HostdError(f"{sentence}; nothing was changed") from error
            if vm.pod_uid not in self._unsaved:
                log.error("%s; going on without it", sentence, extra=event(Message.STATE_NOT_SAVED, pod_uid=vm.pod_uid))  # noqa: TRY400
            self._unsaved.add(vm.pod_uid)

    def _store(self, vm: VM, plain: dict[str, Any]) -> None:
        try:
            self.store.save(vm, plain)
        except OSError as error:
            if not self.relieve(error):
                raise
            self.store.save(vm, plain)

    @staticmethod
    def _put_back(vm: VM, plain: dict[str, Any]) -> None:
        saved = vm_from_plain(plain)
        for name in plain:
            setattr(vm, name, getattr(saved, name))


def _differs(name: str, plain: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether what is told of this field differs."""
    if plain[name] == before.get(name):
        return False
    return name != "layers" or _told(name, plain) != _told(name, before)


def _told(name: str, plain: dict[str, Any]) -> object:
    value = plain.get(name)
    if name != "layers":
        return value
    return [[layer[key] for key in _TOLD] for layer in value or ()]
