"""The log: one line an event, with structured fields in the journal and readable on a terminal.

    log = logging.getLogger(__name__)
    log.info("…", extra=event(Message.VM_EXITED, pod_uid=vm.pod_uid))

In the journal the fields are `HOSTD_POD_UID`, `HOSTD_TARGET` and so on, and a MESSAGE_ID that the catalog explains
(`journalctl -x`). Where stderr is not the journal, lines go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from enum import Enum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTIFIER = "hostd"


class Message(Enum):
    """What can happen, each with the id under which the catalog explains it."""

    STARTED = "fdfb9827938f4a2eb3cf9c6080e79aef"
    STOPPED = "fd55193d9e12460b87a655544ccf1778"
    VM_FOUND = "d34f3f8f78b04386a468dcca07f47558"
    VM_RUNNING = "88300103a0284caa81ee5b1dcf5c56af"
    VM_EXITED = "eda9e34bc70a44eb972b304983834da7"
    VM_RELEASED = "22e9f4e33bd74ba4a13842059667279f"
    VM_FORGOTTEN = "c30179bc0e7748088088919bec7035ad"
    VM_STUCK = "a049d202b9c442f9b411f82c3dba44fb"
    LAYER_BLOCKED = "f8c0f986ca8d4791a1fafe7116a578df"
    LAYER_DETACHED = "3cf433d1c79f4d4292760e3a9d27b849"
    LAYER_REMOUNTED = "859278ae7d674158b7f9c93f1b02d51d"
    FOREIGN_MOUNT = "0fe59ddcee5a40eaa3a44bba041eff2c"
    BAD_STATE_FILE = "c90473b3271d4b00a9b0fd415143e62c"
    BAD_RECORD = "24fa404ebf5141cdb48f0a8cc89c464b"
    STATE_NOT_SAVED = "40b8ea72eaf3481cb0d11d7829287159"
    BUS_LOST = "e4a60df761cf4dea965732428c7f90be"
    DEVICE_CLAIMED = "1e77fbe444144f1fbd1beb827de65942"
    DEVICE_FREED = "e5b44ba1989b4551bec62df804237cd8"
    DEVICE_CONFLICT = "447a84246a2d44feac99ac6cedaa8302"
    HELPER_STATE = "99b8d35a58204f72acc0f83c4c88550c"
    HELPER_FAILED = "17619cd475ea4473bc43743daabff9d9"


def event(message: Message, **fields: object) -> dict[str, object]:
    """The `extra` of a log call: which event it is and what it is about. Bytes are shown with \\xNN escapes."""
    return {"hostd_message": message, "hostd_fields": {name: plain(value) for name, value in fields.items()}}


def plain(value: object) -> str:
    """Any value as text; bytes that are no UTF-8 as `\\xNN`, control characters escaped, so a line stays a line."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def setup(level: int = logging.INFO) -> None:
    """Sends everything that hostd logs to the journal where stderr is one, else to stderr."""
    root = logging.getLogger()
    root.handlers[:] = [_handler()]
    root.setLevel(logging.WARNING)
    logging.getLogger("hostd").setLevel(level)


def _handler() -> logging.Handler:
    if not stderr_is_journal():
        return _Lines(sys.stderr)
    try:
        from pystemd.journal import sendv
    except ImportError:
        return _Lines(sys.stderr)
    return JournalHandler(sendv)


def stderr_is_journal() -> bool:
    """Whether systemd connected stderr to the journal: JOURNAL_STREAM names its device and inode."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class _Lines(logging.StreamHandler[TextIO]):
    """Plain lines; the severity stands in front as sd-daemon(3) has it when nobody reads along."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        human = sys.stderr.isatty()
        layout = "%(asctime)s %(levelname)-7s %(message)s" if human else "%(levelname)s: %(message)s"
        self.setFormatter(logging.Formatter(layout))


class JournalHandler(logging.Handler):
    """Structured entries in the journal, through sd_journal_sendv."""

    def __init__(self, send: Callable[..., object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one entry; what cannot be sent goes where logging's own errors go."""
        try:
            self._send(**journal_fields(record, self.format(record)))
        except Exception:  # noqa: BLE001 - the edge of logging: the daemon goes on whatever the journal does
            self.handleError(record)


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def journal_fields(record: logging.LogRecord, text: str) -> dict[str, str]:
    """The journal's fields of a record."""
    priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
    fields = {"MESSAGE": text, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER, "CODE_FUNC": record.funcName}
    message = getattr(record, "hostd_message", None)
    if isinstance(message, Message):
        fields["MESSAGE_ID"] = message.value
    for name, value in getattr(record, "hostd_fields", {}).items():
        fields[f"HOSTD_{name.upper()}"] = value
    return fields
