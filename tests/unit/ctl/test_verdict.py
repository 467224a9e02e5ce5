"""Is this node clean? Held against what is on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostd.client.model import VM, Device, Helper, Inhibitor, Layer, Status
from hostd.ctl.status import short
from hostd.ctl.verdict import Word, counts, judge

GOOD = Status("1", (), "enforce")


def vm(state: str, *layer_states: str, **more: object) -> VM:
    layers = tuple(Layer("7", f"/{n}", "containerdisk", f"disk_{n}", s, "") for n, s in enumerate(layer_states))
    return replace(VM("7", "", "shop", "db", state, layers=layers), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vms", "word"),
    [
        ([], Word.CLEAN),
        ([vm("running", "mounted"), vm("pending"), vm("released", "gone")], Word.CLEAN),
        ([vm("running", "mounted"), vm("exited", "mounted")], Word.CLEANING),
        ([vm("cleaning", "mounted"), vm("held", "mounted")], Word.CLEANING),
        ([vm("held", "mounted", policy="keep")], Word.HELD),
        ([vm("cleaning", "mounted"), vm("blocked", "busy")], Word.BLOCKED),
        ([vm("cleaning", "hung")], Word.BLOCKED),
        ([vm("cleaning", "mounted", "busy")], Word.BLOCKED),
        ([vm("held", "busy")], Word.HELD),
    ],
)
def test_by_its_vms(vms: list[VM], word: Word) -> None:
    verdict = judge(GOOD, vms, Helper())
    assert verdict.word is word
    assert verdict.clean == (word is Word.CLEAN)
    assert verdict.trouble == (word is Word.BLOCKED)
    assert bool(verdict.reasons) == (word is not Word.CLEAN)


def test_in_observe_mode_what_ended_is_held() -> None:
    assert judge(replace(GOOD, mode="observe"), [vm("exited", "mounted")], Helper()).word is Word.HELD


def test_health_is_trouble() -> None:
    verdict = judge(replace(GOOD, health=(("state", "cannot be saved"),)), [], Helper())
    assert (verdict.word, verdict.reasons) == (Word.UNHEALTHY, ("state: cannot be saved",))
    assert verdict.trouble


@pytest.mark.parametrize(
    ("enabled", "state", "trouble"), [(True, "failed", True), (False, "failed", False), (True, "standby", False)]
)
def test_the_helper_is_trouble_where_it_is_wanted(enabled: bool, state: str, trouble: bool) -> None:
    assert judge(GOOD, [], Helper(enabled, state, last_failure="no")).trouble is trouble


def test_another_device_than_the_one_that_was_claimed_is_trouble() -> None:
    assert judge(GOOD, [], Helper(), [Device("usb/1-2", "usb", "a/b", "", "mismatch", "")]).trouble


def test_reasons_say_who_and_why() -> None:
    blocked = vm("blocked", "busy", "busy", "gone", error="a reason")
    assert judge(GOOD, [blocked], Helper()).reasons == ("shop/db: 2 layers busy, a reason",)
    again = vm("blocked", "gone", error="mounted again")
    assert judge(GOOD, [again], Helper()).reasons == ("shop/db: mounted again",)
    ending = vm("cleaning", "mounted", "gone")
    assert judge(GOOD, [ending], Helper()).reasons == ("shop/db: 1 layer left",)
    held = vm("held", "mounted", inhibitors=(Inhibitor("me", "looks"),))
    assert judge(GOOD, [held], Helper()).reasons == ("shop/db: me: looks",)


def test_the_short_form_fits_a_node_condition() -> None:
    assert short([], judge(GOOD, [], Helper())) == "clean: no VMs"
    assert short([vm("running")], judge(GOOD, [vm("running")], Helper())) == "clean: 1 running"
    many = [vm("blocked", "busy", name="x" * 60)] * 3
    assert len(short(many, judge(GOOD, many, Helper()))) == 80


def test_counts_are_in_the_order_of_a_life() -> None:
    vms = [vm("released"), vm("pending"), vm("new-word"), vm("pending")]
    assert list(counts(vms).items()) == [("pending", 2), ("released", 1), ("new-word", 1)]
