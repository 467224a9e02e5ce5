"""Who may do what: root all, members of the group look, others nothing; polkit can let others in."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.node import MANAGER, NAME, call, get, run
from tests.support.documents import blocks

_RULE = Path("/etc/polkit-1/rules.d/10-node.rules")


def test_root_may_look_and_act() -> None:
    assert call("ListVMs") == []
    assert get("Mode") == "enforce"
    call("Sweep", "t", "1")


def test_a_member_may_look() -> None:
    assert call("ListVMs", user="member") == []
    assert get("Version", user="member")
    assert "ListVMs" in run("busctl", "--timeout=30", "introspect", NAME, MANAGER, user="member").stdout


@pytest.mark.parametrize("member", [("Sweep", "t", "0"), ("Reload",), ("Inhibit", "sss", "", "me", "why")])
def test_a_member_may_not_act(member: tuple[str, ...]) -> None:
    done = call(*member, user="member", check=False)
    assert done.returncode != 0
    assert "denied" in done.stderr.lower() or "authori" in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("member", [("ListVMs",), ("Sweep", "t", "1")])
def test_a_stranger_may_nothing(member: tuple[str, ...]) -> None:
    done = call(*member, user="stranger", check=False)
    assert done.returncode != 0
    assert "denied" in done.stderr.lower() or "not allowed" in done.stderr.lower(), done.stderr


@pytest.fixture
def polkit_lets_members_manage_vms() -> Iterator[None]:
    """By the rule that docs/access.md shows, for a group that the member is in."""
    (rule,) = [block.text for block in blocks("docs/access.md") if block.kind == "js"]
    (group,) = re.findall(r'isInGroup\("([^"]+)"\)', rule)
    run("groupadd", "--force", group)
    run("usermod", "--append", "--groups", group, "member")
    _RULE.parent.mkdir(parents=True, exist_ok=True)
    _RULE.write_text(rule)
    run("systemctl", "restart", "polkit.service")
    yield
    _RULE.unlink()
    run("systemctl", "restart", "polkit.service")


@pytest.mark.usefixtures("polkit_lets_members_manage_vms")
def test_polkit_lets_a_member_act() -> None:
    deadline = time.monotonic() + 30
    while (done := call("Sweep", "t", "0", user="member", check=False)).returncode and time.monotonic() < deadline:
        time.sleep(0.5)  # polkit has just been started
    assert done.returncode == 0, done.stderr
    denied = run("busctl", "--timeout=30", "call", NAME, f"{MANAGER}/pr_helper", f"{NAME}.PRHelper", "Restart",
                 user="member", check=False)  # fmt: skip
    assert denied.returncode != 0, "manage-vms is not manage-pr-helper"


def test_polkit_knows_the_actions() -> None:
    found = run("pkaction").stdout
    for action in ("manage-vms", "manage-devices", "manage-pr-helper"):
        assert f"{NAME}.{action}" in found
