"""hostd's policy files under a real polkitd and a real dbus-daemon: who may change what, and what they are told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.bus import names
from tests.support.daemon import TREE
from tests.support.polkit import Guarded, why_not
from tests.support.wait import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

UID = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
VM = names.vm_path(UID)
LIST = (names.ROOT, f"{names.MANAGER}.ListVMs")
KEEP = (VM, f"{names.VM}.SetPolicy", "keep")
CLAIM = (names.ROOT, f"{names.MANAGER}.ClaimDevice", "pci/0000:3b:00.0", "default/vm", "{}")
#: Lets everybody do what an action allows.
YES = 'polkit.addRule(function(action, subject) {{ if (action.id == "{}") return polkit.Result.YES; }});'
MANAGE_VMS = "io.kubevirt.hostd1.manage-vms"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with Guarded() as made:
        assert VM in made.gdbus("", names.ROOT, f"{names.MANAGER}.RegisterVM", UID, "{'Name': <'vm1'>}")
        yield made


@pytest.fixture(autouse=True)
def clean(guarded: Guarded) -> None:
    """Root may, whatever else is so: there is no polkit between two tests."""
    assert guarded.gdbus("", VM, f"{names.VM}.SetPolicy", "clean") == "()\n"


def policy(guarded: Guarded) -> str:
    return guarded.gdbus("", VM, f"{names.PROPERTIES}.Get", names.VM, "Policy")


def test_without_a_rule_nobody_but_root(guarded: Guarded) -> None:
    with guarded.polkit():
        assert "vm1" in guarded.gdbus("member", *LIST)
        # gdbus sets no flag for a person to be asked, and there is none: an administrator would have to authenticate.
        assert "AccessDenied" in (said := guarded.gdbus("member", *KEEP))
        assert f"not authorized for {MANAGE_VMS}" in said
        assert "clean" in policy(guarded)
        assert guarded.gdbus("", *KEEP) == "()\n"
        assert "keep" in policy(guarded)


def test_a_stranger_does_not_get_past_the_bus(guarded: Guarded) -> None:
    with guarded.polkit(YES.format(MANAGE_VMS)):
        for what in (LIST, KEEP):
            assert "AccessDenied" in guarded.gdbus("stranger", *what)
        assert "clean" in policy(guarded)


def test_a_rule_lets_through_what_it_names_and_no_more(guarded: Guarded) -> None:
    with guarded.polkit(YES.format(MANAGE_VMS)):
        assert guarded.gdbus("member", *KEEP) == "()\n"
        assert "keep" in policy(guarded)
        assert "not authorized for io.kubevirt.hostd1.manage-devices" in guarded.gdbus("member", *CLAIM)
        for user in ("member", "operator"):
            set_level = (names.LOG_CONTROL_PATH, f"{names.PROPERTIES}.Set", names.LOG_CONTROL, "LogLevel", "<'info'>")
            assert "only root may do this" in guarded.gdbus(user, *set_level)


def test_the_rule_in_the_documentation(guarded: Guarded) -> None:
    rule = re.search(r"```js\n(.*?)```", Path(TREE, "docs/access.md").read_text(), re.DOTALL)
    assert rule is not None
    with guarded.polkit(rule[1]):
        assert "not authorized" in guarded.gdbus("member", *KEEP)
        assert guarded.gdbus("operator", *KEEP) == "()\n"


def test_a_rule_that_says_no(guarded: Guarded) -> None:
    with guarded.polkit(YES.format(MANAGE_VMS).replace("YES", "NO")):
        assert f"call as root, or allow {MANAGE_VMS} in a polkit rule" in guarded.gdbus("member", *KEEP)
        assert guarded.gdbus("", *KEEP) == "()\n"


def test_every_action_of_the_contract_is_in_the_policy_file(guarded: Guarded) -> None:
    """polkitd says no to an action that nobody declared, whatever a rule says of it."""
    everything = "polkit.addRule(function(action, subject) { return polkit.Result.YES; });"
    with guarded.polkit(everything):
        assert guarded.gdbus("member", *KEEP) == "()\n"
        # What is allowed is refused for another reason, by hostd itself.
        for call in (CLAIM, (names.HELPER_PATH, f"{names.HELPER}.Enable")):
            assert "uthorized" not in (said := guarded.gdbus("member", *call))
            assert "io.kubevirt.hostd1.Error" in said or "NotSupported" in said or said == "()\n"


def test_polkitd_dies_while_it_is_asked(guarded: Guarded) -> None:
    slow = 'polkit.addRule(function(action, subject) { polkit.spawn(["/bin/sleep", "8"]); return polkit.Result.YES; });'
    ours = guarded.owner(names.BUS_NAME)
    with guarded.polkit(slow) as polkitd:
        asking = guarded.start_gdbus("member", *KEEP)
        until(polkitd.children, why="polkitd asks its rule")
        assert "vm1" in guarded.gdbus("member", *LIST)
        polkitd.kill()
        said = asking.communicate(timeout=60)[0]
    assert "AccessDenied" in said
    assert f"polkit could not say whether {MANAGE_VMS} is allowed" in said
    assert "clean" in policy(guarded)
    assert guarded.owner(names.BUS_NAME) == ours != ""
    assert "polkit, which could allow" in guarded.gdbus("member", *KEEP)
    with guarded.polkit(YES.format(MANAGE_VMS)):
        assert guarded.gdbus("member", *KEEP) == "()\n"
    assert "Traceback" not in guarded.hostd.log()
