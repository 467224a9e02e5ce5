"""README.md and docs/, as tests read them. Runs on the node of the node test, too: nothing but the standard library.

blocks("docs/operating.md")                 all fenced blocks
shown("docs/install.md", "Upgrade")         the script that the ```sh blocks below this heading are
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """One fenced block: `scene` is empty where the comment that names one is missing; `line` is its first."""

    kind: str
    text: str
    line: int
    heading: str
    scene: str


def documents() -> list[str]:
    """Every page, by its path in the tree."""
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(document: str) -> list[Block]:
    """All fenced blocks of a page, without the indentation of a list that they stand in."""
    found: list[Block] = []
    heading = scene = kind = fence = ""
    start = 0
    lines = (ROOT / document).read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not fence and (said := re.fullmatch(r"<!-- scene: ([a-z ]+) -->", line)):
            scene = said[1]
        elif not fence and (said := re.fullmatch(r"#+ (.*)", line)):
            heading = said[1]
        elif not fence and (said := re.fullmatch(r"( *```)([a-z]*)", line)):
            fence, kind, start = said[1], said[2], number
        elif fence and line == fence:
            text = [each.removeprefix(fence[:-3]) for each in lines[start : number - 1]]
            found.append(Block(kind, "\n".join(text), start, heading, scene))
            fence = scene = ""
    assert not fence, f"{document}: the block in line {start} has no end"
    return found


def shown(document: str, heading: str) -> str:
    """The script that a page shows below a heading. Raises AssertionError where there is none."""
    scripts = [block.text for block in blocks(document) if (block.kind, block.heading) == ("sh", heading)]
    assert scripts, f"{document} shows no commands below {heading!r}"
    return "\n".join(scripts)
