from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.prhelper import elf

STRINGS = b"\0libc.so.6\0libmpathpersist.so.0\0"


def program(*, wide: bool, order: str, names: tuple[bytes, ...]) -> bytes:
    """An ELF file with nothing but what says which libraries it needs."""
    word, entry = ("Q", "qQ") if wide else ("I", "iI")
    header_size, segment_size = (64, 56) if wide else (52, 32)
    entries = [(1, STRINGS.index(name)) for name in names]
    base, strings_at = 0x40000, header_size + 2 * segment_size
    dynamic_at = strings_at + len(STRINGS)
    entries += [(5, base + strings_at), (10, len(STRINGS)), (0, 0), (1, 1)]
    dynamic = b"".join(struct.pack(order + entry, *pair) for pair in entries)
    size = dynamic_at + len(dynamic)

    def segment(kind: int, offset: int, length: int) -> bytes:
        if wide:
            return struct.pack(order + "IIQQQQQQ", kind, 0, offset, base + offset, 0, length, length, 0)
        return struct.pack(order + "IIIIIIII", kind, offset, base + offset, 0, length, length, 0, 0)

    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    rest = struct.pack(
        order + f"HHI{word}{word}{word}IHHHHHH", 3, 0, 1, 0, header_size, 0, 0, header_size, segment_size, 2, 0, 0, 0
    )
    return ident + rest + segment(1, 0, size) + segment(2, dynamic_at, len(dynamic)) + STRINGS + dynamic


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
def test_both_sizes_and_both_byte_orders(tmp_path: Path, wide: bool, order: str) -> None:
    file = tmp_path / "program"
    file.write_bytes(program(wide=wide, order=order, names=(b"libc.so.6", b"libmpathpersist.so.0")))
    assert elf.needed(os.fsencode(file)) == {"libc.so.6", "libmpathpersist.so.0"}


def test_a_real_program() -> None:
    assert any(name.startswith("libc.so") for name in elf.needed(os.fsencode(os.path.realpath("/bin/sh"))))


def test_the_same_as_the_dynamic_linker_knows() -> None:
    shown = subprocess.run(["ldd", sys.executable], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in elf.needed(os.fsencode(sys.executable)))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\nexit 1\n", b"\x7fELF\x02\x01" + bytes(20)])
def test_what_is_no_program_is_said(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "program"
    file.write_bytes(data)
    with pytest.raises(elf.NotElf):
        elf.needed(os.fsencode(file))


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        elf.needed(os.fsencode(tmp_path / "none"))


@given(st.data())
def test_broken_programs_never_surprise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = bytearray(program(wide=True, order="<", names=(b"libc.so.6",)))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "broken"
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(elf.NotElf):
        elf.needed(os.fsencode(file))
