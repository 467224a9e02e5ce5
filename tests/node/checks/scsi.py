"""Real SCSI disks with persistent reservations (LIO over tcm_loop), and a client of qemu-pr-helper.

A `Lun` has two paths, each with an initiator of its own, as two nodes of a cluster have: what one reserves the other
runs into. What is reserved is read back from configfs, past the helper.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from pathlib import Path

from tests.node.checks.node import run, until

_TARGET = Path("/sys/kernel/config/target")
_IN, _OUT = 0x5E, 0x5F
READ_KEYS, READ_RESERVATION = 0, 1
REGISTER, RESERVE, RELEASE, CLEAR, PREEMPT = 0, 1, 2, 3, 4
#: Write exclusive: one initiator writes, all may read.
WRITE_EXCLUSIVE = 1
GOOD, CHECK_CONDITION, CONFLICT = 0, 2, 0x18
_UNIT_ATTENTION = 6
_RESPONSE = struct.Struct(">ii96s")


class Lun:
    """A RAM disk of LIO's with two paths; `disks` are their device files."""

    def __init__(self, name: str) -> None:
        for module in ("target_core_mod", "tcm_loop", "sd_mod", "sg"):
            run("modprobe", module)
        # Without these directories LIO answers a registration with an error although it took it.
        for directory in ("/var/target/pr", "/etc/target/pr"):
            os.makedirs(directory, exist_ok=True)
        self._store = _TARGET / "core/rd_mcp_1" / name
        self._store.mkdir(parents=True)
        (self._store / "control").write_text("rd_pages=1024\n")
        (self._store / "enable").write_text("1\n")
        (self._store / "wwn/vpd_unit_serial").write_text(name)
        self._paths = [self._path(number) for number in (1, 2)]
        self.disks = [until(lambda path=path: _disk(path), "the disk appears") for path in self._paths]  # type: ignore[misc]

    def _path(self, number: int) -> Path:
        portal = _TARGET / f"loopback/naa.500140500000000{number}/tpgt_1"
        portal.mkdir(parents=True)
        (portal / "nexus").write_text(f"naa.500140500000001{number}")
        (portal / "lun/lun_0").mkdir()
        (portal / "lun/lun_0/port").symlink_to(self._store)
        return portal

    @property
    def holder(self) -> str:
        """Who holds the reservation, in LIO's words."""
        return (self._store / "pr/res_holder").read_text().strip()

    @property
    def registrations(self) -> str:
        """Who is registered, in LIO's words."""
        return (self._store / "pr/res_pr_registered_i_pts").read_text().strip()

    def remove(self) -> None:
        """Takes the disks away."""
        for portal in self._paths:
            (portal / "lun/lun_0/port").unlink()
            (portal / "lun/lun_0").rmdir()
            portal.rmdir()
            portal.parent.rmdir()
        self._store.rmdir()


def _disk(portal: Path) -> str:
    address = (portal / "address").read_text().strip()
    blocks = Path(f"/sys/class/scsi_device/{address}:0/device/block")
    return next((f"/dev/{each.name}" for each in blocks.iterdir()), "") if blocks.is_dir() else ""


def reservation(what: int, key: int, new: int = 0) -> tuple[bytes, bytes]:
    """PERSISTENT RESERVE OUT and its parameters."""
    parameters = struct.pack(">QQ8x", key, new)
    kind = 0 if what == REGISTER else WRITE_EXCLUSIVE
    return struct.pack(">BBB2xIx", _OUT, what, kind, len(parameters)), parameters


class Helper:
    """One connection to qemu-pr-helper, as QEMU makes it."""

    def __init__(self, path: str, timeout: float = 20.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(path)
        self._receive(4)
        self._socket.sendall(bytes(4))

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (part := self._socket.recv(size - len(data))):
                raise ConnectionError("the helper hung up")
            data += part
        return data

    def _ask(self, disk: str, command: bytes, parameters: bytes = b"") -> tuple[int, bytes]:
        fd = os.open(disk, os.O_RDWR | os.O_NONBLOCK)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            self._socket.sendmsg([command.ljust(16, b"\0")], rights)
            self._socket.sendall(parameters)
            status, size, sense = _RESPONSE.unpack(self._receive(_RESPONSE.size))
            return status, self._receive(size) if size else sense
        finally:
            os.close(fd)

    def read(self, disk: str, what: int) -> tuple[int, bytes]:
        """PERSISTENT RESERVE IN: SCSI status, and the data (or the sense)."""
        return self._ask(disk, struct.pack(">BB5xHx", _IN, what, 1024))

    def write(self, disk: str, what: int, key: int, new: int = 0) -> int:
        """PERSISTENT RESERVE OUT, its SCSI status."""
        return self._ask(disk, *reservation(what, key, new))[0]

    def attention(self, disk: str) -> bool:
        """Whether the disk has something to tell this initiator (a unit attention), which it is told herewith."""
        status, sense = self.read(disk, READ_KEYS)
        return status == CHECK_CONDITION and sense[2 if sense[0] & 0x7F == 0x70 else 1] & 0xF == _UNIT_ATTENTION

    def keys(self, disk: str) -> list[int]:
        """The keys that are registered."""
        status, data = self.read(disk, READ_KEYS)
        assert status == GOOD, data.hex()
        _, size = struct.unpack_from(">II", data)
        return sorted(key for (key,) in struct.iter_unpack(">Q", data[8 : 8 + size]))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
