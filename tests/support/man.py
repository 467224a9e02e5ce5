"""Reading the man pages' source, so that tests can hold them against the code.

page = ManPage("hostd.toml.5")
page.section("SECTION [host]").tagged()      # [(tag, text)] of its .TP paragraphs
page.section("ERRORS").entries()             # [(first line, indented text)] of its paragraphs with an .RS block

Only what the pages use is understood; the rest stays as it is, and the tests fail on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "packaging" / "man"

_CHARACTERS = {
    r"\-": "-",
    r"\(dq": '"',
    r"\(aq": "'",
    r"\(lq": '"',
    r"\(rq": '"',
    r"\(rs": "\\",
    r"\(bu": "*",
    r"\e": "\\",
}
_ESCAPE = re.compile("|".join(re.escape(escape) for escape in _CHARACTERS))
_FONT = re.compile(r"\\f[BIRP]")
#: Macros that set their words in alternating fonts, without a space between them.
_JOINED = re.compile(r"\.(?:BR|BI|IB|IR|RB|RI) ")
_ENTRY = re.compile(r"\\fB")


def plain(roff: str) -> str:
    """Lines of roff as the words that a reader sees, on one line."""
    return " ".join(text for line in roff.splitlines() if (text := _line(line)))


def _line(line: str) -> str:
    if line.startswith('.\\"'):
        return ""
    if _JOINED.match(line):
        words = re.findall(r'"((?:[^"]|"")*)"|(\S+)', line[4:])
        line = "".join(quoted or bare for quoted, bare in words)
    elif line.startswith((".B ", ".I ")):
        line = line[3:].strip('"')
    elif line.startswith("."):
        return ""
    return _ESCAPE.sub(lambda found: _CHARACTERS[found[0]], _FONT.sub("", line))


@dataclass(frozen=True)
class Section:
    """A section's source, without its title."""

    roff: str

    @property
    def text(self) -> str:
        """All of it, as words."""
        return plain(self.roff)

    def part(self, title: str) -> Section:
        """The subsection with this title; raises KeyError."""
        return Section(_split(self.roff, "SS")[title])

    @property
    def parts(self) -> list[str]:
        """The titles of its subsections."""
        return [title for title in _split(self.roff, "SS") if title]

    def tagged(self) -> list[tuple[str, str]]:
        """Its .TP paragraphs: tag and text."""
        found = []
        for block in re.split(r"^\.TP\n", self.roff, flags=re.MULTILINE)[1:]:
            tag, _, text = block.partition("\n")
            found.append((plain(tag), plain(text)))
        return found

    def entries(self) -> list[tuple[str, str]]:
        """Its paragraphs that begin in bold and have an .RS block: first line, and the block's text."""
        found, lines = [], self.roff.splitlines()
        for number, line in enumerate(lines[:-1]):
            if _ENTRY.match(line) and lines[number + 1].startswith(".RS"):
                found.append((plain(line), plain("\n".join(_block(lines[number + 1 :])))))
        return found


def _block(lines: list[str]) -> list[str]:
    """From an .RS to the .RE that ends it."""
    depth = 0
    for number, line in enumerate(lines):
        depth += line.startswith(".RS")
        depth -= line.startswith(".RE")
        if not depth:
            return lines[: number + 1]
    raise AssertionError(f"no .RE ends what begins with {lines[:2]}")


def _split(roff: str, macro: str) -> dict[str, str]:
    head, *rest = re.split(rf"^\.{macro} +", roff, flags=re.MULTILINE)
    blocks = (block.partition("\n") for block in rest)
    return {"": head} | {plain(title.strip('"')): body for title, _, body in blocks}


class ManPage:
    """One page of packaging/man."""

    def __init__(self, name: str) -> None:
        self.path = DIRECTORY / name
        self._sections = _split(self.path.read_text("utf-8"), "SH")

    @property
    def titles(self) -> list[str]:
        """The titles of its sections, in order."""
        return [title for title in self._sections if title]

    def section(self, title: str) -> Section:
        """The section with this title; raises KeyError."""
        return Section(self._sections[title])

    @property
    def head(self) -> str:
        """What stands before the first section."""
        return self._sections[""]
