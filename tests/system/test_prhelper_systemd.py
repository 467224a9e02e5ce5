"""The helper under hostd's units and a real systemd, booted in namespaces."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prhelper import PROGRAM
from tests.support.systemd import CannotBoot, Systemd

TOP = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"needs {PROGRAM}"),
    pytest.mark.skipif(importlib.util.find_spec("pystemd") is None, reason="needs pystemd"),
]


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    try:
        booted = Systemd([TOP / "systemd" / f"hostd-pr-helper.{kind}" for kind in ("socket", "service")])
    except CannotBoot as reason:
        pytest.skip(str(reason))
    with booted:
        yield booted


def test_the_units_under_hostd(systemd: Systemd) -> None:
    done = systemd.run(
        "env", f"PYTHONPATH={TOP}", sys.executable, "-B", "-W", "error", str(TOP / "tests/system/prhelper_scenario.py"),
        check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("done\n")
