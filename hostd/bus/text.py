r"""Bytes as text on the bus, and back without loss.

The rule, in both directions: text that is UTF-8 travels as it is, except that a backslash and each control character
(below U+0020, and U+007F) become `\xNN` for each of their bytes, and so does every byte that is not part of valid
UTF-8. Two lower-case hexadecimal digits, always. Reading takes exactly that form (either case of digit): any other
use of a backslash is refused, so a path that holds one is written with `\x5c`.
"""

from __future__ import annotations

import re

from hostd.errors import InvalidArgs

_UNSAFE = re.compile("[\\\\\x00-\x1f\x7f\udc80-\udcff]")
_UNSPEAKABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2})?")


def escape(raw: bytes) -> str:
    """The text of these bytes, by the module's rule."""
    text = raw.decode("utf-8", "surrogateescape")
    if _UNSAFE.search(text) is None:
        return text
    # A surrogate stands for one byte that is no UTF-8: its low eight bits.
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", text)


def escape_name(name: str) -> str:
    """The same for a name that was read from the host with surrogate escapes."""
    return escape(name.encode("utf-8", "surrogateescape"))


def unescape(text: str) -> bytes:
    """The bytes of this text, by the module's rule. Raises InvalidArgs for a backslash that begins no `\\xNN`."""
    raw = text.encode("utf-8")
    return raw if b"\\" not in raw else _ESCAPE.sub(_byte, raw)


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        raise InvalidArgs("a backslash must begin \\xNN (two hexadecimal digits); write a backslash itself as \\x5c")
    return bytes([int(found[1][1:], 16)])


def sentence(text: str) -> str:
    """Words for a person that any D-Bus peer can take: no NUL, control character or lone surrogate is left in them."""
    if _UNSPEAKABLE.search(text) is None:
        return text
    return _UNSPEAKABLE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", text)
