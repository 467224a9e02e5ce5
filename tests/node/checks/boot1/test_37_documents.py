"""What docs/ tell an administrator to do on a node, done."""

from __future__ import annotations

import re

from tests.node.checks.documents import follow, named
from tests.node.checks.node import prop, run, show


def test_after_the_installation() -> None:
    said = follow("docs/install.md", "After the installation")
    assert "Active: active (running)" in said
    assert re.search(r"version \S+ answers", said), "doctor"
    assert "is ready: " in said, "the journal"


def test_how_to_see_how_it_is() -> None:
    said = follow("docs/operating.md", "See how it is")
    assert re.search(r'^ +Status: "\S', said, re.MULTILINE)
    assert "░░ Subject: " in said


def test_switching_it_off_and_on_and_reloading_it() -> None:
    # An editor is for people.
    commands = set(named("docs/install.md", "systemctl")) - {"systemctl edit hostd"}
    off, on = "systemctl disable --now hostd", "systemctl enable --now hostd"
    assert {off, on, "systemctl reload hostd"} <= commands
    run(*off.split())
    assert show("hostd.service", "ActiveState", "UnitFileState") == {
        "ActiveState": "inactive", "UnitFileState": "disabled",
    }  # fmt: skip
    for command in (on, *(commands - {off, on})):
        run(*command.split())
        assert prop("ActiveState") == "active", command


def test_who_may_look() -> None:
    (command,) = named("docs/install.md", "usermod")
    run("useradd", "--no-create-home", "alice")
    assert run("hostctl", "list", user="alice", check=False).returncode == 1
    run(*command.split())
    assert run("hostctl", "list", user="alice").stdout == "No VMs.\n"


def test_a_detector_in_a_pod_asks_the_host() -> None:
    """As docs/monitoring.md has it: the host's root at /host."""
    (command,) = named("docs/monitoring.md", "chroot")
    run("sh", "-ec", f"mkdir /host; mount --bind / /host; mount --bind /run /host/run; {command} status --short")
    run("sh", "-ec", "umount /host/run /host; rmdir /host")
