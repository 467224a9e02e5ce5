"""The monitor of the QEMU that the node runs on, at the other end of its second serial line."""

from __future__ import annotations

import json
import os
import select
import termios
import time
import tty
from typing import Any

from tests.node.checks.node import DEADLINE

_LINE = "/dev/ttyS1"


class MonitorError(AssertionError):
    """The monitor's own words."""


class Monitor:
    """Speaks QMP. Closed with the process."""

    def __init__(self) -> None:
        self._fd = os.open(_LINE, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        tty.setraw(self._fd)
        termios.tcflush(self._fd, termios.TCIOFLUSH)
        self._buffer = b""
        self._number = 0
        # The line may have sent the greeting back before it was raw: this byte has QEMU forget what it got so far.
        os.write(self._fd, b"\xff")
        self.call("qmp_capabilities")

    def call(self, command: str, **arguments: Any) -> Any:
        """Has QEMU do something; what it returns. Raises MonitorError."""
        self._number += 1
        wanted = {"execute": command, "arguments": arguments, "id": self._number}
        os.write(self._fd, json.dumps(wanted).encode() + b"\n")
        while (reply := self._next()).get("id") != self._number:
            pass
        if "error" in reply:
            raise MonitorError(reply["error"]["desc"])
        return reply["return"]

    def _next(self) -> dict[str, Any]:
        """The next message, an event or a reply. Of the greeting the line lost a part before it was opened."""
        end = time.monotonic() + DEADLINE
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    return found
                continue
            assert select.select([self._fd], [], [], max(end - time.monotonic(), 0))[0], f"silence after {line!r}"
            self._buffer += os.read(self._fd, 4096)
