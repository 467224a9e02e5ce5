"""Every command that README.md and docs/ show is run, and what they show of its output is what it prints.

A document is played from its beginning on a node of its own. Its blocks:

    ```console  `$ ` or `# ` (root's) before a command, its output below. `…` stands for anything, on a line of its own
                for any lines. Process ids, times, sizes and UIDs may differ, the words may not.
    ```log      lines of hostd's log
    ```sh       commands that change a machine, or that end when they are told to: another test reads them out of the
                page and runs them, most of them on the node test's node

A comment `<!-- scene: NAME -->` before a block brings the node where the text is; see SCENES.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostd.ctl import parser
from hostd.log import Message
from tests.support.bus import PrivateBus
from tests.support.devices import NULL, ZERO, SysfsTree
from tests.support.documents import ROOT, Block, blocks, documents, shown
from tests.support.mountns import MS_BIND, MS_REC
from tests.support.node import MANAGER_INTERFACE, NAME, VM_INTERFACE, Node
from tests.support.pod import Pod
from tests.support.programs import with_programs
from tests.support.qemu import FakeQemu
from tests.support.wait import DEADLINE, until

DOCUMENTS = documents()
#: The pod of which the documents tell.
POD_UID = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
KUBELET = "/var/lib/kubelet"


# -- commands


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
    (r"^\S+: pod [0-9a-f-]{36} is alive: ", 1),
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
        self._programs.mkdir()
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
            self._path = with_programs(self._programs, self.node.configuration)
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

    def devices(self) -> None:
        """On a node of its own: a VM that runs has a GPU open, and there is a USB stick."""
        self.close()
        self.node = Node()
        host_devices(self._path_of("sys"), self.node)
        self.pod = self.node.pod(name="web", namespace="shop", uid=POD_UID)
        self._path = with_programs(self._programs, self.node.configuration)
        self.qemu = self.pod.qemu(FakeQemu, disks=[gpu_file(self.node, self.pod)])
        self.running()

    def _path_of(self, name: str) -> Path:
        return self._programs.parent / name

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
            "PATH": self._path,
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
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
    "devices": Stage.devices,
}


def host_devices(path: Path, node: Node) -> None:
    """A GPU and a USB stick in the node's /sys, which is a tree of the test's own but for the cgroups."""
    tree = SysfsTree(path)
    tree.pci("0000:3b:00.0", group="12", number=NULL)
    tree.usb("1-2", number=ZERO)
    (tree.path / "fs").mkdir()
    node.namespace.mount(b"/sys/fs", tree.root + b"/fs", flags=MS_BIND | MS_REC)
    node.namespace.mount(tree.root, b"/sys", flags=MS_BIND | MS_REC)


def gpu_file(node: Node, pod: Pod) -> bytes:
    """The GPU's file as the VM's QEMU sees it."""
    directory = node.namespace.base + b"/vfio"
    pod.launcher_namespace.tmpfs(directory)
    pod.launcher_namespace.call(os.mknod, directory + b"/12", stat.S_IFCHR | 0o666, os.makedev(*NULL))
    return directory + b"/12"


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


def followed() -> set[tuple[str, str]]:
    """The pages and headings whose commands some test reads and runs."""
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return set(re.findall(r'\b(?:shown|follow)\(\s*"(README\.md|docs/[^"]+)", "([^"]+)"', "\n".join(sources)))


def test_every_other_command_is_run_by_a_test_that_reads_it_here() -> None:
    found = {(document, block.heading) for document in DOCUMENTS for block in blocks(document) if block.kind == "sh"}
    assert found == followed()


@pytest.mark.skipif(not os.path.exists("/usr/bin/qemu-pr-helper"), reason="needs qemu-pr-helper")
def test_the_helper_is_switched_on_and_off_as_its_page_has_it(tmp_path: Path) -> None:
    with Node() as node:
        socket = os.path.join(node.directory, "pr/pr-helper.sock")
        node.configure({"pr-helper": {"backend": "child", "socket": socket}})
        node.hostd.start()
        asks = {"PATH": with_programs(tmp_path), "PYTHONPATH": str(ROOT), "DBUS_SYSTEM_BUS_ADDRESS": node.bus.address}
        for line in shown("docs/pr-helper.md", "qemu-pr-helper, supervised").splitlines():
            done = subprocess.run(["bash", "-c", line], env=asks, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), line
            assert os.path.exists(socket) is ("disable" not in line), f"{line}\n{done.stdout}"


def test_the_two_commands_and_a_hostd_beside_everything_else(tmp_path: Path) -> None:
    demo, test, beside = (line.partition("#")[0].strip() for line in shown("README.md", "Two commands").splitlines())
    assert test in (ROOT / ".ci/run").read_text("utf-8").splitlines(), "that is what this test is run by"
    done = subprocess.run(demo.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Node() as node:
        path = with_programs(tmp_path)
        shutil.copy(node.configuration, tmp_path / "my-hostd.toml")
        directory = tmp_path / "bus"
        directory.mkdir()
        bus = PrivateBus(directory)
        bus.start_now()
        line = beside.replace("unix:path=/run/my-bus", bus.address)
        assert line != beside
        hostd = subprocess.Popen(
            ["bash", "-c", f"exec env {line}"], cwd=tmp_path, env={"PATH": path, "PYTHONPATH": str(ROOT)}
        )
        try:
            asks = {"PATH": path, "PYTHONPATH": str(ROOT), "DBUS_SYSTEM_BUS_ADDRESS": bus.address}
            asked = ["hostctl", "status"]
            until(lambda: not subprocess.run(asked, env=asks, capture_output=True, check=False).returncode)
        finally:
            hostd.terminate()
            assert hostd.wait(DEADLINE) == 0
            bus.stop()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_hostctl_takes_what_the_text_names(document: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for named in re.findall(r"`hostctl ([^`]+)`", text):
        parser.parse(shlex.split(named))


def test_what_make_is_told_it_knows() -> None:
    text = "".join((ROOT / document).read_text("utf-8") for document in DOCUMENTS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_are_of_a_kind_that_is_checked(document: str) -> None:
    played, others = {"console", "log"}, {"sh", "text", "toml", "ini", "yaml", "js", "python", "go"}
    assert {block.kind for block in blocks(document)} <= played | others
    assert {block.scene for block in blocks(document)} <= {"", *SCENES}
    assert {block.scene for block in blocks(document) if block.kind not in played} <= {""}
    # Indented blocks would not be looked at.
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"(?<=\n\n)    \S.*", text)


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
        assert found in known | {f"{NAME}.PRHelper", f"{NAME}.Error", f"{NAME}.Access"}
