"""Values as people write them in the configuration, and what hostd makes of them.

Each reader takes what TOML gave and raises ValueError with what is allowed, worded to follow "must be".
"""

from __future__ import annotations

import grp
import pwd
import re
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from enum import StrEnum

SECOND = 1_000_000
#: Ten years: nothing that is meant is longer, and no sum of times overflows.
LONGEST_USEC = 10 * 365 * 86_400 * SECOND
#: sun_path of a Unix socket, without its final NUL.
_SOCKET_PATH_MAX = 107
_PATH_MAX = 4095
#: (uid_t)-1 means "leave as it is" to chown(2), so it is nobody's.
_ID_MAX = (1 << 32) - 2
_UNITS: dict[str, int] = {
    unit: usec
    for units, usec in (
        ("us µs μs usec", 1),
        ("ms msec", 1_000),
        ("s sec second seconds", SECOND),
        ("m min minute minutes", 60 * SECOND),
        ("h hr hour hours", 3_600 * SECOND),
        ("d day days", 86_400 * SECOND),
        ("w week weeks", 7 * 86_400 * SECOND),
    )
    for unit in units.split()
}
_PART = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zµμ]+)", re.ASCII)
_DURATION = 'a time with its unit, such as "500ms", "2s", "1min 30s" or "1h", of at most ten years'


def duration(value: object) -> int:
    """Microseconds of a time as people write it: "500ms", "2s", "1min 30s", "1h", "0"."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(_DURATION)
    total = Decimal(0) if value.strip() == "0" else sum(_times(value), Decimal(0))
    # Less than a microsecond is most likely a mistake, and must not become 0 unseen.
    if total > LONGEST_USEC or total != int(total):
        raise ValueError(_DURATION)
    return int(total)


def _times(text: str) -> Iterator[Decimal]:
    """Each number with its unit, in microseconds; nothing else may stand between them."""
    at, end = 0, len(text.rstrip())
    while at < end:
        part = _PART.match(text, at)
        if part is None or part[2] not in _UNITS:
            raise ValueError(_DURATION)
        yield Decimal(part[1]) * _UNITS[part[2]]
        at = part.end()


def duration_or_never(value: object) -> int | None:
    """A time, or None for "never"."""
    if value in ("never", "infinity"):
        return None
    try:
        return duration(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "never"') from None


def path(value: object) -> bytes:
    """An absolute path in its plain form: without `//`, `/./` and a slash at the end."""
    allowed = "an absolute path, not / itself, without '..'"
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError(allowed)
    parts = [part for part in value.encode().split(b"/") if part not in (b"", b".")]
    plain = b"/" + b"/".join(parts)
    if not parts or b".." in parts or len(plain) > _PATH_MAX:
        raise ValueError(allowed)
    return plain


def path_text(value: object) -> str:
    """The same as text, for what is no file to be walked to."""
    return path(value).decode()


def path_or_nothing(value: object) -> bytes | None:
    """An absolute path, or None for ""."""
    if value == "":
        return None
    try:
        return path(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "" for none') from None


def socket_path(value: object) -> bytes:
    """An absolute path that fits into a Unix socket's address."""
    plain = path(value)
    if len(plain) > _SOCKET_PATH_MAX:
        raise ValueError(f"a path of at most {_SOCKET_PATH_MAX} bytes, which is all that a Unix socket's address holds")
    return plain


def flag(value: object) -> bool:
    """True or false, and no 0, 1 or "yes"."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def choice(kind: type[StrEnum]) -> Callable[[object], StrEnum]:
    """A reader of one of the words of `kind`."""

    def parse(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in list(kind):
            raise ValueError(" or ".join(f'"{word}"' for word in kind))
        return kind(value)

    return parse


def file_mode(value: object) -> int:
    """Permission bits; text, since TOML's own 660 would be read as a decimal number."""
    if not isinstance(value, str) or re.fullmatch(r"0?[0-7]{3}", value, re.ASCII) is None:
        raise ValueError('three octal digits in quotes, such as "0660"')
    return int(value, 8)


def owner(value: object) -> tuple[int, int]:
    """(uid, gid), by number or by a name that this host knows."""
    user, colon, group = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon:
        raise ValueError('user and group, by number or name, such as "107:107" or "qemu:qemu"')
    return (
        _identity("user", user, lambda name: pwd.getpwnam(name).pw_uid),
        _identity("group", group, lambda name: grp.getgrnam(name).gr_gid),
    )


def _identity(what: str, text: str, by_name: Callable[[str], int]) -> int:
    allowed = f'a {what} that exists on this host, or a number up to {_ID_MAX}, where it is "{text}"'
    if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII):
        if int(text) > _ID_MAX:
            raise ValueError(allowed)
        return int(text)
    try:
        return by_name(text)
    except (KeyError, ValueError):
        raise ValueError(allowed) from None


def selinux_label(value: object) -> str:
    """An SELinux context, or ""."""
    if not isinstance(value, str) or re.fullmatch(r"(?:[^\s:\0]+:){2}[^\s:\0]+(?::[^\s\0]+)?|", value) is None:
        raise ValueError('an SELinux context (user:role:type:level), or "" to leave the label alone')
    return value
