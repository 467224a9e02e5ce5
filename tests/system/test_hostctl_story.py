"""hostctl beside a real hostd: an administrator's afternoon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import pytest

from tests.support.bus import Program, run
from tests.support.daemon import TREE
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, eventually, holds_for
from tests.support.witness import FULL, full_pod

pytestmark = pytest.mark.usefixtures("root")

COMMAND = (sys.executable, "-P", "-m", "hostd.ctl.main")


async def hostctl(node: Node, *words: str) -> Program:
    done = await run(*COMMAND, *words, environment={"DBUS_SYSTEM_BUS_ADDRESS": node.bus.address, "PYTHONPATH": TREE})
    assert "Traceback" not in done.error
    return done


async def data(node: Node, *words: str) -> Any:
    return json.loads((await hostctl(node, *words, "--json")).out)


async def test_why_is_this_still_mounted(node: Node) -> None:
    pod = full_pod(node)
    target = pod.targets[0]
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    status = await hostctl(node, "status")
    assert (status.code, status.out.splitlines()[0].split(":")[0]) == (0, "This node is clean")
    listed = await hostctl(node, "list")
    assert str(qemu.pid) in listed.out
    refused = await hostctl(node, "release", pod.uid)
    assert (refused.code, len(pod.mounted())) == (1, FULL)
    assert "alive" in refused.out

    holder = node.namespace.hold(os.open, target, os.O_RDONLY)
    qemu.kill()
    await eventually(lambda: node.states()[pod.uid] == "blocked" and pod.mounted() == [target])
    status = await hostctl(node, "status", "--short")
    assert status.code == 3
    assert status.out.startswith("blocked: ")
    holders = await hostctl(node, "holders", pod.uid[:8])
    assert holders.code == 3
    assert f"process {holder.pid}, " in holders.out
    assert "has a file of it open" in holders.out
    assert (await hostctl(node, "show", pod.uid)).code == 3
    planned = await hostctl(node, "release", "--all", "--dry-run")
    assert (planned.code, pod.mounted()) == (0, [target])
    released = await hostctl(node, "release", "--all")
    assert released.code == 3
    assert "busy" in released.out

    holder.end()
    await eventually(lambda: not pod.mounted())
    await eventually(lambda: node.states()[pod.uid] == "released")
    assert (await hostctl(node, "status")).code == 0
    assert (await data(node, "status"))["clean"] is True
    assert {layer["state"] for layer in await data(node, "layers", pod.uid)} <= {"gone"}


async def test_hold_while_a_command_runs_and_by_policy(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "hold", pod.uid, "--bus", node.bus.address, "--", "sh", "-c", "echo held; read line; exit 4",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TREE},
    )  # fmt: skip
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), DEADLINE) == b"held\n"
    qemu.kill()
    await eventually(lambda: node.states()[pod.uid] == "held")
    assert "runs sh" in (await hostctl(node, "show", pod.uid)).out
    assert (await data(node, "status"))["state"] == "held"
    assert (await hostctl(node, "hold", pod.uid, "--keep")).code == 0
    await process.communicate(b"\n")
    assert process.returncode == 4
    holds_for(lambda: len(pod.mounted()) == FULL, 0.5)
    assert (await hostctl(node, "hold", pod.uid, "--end")).code == 0
    await eventually(lambda: not pod.mounted())


async def test_monitor_follows_over_a_restart(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "monitor", "--json", "--bus", node.bus.address,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TREE},
    )  # fmt: skip
    assert process.stdout is not None
    seen: list[dict[str, Any]] = []

    async def until_seen(name: str) -> dict[str, Any]:
        assert process.stdout is not None
        while True:
            seen.append(json.loads(await asyncio.wait_for(process.stdout.readline(), DEADLINE)))
            if seen[-1]["event"] == name:
                return seen[-1]

    try:
        assert (await until_seen("Resync"))["vms"][0]["state"] == "running"
        node.hostd.kill()
        assert (await until_seen("Lost"))["what"] == "hostd"
        node.hostd.start()
        assert (await until_seen("Resync"))["reason"] == "hostd"
        qemu.kill()
        assert (await until_seen("VMReleased"))["vm"]["pod_uid"] == pod.uid
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 130


async def test_sweep_metrics_and_doctor(node: Node) -> None:
    pod = full_pod(node)
    node.hostd.start()
    await hostctl(node, "sweep", "--dry-run")
    assert (await hostctl(node, "sweep")).code == 0
    await eventually(lambda: node.states()[pod.uid] == "released")
    assert pod.mounted() == []
    metrics = await hostctl(node, "metrics")
    assert metrics.code == 0
    assert 'hostd_vms{state="running"} 0.0' in metrics.out
    # It was started with --config: doctor finds out by itself.
    findings = await data(node, "doctor")
    assert {"level": "good", "area": "configuration", "what": node.configuration, "to_do": ""} in findings
    assert not [each for each in findings if each["area"] in ("hostd", "bus", "cgroups") and each["level"] == "bad"]


async def test_without_hostd_it_says_what_to_do(node: Node) -> None:
    done = await hostctl(node, "status")
    assert (done.code, done.out) == (1, "")
    assert "systemctl status hostd" in done.error
