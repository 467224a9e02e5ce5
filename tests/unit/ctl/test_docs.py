"""docs/agent.md and docs/monitoring.md are held against the code."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from hostd.bus import names
from hostd.bus.contract import contract
from hostd.client import events
from hostd.client.model import Helper
from hostd.client.node import Node, PRHelper
from hostd.ctl.parser import parse
from hostd.metrics import Metrics
from tests.support.fake_service import FakeService, vm

DOCS = Path(__file__).parents[3] / "docs"
AGENT, MONITORING = (DOCS / "agent.md").read_text(), (DOCS / "monitoring.md").read_text()
FILES = {
    name: (DOCS / "monitoring" / name).read_text()
    for name in ("alerts.yml", "dashboard.json", "node-problem-detector.json")
}


def commands() -> set[str]:
    """Every hostctl command line in the pages, without its comment; `VM` and the like stay."""
    texts = [AGENT, MONITORING, *FILES.values()]
    found = re.findall(r"(?:^    |`|: )(hostctl [a-z][^`#;'\"\n.]*)", "\n".join(texts), re.MULTILINE)
    return {" ".join(each.split()) for each in found}


def test_there_are_commands() -> None:
    assert {"hostctl status", "hostctl holders VM", "hostctl doctor", "hostctl pr-helper"} <= commands()


@pytest.mark.parametrize("line", sorted(commands()))
def test_every_command_exists(line: str) -> None:
    assert parse(shlex.split(line)[1:]) is not None


def rows(text: str, heading: str) -> dict[str, tuple[str, str]]:
    """Member → its types in and out, of the table with this heading."""
    table = text.split(f"\n| {heading}", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip().strip("`") for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    return {member: (takes, gives) for member, takes, gives in cells}


@pytest.mark.parametrize(("heading", "interface"), [("Manager", names.MANAGER), ("VM (at", names.VM)])
def test_the_members_for_go_are_those_of_the_contract(heading: str, interface: str) -> None:
    methods = contract()[interface].methods
    assert rows(AGENT, heading) == {name: (each.in_signature, each.out_signature) for name, each in methods.items()}


def test_the_events_are_those_of_the_client() -> None:
    for kind in get_args(events.Event):
        names_ = ", ".join(field.name for field in fields(kind))
        assert f"{kind.__name__}({names_})" in AGENT


def test_the_calls_are_those_of_the_client() -> None:
    table = AGENT.split("The calls, all of them", 1)[1].split("Errors are", 1)[0]
    said = set(re.findall(r"`(?:async with )?\.?(?:pr_helper\.)?([a-z_]+)\(", table))
    known = {
        name
        for kind in (Node, PRHelper)
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name != "watch"
    }
    assert said == known


def all_metrics() -> set[str]:
    service = FakeService(vm(1))
    service.health["x"] = "y"
    service.block(vm(1).pod_uid, "busy")
    service.known[vm(1).pod_uid].exited_usec = 1
    text = Metrics(service, helper=Helper).render().decode()
    return set(re.findall(r"^(hostd_\w+)", text, re.MULTILINE))


def test_every_metric_is_in_the_page_and_no_other() -> None:
    said = set(re.findall(r"^\| `(hostd_\w+)`", MONITORING, re.MULTILINE))
    known = {re.sub(r"_(bucket|count|sum)$", "", name) for name in all_metrics()}
    assert said == known


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_use_metrics_that_exist(file: str) -> None:
    used = set(re.findall(r"\bhostd_\w+", FILES[file]))
    assert used
    assert used <= all_metrics()


def test_every_alert_is_in_the_page() -> None:
    assert set(re.findall(r"alert: (\w+)", FILES["alerts.yml"])) == set(re.findall(r"\b(Hostd[A-Z]\w+)", MONITORING))


def test_the_dashboard_is_one() -> None:
    board = json.loads(FILES["dashboard.json"])
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]


def test_the_detectors_rule_names_its_condition() -> None:
    config = json.loads(FILES["node-problem-detector.json"])
    assert [rule["condition"] for rule in config["rules"]] == [each["type"] for each in config["conditions"]]
    assert config["conditions"][0]["type"] in MONITORING
    assert config["pluginConfig"]["max_output_length"] == 80
