"""What bash, zsh and fish complete for hostctl: the shells themselves are asked, beside a real hostd."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.ctl.parser import build
from tests.support.daemon import TREE
from tests.support.node import Node
from tests.support.programs import with_programs
from tests.support.qemu import FakeQemu
from tests.support.shells import SHELLS, offered
from tests.support.wait import until

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.parametrize(
        "shell",
        [
            pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}"))
            for shell in SHELLS
        ],
    ),
]

DB, WEB = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77", "a0b1c2d3-0c5a-4b6e-9d53-2f1f0d3c1a77"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """hostctl on PATH, and a node with two VMs, one of them with two layers."""
    path = with_programs(tmp_path_factory.mktemp("bin"))
    with Node() as node:
        for name, uid in (("db", DB), ("web", WEB)):
            pod = node.pod(namespace="shop", name=name, uid=uid)
            pod.containerdisk()
            if name == "db":
                pod.hotplug_file("data")
            pod.write_records()
            pod.qemu(FakeQemu)
        node.hostd.start()
        until(lambda: list(node.states().values()) == ["running"] * 2)
        yield {"PATH": path, "PYTHONPATH": TREE, "DBUS_SYSTEM_BUS_ADDRESS": node.bus.address}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command line that takes options: hostctl's own, a command's, and what stands below a command."""
    todo = [("hostctl", build())]
    for line, parser in todo:
        yield line, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += [(f"{line} {name}", below) for name, below in action.choices.items()]


def test_commands_and_options_are_those_of_the_program(shell: str, tmp_path: Path) -> None:
    # fish asks nothing about a program that is not there.
    environment = {"PATH": with_programs(tmp_path)}
    for line, parser in parsers():
        actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
        options = {option for action in actions for option in action.option_strings if option.startswith("--")}
        assert offered(shell, f"{line} --", tmp_path, environment) == options, line
        for action in actions:
            for option in action.option_strings if action.choices else ():
                assert offered(shell, f"{line} {option} ", tmp_path, environment) == set(action.choices or ()), line
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert offered(shell, f"{line} ", tmp_path, environment) == set(action.choices), line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("show ", {"shop/db", "shop/web", DB, WEB}),
        ("show sh", {"shop/db", "shop/web"}),
        ("show 6f", {DB}),
        ("show --json sh", {"shop/db", "shop/web"}),
        ("--json show shop/d", {"shop/db"}),
        ("layers --state busy a0", {WEB}),
        ("hold shop/w", {"shop/web"}),
        ("release shop/db shop/w", {"shop/web"}),
        ("release --dry-run a0", {WEB}),
        ("holders shop/db ", {"disk_0", "data"}),
        (f"holders {DB} da", {"data"}),
        ("devices claim usb/1-2 ", {"shop/db", "shop/web"}),
        # Not VMs:
        ("devices release ", set()),
        ("hold shop/db -- sh", set()),
    ],
)
def test_vms_and_layers_are_those_of_the_node(
    shell: str, line: str, expected: set[str], environment: dict[str, str], tmp_path: Path
) -> None:
    assert offered(shell, f"hostctl {line}", tmp_path, environment) == expected


def test_without_hostd_nothing_is_offered(shell: str, environment: dict[str, str], tmp_path: Path) -> None:
    nowhere = environment | {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={tmp_path}/none"}
    assert offered(shell, "hostctl release ", tmp_path, nowhere) == set()
