"""What udev tells: that devices come, go or change, and what they are called. Through pyudev, without a thread.

Events only say when to look at sysfs again, so a lost, late or strange one does no harm. Where udevd does not run, the
kernel's own events serve: sysfs does not need udev. Where pyudev or libudev is missing, hostd goes on without.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from hostd.devices.sysfs import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

SUBSYSTEMS = ("pci", "mdev", "usb", "vfio", "vfio-dev")
#: udevd listens here while it runs; libudev asks the same question.
_CONTROL = "/run/udev/control"
#: Receive buffers (bytes): the first, and the largest that overflows lead to.
BUFFER, BUFFER_MAX = 1 << 20, 64 << 20
#: Events taken in before the event loop gets its turn.
_AT_ONCE = 512
#: How long to wait before a monitor that failed is set up anew (seconds).
_ANEW_SECONDS = 5.0


class DeviceEvents:
    """Calls `changed` after events of these subsystems, once for all that wait; `lost` of them need not be known."""

    def __init__(
        self, changed: Callable[[], None], subsystems: Iterable[str] = SUBSYSTEMS, *, source: str | None = None
    ) -> None:
        self._changed = changed
        self._subsystems = tuple(subsystems)
        self._source = source
        self._monitor: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = BUFFER
        #: Why nothing is heard, in words; empty while all is well.
        self.problem = ""
        #: How often events were lost, so that all devices were looked at again.
        self.overflows = 0

    def start(self) -> None:
        """Begins to listen; `problem` says if that cannot be."""
        self._timer = None
        try:
            self._monitor = self._listen()
        except ImportError as error:
            self._fail(f"pyudev cannot be used ({error}), so devices that come and go are seen only at a restart")
            return
        except OSError as error:
            self._fail(f"udev's events cannot be heard: {error}")
            self._start_again_later()
            return
        self.problem = ""
        asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._on_readable)

    def _listen(self) -> Any:  # noqa: ANN401 - pyudev has no types
        import pyudev

        source = self._source or ("udev" if os.path.exists(_CONTROL) else "kernel")
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=source)
        for subsystem in self._subsystems:
            monitor.filter_by(subsystem)
        self._set_buffer(monitor)
        monitor.start()
        return monitor

    def _set_buffer(self, monitor: Any) -> None:  # noqa: ANN401
        try:
            monitor.set_receive_buffer_size(self._buffer)
        except OSError as error:
            log.debug("the receive buffer of udev's events stays as it is: %s", error)

    def _on_readable(self) -> None:
        heard = 0
        try:
            # The device itself is not looked at: it may be gone, and sysfs tells what is. None is said for one of
            # another subsystem, too; what is left is read in the next round.
            while heard < _AT_ONCE and self._monitor.poll(timeout=0) is not None:
                heard += 1
        except OSError as error:
            self._on_error(error)
            heard += 1
        if heard:
            self._changed()

    def _on_error(self, error: OSError) -> None:
        """An overflow shows as ENOBUFS, or as a pending error of the socket that pyudev reports without its number."""
        number = error.errno or _pending_error(self._monitor.fileno())
        if number == errno.ENOBUFS:
            self.overflows += 1
            self._buffer = min(self._buffer * 2, BUFFER_MAX)
            self._set_buffer(self._monitor)
            log.warning("udev's events came faster than they were read: looking at all devices again")
            return
        self._stop_listening()
        self._fail(f"udev's events cannot be heard any more: {error}")
        self._start_again_later()

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            log.error("%s", problem)
        self.problem = problem

    def _start_again_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_ANEW_SECONDS, self._start_again)

    def _start_again(self) -> None:
        self.start()
        self._changed()

    def _stop_listening(self) -> None:
        if self._monitor is not None:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._monitor = None  # pyudev closes it when nobody has it any more

    def close(self) -> None:
        """Hears nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._stop_listening()


def _pending_error(fd: int) -> int:
    """The socket's pending error, taken away from it."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        return copy.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


class Database:
    """udev's database of names. Without udev, or for a device that it does not know, all names are empty."""

    def __init__(self) -> None:
        self._context: Any = None

    def __call__(self, directory: bytes) -> Names:
        """The names of the device in a directory of /sys."""
        try:
            import pyudev
        except ImportError:
            return Names()
        try:
            if self._context is None:
                self._context = pyudev.Context()
            found = pyudev.Devices.from_path(self._context, os.fsdecode(directory)).properties
            return Names(
                vendor=_first(found, "ID_VENDOR_FROM_DATABASE", "ID_VENDOR"),
                model=_first(found, "ID_MODEL_FROM_DATABASE", "ID_MODEL"),
                serial=_first(found, "ID_SERIAL_SHORT"),
            )
        except (ImportError, OSError, ValueError, pyudev.DeviceNotFoundError) as error:
            # ImportError: pyudev looks for libudev only now. Not found: the device went meanwhile.
            log.debug("%s has no names: %s", os.fsdecode(directory), error)
            return Names()


def _first(properties: Any, *keys: str) -> str:  # noqa: ANN401
    return next((str(value) for key in keys if (value := properties.get(key))), "")
