"""What is remembered: what people chose, over boots; which listener is ours, over restarts of hostd.

The choice of Enable and Disable (`pr-helper.json` in the state directory) holds until the configuration's own word
changes: whoever spoke last is heard. The listeners (`pr-helper.json` in the runtime directory) are written down before
a helper gets them, so a helper can be found whenever hostd was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hostd.linux.clock import boot_id

if TYPE_CHECKING:
    from hostd.prhelper.path import Inode

log = logging.getLogger(__name__)

VERSION: Final = 1
_NAME: Final = "pr-helper.json"
_LARGEST: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Known:
    """Our listeners: the current one by its file's inode and its socket's number (0: the service manager holds it),
    and the numbers of those whose helpers finish with their clients."""

    backend: str = ""
    inode: Inode | None = None
    number: int = 0
    retired: tuple[int, ...] = ()


class Memory:
    """Both files. What cannot be read counts as not there, and is said."""

    def __init__(self, state_dir: bytes, runtime_dir: bytes) -> None:
        self._choice = os.path.join(os.fsdecode(state_dir), _NAME)
        self._listeners = os.path.join(os.fsdecode(runtime_dir), _NAME)
        self.known = _known(_read(self._listeners))

    def enabled(self, configured: bool) -> bool:
        """Whether the helper is to run, by the last word."""
        chosen = _read(self._choice)
        if chosen.get("configured") is configured and isinstance(chosen.get("enabled"), bool):
            return bool(chosen["enabled"])
        return configured

    def choose(self, enabled: bool, configured: bool) -> None:
        """Durable on return. Raises OSError."""
        _write(self._choice, {"version": VERSION, "enabled": enabled, "configured": configured})

    def remember(self, known: Known) -> None:
        """Replaces `known`; durable on return. Raises OSError."""
        if known != self.known:
            plain = {
                "version": VERSION, "boot": boot_id(), "backend": known.backend, "inode": known.inode,
                "number": known.number, "retired": known.retired,
            }  # fmt: skip
            _write(self._listeners, plain)
            self.known = known


def _known(plain: dict[str, Any]) -> Known:
    if plain.get("boot") != boot_id():
        return Known()
    try:
        inode = plain["inode"] and (int(plain["inode"][0]), int(plain["inode"][1]))
        return Known(str(plain["backend"]), inode, int(plain["number"]), tuple(map(int, plain["retired"])))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        log.warning("what was remembered of qemu-pr-helper's listener cannot be used: %r", error)
        return Known()


def _read(path: str) -> dict[str, Any]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            plain = json.loads(file.read(_LARGEST))
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise ValueError(f"not of version {VERSION}")  # noqa: TRY301 - one way to tell of all that is wrong
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be used and counts as missing: %s", path, error)
        return {}
    return plain


def _write(path: str, plain: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(plain, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
