"""What the processes of a VM look like: QEMU and virt-launcher, by name and command line.

A process can rewrite its command line at will, so what is read here is for people to see (namespace, name, VMI UID)
and is never trusted for identity: the pod comes from the cgroup, life and death from the pidfd.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: The kernel keeps 15 characters of a process's name, which cuts `qemu-system-x86_64` short.
_QEMU = (b"qemu-system", b"qemu-kvm")
_OTHER_TOOLS = frozenset({b"qemu-img", b"qemu-io", b"qemu-nbd", b"qemu-pr-helper", b"qemu-storage-daemon", b"qemu-ga"})
_LAUNCHERS = frozenset({b"virt-launcher", b"virt-launcher-monitor"})
#: No name or UID of Kubernetes is longer; what is longer is no name.
_TEXT_MAX = 253


@dataclass(frozen=True, slots=True)
class Guest:
    """A VM as its command line names it; `namespace` is empty where the name has no `_`, or nothing behind it."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Launcher:
    """A VMI as its virt-launcher's command line names it."""

    name: str
    uid: str
    namespace: str


def looks_like_qemu(comm: bytes) -> bool:
    """Whether a process of this name (as in /proc/PID/comm, without the newline) is a QEMU system emulator."""
    return comm.startswith(_QEMU)


def looks_like_launcher(comm: bytes) -> bool:
    """Whether a process of this name is a virt-launcher or its monitor (`virt-launcher-m` after the kernel's cut)."""
    return comm.startswith(b"virt-launcher")


def is_probe(argv: Sequence[bytes]) -> bool:
    """Whether this is libvirt asking a QEMU for its capabilities (`-machine none`): no VM ever runs in it."""
    machine = _last(_values(argv, b"machine", b"M"))
    return machine is not None and _options(machine, b"type").get(b"type") == b"none"


def guest(argv: Sequence[bytes]) -> Guest | None:
    """The VM that a QEMU's command line names; None for probes, other tools, and where no guest is named.

    KubeVirt names its guests `<namespace>_<vmi>`. A namespace has no `_`, so the first one divides.
    """
    if not argv or posixpath.basename(argv[0]) in _OTHER_TOOLS or is_probe(argv):
        return None
    name: bytes | None = None
    for value in _values(argv, b"name"):
        name = _options(value, b"guest").get(b"guest", name)
    text = _text(name)
    if not text:
        return None
    namespace, _, vmi = text.partition("_")
    return Guest(namespace, vmi) if vmi else Guest("", text)


def launcher(argv: Sequence[bytes]) -> Launcher | None:
    """The VMI that a virt-launcher (or its monitor) was started for; None for any other process."""
    if not argv or posixpath.basename(argv[0]) not in _LAUNCHERS:
        return None
    name, uid, namespace = (_text(_last(_values(argv, key))) for key in (b"name", b"uid", b"namespace"))
    return Launcher(name, uid, namespace) if name and uid and namespace else None


def _values(argv: Sequence[bytes], *names: bytes) -> Iterator[bytes]:
    """The values of an option in all its spellings: `-name V`, `--name V`, `--name=V`."""
    spellings = {dashes + name for name in names for dashes in (b"-", b"--")}
    for at, argument in enumerate(argv[1:], 1):
        option, equals, value = argument.partition(b"=")
        if option not in spellings:
            continue
        if equals:
            yield value
        elif at + 1 < len(argv):
            yield argv[at + 1]


def _last(values: Iterator[bytes]) -> bytes | None:
    """The last one counts, as it does for QEMU and virt-launcher themselves."""
    found = list(values)
    return found[-1] if found else None


def _options(text: bytes, implied: bytes) -> dict[bytes, bytes]:
    """QEMU's option syntax: `key=value,…`, where `,,` is a comma and a first word without `=` is `implied`'s value."""
    found: dict[bytes, bytes] = {}
    for at, part in enumerate(_divide(text)):
        key, equals, value = part.partition(b"=")
        if equals:
            found[key] = value
        elif at == 0:
            found[implied] = part
    return found


def _divide(text: bytes) -> list[bytes]:
    """The text between single commas; two commas in a row are one that belongs to the text."""
    # NUL cannot be in an argument of a process, so it can stand in for a doubled comma.
    return [part.replace(b"\0", b",") for part in text.replace(b",,", b"\0").split(b",")]


def _text(value: bytes | None) -> str:
    if value is None or len(value) > _TEXT_MAX:
        return ""
    return value.decode("utf-8", "backslashreplace")
