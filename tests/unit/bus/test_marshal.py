"""Marshalling, read back by both libraries."""

from __future__ import annotations

import importlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.bus import library
from hostd.bus.marshal import Elements, Variant, marshal, split

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "y": st.integers(0, 255),
    "b": st.booleans(),
    "n": st.integers(-(2**15), 2**15 - 1),
    "q": st.integers(0, 2**16 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "u": st.integers(0, 2**32 - 1),
    "x": st.integers(-(2**63), 2**63 - 1),
    "t": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False),
    "s": TEXT,
    "o": st.sampled_from(["/", "/a", "/a/b_1"]),
    "g": st.sampled_from(["", "s", "a{sv}"]),
}


def of(signature: str) -> st.SearchStrategy[Any]:
    if signature in VALUES:
        return VALUES[signature]
    if signature.startswith("a{"):
        key, value = split(signature[2:-1])
        return st.dictionaries(of(key), of(value), max_size=4)
    if signature[0] == "a":
        return st.lists(of(signature[1:]), max_size=4)
    return st.tuples(*map(of, split(signature[1:-1]))).map(list)


BODIES = st.sampled_from(
    ["s", "ys", "a(sssssuo)", "a{s(yt)}", "aas", "bnqiuxtd", "a{oa{ss}}", "ag", "ya(ya(sx))", "ax"]
)


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


@given(st.data())
@pytest.mark.parametrize("reader", ["dbus_fast", "dbus_next"])
def test_it_is_read_as_it_was(reader: str, data: st.DataObject) -> None:
    signature = data.draw(BODIES)
    body = [data.draw(of(each)) for each in split(signature)]
    content = marshal(signature, body)
    fields = [[1, Variant("o", "/a")], [3, Variant("s", "M")], [8, Variant("g", signature)]]
    head = marshal("yyyyuua(yv)", [ord("l"), 1, 0, 1, len(content), 1, fields])
    unmarshaller = importlib.import_module(f"{reader}._private.unmarshaller").Unmarshaller
    io = importlib.import_module("io")
    message = unmarshaller(io.BytesIO(bytes(head + bytes(-len(head) % 8) + content))).unmarshall()
    assert plain(message.body) == body


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        ("u", -1),
        ("u", 2**32),
        ("u", "1"),
        ("t", None),
        ("s", 5),
        ("s", "a\0"),
        ("s", "\udcff"),
        ("o", ""),
        ("o", "/a/"),
        ("o", "a"),
        ("o", "/ä"),
        ("g", "k"),
        ("g", "("),
        ("(ss)", ["a"]),
        ("(ss)", ["a", "b", "c"]),
        ("a(ss)", [["a"]]),
        ("v", 5),
        ("v", Variant("ss", "a")),
        ("v", Variant("u", -1)),
        ("a{ss}", ["a"]),
    ],
)
def test_what_cannot_travel_raises(signature: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, OverflowError, struct.error)):
        marshal(signature, [value])


def test_as_many_values_as_types() -> None:
    with pytest.raises(ValueError, match="zip"):
        marshal("ss", ["a"])


def test_bytes_are_counted_not_characters() -> None:
    assert bytes(marshal("s", ["ä"])) == b"\2\0\0\0\xc3\xa4\0"


@pytest.mark.parametrize("signature", ["a", "(", "(s", "a{s", "z", "s)"])
def test_no_signatures(signature: str) -> None:
    with pytest.raises(ValueError, match="not a D-Bus signature"):
        split(signature)


def test_the_librarys_own_is_used_only_where_it_is_right() -> None:
    assert bytes(library._body("sa{sv}", ["ä雪", {}])) == bytes(marshal("sa{sv}", ["ä雪", {}]))


@pytest.mark.parametrize(
    ("signature", "element", "values"),
    [
        ("a(su)", "(su)", [["a", 1], ["", 2], ["abcdefgh", 3]]),
        ("a{sv}", "(sv)", {"k": Variant("y", 1), "longer": Variant("as", ["x", "y"])}),
        ("a(su)", "(su)", []),
    ],
)
def test_elements_that_are_marshalled_already(signature: str, element: str, values: Any) -> None:
    """The same bytes as all at once, wherever the array begins."""
    each = values.items() if isinstance(values, dict) else values
    parts = Elements([bytes(marshal(element, [list(value)])) for value in each])
    for before, first in (("", []), ("y", [7]), ("s", ["abc"]), ("yt", [1, 2])):
        whole = marshal(f"{before}{signature}s", [*first, values, "after"])
        assert marshal(f"{before}{signature}s", [*first, parts, "after"]) == whole
