"""Bytes as text and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.bus.text import escape, escape_name, sentence, unescape
from hostd.errors import InvalidArgs


@given(st.binary())
def test_every_byte_string_comes_back(raw: bytes) -> None:
    assert unescape(escape(raw)) == raw


@given(st.binary())
def test_what_goes_out_can_travel(raw: bytes) -> None:
    text = escape(raw)
    text.encode("utf-8")
    assert re.search(r"[\x00-\x1f\x7f]", text) is None


@given(st.binary(), st.binary())
def test_no_two_byte_strings_look_alike(one: bytes, other: bytes) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"/a b#c", "/a b#c"),
        ("/größe/雪".encode(), "/größe/雪"),
        (b"/x\xff\xfe", r"/x\xff\xfe"),
        (b"/tab\tnewline\n", r"/tab\x09newline\x0a"),
        (rb"/\040", r"/\x5c040"),
        (rb"/\xff", r"/\x5cxff"),
        (b"\0\x7f", r"\x00\x7f"),
        # One byte of a sequence that ends too soon.
        (b"\xe9x", r"\xe9x"),
    ],
)
def test_the_rule(raw: bytes, text: str) -> None:
    assert escape(raw) == text
    assert unescape(text) == raw


def test_either_case_of_digit_is_read() -> None:
    assert unescape(r"\xFf") == b"\xff"


@pytest.mark.parametrize("text", ["\\", r"a\b", r"\x", r"\x1", r"\xg0", r"\\x41", r"\x41\ "])
def test_another_backslash_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgs, match=r"x5c"):
        unescape(text)


def test_a_name_from_the_host() -> None:
    assert escape_name(b"disk\xff\\".decode("utf-8", "surrogateescape")) == r"disk\xff\x5c"


@given(st.text())
def test_a_sentence_can_always_travel(words: str) -> None:
    said = sentence(words)
    said.encode("utf-8")
    assert re.search(r"[\x00-\x1f\x7f]", said) is None


def test_a_sentence_keeps_its_backslashes() -> None:
    assert sentence("umount \\xff: busy\n\udcff") == "umount \\xff: busy\\x0a\\xff"
