"""The unit: it is up, it says so, and it is confined."""

from __future__ import annotations

import re

import pytest

from tests.node.checks.node import MANAGER, NAME, UNIT, main_pid, run, show, text, until


def test_it_answers_on_the_bus() -> None:
    found = run("busctl", "--timeout=30", "introspect", NAME, MANAGER).stdout
    assert re.search(r"^\.ListVMs +method", found, re.MULTILINE)
    assert re.search(r"^\.Version +property +s +\"", found, re.MULTILINE)


def test_the_status_shows_its_line() -> None:
    status = run("systemctl", "status", "--no-pager", "--full", UNIT).stdout
    assert re.search(r'^ +Status: "\S.*"$', status, re.MULTILINE), status


def test_the_catalog_explains_its_events() -> None:
    entries = run("journalctl", "--no-pager", "--catalog", f"--unit={UNIT}").stdout
    assert re.search(r"^░░ Subject: \S", entries, re.MULTILINE), entries


def test_every_event_is_in_the_catalog() -> None:
    program = "from hostd.log import Message; print(*(each.value for each in Message))"
    ids = run("/usr/bin/python3", "-c", program).stdout
    known = run("journalctl", "--list-catalog").stdout
    assert [each for each in ids.split() if each not in known] == []


def test_the_watchdog_and_the_fd_store_are_on() -> None:
    found = show(UNIT, "Type", "WatchdogUSec", "FileDescriptorStoreMax", "Restart", "KillMode",
                 "RuntimeDirectoryPreserve")  # fmt: skip
    assert found == {
        "Type": "notify", "WatchdogUSec": "30s", "FileDescriptorStoreMax": "4096", "Restart": "always",
        "KillMode": "process", "RuntimeDirectoryPreserve": "yes",
    }  # fmt: skip


def test_it_is_the_last_choice_of_the_oom_killer() -> None:
    assert text(f"/proc/{main_pid()}/oom_score_adj") == "-900"


def _exposure() -> dict[str, float]:
    table = run("systemd-analyze", "security", "--no-pager").stdout
    return {name: float(value) for name, value in re.findall(r"^(\S+\.service) +([\d.]+) ", table, re.MULTILINE)}


def test_its_exposure_is_small() -> None:
    """Below that of two daemons that do less with the same privileges."""
    for unit in ("systemd-machined.service", "udisks2.service"):
        run("systemctl", "start", unit)
    found = _exposure()
    print({name: found[name] for name in found if name.startswith(("hostd", "systemd-machined", "udisks2"))})
    assert found["hostd.service"] <= 3.0
    assert found["hostd.service"] < min(found["systemd-machined.service"], found["udisks2.service"])
    for unit in ("systemd-machined.service", "udisks2.service"):
        run("systemctl", "stop", unit)


@pytest.mark.parametrize("name", ["Seccomp", "NoNewPrivs"])
def test_the_kernel_confines_it(name: str) -> None:
    status = dict(line.split(":", 1) for line in text(f"/proc/{main_pid()}/status").splitlines())
    assert status[name].strip() == {"Seccomp": "2", "NoNewPrivs": "1"}[name]


def test_it_has_a_mount_namespace_of_its_own() -> None:
    """And its workers act in PID 1's: the story's checks show that."""
    namespaces = run("sh", "-c", f"readlink /proc/1/ns/mnt /proc/{main_pid()}/ns/mnt").stdout.split()
    assert namespaces[0] != namespaces[1]


def test_it_starts_fast_enough_for_kubelet_to_wait() -> None:
    """kubelet is ordered after it: what a start costs on an emulated processor is an upper bound."""
    run("systemctl", "restart", UNIT)
    started = until(lambda: show(UNIT, "ActiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic"), "times")
    took = int(started["ActiveEnterTimestampMonotonic"]) - int(started["InactiveExitTimestampMonotonic"])
    print(f"start to READY: {took / 1e6:.2f} s")
    assert took < 30_000_000
