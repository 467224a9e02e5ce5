"""What the bus asks of the parts that are not the core: devices, and qemu-pr-helper. Each may be absent (None)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hostd.core.model import DeviceConflict, DeviceRow, HelperStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["DeviceConflict", "DeviceRow", "DeviceService", "HelperService", "HelperStatus"]


class DeviceService(Protocol):
    """The host devices of this node and the claims on them."""

    def devices(self) -> Iterable[DeviceRow]:
        """All of them, in an order that stays."""
        ...

    async def claim(self, device: str, vm: str, *, vmi_uid: str | None, on_exit: str | None) -> None:
        """Durable on return. `on_exit` (release, hold) is for all devices of this VM, None = as configured.

        Raises NoSuchDevice, DeviceBusy, InvalidArgs.
        """
        ...

    async def release(self, device: str, vm: str) -> None:
        """Durable on return. Raises NoSuchDevice, DeviceBusy."""
        ...

    def subscribe(self, listener: Callable[[DeviceConflict], None]) -> Callable[[], None]:
        """Calls `listener` for each conflict from now on; the result ends it."""
        ...


class HelperService(Protocol):
    """The keeper of qemu-pr-helper."""

    @property
    def status(self) -> HelperStatus:
        """Now."""
        ...

    async def enable(self) -> None:
        """Raises HelperFailed, NotSupported."""
        ...

    async def disable(self) -> None:
        """Raises HelperFailed."""
        ...

    async def restart(self) -> None:
        """Raises NotEnabled, HelperFailed."""
        ...

    async def probe(self) -> Mapping[str, str | int | bool]:
        """Findings by name. Raises NotEnabled, HelperFailed."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` when `status` has changed; the result ends it."""
        ...
