"""What callers say, looked at before anybody acts on it. All of it raises InvalidArgs with a sentence that helps."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from hostd.bus import text
from hostd.errors import InvalidArgs

_POD_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: Of a string argument, in bytes; a path in it may take 4,096 bytes of four characters each.
MAX_STRING = 64 * 1024
#: Of a name in the cluster, in bytes.
MAX_NAME = 253
#: Of an inhibitor's who and why, in bytes.
MAX_WORDS = 1024
#: The kernel's own bound on a process id, PID_MAX_LIMIT.
MAX_PID = 4 * 1024 * 1024

DRY_RUN, LAZY = 1, 2

Word = TypeVar("Word", bound=StrEnum)
Details = Mapping[str, Any]


def string(value: str, what: str, limit: int = MAX_STRING) -> str:
    """Text without control characters, of at most `limit` bytes."""
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise InvalidArgs(f"{what} is {size} bytes long; at most {limit} are taken")
    if _CONTROL.search(value):
        raise InvalidArgs(f"{what} has a control character in it; in a path, write its bytes as \\xNN")
    return value


def name(value: str, what: str) -> str:
    """A name in the cluster: not empty, no slash."""
    string(value, what, MAX_NAME)
    if not value or "/" in value:
        raise InvalidArgs(f"{what} {value!r} is not a name: it must not be empty or contain a slash")
    return value


def words(value: str, what: str) -> str:
    """Words for people: not empty."""
    string(value, what, MAX_WORDS)
    if not value.strip():
        raise InvalidArgs(f"{what} is empty: say it in a few words")
    return value


def pod_uid(value: str) -> str:
    """A pod's UID, in lower case."""
    lower = string(value, "the pod UID").lower()
    if _POD_UID.fullmatch(lower) is None:
        shown = value if len(value) <= 64 else f"{value[:64]}…"
        raise InvalidArgs(
            f"{shown!r} is not a pod UID: give metadata.uid of the launcher pod, "
            "like 6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
        )
    return lower


def path(value: str, what: str = "the target") -> bytes:
    """A path of the host: absolute; `\\xNN` stands for a byte."""
    raw = text.unescape(string(value, what))
    if not raw.startswith(b"/"):
        raise InvalidArgs(f"{what} {value[:256]!r} is not an absolute path")
    if b"\0" in raw:
        raise InvalidArgs(f"{what} has a NUL byte in it")
    return raw


def pid(value: int) -> int:
    """A process of the host that may be a QEMU."""
    if not 1 < value <= MAX_PID:
        why = "that is the host's init" if value == 1 else f"process ids are from 2 to {MAX_PID}"
        raise InvalidArgs(f"process {value} cannot be a VM's: {why}")
    if value == os.getpid():
        raise InvalidArgs(
            f"process {value} is hostd itself: ids are the host's; from a container pass a pidfd (LeaderPIDFD)"
        )
    return value


def flags(value: int, known: Mapping[int, str]) -> int:
    """A set of flags, all of them known."""
    unknown = value & ~sum(known)
    if unknown:
        listed = ", ".join(f"{bit} ({word})" for bit, word in known.items())
        raise InvalidArgs(f"flag {unknown & -unknown:#x} is not known; known: {listed}")
    return value


def word(kind: type[Word], value: str, what: str) -> Word:
    """One of the words of an enumeration."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise InvalidArgs(f"{what} {string(value, what)[:64]!r} is not known; it is one of: {known}") from None


def details(given: Details, known: Mapping[str, str], what: str) -> dict[str, Any]:
    """The values of an a{sv}: every key known and of its type. Handles stay the numbers that they are."""
    values = {}
    for key, value in given.items():
        expected = known.get(key)
        if expected is None:
            listed = ", ".join(f"{each} {type_}" for each, type_ in known.items()) or "none"
            raise InvalidArgs(f"{what} does not know the key {string(key, 'a key')[:64]!r}; known: {listed}")
        if value.signature != expected:
            raise InvalidArgs(f"{what} takes {key} as {expected}, not as {value.signature[:64]}")
        values[key] = string(value.value, key) if expected == "s" else value.value
    return values
