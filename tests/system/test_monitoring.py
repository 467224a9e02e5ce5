"""What docs/ give to others, held by their own programs: rules and queries by promtool, manifests by kubectl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.daemon import TREE
from tests.support.documents import blocks
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.witness import full_pod, in_state

DOCS = Path(TREE) / "docs"
ALERTS = DOCS / "monitoring/alerts.yml"
#: scripts/install-missing has put it there, where it is not installed.
PROMTOOL = shutil.which("promtool") or str(Path(TREE, ".cache/promtool"))
needs_promtool = pytest.mark.skipif(not Path(PROMTOOL).exists(), reason="needs promtool: scripts/install-missing test")


def rules() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def promtool(*words: str, given: str = "") -> str:
    done = subprocess.run([PROMTOOL, *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- alerts


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(ALERTS))


#: Alert → series of node n1 as promtool writes them (each minute a value), when it fires (minutes), with which value,
#: and which labels it has beside the node.
FIRES: dict[str, tuple[dict[str, str], int, str, dict[str, str]]] = {
    # Each attempt takes the VM out of the state for a moment.
    "HostdLayerBlocked": ({'hostd_vms{instance="n1",state="blocked"}': "1 0 1 0 1 0 1 0 1 0 1"}, 8, "1", {}),
    "HostdLayerBlockedLong": ({'hostd_blocked_since_timestamp_seconds{instance="n1"}': "0x70"}, 61, "3660", {}),
    "HostdWorkersHung": ({'hostd_workers_hung{instance="n1"}': "2x10"}, 3, "2", {}),
    "HostdUnhealthy": ({'hostd_unhealthy{instance="n1",part="state"}': "1x10"}, 6, "1", {"part": "state"}),
    "HostdCleanupSlow": (
        {
            'hostd_cleanup_seconds_bucket{instance="n1",le="60.0"}': "0x60",
            'hostd_cleanup_seconds_bucket{instance="n1",le="300.0"}': "0+1x60",
            'hostd_cleanup_seconds_bucket{instance="n1",le="+Inf"}': "0+1x60",
        },
        60,
        "",
        {},
    ),
    "HostdPRHelperDown": (
        {
            'hostd_pr_helper_enabled{instance="n1"}': "1x10",
            'hostd_pr_helper_state{instance="n1",state="failed"}': "1x10",
        },
        3,
        "1",
        {},
    ),
    "HostdPRHelperRestarts": ({'hostd_pr_helper_restarts_total{instance="n1"}': "0+1x60"}, 60, "", {}),
    "HostdBusLost": ({'hostd_bus_connections_total{instance="n1"}': "1+1x60"}, 60, "", {}),
    "HostdAbsent": ({'up{instance="n1",job="node-exporter"}': "1x20"}, 11, "1", {"job": "node-exporter"}),
}
#: A node where all is well.
QUIET = {
    'up{instance="n1",job="node-exporter"}': "1x90",
    'hostd_info{instance="n1",mode="enforce"}': "1x90",
    'hostd_vms{instance="n1",state="blocked"}': "0x90",
    'hostd_vms{instance="n1",state="running"}': "7x90",
    'hostd_workers_hung{instance="n1"}': "0x90",
    'hostd_cleanup_seconds_bucket{instance="n1",le="60.0"}': "0+1x90",
    'hostd_cleanup_seconds_bucket{instance="n1",le="+Inf"}': "0+1x90",
    'hostd_pr_helper_enabled{instance="n1"}': "0x90",
    'hostd_pr_helper_state{instance="n1",state="refused"}': "1x90",
    'hostd_pr_helper_restarts_total{instance="n1"}': "3x90",
    'hostd_bus_connections_total{instance="n1"}': "2x90",
}


def case(series: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": expected}


def alert(name: str, minutes: int, value: str, labels: dict[str, str]) -> dict[str, Any]:
    """That it fires then, with its annotations filled in."""
    has = {"instance": "n1"} | labels
    annotations = {}
    for key, text in rules()[name]["annotations"].items():
        filled = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: has[found[1]], text)
        annotations[key] = filled.replace("{{ $value }}", value)
    expected = {"exp_labels": has | rules()[name]["labels"], "exp_annotations": annotations}
    return {"alertname": name, "eval_time": f"{minutes}m", "exp_alerts": [expected]}


def silent(name: str, minutes: int) -> dict[str, Any]:
    return {"alertname": name, "eval_time": f"{minutes}m", "exp_alerts": []}


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_where_all_is_well(tmp_path: Path) -> None:
    assert set(FIRES) == set(rules())
    tests = [case(series, [alert(name, at, value, labels)]) for name, (series, at, value, labels) in FIRES.items()]
    tests.append(case(QUIET, [silent(name, at) for name in FIRES for at in (0, 30, 90)]))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


# -- the dashboard, the metrics


@needs_promtool
def test_the_dashboards_queries_are_queries(tmp_path: Path) -> None:
    """As rules that record, which promtool parses; Grafana's variables with a value."""
    board = json.loads((DOCS / "monitoring/dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= len(board["panels"])
    filled = [each.replace("$instance", "n.*").replace("$__rate_interval", "5m") for each in queries]
    assert not [each for each in filled if "$" in each]
    recorded = [{"record": f"query:{number}", "expr": each} for number, each in enumerate(filled)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(file))


@needs_promtool
@pytest.mark.usefixtures("root")
def test_prometheus_has_nothing_to_say_of_the_metrics(node: Node) -> None:
    pod = full_pod(node)
    qemu = pod.qemu(FakeQemu)
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "released")
    command = [sys.executable, "-P", "-m", "hostd.ctl.main", "--bus", node.bus.address, "metrics"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": TREE}).stdout
    assert promtool("check", "metrics", given=text) == ""


# -- manifests


needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl: scripts/install-missing test"
)


def kubectl(command: str, *words: str, given: object) -> Any:
    """What becomes of a manifest, without a cluster."""
    done = subprocess.run(
        ["kubectl", *command.split(), "--local", "-f", "-", "-o", "yaml", *words],
        input=yaml.safe_dump(given), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return yaml.safe_load(done.stdout)


def manifests(document: str) -> list[Any]:
    return [yaml.safe_load(block.text) for block in blocks(document) if block.kind == "yaml"]


@needs_kubectl
@pytest.mark.parametrize("reference", [False, True], ids=["the page's agent", "the reference agent"])
def test_kubectl_knows_every_field_of_the_daemon_set(reference: bool) -> None:
    """kubectl reads it into the API's types and writes it out: a field that they do not have would be lost.

    No cluster is asked, so what an admission controller thinks of it is not known.
    """
    manifest, fragment = manifests("docs/agent.md")
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    if reference:
        # As the text around the fragment has it.
        container |= fragment
        del pod["hostPID"]
        pod["securityContext"] = {"supplementalGroups": [990]}
        pod["volumes"].append({"name": "state", "hostPath": {"path": "/var/lib/agent", "type": "Directory"}})
    assert lost(manifest, kubectl("set resources", "--limits=memory=64Mi", given=manifest)) == []
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert manifest["spec"]["selector"]["matchLabels"] == manifest["spec"]["template"]["metadata"]["labels"]
    bus = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "bus")
    assert container["env"][0]["value"].startswith(f"unix:path={bus}/")


@needs_kubectl
@pytest.mark.parametrize("others", [["pr-helper"], []], ids=["with the feature", "without"])
def test_the_patch_takes_the_container_out_and_does_no_harm(others: list[str]) -> None:
    """docs/pr-helper.md's for virt-handler's DaemonSet, applied as KubeVirt's operator does: as a strategic merge."""
    (kubevirt,) = manifests("docs/pr-helper.md")
    (patch,) = kubevirt["spec"]["customizeComponents"]["patches"]
    assert (patch["resourceType"], patch["resourceName"], patch["type"]) == ("DaemonSet", "virt-handler", "strategic")
    containers = [{"name": name, "image": "registry.example/it"} for name in ("virt-handler", *others)]
    daemon_set = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "virt-handler"},
        "spec": {"template": {"spec": {"containers": containers}}},
    }
    patched = kubectl("patch", "--type=strategic", "-p", patch["patch"], given=daemon_set)
    assert [each["name"] for each in patched["spec"]["template"]["spec"]["containers"]] == ["virt-handler"]


def lost(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where theirs is not what ours is; more in it is as good."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key in ours for each in lost(ours[key], theirs.get(key), f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for n in range(len(ours)) for each in lost(ours[n], theirs[n], f"{at}[{n}]")]
    return [] if ours == theirs else [at]


def test_a_field_that_is_lost_is_seen() -> None:
    assert lost({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 2}]}) == []
    assert lost({"a": [{"b": 1, "d": 3}]}, {"a": [{"b": 1}]}) == [".a[0].d"]
