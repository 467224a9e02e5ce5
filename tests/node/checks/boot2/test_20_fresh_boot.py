"""After the boot: hostd runs again, and knows that what it wrote down belongs to another boot."""

from __future__ import annotations

from tests.node.checks.hostd import states
from tests.node.checks.node import mounts, prop, until


def test_it_runs_and_has_no_vms() -> None:
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    assert not [each for each in mounts() if b"kubernetes.io~empty-dir" in each]
    assert "running" not in states().values()
