"""docs/examples/node_agent.py on a real node: one hook for one death, whatever is restarted around it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.support.daemon import TREE
from tests.support.documents import shown
from tests.support.node import Node
from tests.support.pod import Pod
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, until

pytestmark = pytest.mark.usefixtures("root")

EXAMPLES = Path(TREE, "docs", "examples")
PROGRAM = EXAMPLES / "node_agent.py"
UNIT = EXAMPLES / "hostd-node-agent.service"
#: Writes its arguments and what it got in its environment, a line each time.
RECORD = """\
#!/bin/sh
echo "$*|$HOSTD_NAMESPACE/$HOSTD_NAME $HOSTD_VMI_UID $HOSTD_POD_UID $HOSTD_REASON" >>"$LOG"
"""


class Agent:
    """The program beside a node's hostd; it may be started again and again."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node = node
        self.directory = directory
        self.calls = directory / "calls"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, hook: str = RECORD) -> Self:
        """Starts it; `hook` is a script, or empty for none."""
        behind: list[str] = []
        if hook:
            script = self.directory / "hook"
            script.write_text(hook)
            script.chmod(0o755)
            behind = ["--", str(script), "first"]
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *options, *behind],
            env={
                **os.environ,
                "DBUS_SYSTEM_BUS_ADDRESS": self._node.bus.address,
                "PYTHONPATH": TREE,
                "LOG": str(self.calls),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
        )
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        status = self._process.wait(DEADLINE)
        self._process = None
        return status

    def close(self) -> None:
        if self._process is not None:
            self.stop(signal.SIGKILL)
        self._said.close()

    def text(self) -> str:
        return os.pread(self._said.fileno(), 1 << 20, 0).decode()

    def says(self, words: str, times: int = 1) -> None:
        """Waits until it has said this so often."""
        until(
            lambda: len(re.findall(words, self.text(), re.MULTILINE)) >= times,
            why=lambda: f"{words}: {self.text()}\n{self._node.hostd.log()}",
        )

    def called(self, pod: Pod) -> int:
        """How often the hook was called for a pod."""
        return self.calls.read_text().count(f"{pod.uid} poweroff|") if self.calls.exists() else 0

    def calls_for(self, pod: Pod) -> None:
        """Waits until the hook was called for a pod."""
        until(lambda: self.called(pod), why=lambda: f"the hook for {pod.uid}: {self.text()}\n{self._node.hostd.log()}")


@pytest.fixture
def agent(node: Node, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(node, tmp_path)
    yield made
    made.close()


def vm(node: Node, name: str, namespace: str = "shop") -> tuple[Pod, FakeQemu]:
    pod = node.pod(name=name, namespace=namespace)
    pod.containerdisk()
    pod.write_records()
    return pod, pod.qemu(FakeQemu)


def running(node: Node, *pods: Pod) -> None:
    until(lambda: all(node.states().get(pod.uid) == "running" for pod in pods), why=node.hostd.log)


def power_off(node: Node, pod: Pod, qemu: FakeQemu) -> None:
    """As a guest does it; returns when hostd has seen it."""
    qemu.poweroff()
    until(lambda: node.states()[pod.uid] == "released", why=node.hostd.log)


def test_the_hook_gets_the_facts_and_only_of_a_poweroff(node: Node, agent: Agent) -> None:
    off, off_qemu = vm(node, "off")
    killed, killed_qemu = vm(node, "killed")
    failed, failed_qemu = vm(node, "failed")
    node.hostd.start()
    agent.start("--after", "0.1")
    running(node, off, killed, failed)
    killed_qemu.kill()
    failed_qemu.poweroff(1)
    power_off(node, off, off_qemu)
    agent.calls_for(off)
    facts = f"shop off {off.vmi_uid} {off.uid} poweroff"
    assert agent.calls.read_text() == f"first {facts}|{facts.replace('shop off', 'shop/off', 1)}\n"
    assert agent.stop() == 0
    assert agent.text() == ""


def test_it_runs_as_the_page_shows_it(node: Node, agent: Agent) -> None:
    """With the paths of the test, and without the half minute."""
    pod, qemu = vm(node, "off")
    node.hostd.start()
    running(node, pod)
    python, program, *options = shlex.split(shown("docs/agent.md", "A reference agent"))
    assert (python, program, options[-2], Path(options[-1]).name) == ("python3", PROGRAM.name, "--", "on-poweroff")
    options[options.index("--after") + 1] = "0.1"
    options[options.index("--state") + 1] = str(agent.directory / "done.json")
    agent.start(*options[:-2])
    power_off(node, pod, qemu)
    agent.calls_for(pod)
    assert agent.stop() == 0
    assert (agent.directory / "done.json").exists()


def test_without_a_hook_it_prints_a_line(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    node.hostd.start()
    running(node, pod)
    agent.start("--after", "0", hook="")
    power_off(node, pod, qemu)
    agent.says(f"^shop/web poweroff vmi={pod.vmi_uid} pod={pod.uid}$")


def test_one_call_for_one_death_over_restarts_of_all(node: Node, agent: Agent) -> None:
    options = ("--after", "0", "--state", str(agent.directory / "done.json"))
    agent.start(*options)
    agent.says("hostd is gone; waiting for it")
    first, first_qemu = vm(node, "first")
    second, second_qemu = vm(node, "second")
    third, third_qemu = vm(node, "third")
    node.hostd.start()
    running(node, first, second, third)
    power_off(node, first, first_qemu)
    agent.calls_for(first)

    # The bus is away while one powers off.
    node.bus.stop()
    agent.says("bus is gone; waiting for it")
    second_qemu.poweroff()
    until(lambda: not second.mounted())
    node.bus.start_now()
    agent.calls_for(second)

    # hostd is.
    node.hostd.kill()
    agent.says("hostd is gone; waiting for it", 2)
    node.hostd.start()

    # The agent itself is.
    assert agent.stop() == 0
    power_off(node, third, third_qemu)
    agent.start(*options)
    agent.calls_for(third)
    last, last_qemu = vm(node, "last")
    running(node, last)
    power_off(node, last, last_qemu)
    agent.calls_for(last)
    assert [agent.called(pod) for pod in (first, second, third, last)] == [1, 1, 1, 1]


class Plug:
    """A VM whose hook takes the agent's only turn, so that the time of all others comes when the test wants it."""

    def __init__(self, node: Node, agent: Agent) -> None:
        self._node, self._agent = node, agent
        self._fifo = agent.directory / "plug"
        os.mkfifo(self._fifo)
        self._pod, self._qemu = vm(node, "plug")

    def start(self, *options: str) -> None:
        """Starts the agent, and takes its turn."""
        hook = f"{RECORD}[ $3 != plug ] || timeout 60 cat {self._fifo}\n"
        self._agent.start("--after", "0", "--hooks", "1", *options, hook=hook)
        running(self._node, self._pod)
        power_off(self._node, self._pod, self._qemu)
        self._agent.calls_for(self._pod)

    def release(self, *, while_away: Callable[[], object] = lambda: None) -> None:
        """Lets the others have their turn as soon as the agent knows all that hostd knows."""
        self._node.hostd.kill()
        self._agent.says("hostd is gone")
        while_away()
        self._fifo.write_text("go\n")
        self._node.hostd.start()


def test_who_is_left_alone(node: Node, agent: Agent) -> None:
    file = agent.directory / "leave-alone"
    pods = {name: vm(node, name) for name in ("named", "late", "by-uid", "again", "known", "other")}
    plug = Plug(node, agent)
    node.hostd.start()
    plug.start("--skip", "*/named", "--skip-file", str(file))
    running(node, *(pod for pod, _ in pods.values()))
    for pod, qemu in pods.values():
        power_off(node, pod, qemu)
    # While the agent waits: a person writes the file, a VM is started anew, an agent acknowledges one.
    file.write_text(f"# not now\nshop/la?e  # the late one\n\n{pods['by-uid'][0].uid}\n")
    second, _ = vm(node, "again")
    running(node, second)
    node.call("UnregisterVM", "s", pods["known"][0].uid)
    plug.release()
    agent.calls_for(pods["other"][0])
    for name, why in {
        "named": r"to be skipped \(\*/named\)",
        "late": r"to be skipped \(shop/la\?e\)",
        "by-uid": rf"to be skipped \({pods['by-uid'][0].uid}\)",
        "again": f"it runs again, or ran, in pod {second.uid}",
        "known": "it was acknowledged, or",
    }.items():
        agent.says(f"^shop/{name} .*: powered off, and left alone: {why}")
    assert [name for name, (pod, _) in pods.items() if agent.called(pod)] == ["other"]


def test_one_that_runs_again_while_hostd_is_away_is_left_alone(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    plug = Plug(node, agent)
    node.hostd.start()
    plug.start()
    running(node, pod)
    power_off(node, pod, qemu)
    again: list[Pod] = []
    plug.release(while_away=lambda: again.append(vm(node, "web")[0]))
    agent.says(f"left alone: it runs again, or ran, in pod {again[0].uid}")
    assert agent.called(pod) == 0


def test_one_that_ran_again_and_ended_otherwise_is_left_alone(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    plug = Plug(node, agent)
    node.hostd.start()
    plug.start()
    running(node, pod)
    power_off(node, pod, qemu)
    again, again_qemu = vm(node, "web")
    running(node, again)
    again_qemu.kill()
    until(lambda: node.states()[again.uid] == "released")
    plug.release()
    agent.says(f"left alone: it runs again, or ran, in pod {again.uid}")
    assert (agent.called(pod), agent.called(again)) == (0, 0)


def test_a_second_run_in_the_same_pod_is_a_death_of_its_own(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    node.hostd.start()
    agent.start("--after", "0")
    running(node, pod)
    power_off(node, pod, qemu)
    agent.calls_for(pod)
    second = pod.qemu(FakeQemu, disks=[])
    running(node, pod)
    power_off(node, pod, second)
    until(lambda: agent.called(pod) == 2, why=agent.text)


def test_a_hook_that_hangs_or_fails_is_told_and_holds_up_nobody(node: Node, agent: Agent) -> None:
    hook = f"{RECORD}case $3 in hangs) sleep 300;; fails) exit 7;; dies) kill -9 $$;; esac\n"
    pods = {name: vm(node, name) for name in ("hangs", "fails", "dies", "fine")}
    node.hostd.start()
    agent.start("--after", "0", "--timeout", "1.5", "--hooks", "2", hook=hook)
    running(node, *(pod for pod, _ in pods.values()))
    for pod, qemu in pods.values():
        power_off(node, pod, qemu)
        agent.calls_for(pod)
    agent.says("^shop/hangs .*: the hook was killed: it did not end within 1.5 s$")
    agent.says("^shop/fails .*: the hook failed with status 7$")
    agent.says("^shop/dies .*: the hook died of signal 9$")
    agent.stop()
    assert not re.search("shop/fine", agent.text())


def test_a_hook_that_is_not_there_is_told(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    node.hostd.start()
    agent.start("--after", "0", hook="#!/no/such/interpreter\n")
    running(node, pod)
    power_off(node, pod, qemu)
    agent.says("^shop/web .*: the hook cannot be run: .*No such file")


def test_a_stop_waits_for_its_hook_and_a_kill_does_not_run_it_twice(node: Node, agent: Agent) -> None:
    state = agent.directory / "done.json"
    go = agent.directory / "go"
    os.mkfifo(go)
    hook = f"{RECORD}timeout 60 cat {go}\necho over >>{agent.calls}\n"
    first, first_qemu = vm(node, "first")
    second, second_qemu = vm(node, "second")
    node.hostd.start()
    agent.start("--after", "0", "--state", str(state), hook=hook)
    running(node, first, second)
    power_off(node, first, first_qemu)
    agent.calls_for(first)
    assert agent._process is not None
    agent._process.send_signal(signal.SIGTERM)
    go.write_text("go\n")
    assert agent.wait() == 0
    assert agent.calls.read_text().endswith("over\n")

    agent.start("--after", "0", "--state", str(state), hook=hook)
    power_off(node, second, second_qemu)
    agent.calls_for(second)
    assert agent.stop(signal.SIGKILL) == -signal.SIGKILL
    go.write_text("go\n")  # the hook of the killed one goes on
    agent.start("--after", "0", "--state", str(state), hook=hook)
    agent.says(f"{second.uid}: the agent ended while its hook ran; it is not run again")
    assert agent.stop() == 0
    assert (agent.called(first), agent.called(second)) == (1, 1)


def test_a_state_file_that_is_none_stops_it(node: Node, agent: Agent) -> None:
    state = agent.directory / "done.json"
    for text in ("", "[]", '{"done": 1}', '{"done": {"a": 1}}'):
        state.write_text(text)
        agent.start("--state", str(state))
        assert agent.wait() == 1
        assert "remove it to begin anew" in agent.text().splitlines()[-1]
    state.write_text(json.dumps({"done": {}}))
    agent.start("--state", str(state))
    agent.says("hostd is gone")


def test_it_waits_for_a_bus_that_is_not_there_yet(node: Node, agent: Agent) -> None:
    pod, qemu = vm(node, "web")
    node.bus.stop()
    agent.start("--after", "0")
    agent.says("^waiting: the bus cannot be reached")
    node.bus.start_now()
    node.hostd.start()
    running(node, pod)
    power_off(node, pod, qemu)
    agent.calls_for(pod)


def test_wrong_usage_ends_with_2(agent: Agent) -> None:
    for options in (["--after", "nan"], ["--after", "-1"], ["--hooks", "0"], ["--"], ["word"]):
        command = [sys.executable, str(PROGRAM), *options]
        done = subprocess.run(command, env={"PYTHONPATH": TREE}, capture_output=True, check=False)
        assert done.returncode == 2, options


def options_of_the_program() -> set[str]:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--help"], env={"PYTHONPATH": TREE}, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout)) - {"--help"}


def test_the_page_has_its_options() -> None:
    section = (EXAMPLES.parent / "agent.md").read_text().partition("## A reference agent")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(--[a-z-]+)", section)) == options_of_the_program()


def test_the_unit_runs_it_as_a_reader_with_options_that_it_has() -> None:
    unit = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    unit.read_string(UNIT.read_text().replace("\\\n", " "))
    command = unit.get("Service", "ExecStart")
    assert set(re.findall(r"--[a-z][a-z-]*", command)) <= options_of_the_program()
    assert command.split()[:2] == ["/usr/bin/python3", "/usr/local/lib/hostd/node_agent.py"]
    assert unit.get("Service", "SupplementaryGroups") == "hostd"
    assert int(unit.get("Service", "TimeoutStopSec")) > 60
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", UNIT], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "hostd-node-agent" in line and "No such file" not in line]
    assert not said
