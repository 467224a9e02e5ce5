"""Following a page of docs/, as somebody does who reads it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.documents import ROOT, shown


def follow(document: str, heading: str, *, directory: Path = Path("/")) -> str:
    """Runs what a page shows below a heading, as root who says yes; what it printed."""
    script = shown(document, heading)
    done = subprocess.run(
        ["sh", "-exc", script], cwd=directory, input="y\n", capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{document}, {heading}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def named(document: str, program: str) -> list[str]:
    """The commands of a program that a page's sentences name, in their order."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"`({program} [^`]+)`", text)
