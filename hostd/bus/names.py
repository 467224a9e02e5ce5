"""Names and paths of hostd on the bus, in one place."""

from __future__ import annotations

import re
from functools import lru_cache

from hostd.errors import UnknownObject

BUS_NAME = "io.kubevirt.hostd1"
ROOT = "/io/kubevirt/hostd1"
VM_PREFIX = ROOT + "/vm"
HELPER_PATH = ROOT + "/pr_helper"
LOG_CONTROL_PATH = "/org/freedesktop/LogControl1"

MANAGER = BUS_NAME + ".Manager"
VM = BUS_NAME + ".VM"
HELPER = BUS_NAME + ".PRHelper"
LOG_CONTROL = "org.freedesktop.LogControl1"

DBUS = "org.freedesktop.DBus"
DBUS_PATH = "/org/freedesktop/DBus"
PROPERTIES = DBUS + ".Properties"
INTROSPECTABLE = DBUS + ".Introspectable"
PEER = DBUS + ".Peer"
OBJECT_MANAGER = DBUS + ".ObjectManager"

_ESCAPED = re.compile(r"^[0-9]|[^A-Za-z0-9]")


def escape_label(label: str) -> str:
    """One element of an object path, as sd_bus_path_encode(3) makes it: `_` and two hexadecimal digits a byte.

    A digit is escaped where it stands first, and the empty label is `_`.
    """
    return _ESCAPED.sub(_hex, label) if label else "_"


def _hex(found: re.Match[str]) -> str:
    return "".join(f"_{byte:02x}" for byte in found[0].encode("utf-8"))


def unescape_label(label: str) -> str:
    """What `escape_label` was given. Raises UnknownObject for a label that it would not have made."""
    if label == "_":
        return ""
    try:
        text = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), label.encode("ascii")).decode(
            "utf-8"
        )
    except UnicodeError:
        text = ""
    if escape_label(text) != label:
        raise UnknownObject(f"no object has a path with {label!r} in it")
    return text


@lru_cache(maxsize=4096)
def vm_path(pod_uid: str) -> str:
    """The object path of a pod's VM."""
    return f"{VM_PREFIX}/{escape_label(pod_uid)}"


def pod_uid_of(path: str) -> str:
    """The pod of a VM's object path. Raises UnknownObject."""
    parent, _, label = path.rpartition("/")
    if parent != VM_PREFIX or not label:
        raise UnknownObject(f"nothing lives at {path}")
    return unescape_label(label)
