"""dm-multipath on this host: whether there are such devices, and whether multipathd can be spoken to.

A helper without libmpathpersist registers on one path of a multipath device only, and then its reservation fails or
conflicts: it would be worse than none. One with the library needs multipathd.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from enum import StrEnum

#: Where multipathd listens: up to 0.9 in the abstract name space, newer ones at a path too.
SOCKETS: tuple[bytes, ...] = (b"/run/multipathd.socket", b"\0/org/kernel/linux/storage/multipathd")
SYS_BLOCK = "/sys/block"
LIBRARY = "libmpathpersist"


class Multipath(StrEnum):
    """How it stands; the words are those of the bus."""

    NONE = "none"  # the host has no multipath devices
    OK = "ok"
    UNSUPPORTED = "unsupported"  # devices, and a helper that would do harm to them
    UNREACHABLE = "unreachable"  # devices and library, but no multipathd


def devices(sys_block: str = SYS_BLOCK) -> list[str]:
    """The names (dm-0) of the multipath devices there are."""
    with suppress(OSError):
        return sorted(
            name for name in os.listdir(sys_block) if name.startswith("dm-") and _is_multipath(sys_block, name)
        )
    return []


def _is_multipath(sys_block: str, name: str) -> bool:
    # A device that is being removed has no such file any more.
    with suppress(OSError), open(f"{sys_block}/{name}/dm/uuid", "rb") as file:
        return file.read(6) == b"mpath-"
    return False


def is_linked(libraries: frozenset[str]) -> bool:
    """Whether a helper that needs these libraries knows multipath."""
    return any(name.startswith(LIBRARY) for name in libraries)


def reachable(sockets: tuple[bytes, ...] = SOCKETS, *, abstract: bool = True) -> bool:
    """Whether multipathd takes a connection; abstract sockets count for those in our network namespace only."""
    return any(_takes_connection(name) for name in sockets if abstract or not name.startswith(b"\0"))


def _takes_connection(name: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except BlockingIOError:
            return True  # it listens, and has much to do
        except OSError:
            return False
    return True
