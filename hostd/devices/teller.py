"""Tells what has become of devices: to the log, to those who listen for conflicts, to the VMs that have them.

Everything is told once: what is as it was when it was last told is not told again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hostd.devices import listing
from hostd.log import Message, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.core.model import DeviceConflict
    from hostd.devices.claim import Claim, Claims, Devices, Runs

log = logging.getLogger(__name__)


class Teller:
    """`publish` is told which devices a pod's VM has, whenever that changes."""

    def __init__(self, publish: Callable[[str, tuple[str, ...]], None]) -> None:
        self._publish = publish
        self._listeners: list[Callable[[DeviceConflict], None]] = []
        #: What each pod's VM is known to have; a pod that is not in here is known to have nothing.
        self._published: dict[str, tuple[str, ...]] = {}
        self._conflicts: dict[listing.Key, DeviceConflict] = {}
        self._absent: set[str] = set()

    def subscribe(self, listener: Callable[[DeviceConflict], None]) -> Callable[[], None]:
        """Calls `listener` for each conflict from now on; the result ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def assume(self, pod_uid: str, names: tuple[str, ...]) -> None:
        """What a pod that is new here is known to have, from an earlier hostd perhaps."""
        self._published[pod_uid] = names

    def tell(self, claims: Claims, runs: Runs, devices: Devices) -> None:
        """Tells what differs from what was told last. A pod that is not in `runs` has nothing (any more)."""
        told, self._published = self._published, listing.devices_of(claims, runs)
        for pod_uid in told | self._published:
            names = self._published.get(pod_uid, ())
            if names != told.get(pod_uid, ()):
                self._publish(pod_uid, names)
        before, self._conflicts = self._conflicts, listing.conflicts(claims, runs, devices)
        for key, conflict in self._conflicts.items():
            if key not in before:
                self._tell_conflict(conflict)
        self._tell_absent(claims, devices)

    def _tell_conflict(self, conflict: DeviceConflict) -> None:
        owner = conflict.vm or "a VM without a name"
        extra = event(Message.DEVICE_CONFLICT, device=conflict.device, vm=conflict.vm)
        log.warning("%s, claimed by %s: %s", conflict.device, owner, conflict.reason, extra=extra)
        for listener in list(self._listeners):
            try:
                listener(conflict)
            except Exception:
                log.exception("a listener failed on a conflict about %s", conflict.device)

    def _tell_absent(self, claims: Claims, devices: Devices) -> None:
        before, self._absent = self._absent, set(claims.keys() - devices.keys())
        for name in sorted(self._absent - before):
            extra = event(Message.DEVICE_CONFLICT, device=name, vm=claims[name].vm)
            log.warning("%s, claimed by %s, is not there (any more)", name, _owner(claims[name]), extra=extra)


def log_changes(before: Claims, after: Claims) -> None:
    """One line for each claim that came, went or changed its stage."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if new is None:
            assert old is not None
            extra = event(Message.DEVICE_FREED, device=name, vm=old.vm)
            log.info("%s is free again; %s had it", name, _owner(old), extra=extra)
        elif old is None or old.stage is not new.stage:
            extra = event(Message.DEVICE_CLAIMED, device=name, vm=new.vm)
            log.info("%s is %s for %s", name, new.stage, _owner(new), extra=extra)


def _owner(claim: Claim) -> str:
    return claim.vm or f"pod {claim.pod_uid}"
