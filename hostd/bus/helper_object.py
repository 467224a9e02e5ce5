"""io.kubevirt.hostd1.PRHelper: qemu-pr-helper's object, there even where hostd keeps none."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hostd.bus import library, names
from hostd.bus.interface import Exported, getter, method
from hostd.bus.protocols import HelperService, HelperStatus
from hostd.bus.text import sentence
from hostd.errors import NotSupported

#: Field of the status → the property that shows it; Clients is not told of.
SHOWN_BY = {
    "enabled": "Enabled",
    "state": "State",
    "main_pid": "MainPID",
    "socket_path": "SocketPath",
    "restarts": "NRestarts",
    "last_failure": "LastFailure",
    "multipath": "Multipath",
    "owner_pid": "OwnerPID",
}
_TYPES: dict[type, str] = {bool: "b", int: "x", str: "s"}


class HelperObject(Exported, interface=names.HELPER):
    """qemu-pr-helper."""

    changed_by = {"Enabled": "Enable or Disable"}

    def __init__(self, helper: HelperService | None) -> None:
        self._helper = helper
        self._absent = HelperStatus()

    @property
    def _status(self) -> HelperStatus:
        return self._absent if self._helper is None else self._helper.status

    def _with_helper(self) -> HelperService:
        if self._helper is None:
            raise NotSupported("this hostd keeps no qemu-pr-helper: Features has no `pr-helper`")
        return self._helper

    @method("Enable")
    async def enable(self) -> None:
        """Switches it on."""
        await self._with_helper().enable()

    @method("Disable")
    async def disable(self) -> None:
        """Switches it off."""
        await self._with_helper().disable()

    @method("Restart")
    async def restart(self) -> None:
        """Starts it anew."""
        await self._with_helper().restart()

    @method("Probe")
    async def probe(self) -> dict[str, Any]:
        """Asks it."""
        found = await self._with_helper().probe()
        return {
            name: library.variant(_TYPES[type(value)], sentence(value) if isinstance(value, str) else value)
            for name, value in found.items()
        }

    @getter("Enabled")
    def enabled(self) -> bool:
        """Switched on."""
        return self._status.enabled

    @getter("State")
    def state(self) -> str:
        """In a word."""
        return sentence(self._status.state)

    @getter("MainPID")
    def main_pid(self) -> int:
        """Its process."""
        return self._status.main_pid

    @getter("SocketPath")
    def socket_path(self) -> str:
        """Where QEMU reaches it."""
        return sentence(self._status.socket_path)

    @getter("NRestarts")
    def restarts(self) -> int:
        """By itself."""
        return self._status.restarts

    @getter("LastFailure")
    def last_failure(self) -> str:
        """In words."""
        return sentence(self._status.last_failure)

    @getter("Multipath")
    def multipath(self) -> str:
        """In a word."""
        return sentence(self._status.multipath)

    @getter("OwnerPID")
    def owner_pid(self) -> int:
        """Who else has the path."""
        return self._status.owner_pid

    @getter("Clients")
    def clients(self) -> int:
        """Connected QEMUs."""
        return self._status.clients


def changed(before: HelperStatus, now: HelperStatus) -> list[str]:
    """The properties that differ."""
    differing = (each.name for each in fields(now) if getattr(before, each.name) != getattr(now, each.name))
    return [SHOWN_BY[name] for name in differing if name in SHOWN_BY]
