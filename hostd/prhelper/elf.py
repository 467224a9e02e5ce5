"""Which libraries a program is linked to, read from its ELF file: all that it takes to see a build's features.

Nothing is run and nothing else is needed: program headers → PT_DYNAMIC → DT_NEEDED names in DT_STRTAB. The file may
be anything, so every offset is checked by what is read there.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, Final

_MAGIC: Final = b"\x7fELF"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ = 0, 1, 5, 10
#: No program has tables larger than this (bytes), or more headers than that.
_LARGEST: Final = 1 << 20
_MOST_HEADERS: Final = 1 << 10


class NotElf(ValueError):
    """The file is no ELF program, or a broken one."""


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


def needed(path: bytes) -> frozenset[str]:
    """The names (DT_NEEDED) of the libraries a program needs; none for a static one. Raises NotElf, OSError."""
    # O_NONBLOCK: a FIFO would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        try:
            return _needed(file)
        except struct.error:
            raise NotElf(f"{os.fsdecode(path)} ends too early for an ELF program") from None


def _needed(file: BinaryIO) -> frozenset[str]:
    order, wide = _identify(file.read(6))
    segments = _segments(file, order, wide)
    dynamic = next((segment for segment in segments if segment.kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return frozenset()
    entries = _entries(_at(file, dynamic.offset, dynamic.size), order, wide)
    table = dict(entries)
    if _DT_STRTAB not in table or _DT_STRSZ not in table:
        return frozenset()
    strings = _at(file, _offset(segments, table[_DT_STRTAB]), table[_DT_STRSZ])
    return frozenset(_string(strings, value) for tag, value in entries if tag == _DT_NEEDED)


def _identify(head: bytes) -> tuple[str, bool]:
    if head[:4] != _MAGIC or len(head) < 6 or head[4] not in (1, 2) or head[5] not in (1, 2):
        raise NotElf("not an ELF program")
    return "<" if head[5] == 1 else ">", head[4] == 2


def _segments(file: BinaryIO, order: str, wide: bool) -> list[_Segment]:
    place, layout = (32, "Q14xHH") if wide else (28, "I10xHH")
    header = struct.Struct(order + layout)
    start, size, count = header.unpack(_at(file, place, header.size))
    if count > _MOST_HEADERS or size > _LARGEST:
        raise NotElf("an ELF program with too many headers")
    entry = struct.Struct(order + ("IIQQQQ" if wide else "IIIIII"))
    return [_segment(entry.unpack(_at(file, start + n * size, entry.size)), wide) for n in range(count)]


def _segment(values: tuple[int, ...], wide: bool) -> _Segment:
    # 64 bits: type, flags, offset, address, physical address, size in the file; 32 bits: the flags come later.
    kind, offset, address, size = (values[n] for n in ((0, 2, 3, 5) if wide else (0, 1, 2, 4)))
    return _Segment(kind, offset, address, size)


def _entries(data: bytes, order: str, wide: bool) -> list[tuple[int, int]]:
    entry = struct.Struct(order + ("qQ" if wide else "iI"))
    found: list[tuple[int, int]] = []
    for tag, value in entry.iter_unpack(data[: len(data) - len(data) % entry.size]):
        if tag == _DT_NULL:
            break
        found.append((tag, value))
    return found


def _offset(segments: list[_Segment], address: int) -> int:
    for segment in segments:
        if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    raise NotElf("an ELF program whose string table is nowhere")


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.find(b"\0", at)].decode("utf-8", "backslashreplace") if at < len(strings) else ""


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    if size > _LARGEST:
        raise NotElf("an ELF program with a table that is too large")
    try:
        file.seek(offset)
    except (OSError, OverflowError, ValueError):
        raise NotElf("an ELF program with an offset that leads nowhere") from None
    return file.read(size)
