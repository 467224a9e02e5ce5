"""Values to D-Bus's bytes, little-endian. Whatever cannot travel raises here, before the bus sees it.

Written out because what the libraries do is not safe to send: dbus-fast 1.84 (Debian 12) counts a string's characters
for its bytes and goes on when a value does not fit its type, dbus-next looks for neither NUL nor wrong paths; for each
of them a bus ends the connection. Each type of a signature becomes a function once, which appends to a buffer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

Writer = Callable[[bytearray, Any], None]
#: Of one array, says the specification.
MAX_ARRAY = 64 * 1024 * 1024
_PADDING = tuple(bytes(n) for n in range(8))
_LENGTH = struct.Struct("<I")
_FIXED = {"y": "B", "b": "I", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d", "h": "I"}
_PATH = re.compile(r"/|(/[A-Za-z0-9_]+)+")


class Variant(NamedTuple):
    """A value that brings its type: one complete type of D-Bus."""

    signature: str
    value: Any


class Elements(NamedTuple):
    """An array's elements, marshalled one by one: structs or entries of a dictionary, which begin at eight bytes."""

    parts: list[bytes]


def marshal(signature: str, values: list[Any]) -> bytearray:
    """A message's body. Raises ValueError, TypeError, AttributeError, OverflowError or struct.error."""
    buffer = bytearray()
    for writer, value in zip(_writers(signature), values, strict=True):
        writer(buffer, value)
    return buffer


@cache
def _writers(signature: str) -> tuple[Writer, ...]:
    return tuple(_writer(each) for each in split(signature))


@cache
def split(signature: str) -> tuple[str, ...]:
    """The complete types of a signature. Raises ValueError."""
    found = []
    at = 0
    while at < len(signature):
        end = _end(signature, at)
        found.append(signature[at:end])
        at = end
    return tuple(found)


def _end(signature: str, at: int) -> int:
    """Where the complete type that begins here ends."""
    first = signature[at : at + 1]
    if first == "a":
        return _end(signature, at + 1)
    if first in ("(", "{"):
        close = ")" if first == "(" else "}"
        at += 1
        while signature[at : at + 1] != close:
            at = _end(signature, at)
        return at + 1
    if not first or first not in "ybnqiuxtdhsogv":
        raise ValueError(f"{signature!r} is not a D-Bus signature")
    return at + 1


@cache
def _writer(kind: str) -> Writer:
    if kind in _FIXED:
        return _fixed(kind)
    if kind[0] == "a":
        return _array(kind[1:])
    if kind[0] == "(":
        return _struct(_writers(kind[1:-1]))
    others: dict[str, Writer] = {"s": _string, "o": _object_path, "g": _signature, "v": _variant}
    return others[kind]


def _fixed(kind: str) -> Writer:
    layout = struct.Struct("<" + _FIXED[kind])
    mask, pack = layout.size - 1, layout.pack

    def write(buffer: bytearray, value: Any) -> None:  # noqa: ANN401 - struct looks at it
        buffer += _PADDING[-len(buffer) & mask] + pack(value)

    return write


def _string(buffer: bytearray, value: str) -> None:
    raw = value.encode()
    if b"\0" in raw:
        raise ValueError("a string has a NUL in it")
    buffer += _PADDING[-len(buffer) & 3] + _LENGTH.pack(len(raw)) + raw + b"\0"


def _object_path(buffer: bytearray, value: str) -> None:
    if _PATH.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not an object path")
    _string(buffer, value)


def _signature(buffer: bytearray, value: str) -> None:
    split(value)
    raw = value.encode()
    buffer += bytes([len(raw)]) + raw + b"\0"


def _variant(buffer: bytearray, value: Variant) -> None:
    head, writer = _variant_parts(value.signature)
    buffer += head
    writer(buffer, value.value)


@cache
def _variant_parts(signature: str) -> tuple[bytes, Writer]:
    """A variant's signature as bytes, and what writes its value."""
    (writer,) = _writers(signature)
    head = bytearray()
    _signature(head, signature)
    return bytes(head), writer


def _struct(members: tuple[Writer, ...]) -> Writer:
    def write(buffer: bytearray, value: list[Any]) -> None:
        buffer += _PADDING[-len(buffer) & 7]
        for member, each in zip(members, value, strict=True):
            member(buffer, each)

    return write


def _array(element: str) -> Writer:
    entry = element[0] == "{"
    writer = _struct(_writers(element[1:-1])) if entry else _writer(element)
    aligned = element[0] in "xtd({"

    def write(buffer: bytearray, value: Any) -> None:  # noqa: ANN401 - a list, or a dict where entries are wanted
        buffer += _PADDING[-len(buffer) & 3] + b"\0\0\0\0"
        length_at = len(buffer) - 4
        if aligned:
            buffer += _PADDING[-len(buffer) & 7]
        start = len(buffer)
        if isinstance(value, Elements):
            for part in value.parts:
                buffer += _PADDING[-len(buffer) & 7] + part
        else:
            for each in value.items() if entry else value:
                writer(buffer, each)
        if len(buffer) - start > MAX_ARRAY:
            raise ValueError("an array is longer than 64 MiB")
        _LENGTH.pack_into(buffer, length_at, len(buffer) - start)

    return write
