"""What the demo prints: numbered steps, commands with their output, and checks that are kept count of."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

_COLOURS = {"bold": "1", "dim": "2", "green": "32", "red": "31", "cyan": "36"}


def _styled(text: str, *styles: str) -> str:
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{';'.join(_COLOURS[style] for style in styles)}m{text}\x1b[0m"


class Page:
    """The demo's output, and whether all that it claimed was true."""

    def __init__(self) -> None:
        self._step = 0
        self.failed: list[str] = []
        # Wide enough for a mount table's row where the terminal allows it; unlimited in a file.
        self._width = shutil.get_terminal_size((200, 50)).columns if sys.stdout.isatty() else 10_000

    def title(self, text: str) -> None:
        """The first line."""
        self._put(_styled(text, "bold"))

    def step(self, text: str, *prose: str) -> None:
        """A numbered heading, with a paragraph."""
        self._step += 1
        self._put("", _styled(f"{self._step}. {text}", "bold"))
        self.say(*prose)

    def say(self, *prose: str) -> None:
        """Sentences."""
        for text in prose:
            self._put(*textwrap.wrap(text, min(self._width, 100), initial_indent="   ", subsequent_indent="   "))

    def table(self, rows: Iterable[Iterable[object]]) -> None:
        """Rows in columns."""
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._put("     " + self._cut(line.rstrip()))

    def command(self, command: str, output: str) -> None:
        """A command as one would type it, and what it printed."""
        self._put("   " + _styled("$ " + command, "cyan"))
        self.lines(output.splitlines())

    def lines(self, lines: Iterable[str]) -> None:
        """Somebody else's output."""
        for line in lines:
            self._put("     " + _styled(self._cut(line), "dim"))

    def check(self, true: object, claim: str) -> None:
        """A claim, and whether it holds."""
        if not true:
            self.failed.append(claim)
        self._put("   " + (_styled("✔ ", "green") if true else _styled("✘ NOT TRUE: ", "red", "bold")) + claim)

    def verdict(self, text: str) -> int:
        """The last line, and the exit status."""
        if self.failed:
            self._put("", _styled(f"The demo failed: {'; '.join(self.failed)}", "red", "bold"))
            return 1
        self._put("", _styled(text, "green", "bold"))
        return 0

    def _cut(self, line: str) -> str:
        room = self._width - 6
        return line if len(line) <= room else line[: room - 1] + "…"

    @staticmethod
    def _put(*lines: str) -> None:
        print(*lines, sep="\n", flush=True)
