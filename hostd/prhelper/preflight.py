"""What must be true before a helper is started, and what speaks against it: gathered, then judged without looking."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Final

from hostd.prhelper import elf, multipath
from hostd.prhelper.multipath import Multipath

PROGRAM: Final = b"/usr/bin/qemu-pr-helper"
#: Bits of capabilities(7) that the helper needs at its start, even where it gives them up then.
NEEDED: Final = {6: "CAP_SETGID", 7: "CAP_SETUID", 8: "CAP_SETPCAP", 17: "CAP_SYS_RAWIO"}
#: And for multipath devices.
NEEDED_FOR_MULTIPATH: Final = {21: "CAP_SYS_ADMIN"}


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on a host; tests have their own."""

    program: bytes = PROGRAM
    sys_block: str = multipath.SYS_BLOCK
    multipathd: tuple[bytes, ...] = multipath.SOCKETS
    selinux: str = "/sys/fs/selinux/enforce"


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found. `libraries` is None where the program cannot be read as ELF."""

    program: bytes
    #: Why the program cannot be run; empty = it can.
    trouble: str
    libraries: frozenset[str] | None
    capabilities: int
    devices: tuple[str, ...]
    multipathd: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal`: it must not run. `failure`: it cannot be started now. Both in words, empty where all is well."""

    refusal: str = ""
    failure: str = ""
    multipath: Multipath = Multipath.NONE


class Preflight:
    """Looks at the host; remembers what a program is linked to for as long as its file is the same."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: tuple[tuple[int, ...], frozenset[str] | None] | None = None

    def look(self, program: bytes, capabilities: int, *, helper_pid: int = 0) -> Findings:
        """What is true now, for a helper of that program and those capabilities (and, where one runs, its pid)."""
        trouble, libraries = self._look_at(program)
        devices = tuple(multipath.devices(self._places.sys_block))
        return Findings(
            program,
            trouble,
            libraries,
            capabilities,
            devices,
            # Nobody is disturbed where it does not matter.
            bool(devices) and multipath.reachable(self._places.multipathd, abstract=_shares_network(helper_pid)),
        )

    def _look_at(self, program: bytes) -> tuple[str, frozenset[str] | None]:
        shown = os.fsdecode(program)
        try:
            found = os.stat(program)
        except OSError as error:
            hint = "; install qemu-system-common (Debian) or qemu-pr-helper (Fedora)" if program == PROGRAM else ""
            return f"{shown} cannot be run: {error.strerror}{hint}", None
        if not stat.S_ISREG(found.st_mode) or not os.access(program, os.X_OK):
            return f"{shown} is not an executable file; chmod +x it or install it anew", None
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if self._known is None or self._known[0] != key:
            self._known = (key, _libraries(program))
        return "", self._known[1]


def _libraries(program: bytes) -> frozenset[str] | None:
    try:
        return elf.needed(program)
    except (elf.NotElf, OSError):
        return None


def _shares_network(pid: int) -> bool:
    """Whether a helper is in our network namespace, which is where we look for abstract sockets."""
    if not pid:
        return True
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return True


def own_capabilities() -> int:
    """What a child of ours would have: for root all of the bounding set, for others what is ambient."""
    wanted = b"CapBnd:" if os.geteuid() == 0 else b"CapAmb:"
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(wanted):
                return int(line.split()[1], 16)
    return 0


def judge(found: Findings) -> Verdict:
    """The verdict on what was found."""
    state = _multipath(found)
    refusal = ""
    if state is Multipath.UNSUPPORTED:
        refusal = (
            f"{os.fsdecode(found.program)} is built without {multipath.LIBRARY}, and this host has multipath devices "
            f"({', '.join(found.devices[:4])}): its reservations would hold on one path only; "
            "install a qemu-pr-helper with multipath support"
        )
    return Verdict(refusal, found.trouble or _lacking(found), state)


def _multipath(found: Findings) -> Multipath:
    if not found.devices:
        return Multipath.NONE
    if found.libraries is None:
        # Where there is no program to be read there is nothing to be refused either.
        return Multipath.UNREACHABLE if found.trouble else Multipath.UNSUPPORTED
    if not multipath.is_linked(found.libraries):
        return Multipath.UNSUPPORTED
    return Multipath.OK if found.multipathd else Multipath.UNREACHABLE


def _lacking(found: Findings) -> str:
    needed = NEEDED | (NEEDED_FOR_MULTIPATH if found.devices else {})
    lacking = [name for bit, name in needed.items() if not found.capabilities >> bit & 1]
    if not lacking:
        return ""
    hint = "; use the multipath drop-in of hostd-pr-helper.service" if lacking == ["CAP_SYS_ADMIN"] else ""
    return f"the helper would lack {', '.join(lacking)}{hint}"
