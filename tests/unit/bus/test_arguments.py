"""What callers may say."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hostd.bus import arguments, library
from hostd.core.model import Policy
from hostd.errors import InvalidArgs

UID = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"


@pytest.mark.parametrize("uid", [UID, "0123456789abcdef0123456789abcdef"])
def test_pod_uids(uid: str) -> None:
    assert arguments.pod_uid(uid) == uid
    assert arguments.pod_uid(uid.upper()) == uid


@pytest.mark.parametrize(
    "uid",
    [
        "",
        "x",
        UID[:-1],
        UID + "0",
        UID.replace("-", "", 1),
        f"{UID}\n",
        f"../{UID}",
        "g" + UID[1:],
        "a" * 100_000,
        "é" * 32,
    ],
)
def test_no_pod_uids(uid: str) -> None:
    with pytest.raises(InvalidArgs) as failure:
        arguments.pod_uid(uid)
    assert len(failure.value.message) < 300


@pytest.mark.parametrize("pid", [0, 1, 4 * 1024 * 1024 + 1, 2**32 - 1, -1, os.getpid()])
def test_no_processes(pid: int) -> None:
    with pytest.raises(InvalidArgs, match=str(pid)):
        arguments.pid(pid)


def test_a_process() -> None:
    assert arguments.pid(os.getppid() if os.getppid() > 1 else 2) > 1


@pytest.mark.parametrize("check", [arguments.string, arguments.name, arguments.words])
@pytest.mark.parametrize("value", ["a\tb", "a\0", "\x7f", "a\x85b", "a" * 65537])
def test_text_that_nobody_wants(check: Callable[[str, str], str], value: str) -> None:
    with pytest.raises(InvalidArgs, match="the thing"):
        check(value, "the thing")


def test_text_up_to_its_bound() -> None:
    assert arguments.string("ä" * 32768, "it")
    with pytest.raises(InvalidArgs, match="65538 bytes"):
        arguments.string("ä" * 32769, "it")


@pytest.mark.parametrize("value", ["", "a/b", "x" * 254])
def test_no_names(value: str) -> None:
    with pytest.raises(InvalidArgs):
        arguments.name(value, "Name")


@pytest.mark.parametrize("value", ["", "  "])
def test_no_words(value: str) -> None:
    with pytest.raises(InvalidArgs, match="empty"):
        arguments.words(value, "why")


def test_paths() -> None:
    assert arguments.path("/a b") == b"/a b"
    assert arguments.path(r"/\xff\x5c\x0a") == b"/\xff\\\n"


@pytest.mark.parametrize("value", ["", "a", "./a", "/a\n", r"/a\x00b", "/a\\b"])
def test_no_paths(value: str) -> None:
    with pytest.raises(InvalidArgs):
        arguments.path(value)


def test_flags() -> None:
    known = {1: "dry run", 2: "lazy"}
    assert arguments.flags(3, known) == 3
    assert arguments.flags(0, known) == 0
    for value in (4, 7, 2**63, 2**64 - 1):
        with pytest.raises(InvalidArgs, match=r"known: 1 \(dry run\), 2 \(lazy\)"):
            arguments.flags(value, known)


def test_words_of_a_kind() -> None:
    assert arguments.word(Policy, "keep", "the policy") is Policy.KEEP
    with pytest.raises(InvalidArgs, match="clean, keep"):
        arguments.word(Policy, "Keep", "the policy")


def test_details() -> None:
    given = {"A": library.variant("s", "x"), "B": library.variant("u", 4)}
    assert arguments.details(given, {"A": "s", "B": "u", "C": "t"}, "It") == {"A": "x", "B": 4}
    with pytest.raises(InvalidArgs, match="does not know the key 'B'; known: A s"):
        arguments.details(given, {"A": "s"}, "It")
    with pytest.raises(InvalidArgs, match="takes B as t, not as u"):
        arguments.details(given, {"A": "s", "B": "t"}, "It")
    with pytest.raises(InvalidArgs, match="known: none"):
        arguments.details(given, {}, "It")
    with pytest.raises(InvalidArgs, match="control"):
        arguments.details({"A": library.variant("s", "\n")}, {"A": "s"}, "It")
