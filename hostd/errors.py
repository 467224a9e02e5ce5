"""Every error that hostd tells a caller by name.

    HostdError                  org.freedesktop.DBus.Error.Failed
    ├── InvalidArgs             a value, key or type that the call does not take
    ├── AccessDenied            the caller may not do this
    ├── NotSupported            this build, host or library cannot do this
    ├── UnknownObject           nothing lives at this path
    ├── UnknownInterface, UnknownMethod, UnknownProperty, PropertyReadOnly
    ├── NoSuchVM, VMExists, VMAlive
    ├── NoSuchProcess, ProcessMismatch
    ├── NotATarget, LayerBusy
    ├── NoSuchDevice, DeviceBusy
    ├── NotEnabled, HelperFailed
    ├── LimitExceeded
    └── ConfigError             never on the bus: the configuration cannot be used

The first line of each class's docstring is its line in the documentation; `TABLE` is what the bus and the
man page are made from. A message says what happened, to which pod and path, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

_HOSTD = "io.kubevirt.hostd1.Error."
_STANDARD = "org.freedesktop.DBus.Error."


class HostdError(Exception):
    """Something failed that has no name of its own."""

    dbus_name: ClassVar[str] = _STANDARD + "Failed"

    @property
    def message(self) -> str:
        """The sentence that a person reads."""
        return str(self)


class InvalidArgs(HostdError):
    """A value, key or type that the call does not take."""

    dbus_name = _STANDARD + "InvalidArgs"


class AccessDenied(HostdError):
    """The caller may not do this; the message says what would let it."""

    dbus_name = _STANDARD + "AccessDenied"


class NotSupported(HostdError):
    """This host, or the library that hostd runs on, cannot do this."""

    dbus_name = _STANDARD + "NotSupported"


class UnknownObject(HostdError):
    """Nothing lives at this path (any more)."""

    dbus_name = _STANDARD + "UnknownObject"


class UnknownInterface(HostdError):
    """The object has no such interface."""

    dbus_name = _STANDARD + "UnknownInterface"


class UnknownMethod(HostdError):
    """The interface has no such method."""

    dbus_name = _STANDARD + "UnknownMethod"


class UnknownProperty(HostdError):
    """The interface has no such property."""

    dbus_name = _STANDARD + "UnknownProperty"


class PropertyReadOnly(HostdError):
    """The property cannot be set; the message names the method that changes it, where there is one."""

    dbus_name = _STANDARD + "PropertyReadOnly"


class NoSuchVM(HostdError):
    """No VM of this pod UID, name, path or process is known."""

    dbus_name = _HOSTD + "NoSuchVM"


class VMExists(HostdError):
    """The pod is registered already, with another process or another VMI."""

    dbus_name = _HOSTD + "VMExists"


class VMAlive(HostdError):
    """A QEMU of this pod lives, so its layers stay."""

    dbus_name = _HOSTD + "VMAlive"


class NoSuchProcess(HostdError):
    """The process does not exist, or is dead."""

    dbus_name = _HOSTD + "NoSuchProcess"


class ProcessMismatch(HostdError):
    """The process is not the one that was meant: another start time or pidfd id, or another pod's."""

    dbus_name = _HOSTD + "ProcessMismatch"


class NotATarget(HostdError):
    """The path is not below a VM's own directories, or a symbolic link stands on the way."""

    dbus_name = _HOSTD + "NotATarget"


class LayerBusy(HostdError):
    """A layer cannot be unmounted yet; ListHolders names who holds it."""

    dbus_name = _HOSTD + "LayerBusy"


class NoSuchDevice(HostdError):
    """No device of this name exists, and no claim names it."""

    dbus_name = _HOSTD + "NoSuchDevice"


class DeviceBusy(HostdError):
    """The device is in use or reserved; the message names its holder."""

    dbus_name = _HOSTD + "DeviceBusy"


class NotEnabled(HostdError):
    """This part of hostd is switched off; the message says how to switch it on."""

    dbus_name = _HOSTD + "NotEnabled"


class HelperFailed(HostdError):
    """qemu-pr-helper did not do what was asked; LastFailure says more."""

    dbus_name = _HOSTD + "HelperFailed"


class LimitExceeded(HostdError):
    """A bound of hostd or of the host is reached; the message names it."""

    dbus_name = _HOSTD + "LimitExceeded"


class ConfigError(HostdError):
    """The configuration cannot be used: names file, key and what is allowed. Never on the bus."""


def _tree(top: type[HostdError]) -> list[type[HostdError]]:
    return [top, *(leaf for child in top.__subclasses__() for leaf in _tree(child))]


#: D-Bus name → (exception, line of documentation); `ConfigError` has no name of its own.
TABLE: dict[str, tuple[type[HostdError], str]] = {
    kind.dbus_name: (kind, (kind.__doc__ or "").splitlines()[0])
    for kind in reversed(_tree(HostdError))
    if kind is not ConfigError
}
