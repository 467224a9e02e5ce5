"""The terminal, or what stands in for it: tables that fit, colour where it is seen, JSON for programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hostd.client.model import plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

#: No column is made narrower than this.
_NARROWEST = 6
_GAP = "  "


class Style(Enum):
    """What a colour means."""

    NONE = ""
    GOOD = "32"
    WAIT = "33"
    BAD = "1;31"
    DIM = "2"
    STRONG = "1"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a meaning."""

    text: str
    style: Style = Style.NONE


class Screen:
    """Where output goes. `width` None: nobody looks at it, so nothing is cut short."""

    def __init__(
        self, out: TextIO, *, width: int | None = None, colour: bool = False, as_json: bool = False, asks: bool = False
    ) -> None:
        self._out = out
        self.width = width
        self.colour = colour
        self.as_json = as_json
        #: A person is there who can be asked.
        self.asks = asks

    @classmethod
    def of_process(cls, *, as_json: bool = False) -> Screen:
        """stdout, with what it can do."""
        terminal = sys.stdout.isatty()
        plain_wanted = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(
            sys.stdout,
            width=shutil.get_terminal_size().columns if terminal else None,
            colour=terminal and not plain_wanted,
            as_json=as_json,
            asks=terminal and sys.stdin.isatty(),
        )

    def line(self, *parts: str | Cell) -> None:
        """One line."""
        print("".join(self._painted(_cell(part)) for part in parts), file=self._out)

    def text(self, text: str) -> None:
        """Lines that hostd made, as they are."""
        self._out.write(text)

    def give(self, value: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """A JSON document, readable where a person looks at it."""
        print(json.dumps(plain(value), indent=2 if self.width else None, ensure_ascii=False), file=self._out)

    def record(self, value: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """One JSON object on a line of its own, at once, whoever reads it."""
        print(json.dumps(value, ensure_ascii=False), file=self._out, flush=True)

    def flush(self) -> None:
        """Everything out."""
        self._out.flush()

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str | Cell]], paths: Sequence[str] | None = None
    ) -> None:
        """Rows below their headers; where it is wider than the terminal, the widest columns give way.

        `paths`: one for each row, never cut: on a terminal each is a line below its row, else the last column.
        """
        if paths is not None and self.width is None:
            headers, rows = [*headers, "TARGET"], [[*row, path] for row, path in zip(rows, paths, strict=True)]
        below = paths if paths is not None and self.width is not None else [""] * len(rows)
        cells = [[_cell(part) for part in row] for row in rows]
        widths = [
            max(width_of(header), *(width_of(printable(row[n].text)) for row in cells)) if cells else width_of(header)
            for n, header in enumerate(headers)
        ]
        if self.width is not None:
            widths = fitted(widths, self.width - len(_GAP) * (len(headers) - 1))
        self._row([Cell(header, Style.STRONG) for header in headers], widths)
        for row, path in zip(cells, below, strict=True):
            self._row(row, widths)
            if path:
                self.line(f"  {path}")

    def ask(self, question: str) -> bool:
        """Whether a person says yes."""
        self._out.flush()
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def _row(self, row: Sequence[Cell], widths: Sequence[int]) -> None:
        shown = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = shortened(printable(cell.text), width)
            # Nothing stands behind the last column.
            padding = " " * (width - width_of(text)) if number < len(row) - 1 else ""
            shown.append(self._painted(Cell(text, cell.style)) + padding)
        print(_GAP.join(shown).rstrip(), file=self._out)

    def _painted(self, cell: Cell) -> str:
        text = printable(cell.text)
        return f"\x1b[{cell.style.value}m{text}\x1b[0m" if self.colour and cell.style.value and text else text


def _cell(part: str | Cell) -> Cell:
    return part if isinstance(part, Cell) else Cell(part)


def printable(text: str) -> str:
    """Text that cannot move the cursor: what is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width_of(text: str) -> int:
    """Columns on a terminal."""
    return len(text) if text.isascii() else sum(_columns(each) for each in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(widths: Sequence[int], total: int) -> list[int]:
    """Widths that fit into `total`, the widest cut first; as narrow as it may be where nothing fits."""
    left = list(widths)
    while sum(left) > total and max(left) > _NARROWEST:
        left[left.index(max(left))] -= 1
    return left


def shortened(text: str, width: int) -> str:
    """Text of at most so many columns; the middle gives way, for the end of a path tells most."""
    if width_of(text) <= width:
        return text
    head, tail = (width - 1) // 3, (width - 1) - (width - 1) // 3
    return _start(text, head) + "…" + _start(text[::-1], tail)[::-1]


def _start(text: str, width: int) -> str:
    taken = 0
    for number, character in enumerate(text):
        taken += _columns(character)
        if taken > width:
            return text[:number]
    return text
