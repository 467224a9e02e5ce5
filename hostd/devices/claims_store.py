"""The claims on disk: one file in the state directory, for claims outlive a boot.

The format is private and has a version. The file is replaced whole, so a crash or a full disk leaves the old one. One
that cannot be used is moved aside to `bad/` and named; what is in use is then found again by looking.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hostd.config import OnExit
from hostd.devices.claim import Claim, Stage
from hostd.devices.device import device_name
from hostd.errors import InvalidArgs
from hostd.linux import small_file

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
NAME = "claims.json"
#: 4,096 claims with all their texts take about 2 MiB.
LARGEST = 16 << 20

_FIELDS = tuple(each.name for each in fields(Claim))


@dataclass(frozen=True, slots=True)
class BadClaims:
    """A claims file that could not be used, where it is kept now (empty: it could not even be moved), and why."""

    kept_as: str
    why: str


class ClaimsStore:
    """The claims file of one hostd. Its directory may come later: every call opens it anew."""

    def __init__(self, state_dir: str) -> None:
        self.path = os.path.join(state_dir, NAME)
        self._directory = state_dir

    def load(self) -> tuple[dict[str, Claim], BadClaims | None]:
        """The claims that were saved last, none where there is no file, and what was wrong with the file."""
        try:
            return _parse(small_file.read(self.path, LARGEST)), None
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, InvalidArgs) as error:
            return {}, BadClaims(self._set_aside(), f"{type(error).__name__}: {error}")

    def save(self, claims: Iterable[Claim]) -> None:
        """Durable on return. Raises OSError, and then the old file is as it was."""
        rows = [{name: getattr(claim, name) for name in _FIELDS} for claim in claims]
        data = json.dumps({"version": VERSION, "claims": rows}, separators=(",", ":")).encode()
        os.makedirs(self._directory, mode=0o755, exist_ok=True)
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            small_file.replace(fd, NAME, data)
        finally:
            os.close(fd)

    def _set_aside(self) -> str:
        """Where the bad file is now. An earlier one stays: it may be all that is left of somebody's claims."""
        aside = os.path.join(self._directory, "bad")
        try:
            os.makedirs(aside, mode=0o700, exist_ok=True)
            taken = set(os.listdir(aside))
            name = next(name for name in _free_names() if name not in taken)
            os.rename(self.path, os.path.join(aside, name))
        except OSError:
            return ""
        return os.path.join(aside, name)


def _free_names() -> Iterable[str]:
    yield NAME
    number = 1
    while True:
        yield f"{NAME}.{number}"
        number += 1


def _parse(data: bytes) -> dict[str, Claim]:
    plain = json.loads(data)
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise ValueError(f"not a claims file of version {VERSION}")
    claims = [_claim(row) for row in plain["claims"]]
    found = {claim.device: claim for claim in claims}
    if len(found) != len(claims):
        raise ValueError("a device is claimed twice")
    return found


def _claim(row: dict[str, Any]) -> Claim:
    """One claim; keys that a later hostd may add are passed over. Raises ValueError, TypeError or KeyError."""
    values = {name: row[name] for name in _FIELDS}
    for name in ("device", "vm", "pod_uid", "vmi_uid", "identity", "serial", "description", "used_by"):
        if not isinstance(values[name], str):
            raise TypeError(f"{name}: a string, not {values[name]!r}")
        os.fsencode(values[name])  # a surrogate stands for a byte, or the text cannot be told to anybody
    for name in ("asked", "renewed"):
        if not isinstance(values[name], bool):
            raise TypeError(f"{name}: true or false, not {values[name]!r}")
    values["stage"] = Stage(values["stage"])
    values["on_exit"] = None if values["on_exit"] is None else OnExit(values["on_exit"])
    if device_name(values["device"]) != values["device"]:
        raise ValueError(f"{values['device']!r} is not a name's plain form")
    return Claim(**values)
