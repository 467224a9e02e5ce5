"""What callers may do, and how they are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostd.config import OnExit
from hostd.devices import asking
from hostd.devices.asking import Wish, claimed, exit_choice, refuse_release, vm_name
from hostd.devices.claim import Claim, Life, Run, Stage
from hostd.devices.device import Device
from hostd.devices.open_files import Holder
from hostd.errors import DeviceBusy, InvalidArgs, LimitExceeded, NoSuchDevice

GPU = Device("pci/0000:3b:00.0", "10de:1eb8", "a GPU", group="12")
AUDIO = Device("pci/0000:3b:00.1", "10de:10f8", "its sound", group="12")
THERE = {device.name: device for device in (GPU, AUDIO)}
WISH = Wish(GPU.name, "ns/a")


def live(vm: str = "ns/a", pod: str = "p1", *devices: Device) -> dict[str, Run]:
    return {pod: Run(pod, vm, "uid-1", Life.ALIVE, open={device.name: 42 for device in devices})}


def ask(claims: dict[str, Claim], wish: Wish = WISH, runs: dict[str, Run] | None = None) -> dict[str, Claim]:
    return claimed(claims, wish, THERE.get(wish.device), runs or {}, THERE)


def test_a_free_device_is_reserved() -> None:
    claim = ask({}, replace(WISH, vmi_uid="u"))[GPU.name]
    assert (claim.stage, claim.asked, claim.vmi_uid) == (Stage.RESERVED, True, "u")
    assert (claim.identity, claim.description) == (GPU.identity, GPU.description)


def test_the_same_again_changes_nothing() -> None:
    once = ask({})
    assert ask(once) == once


def test_another_vm_is_told_who_has_it() -> None:
    with pytest.raises(DeviceBusy, match=r"pci/0000:3b:00.0 is reserved for ns/a; ReleaseDevice gives it up"):
        ask(ask({}), replace(WISH, vm="ns/b"))


def test_another_vm_is_told_which_process_uses_it() -> None:
    used = {GPU.name: Claim(GPU.name, "ns/a", "p1", stage=Stage.IN_USE, used_by="p1")}
    with pytest.raises(DeviceBusy, match=r"is in use by ns/a \(pod p1\): process 42 has it open"):
        ask(used, replace(WISH, vm="ns/b"), live("ns/a", "p1", GPU))


def test_a_group_goes_to_one_vm() -> None:
    with pytest.raises(DeviceBusy, match=r"shares IOMMU group 12 with pci/0000:3b:00.0, which is reserved for ns/a"):
        ask(ask({}), Wish(AUDIO.name, "ns/b"))
    assert set(ask(ask({}), Wish(AUDIO.name, "ns/a"))) == {GPU.name, AUDIO.name}


def test_a_held_device_is_claimed_again_by_its_vm() -> None:
    held = {GPU.name: Claim(GPU.name, "ns/a", "p1", stage=Stage.HELD, used_by="p1", identity=GPU.identity)}
    claim = ask(held)[GPU.name]
    assert (claim.stage, claim.used_by, claim.asked) == (Stage.RESERVED, "", True)


def test_no_device_no_claim() -> None:
    with pytest.raises(NoSuchDevice, match="ListDevices"):
        ask({}, Wish("usb/1-2", "ns/a"))
    gone = {"usb/1-2": Claim("usb/1-2", "ns/a")}
    with pytest.raises(NoSuchDevice):
        ask(gone, Wish("usb/1-2", "ns/a"))
    with pytest.raises(DeviceBusy, match="is absent, and is reserved for ns/a"):
        ask(gone, Wish("usb/1-2", "ns/b"))


def test_another_device_at_the_place_is_not_taken_silently() -> None:
    old = {GPU.name: Claim(GPU.name, "ns/a", identity="10de:2204")}
    with pytest.raises(DeviceBusy, match=r"10de:1eb8 is there now, 10de:2204 was then; give the old claim up"):
        ask(old)


def test_the_choice_for_the_exit_counts_for_the_whole_vm() -> None:
    both = ask(ask({}), Wish(AUDIO.name, "ns/a", on_exit=OnExit.HOLD))
    assert {claim.on_exit for claim in both.values()} == {OnExit.HOLD}
    assert {claim.on_exit for claim in ask(both).values()} == {OnExit.HOLD}


def test_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MOST", 1)
    one = ask({}, Wish(AUDIO.name, "ns/a"))
    with pytest.raises(LimitExceeded, match="1 claims"):
        ask(one)
    assert ask(one, Wish(AUDIO.name, "ns/a")) == one


def test_a_release_is_refused_by_use_whoever_uses_it() -> None:
    claim = Claim(GPU.name, "ns/a", "p1", stage=Stage.IN_USE, used_by="p1")
    with pytest.raises(DeviceBusy, match=r"process 42 of ns/a \(pod p1\) has it open"):
        refuse_release(claim, "ns/a", live("ns/a", "p1", GPU), ())
    with pytest.raises(DeviceBusy, match=r"process 42 of ns/b \(pod p9\), which is not ns/a's has it open"):
        refuse_release(claim, "ns/a", live("ns/b", "p9", GPU), ())
    with pytest.raises(DeviceBusy, match=r"in use: dpdk\[99\] has it open"):
        refuse_release(claim, "ns/a", {}, [Holder(99, "dpdk")])
    refuse_release(claim, "ns/a", {}, ())


def test_nobody_releases_another_vm_s_claim() -> None:
    with pytest.raises(DeviceBusy, match=r"is not ns/b's: it is held for ns/a"):
        refuse_release(Claim(GPU.name, "ns/a", stage=Stage.HELD), "ns/b", {}, ())


@pytest.mark.parametrize("text", ["", "a", "/", "a/", "/b", "a/b/c", "a/b c", "a/b\n", "a/" + "x" * 254, "a\0/b"])
def test_what_is_no_vm(text: str) -> None:
    with pytest.raises(InvalidArgs, match="namespace/name"):
        vm_name(text)


def test_words_for_the_exit() -> None:
    assert (exit_choice(None), exit_choice("hold")) == (None, OnExit.HOLD)
    with pytest.raises(InvalidArgs, match="OnExit is release or hold, not 'keep'"):
        exit_choice("keep")
