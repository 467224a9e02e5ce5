"""Errors on their way back: the bus's names become the classes of `hostd.errors` again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.errors import TABLE, AccessDenied, HostdError

if TYPE_CHECKING:
    from hostd.bus.connection import CallFailed

_STANDARD = "org.freedesktop.DBus.Error."
#: What the bus says, and not hostd, where hostd does not run or ended before it answered.
_ABSENT = frozenset(
    _STANDARD + name
    for name in ("ServiceUnknown", "NameHasNoOwner", "NoReply", "Spawn.ChildExited", "Spawn.ServiceNotValid")
)
NOT_RUNNING = "hostd is not on the bus; see `systemctl status hostd` and `journalctl -u hostd`"


class Unreachable(HostdError):
    """There is no bus, hostd is not on it, or it did not answer."""


def as_error(failure: CallFailed) -> HostdError:
    """The exception for an error that came back over the bus."""
    text = str(failure).removesuffix(f" ({failure.name})")
    if failure.name in _ABSENT or failure.name.startswith(_STANDARD + "Spawn."):
        return Unreachable(NOT_RUNNING)
    kind, _ = TABLE.get(failure.name, (HostdError, ""))
    if kind is AccessDenied and _by_the_bus(text):
        return AccessDenied("the bus does not let you ask hostd: be root, or a member of the group hostd")
    return kind(text)


def _by_the_bus(text: str) -> bool:
    """Whether these are dbus-daemon's or dbus-broker's words for a message that its policy keeps back."""
    return text.startswith(("Rejected send message", "Sender is not authorized"))
