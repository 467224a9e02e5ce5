"""statmount(2)'s answer as bytes, with any paths in it; that the kernel lays it out so, test_statmount holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hostd.linux import libc, statmount
from hostd.linux.mount_table import Mount

STRINGS = st.binary(max_size=40).map(lambda text: text.replace(b"\0", b""))
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(st.lists(STRINGS, min_size=5, max_size=5), st.booleans(), U32, U32, st.tuples(U32, U32, U64, U64), st.binary())
def test_any_strings_are_read_as_they_are(
    texts: list[bytes], subtype: bool, major: int, minor: int, ids: tuple[int, int, int, int], rest: bytes
) -> None:
    area, offsets = b"\0", []
    for text in texts:
        offsets.append(len(area) if text else 0)
        area += text + b"\0"
    size = statmount._STRINGS + len(area)
    told = libc.STATMOUNT_FS_SUBTYPE if subtype else 0
    kind, root, point, sub, source = offsets
    head = statmount._ROW.pack(size, told, major, minor, kind, *ids, root, point, sub, source)
    # What follows is of an earlier, longer answer.
    found = statmount._parse(bytearray(head.ljust(statmount._STRINGS, b"\xff") + area + rest))
    fstype = texts[0] + (b"." + texts[3] if subtype else b"")
    assert found == Mount(
        ids[0], ids[1], f"{major}:{minor}", texts[1], texts[2], fstype, texts[4], ids[2], ids[3]
    )  # fmt: skip
