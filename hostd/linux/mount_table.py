r"""The mount table: /proc/PID/mountinfo, read whole and searched as bytes.

A row, by proc_pid_mountinfo(5):

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    id parent device root target options [optional fields] - fstype source super-options

Fields end at one space, and one may be empty (a source can be). In root and target the kernel writes space, tab,
newline and backslash as `\` and three octal digits, and any other byte as it is; in the source `#` too. The root of
a file that was deleted ends in `//deleted`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostd.linux.descriptor import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_ESCAPED = re.compile(rb"[ \t\n\\]")
# Fields before the optional ones.
_FIXED = 6
#: Spaces in a row before the one in front of its target.
_BEFORE_TARGET = 3
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Mount:
    """One row. `device` is "major:minor", `peer_group` the N of shared:N, `master` that of master:N; 0 = none."""

    mount_id: int
    parent_id: int
    device: str
    root: bytes
    target: bytes
    fstype: bytes
    source: bytes
    peer_group: int
    master: int


def unescape(field: bytes) -> bytes:
    r"""Decodes `\ooo` in one pass: what comes out is not looked at again. Other backslashes stay."""
    return _OCTAL.sub(lambda found: bytes((int(found[1], 8),)), field) if b"\\" in field else field


def escape(path: bytes) -> bytes:
    """A path as the kernel writes it in root and target."""
    return _ESCAPED.sub(lambda found: b"\\%03o" % found[0][0], path)


def parse(table: bytes) -> list[Mount]:
    """All rows; a malformed one is skipped, for there is nothing in it to act on."""
    return [mount for row in table.split(b"\n") if (mount := _parse_row(row)) is not None]


def rows_below(table: bytes, prefix: bytes) -> list[Mount]:
    """The rows whose target is strictly below the directory `prefix`, in the table's order; the others are not parsed.

    Never raises; skips what `parse` skips.
    """
    mounts = (_parse_row(row) for row in _raw_rows_below(table, escape(prefix.rstrip(b"/"))))
    # The root directory is the only target that ends in a slash, and it is not below itself.
    return [mount for mount in mounts if mount is not None and mount.target != b"/"]


def _raw_rows_below(table: bytes, escaped: bytes) -> Iterator[bytes]:
    needle = b" " + escaped + b"/"
    found = table.find(needle)
    while found >= 0:
        start = table.rfind(b"\n", 0, found) + 1
        # The needle may as well be in another field, and in the target after that.
        following = found + 1
        if table.count(b" ", start, found) == _BEFORE_TARGET:
            end = table.find(b"\n", found)
            following = len(table) if end < 0 else end
            yield table[start:following]
        found = table.find(needle, following)


def rows_naming(table: bytes, *needles: bytes) -> list[Mount]:
    """The rows that contain one of the needles anywhere, in the table's order; the others are not parsed.

    For those who sort the rows themselves and know what a row that matters must contain.
    """
    found = dict(pair for needle in needles for pair in _rows_with(table, escape(needle)))
    return [mount for start in sorted(found) if (mount := _parse_row(found[start])) is not None]


def _rows_with(table: bytes, needle: bytes) -> Iterator[tuple[int, bytes]]:
    """Each row that contains the needle, with where it starts."""
    at = table.find(needle)
    while at >= 0:
        start, end = table.rfind(b"\n", 0, at) + 1, table.find(b"\n", at)
        end = len(table) if end < 0 else end
        yield start, table[start:end]
        at = table.find(needle, end)


def _parse_row(row: bytes) -> Mount | None:
    fields = row.split(b" ")
    try:
        dash = fields.index(b"-", _FIXED)
        fstype, source = fields[dash + 1], fields[dash + 2]
        peer_group, master = _propagation(fields[_FIXED:dash])
        return Mount(
            int(fields[0]),
            int(fields[1]),
            fields[2].decode("ascii"),
            unescape(fields[3]),
            unescape(fields[4]),
            unescape(fstype),
            unescape(source),
            peer_group,
            master,
        )
    except (ValueError, IndexError):
        return None


def _propagation(optional: list[bytes]) -> tuple[int, int]:
    """(peer group, master) of the optional fields; others (propagate_from, unbindable) say nothing we need."""
    told = dict(field.partition(b":")[::2] for field in optional)
    return int(told.get(b"shared", 0)), int(told.get(b"master", 0))


class MountTable(Descriptor):
    """The table of one mount namespace, kept open: it outlives the process through which it was opened.

    To hear of changes it is polled for EPOLLPRI, see `hostd.linux.mount_watch`.
    """

    def __init__(self, path: str = "/proc/1/mountinfo") -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read(self) -> bytes:
        """The whole table. No row that is there all the while is missed, though mounts come and go."""
        parts = []
        offset = 0
        while chunk := os.pread(self._fd, _CHUNK, offset):
            parts.append(chunk)
            offset += len(chunk)
        return b"".join(parts)
