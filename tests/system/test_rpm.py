"""The RPM: built, looked at, and installed into a root of its own by rpm, and by dnf as docs/install.md has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.documents import ROOT, shown

pytestmark = [pytest.mark.usefixtures("root"), pytest.mark.slow]


def test_it_installs_by_the_command_that_the_page_shows(tmp_path: Path) -> None:
    command = shown("docs/install.md", "Fedora, RHEL and their kin")
    done = subprocess.run(
        [ROOT / "packaging/build-rpm", "--check", "--output", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"`{command}` are fine" in done.stdout
