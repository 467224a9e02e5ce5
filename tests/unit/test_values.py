from __future__ import annotations

import grp
import os
import pwd
from enum import StrEnum
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd import values

if TYPE_CHECKING:
    from collections.abc import Callable

S = 1_000_000


class Word(StrEnum):
    ONE = "one"
    TWO = "two"


@pytest.mark.parametrize(
    ("text", "usec"),
    [
        ("0", 0),
        (" 0 ", 0),
        ("0s", 0),
        ("1us", 1),
        ("1µs", 1),
        ("1usec", 1),
        ("500ms", S // 2),
        ("2s", 2 * S),
        ("2 s", 2 * S),
        ("  2\ts ", 2 * S),
        ("2sec", 2 * S),
        ("2 seconds", 2 * S),
        ("1.5s", S * 3 // 2),
        ("0.000001s", 1),
        ("10min", 600 * S),
        ("10m", 600 * S),
        ("1min 30s", 90 * S),
        ("1min30s", 90 * S),
        ("1 hour 1 minute", 3660 * S),
        ("1h", 3600 * S),
        ("2 hr", 7200 * S),
        ("1d 1h", 90_000 * S),
        ("1week", 604_800 * S),
        ("3650d", values.LONGEST_USEC),
    ],
)
def test_times(text: str, usec: int) -> None:
    assert values.duration(text) == usec
    assert values.duration_or_never(text) == usec


BAD_TIMES: list[object] = [
    *("", " ", "2", "2 3s", "s", "2x", "-2s", "+2s", "2s-", "2s,3s", "1e3s", "1.s", ".5s", "0.5us", "1S", "2 Min"),
    *("3651d", "99999999999999999999999s", "9" * 100_000 + "s", "²s", "\u0662s", "2s\0", "2", "00", "2\ns3"),
    *(2, 2.0, 0, True, None, [], ["2s"], {}, {"s": 2}),
]


@pytest.mark.parametrize("value", [*BAD_TIMES, "never", "infinity"], ids=lambda value: repr(value)[:20])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ValueError, match=r'a time with its unit, such as "500ms"'):
        values.duration(value)


@pytest.mark.parametrize("value", [*BAD_TIMES, "Never", "forever", "never 2s"], ids=lambda value: repr(value)[:20])
def test_what_is_neither_a_time_nor_never(value: object) -> None:
    with pytest.raises(ValueError, match=r'of at most ten years, or "never"$'):
        values.duration_or_never(value)


@pytest.mark.parametrize("text", ["never", "infinity"])
def test_never(text: str) -> None:
    assert values.duration_or_never(text) is None


@given(st.integers(0, values.LONGEST_USEC))
def test_every_time_can_be_written(usec: int) -> None:
    assert values.duration(f"{usec}us") == usec
    assert values.duration(f"{usec // S}s {usec % S}us") == usec
    assert values.duration(f"{usec // S}.{usec % S:06}s") == usec


@given(st.text(max_size=20) | st.text("0123456789. smhdinuµ-", max_size=20))
def test_any_text_is_a_time_or_a_value_error(text: str) -> None:
    try:
        found = values.duration(text)
    except ValueError:
        return
    assert 0 <= found <= values.LONGEST_USEC


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a", b"/a"),
        ("/a/b/", b"/a/b"),
        ("//a//./b/.", b"/a/b"),
        ("/größe", "/größe".encode()),
        ("/a..b/...", b"/a..b/..."),
    ],
)
def test_paths(text: str, path: bytes) -> None:
    assert values.path(text) == values.path_or_nothing(text) == path
    assert values.path_text(text) == path.decode()


BAD_PATHS: list[object] = [
    "a",
    "./a",
    "~/a",
    "/",
    "//",
    "/.",
    "/a/../b",
    "/..",
    "/a\0b",
    "/" + "x" * 5000,
    " /a",
    7,
    None,
    [],
]


@pytest.mark.parametrize("value", ["", *BAD_PATHS], ids=lambda value: repr(value)[:20])
def test_what_is_no_path(value: object) -> None:
    for parse in (values.path, values.path_text, values.socket_path):
        with pytest.raises(ValueError, match="an absolute path"):
            parse(value)


def test_a_path_or_nothing() -> None:
    assert values.path_or_nothing("") is None
    for value in BAD_PATHS:
        with pytest.raises(ValueError, match=r'or "" for none$'):
            values.path_or_nothing(value)


def test_a_sockets_path_fits_into_its_address() -> None:
    assert len(values.socket_path("/" + "x" * 106)) == 107
    with pytest.raises(ValueError, match="at most 107 bytes"):
        values.socket_path("/" + "x" * 107)
    with pytest.raises(ValueError, match="at most 107 bytes"):
        values.socket_path("/" + "ö" * 54)


def test_flags() -> None:
    assert values.flag(True) is True
    assert values.flag(False) is False
    wrong: list[object] = [0, 1, "true", "yes", "", None, []]
    for value in wrong:
        with pytest.raises(ValueError, match=r"^true or false$"):
            values.flag(value)


def test_choices() -> None:
    assert values.choice(Word)("two") is Word.TWO
    wrong: list[object] = ["TWO", "", "three", 1, None, ["one"], {}]
    for value in wrong:
        with pytest.raises(ValueError, match=r'^"one" or "two"$'):
            values.choice(Word)(value)


@pytest.mark.parametrize(("text", "mode"), [("0660", 0o660), ("660", 0o660), ("0000", 0), ("777", 0o777)])
def test_modes(text: str, mode: int) -> None:
    assert values.file_mode(text) == mode


@pytest.mark.parametrize(
    "value", [660, 0o660, "0o660", "1777", "0888", "66", "", "rw-rw----", "00660", "-660", None, "660\n"]
)
def test_what_is_no_mode(value: object) -> None:
    with pytest.raises(ValueError, match="three octal digits"):
        values.file_mode(value)


def test_owners() -> None:
    assert values.owner("107:107") == (107, 107)
    assert values.owner("0:4294967294") == (0, 4294967294)
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(0).gr_name
    assert values.owner(f"{user}:{group}") == (os.getuid(), 0)
    assert values.owner(f"{user}:7") == (os.getuid(), 7)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("107", "^user and group, by number or name"),
        ("", "^user and group"),
        (107, "^user and group"),
        (None, "^user and group"),
        (["107", "107"], "^user and group"),
        ("no-such-user:0", 'a user that exists on this host.*"no-such-user"'),
        ("0:no-such-group", 'a group that exists on this host.*"no-such-group"'),
        (":0", "a user that exists"),
        ("0:", "a group that exists"),
        ("-1:0", "a user that exists"),
        ("4294967295:0", "a number up to 4294967294"),
        ("99999999999:0", "a user that exists"),
        ("0:0:0", "a group that exists"),
        ("a\0b:0", "a user that exists"),
        ("\u0661:0", "a user that exists"),
    ],
)
def test_what_is_no_owner(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        values.owner(value)


LABELS = [
    "",
    "u:r:t",
    "system_u:object_r:container_file_t:s0",
    "system_u:object_r:container_file_t:s0:c1,c2",
    "u:r:t:s0-s15",
]


@pytest.mark.parametrize("text", LABELS)
def test_labels(text: str) -> None:
    assert values.selinux_label(text) == text


@pytest.mark.parametrize("value", ["u", "u:r", "u:r:", ":r:t", "u:r:t ", "u: r:t", "u:r:t\0", "u:r:t:s0\n", 7, None])
def test_what_is_no_label(value: object) -> None:
    with pytest.raises(ValueError, match="an SELinux context"):
        values.selinux_label(value)


READERS: list[Callable[[object], object]] = [
    *(values.duration, values.duration_or_never, values.path, values.path_text, values.path_or_nothing),
    *(values.socket_path, values.flag, values.choice(Word), values.file_mode, values.owner, values.selinux_label),
]


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()) | st.dates())
def test_any_value_is_read_or_a_value_error_that_says_what_is_allowed(value: object) -> None:
    for read in READERS:
        try:
            read(value)
        except ValueError as error:
            assert str(error)  # noqa: PT017 - not every value is wrong
