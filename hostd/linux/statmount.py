"""The mount table of one namespace row by row: statmount(2) and listmount(2), as include/uapi/linux/mount.h has them.

Both are there since Linux 6.8, for another namespace than one's own since 6.11, with the source since 6.13; they need
CAP_SYS_ADMIN. Mounts have numbers here that are never given anew while the system runs, unlike `Mount.mount_id`, and
that rise: later mounts have higher ones. Rows come in that order, which since 6.8 is that of /proc/PID/mountinfo too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

from hostd.linux import libc
from hostd.linux.descriptor import Descriptor
from hostd.linux.mount_table import Mount

#: ioctl_ns(2) NS_GET_MNTNS_ID: _IOR(0xb7, 5, __u64).
_NS_GET_MNTNS_ID: Final = 0x8008_B705
#: struct mnt_id_req: size, spare, mount or where to begin, mask or the last one listed, namespace.
_REQUEST: Final = struct.Struct("=IIQQQ")
_ID: Final = struct.Struct("=Q")
#: struct statmount begins with this.
_SIZE: Final = struct.Struct("=I")
#: struct statmount: size, mask, device, type, number, ids of mountinfo, groups, root, mountpoint, subtype, source.
_ROW: Final = struct.Struct("=I4xQII12xI8x8xII16xQQ8xII8xII")
#: Where its strings begin; the fields tell offsets from here.
_STRINGS: Final = 512
_MOUNTPOINT: Final = libc.STATMOUNT_MNT_POINT
_EVERYTHING: Final = (
    libc.STATMOUNT_SB_BASIC
    | libc.STATMOUNT_MNT_BASIC
    | libc.STATMOUNT_MNT_ROOT
    | libc.STATMOUNT_MNT_POINT
    | libc.STATMOUNT_FS_TYPE
    | libc.STATMOUNT_FS_SUBTYPE
    | libc.STATMOUNT_SB_SOURCE
)
#: Mounts that are listed by one call.
_LISTED: Final = 4096


class MountRows(Descriptor):
    """The rows of the namespace that `path` (/proc/PID/ns/mnt) names; it is held open, for `MountEvents` too.

    Raises OSError where the kernel, or a filter of system calls, does not allow it.
    """

    def __init__(self, path: str) -> None:
        self._make_room(8192)
        self._numbers = (ctypes.c_uint64 * _LISTED)()
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            (self._namespace,) = _ID.unpack(fcntl.ioctl(self._fd, _NS_GET_MNTNS_ID, bytes(_ID.size)))
            for number in self.numbers()[:1]:
                self._read(number, _EVERYTHING)
        except BaseException:
            self.close()
            raise

    def numbers(self) -> list[int]:
        """All mounts, rising. None that is there all the while is missed, though others come and go."""
        found: list[int] = []
        while True:
            last = found[-1] if found else 0
            count = libc.listmount(self._request(libc.LSMT_ROOT, last), self._numbers)
            found += self._numbers[:count]
            if count < _LISTED:
                return found

    def row(self, number: int, *naming: bytes) -> Mount | None:
        """The row of one mount; None where it is not in the namespace, or its target contains none of `naming`."""
        try:
            if naming and not self._has(number, naming):
                return None
            self._read(number, _EVERYTHING)
        except FileNotFoundError:
            return None
        return _parse(self._answer)

    def _has(self, number: int, needles: tuple[bytes, ...]) -> bool:
        self._read(number, _MOUNTPOINT)
        (size,) = _SIZE.unpack_from(self._answer)
        return any(self._answer.find(needle, _STRINGS, size) >= 0 for needle in needles)

    def _read(self, number: int, mask: int) -> None:
        request = self._request(number, mask)
        while True:
            try:
                return libc.statmount(request, self._buffer)
            except OSError as error:
                if error.errno != errno.EOVERFLOW:
                    raise
                # A path may be longer than PATH_MAX.
                self._make_room(2 * len(self._answer))

    def _make_room(self, size: int) -> None:
        self._answer = bytearray(size)
        self._buffer = (ctypes.c_char * size).from_buffer(self._answer)

    def _request(self, number: int, parameter: int) -> bytes:
        return _REQUEST.pack(_REQUEST.size, 0, number, parameter, self._namespace)


def _parse(raw: bytearray) -> Mount:
    # What the kernel did not tell is the first string of all, which is empty.
    size, told, major, minor, kind, mount, parent, peers, master, root, point, subtype, source = _ROW.unpack_from(raw)
    text = bytes(raw[_STRINGS:size])
    fstype = _string(text, kind)
    if told & libc.STATMOUNT_FS_SUBTYPE:
        fstype += b"." + _string(text, subtype)
    return Mount(
        mount, parent, f"{major}:{minor}", _string(text, root), _string(text, point),
        fstype, _string(text, source), peers, master,
    )  # fmt: skip


def _string(text: bytes, offset: int) -> bytes:
    return text[offset : text.index(0, offset)]
