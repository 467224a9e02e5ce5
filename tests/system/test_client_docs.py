"""What docs/agent.md and docs/monitoring.md show is run: the agent, the commands, the detector's rule."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.bus import Program, run
from tests.support.daemon import TREE
from tests.support.documents import shown
from tests.support.node import Node
from tests.support.programs import with_programs
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, eventually
from tests.support.witness import full_pod

pytestmark = pytest.mark.usefixtures("root")

DOCS = Path(TREE) / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("agent.md", "monitoring.md")}


def environment(node: Node, **more: str) -> dict[str, str]:
    return {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": node.bus.address, "PYTHONPATH": TREE, **more}


async def test_the_agent_reports_and_acknowledges(node: Node, tmp_path: Path) -> None:
    program, registering = re.findall(r"```python\n(.*?)```", PAGES["agent.md"], re.DOTALL)
    compile(registering, "agent.md", "exec")
    (tmp_path / "agent.py").write_text(program)
    first, second = full_pod(node, "first"), full_pod(node, "second")
    qemus = [pod.qemu(FakeQemu) for pod in (first, second)]
    node.hostd.start()
    agent = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "agent.py"), stdout=asyncio.subprocess.PIPE, env=environment(node)
    )

    async def said(words: str) -> None:
        assert agent.stdout is not None
        while not re.search(words.encode(), await asyncio.wait_for(agent.stdout.readline(), DEADLINE)):
            pass

    try:
        holder = node.namespace.hold(os.open, first.targets[0], os.O_RDONLY)
        qemus[0].kill()
        await said(f"{os.fsdecode(first.targets[0])} stays")
        await said(rf"\[{holder.pid}\]")
        holder.end()
        await said(r"^ns/first: (signal|unknown), clean\n$")
        await eventually(lambda: first.uid not in node.states())
        node.hostd.kill()
        qemus[1].kill()
        node.hostd.start()
        await said(r"^ns/second: \w+, clean\n$")
        await eventually(lambda: not node.states())
    finally:
        agent.kill()
        await agent.wait()


async def test_the_second_example_registers(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    code = re.findall(r"```python\n(.*?)```", PAGES["agent.md"], re.DOTALL)[1]
    names: dict[str, object] = {}
    exec("from __future__ import annotations\n" + code, names)  # the page's own lines
    import hostd.client

    async with hostd.client.connect(node.bus.address) as client:
        await names["on_domain"](client, pod.uid, qemu.pid)  # type: ignore[operator]
        vm = await client.get(pod.uid)
    assert (vm.full_name, vm.grace_usec) == ("shop/db", 5_000_000)


#: What the pages tell to say on a node.
COMMANDS = "\n".join(
    [
        shown("docs/agent.md", "From a shell"),
        shown("docs/monitoring.md", "On the node"),
        shown("docs/monitoring.md", "Prometheus"),
    ]
)


@pytest.mark.parametrize("line", [line.partition("#")[0].strip() for line in COMMANDS.splitlines()])
async def test_every_command_of_the_pages_runs(node: Node, line: str, tmp_path: Path) -> None:
    given = environment(node, PATH=with_programs(tmp_path))
    node.hostd.start()
    if line == "hostctl monitor":
        # It does not end by itself.
        line = "timeout --signal=INT --preserve-status 3 hostctl monitor | head -1"
    done = await run("bash", "-c", line, environment=given)
    # doctor may find this machine wanting.
    assert done.code == 0 or ("doctor" in line and done.code == 3), done
    assert done.out


async def rule(node: Node, path: str) -> Program:
    config = json.loads((DOCS / "monitoring/node-problem-detector.json").read_text())
    (found,) = config["rules"]
    return await run(found["path"], *found["args"], environment=environment(node, PATH=path))


async def test_the_detectors_rule_says_ok_not_ok_and_unknown(node: Node, tmp_path: Path) -> None:
    path = with_programs(tmp_path)
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    assert (await rule(node, path)).code == 2
    node.hostd.start()
    fine = await rule(node, path)
    assert (fine.code, fine.out) == (0, "clean: 1 running\n")
    holder = node.namespace.hold(os.open, pod.targets[0], os.O_RDONLY)
    qemu.kill()
    await eventually(lambda: node.states()[pod.uid] == "blocked")
    blocked = await rule(node, path)
    assert blocked.code == 1
    assert blocked.out.startswith("blocked: ns/vm: 1 layer busy, held by ")
    assert len(blocked.out.strip()) <= 80
    holder.end()
