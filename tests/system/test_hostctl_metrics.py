"""`hostctl metrics` and the textfile that the daemon writes, over a VM's life."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.daemon import TREE
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import until
from tests.support.witness import FULL, full_pod, gone, in_state

pytestmark = pytest.mark.usefixtures("root")


def values(path: str) -> dict[str, float]:
    """The file's; nothing while there is none."""
    try:
        with open(path) as file:
            return samples(file.read())
    except FileNotFoundError:
        return {}


def told(node: Node) -> dict[str, float]:
    """What `hostctl metrics` prints."""
    command = [sys.executable, "-P", "-m", "hostd.ctl.main", "metrics", "--bus", node.bus.address]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": TREE})
    return samples(done.stdout)


def samples(text: str) -> dict[str, float]:
    """Name with labels → value."""
    return {m[1]: float(m[2]) for m in re.finditer(r"^(hostd_\S+) (\S+)$", text, re.MULTILINE)}


def test_the_textfile_follows_a_vm() -> None:
    with Node() as node:
        directory = os.path.join(node.directory, "metrics")
        path = os.path.join(directory, "hostd.prom")
        os.mkdir(directory)
        node.configure({"metrics": {"textfile": path}})
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        assert values(path)['hostd_vms{state="running"}'] == 1
        assert os.stat(path).st_mode & 0o777 == 0o644
        until(lambda: values(path).get("hostd_bus_connections_total") == 1)
        holder = node.namespace.hold(os.open, pod.targets[0], os.O_RDONLY)
        qemu.kill()
        until(lambda: values(path)["hostd_umount_retries_total"] > 0)
        until(lambda: values(path)["hostd_layers_blocked_total"] == 1)
        holder.end()
        gone(node, pod)
        in_state(node, pod, "released")
        until(lambda: values(path)["hostd_vms_released_total"] == 1)
        found = values(path)
        assert found["hostd_layers_released_total"] >= FULL
        assert found["hostd_cleanup_seconds_count"] == 1
        assert found["hostd_cleanup_seconds_sum"] > 0
        assert found['hostd_vms{state="released"}'] == 1
        node.bus.stop()
        node.bus.start_now()
        until(lambda: values(path)["hostd_bus_connections_total"] == 2)
        assert told(node) == values(path)
        assert node.hostd.stop() == 0
        assert os.listdir(directory) == []


def test_hostctl_tells_all_of_it_without_a_file() -> None:
    """Each of what an alert or a dashboard needs, by what happened to a VM."""
    with Node() as node:
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        holder = node.namespace.hold(os.open, pod.targets[0], os.O_RDONLY)
        qemu.kill()
        in_state(node, pod, "blocked")
        found = told(node)
        assert found['hostd_vms{state="blocked"}'] == 1
        assert sum(value for name, value in found.items() if re.match(r'hostd_layers\{.*state="busy"', name)) == 1
        assert found["hostd_umount_retries_total"] > 0
        assert found["hostd_blocked_since_timestamp_seconds"] > 0
        assert found["hostd_workers_hung"] == 0
        holder.end()
        in_state(node, pod, "released")
        found = told(node)
        assert found["hostd_cleanup_seconds_count"] == found['hostd_cleanup_seconds_bucket{le="+Inf"}'] == 1
        assert found["hostd_pr_helper_restarts_total"] == found['hostd_pr_helper_probes_total{result="silent"}'] == 0
        assert found["hostd_bus_connections_total"] == 1


def test_a_death_that_is_found_at_the_start_is_counted() -> None:
    with Node() as node:
        path = os.path.join(node.directory, "hostd.prom")
        node.configure({"metrics": {"textfile": path}})
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        node.hostd.kill()
        qemu.kill()
        node.hostd.start()
        gone(node, pod)
        until(lambda: values(path)["hostd_vms_released_total"] == 1)


def test_a_directory_that_comes_late_hinders_nobody() -> None:
    with Node() as node:
        node.configure({"metrics": {"textfile": os.path.join(node.directory, "none/hostd.prom")}})
        pod = full_pod(node)
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        assert "metrics.textfile" in node.get("Health")["metrics"]
        os.mkdir(os.path.join(node.directory, "none"))
        qemu.kill()
        gone(node, pod)
        until(lambda: "metrics" not in node.get("Health"))
        assert "Traceback" not in node.hostd.log()
