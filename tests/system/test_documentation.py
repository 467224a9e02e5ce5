"""Every command that README.md and docs/ show is run, and what they show of its output is what it prints.

A document is played from its beginning on a node of its own. Its blocks:

    ```console  `$ ` or `# ` (root's) before a command, its output below. `…` stands for anything, on a line of its own
                for any lines. Process ids, times, sizes and UIDs may differ, the words may not.
    ```log      lines of hostd's log
    ```sh       commands that change a machine: another test runs each (RUN_ELSEWHERE says which)

A comment `<!-- scene: NAME -->` before a block brings the node where the text is; see SCENES.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostd.ctl import parser
from hostd.log import Message
from tests.support.daemon import TREE
from tests.support.node import MANAGER_INTERFACE, NAME, VM_INTERFACE, Node
from tests.support.qemu import FakeQemu
from tests.support.wait import until

ROOT = Path(TREE)
DOCUMENTS = (
    "README.md",
    "docs/operating.md",
    "docs/how-it-works.md",
    "docs/security.md",
    "docs/comparison.md",
)
#: The pod of which the documents tell.
POD_UID = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
KUBELET = "/var/lib/kubelet"

#: Commands that cannot run beside other tests: the file that runs each, and how that has it.
RUN_ELSEWHERE = {
    "DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/my-bus hostd --config my-hostd.toml": (
        "tests/support/daemon.py",
        '"DBUS_SYSTEM_BUS_ADDRESS": bus_address',
    ),
    "make demo": ("Makefile", "-m tests.demo"),
    "make test": (".ci/run", "make test"),
    "systemctl status hostd": ("tests/node/checks/boot1/test_40_story.py", '"systemctl", "status"'),
    "systemctl restart hostd": ("tests/node/checks/boot1/test_40_story.py", '"systemctl", "restart", "hostd.service"'),
    "journalctl -x -u hostd": ("tests/node/start", "journalctl --no-pager -x -u hostd.service"),
    "apt remove hostd": ("tests/node/checks/boot2/test_90_removal.py", '"apt-get", "remove"'),
}


# -- what stands in a document


@dataclass(frozen=True)
class Block:
    """One fenced block: `scene` is empty where the node stays as it is."""

    kind: str
    text: str
    line: int
    scene: str


def blocks(document: str) -> list[Block]:
    """All fenced blocks of a document."""
    found: list[Block] = []
    scene = ""
    lines = (ROOT / document).read_text("utf-8").splitlines()
    start = kind = None
    for number, line in enumerate(lines, 1):
        if start is None and (said := re.fullmatch(r"<!-- scene: ([a-z ]+) -->", line)):
            scene = said[1]
        elif start is None and (fence := re.fullmatch(r"```([a-z]*)", line)):
            start, kind = number, fence[1]
        elif start is not None and line == "```":
            found.append(Block(kind or "", "\n".join(lines[start : number - 1]), start, scene))
            start, scene = None, ""
    assert start is None, f"{document}: the block in line {start} has no end"
    return found


@dataclass(frozen=True)
class Command:
    """A command and the lines that are shown below it."""

    text: str
    shown: list[str]
    changes: bool


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith(("$ ", "# ")):
            text = line[2:]
            while text.endswith("\\"):
                text = text[:-1] + next(lines).strip()
            found.append(Command(text, [], changes=line.startswith("# ")))
        else:
            assert found, f"line {block.line}: a console block begins with a command"
            found[-1].shown.append(line)
    return found


#: What tells that a command ends with something else than 0, and with what.
_STATUSES = (
    (r"^Call failed: ", 1),
    (r"^\S+ \([0-9a-f-]{36}\): .* is alive: ", 1),
    (r"^This node is (blocked|unhealthy)", 3),
    (r" is busy: held by |: detached: ", 3),
)


def expected_status(command: Command) -> int:
    """The exit status that goes with what is shown."""
    return next((status for words, status in _STATUSES if re.search(words, "\n".join(command.shown), re.MULTILINE)), 0)


# -- the node, where the text is


class Stage:
    """The node on which a document is played: a pod with a containerDisk and a hotplugged volume, and its QEMU."""

    def __init__(self, tmp_path: Path) -> None:
        self._programs = tmp_path / "bin"
        self._holder: subprocess.Popen[bytes] | None = None
        self._said: list[str] = []
        self._build()

    def _build(self) -> None:
        self.node = Node()
        try:
            self.pod = self.node.pod(name="web", namespace="shop", uid=POD_UID)
            self.pod.containerdisk()
            self.volume = self.pod.hotplug_file("data")
            self.pod.write_records()
            self.qemu = self.pod.qemu(FakeQemu)
            write_programs(self._programs, self.node.configuration)
        except BaseException:
            self.node.close()
            raise

    def close(self) -> None:
        self.free()
        self.node.close()

    # scenes

    def running(self) -> None:
        """The VM runs, and hostd knows it."""
        self.node.hostd.start()
        self.until_state("running")

    def observe(self) -> None:
        """hostd was started in observe mode, and the VM is dead."""
        self.node.configure({"cleanup": {"mode": "observe"}})
        self.running()
        self.qemu.kill()
        self.until_state("exited")

    def enforce(self) -> None:
        """Its configuration says enforce; it was not told yet."""
        self.node.configure({"cleanup": {"mode": "enforce"}})

    def dies(self) -> None:
        """The VM is dead and cleaned up after."""
        self.qemu.kill()
        self.until_state("released")

    def held(self) -> None:
        """On a node of its own: the VM is dead, and somebody has its volume open."""
        self.close()
        self._build()
        self.running()
        # Not this process: its children have what it has open, until they are the program that they are to be.
        with open(self.node.outside(self.volume), "rb") as volume:
            self._holder = subprocess.Popen(["tail", "-f", "/dev/null"], stdin=volume)
        self.qemu.kill()
        self.until_state("blocked")
        until(lambda: "held by" in str(self.node.call("ListLayers", "a{sv}", "0")), why="the holder is named")

    def free(self) -> None:
        """Whoever had it open has closed it."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            self._holder = None

    def released(self) -> None:
        """Nobody holds anything any more."""
        self.free()
        self.until_state("released")

    def until_state(self, state: str) -> None:
        until(lambda: self.node.states().get(POD_UID) == state, why=lambda: f"{state}; {self.node.hostd.log()}")

    # commands

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as an administrator of this node would; what was assigned before holds."""
        if re.match(r"\w+=", command):
            self._said.append(command)
        script = "\n".join([*self._said, command]).replace(KUBELET, os.fsdecode(self.node.kubelet))
        environment = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": TREE,
            "DBUS_SYSTEM_BUS_ADDRESS": self.node.bus.address,
        }
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)

    def shape(self, text: str) -> str:
        return shape(text.replace(os.fsdecode(self.node.kubelet), KUBELET))


SCENES: dict[str, Callable[[Stage], None]] = {
    "running": Stage.running,
    "observe": Stage.observe,
    "enforce": Stage.enforce,
    "dies": Stage.dies,
    "held": Stage.held,
    "released": Stage.released,
}


def write_programs(directory: Path, configuration: str) -> None:
    """hostd and hostctl as an installation would have them on PATH, of this tree and on this node's configuration."""
    directory.mkdir(exist_ok=True)
    for name, module, more in (("hostd", "hostd.app", f"--config {configuration}"), ("hostctl", "hostd.ctl.main", "")):
        program = directory / name
        run = f"{sys.executable} -P -c 'import sys; from {module} import main; sys.exit(main())'"
        program.write_text(f'#!/bin/sh\nexec {run} {more} "$@"\n')
        program.chmod(0o755)


# -- comparing


def shape(text: str) -> str:
    """Output without what differs from one run to the next."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID", text)
    text = re.sub(r"_3[0-9]\w+_2d\w+", "ENCODED", text)
    text = re.sub(r"\b\d+(\.\d+)*(ms|s|min|h|d)?\b", "N", text)
    return re.sub(r"\s+", " ", text).strip()


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines shown are those printed."""
    if not shown:
        return not printed
    if shown[0] == "…":
        return any(matches(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and same_line(shown[0], printed[0]) and matches(shown[1:], printed[1:])


def same_line(shown: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in shown.split("…"))
    return re.fullmatch(pattern.replace(r"\ .*", r".*"), printed) is not None


# -- the tests


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[[], Stage]]:
    """Makes a stage where it is called: not every document has commands."""
    with contextlib.ExitStack() as end:

        def make() -> Stage:
            made = Stage(tmp_path)
            end.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_do_what_the_document_shows(document: str, make_stage: Callable[[], Stage]) -> None:
    stage: Stage | None = None
    for block in blocks(document):
        if block.kind not in {"console", "log"}:
            continue
        stage = stage or make_stage()
        where = f"{document}, line {block.line}"
        if block.scene:
            SCENES[block.scene](stage)
        if block.kind == "log":
            _check_log(stage, block, where)
        for command in commands(block) if block.kind == "console" else ():
            _check_command(stage, command, where)


def _check_command(stage: Stage, command: Command, where: str) -> None:
    shown = [line if line == "…" else shape(line) for line in command.shown]
    status = expected_status(command)
    told = ""

    def as_shown() -> bool:
        nonlocal told
        done = stage.run(command.text)
        told = f"{where}: {command.text}\n{done.stdout}{done.stderr}-> {done.returncode}; {status} expected"
        printed = [stage.shape(line) for line in (done.stdout + done.stderr).splitlines()]
        return done.returncode == status and matches(shown, printed)

    # What is only looked at may be between two states just now.
    if command.changes:
        assert as_shown(), told
    else:
        until(as_shown, deadline=5, why=lambda: told)


def _check_log(stage: Stage, block: Block, where: str) -> None:
    for line in block.text.splitlines():
        wanted = shape(line)
        until(
            lambda wanted=wanted: any(same_line(wanted, each) for each in _logged(stage)),  # type: ignore[misc]
            deadline=5,
            why=f"{where}: the log has: {line}\n{stage.node.hostd.log()}",
        )


def _logged(stage: Stage) -> list[str]:
    return [stage.shape(line.partition(": ")[2]) for line in stage.node.hostd.log().splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_other_commands_are_run_by_other_tests(document: str) -> None:
    for block in blocks(document):
        for line in block.text.splitlines() if block.kind == "sh" else ():
            command = line.partition(" #")[0].strip()
            assert command in RUN_ELSEWHERE, f"{document}: nobody runs: {line}"


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_those_other_tests_are_there(command: str) -> None:
    path, needle = RUN_ELSEWHERE[command]
    assert needle in (ROOT / path).read_text("utf-8"), f"{path} does not run {command}"


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/install.md"])
def test_hostctl_takes_what_the_text_names(document: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for named in re.findall(r"`hostctl ([^`]+)`|^ +hostctl (.+?)(?: +#.*)?$", text, re.MULTILINE):
        parser.parse(shlex.split("".join(named)))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_are_of_a_kind_that_is_checked(document: str) -> None:
    assert {block.kind for block in blocks(document)} <= {"console", "log", "sh", "text", "toml", "ini"}
    assert {block.scene for block in blocks(document)} <= {"", *SCENES}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", path.read_text("utf-8")):
        assert link.startswith("https://") or (path.parent / link).exists(), f"{document} links to {link}"


def test_the_capabilities_that_are_explained_are_those_of_the_unit() -> None:
    unit = (ROOT / "systemd/hostd.service").read_text("utf-8")
    (granted,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    table = (ROOT / "docs/security.md").read_text("utf-8").partition("## Why root")[2].partition("\nA process")[0]
    assert sorted(re.findall(r"`(CAP_\w+)`", table)) == sorted(granted.split())


def test_the_events_that_are_listed_are_those_of_the_log() -> None:
    listed = re.findall(r"`([0-9a-f]{32})` \|$", (ROOT / "docs/operating.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(message.value for message in Message)


def test_a_line_matches_its_own_shape_and_no_other() -> None:
    assert same_line(shape('s "held by tail[12] (open)"'), shape('s "held by tail[1527] (open)"'))
    assert same_line("a … c", "a b c")
    assert not same_line("a … c", "a b d")
    assert not same_line("a b", "a b c")
    assert matches(["a", "…"], ["a", "b", "c"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "b"], ["a"])


def test_names_are_those_of_the_bus() -> None:
    text = "".join((ROOT / document).read_text("utf-8") for document in DOCUMENTS)
    known = {NAME, MANAGER_INTERFACE, VM_INTERFACE}
    for found in re.findall(r"\bio\.kubevirt\.hostd1(?:\.[A-Z]\w+)?\b", text):
        assert found in known | {f"{NAME}.PRHelper", f"{NAME}.Error"}
