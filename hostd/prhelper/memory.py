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

from hostd.linux import small_file
from hostd.linux.clock import boot_id
from hostd.linux.descriptor import Descriptor

if TYPE_CHECKING:
    from hostd.prhelper.path import Inode

log = logging.getLogger(__name__)

VERSION: Final = 1
_NAME: Final = "pr-helper.json"
_LARGEST: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Known:
    """Our listeners: the current one by its file's inode, its socket's number (0: the service manager holds it) and its
    path, and the numbers of those whose helpers finish with their clients."""

    backend: str = ""
    inode: Inode | None = None
    number: int = 0
    retired: tuple[int, ...] = ()
    path: str = ""


class Memory:
    """Both files. What cannot be read counts as not there, and is said."""

    def __init__(self, state_dir: bytes, runtime_dir: bytes) -> None:
        self._choice = os.path.join(os.fsdecode(state_dir), _NAME)
        self._listeners = os.path.join(os.fsdecode(runtime_dir), _NAME)
        self.known = _known(_read(self._listeners))

    def enabled(self, configured: bool) -> bool:
        """Whether the helper is to run, by the last word: a choice that the configuration overrules is forgotten."""
        chosen = _read(self._choice)
        if chosen.get("configured") is configured and isinstance(chosen.get("enabled"), bool):
            return bool(chosen["enabled"])
        with contextlib.suppress(OSError):  # missing most often; what cannot be removed is overruled by each start
            os.unlink(self._choice)
        return configured

    def choose(self, enabled: bool, configured: bool) -> None:
        """Durable on return. Raises OSError."""
        _write(self._choice, {"version": VERSION, "enabled": enabled, "configured": configured})

    def remember(self, known: Known) -> None:
        """Replaces `known`; durable on return. Raises OSError."""
        if known != self.known:
            plain = {
                "version": VERSION, "boot": boot_id(), "backend": known.backend, "inode": known.inode,
                "number": known.number, "retired": known.retired, "path": known.path,
            }  # fmt: skip
            _write(self._listeners, plain)
            self.known = known


def _known(plain: dict[str, Any]) -> Known:
    if plain.get("boot") != boot_id():
        return Known()
    match {"path": "", **plain}:
        case {
            "backend": str(backend),
            "inode": None | [int(), int()] as inode,
            "number": int(number),
            "retired": [*retired],
            "path": str(path),
        } if all(isinstance(each, int) for each in retired) and _is_path(path):
            return Known(backend, inode and (inode[0], inode[1]), number, tuple(retired), path)
    log.warning("what was remembered of qemu-pr-helper's listener cannot be used: %r", plain)
    return Known()


def _is_path(text: str) -> bool:
    """Whether it is one, or empty: a surrogate in it stands for a byte, and there is no NUL."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _read(path: str) -> dict[str, Any]:
    try:
        plain = json.loads(small_file.read(path, _LARGEST))
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise ValueError(f"not of version {VERSION}")  # noqa: TRY301 - one way to tell of all that is wrong
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be used and counts as missing: %s", path, error)
        return {}
    return plain


def _write(path: str, plain: dict[str, Any]) -> None:
    directory, name = os.path.split(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with Descriptor(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as opened:
        small_file.replace(opened.fileno(), name, json.dumps(plain).encode())
