"""What the second boot looks at: a node that goes down with VMs on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.checks.hostd import reaches
from tests.node.checks.pods import Life, Pod


@pytest.mark.parametrize("life", [Life.BOOT, Life.SLOW], ids=["quick", "slow"])
def test_vms_run_when_the_node_goes_down(life: Life) -> None:
    pod = Pod(life.name.lower())
    source = Path(f"/var/lib/node/{pod.name}.img")
    source.write_bytes(bytes(4096))
    pod.containerdisk(0, source)
    pod.fake_qemu(life)
    reaches(pod, "running")
