"""What is shown."""

from __future__ import annotations

from hostd.core.model import DeviceRow
from hostd.devices.claim import Claim, Life, Run, Stage
from hostd.devices.device import Device
from hostd.devices.listing import conflicts, devices_of, rows

STICK = Device("usb/1-2", "046d:c52b", "046d:c52b a stick", serial="S1")


def only(claim: Claim, *devices: Device, runs: dict[str, Run] | None = None) -> DeviceRow:
    found = rows({claim.device: claim}, runs or {}, {device.name: device for device in devices})
    return next(row for row in found if row.device == claim.device)


def test_free_and_reserved_and_in_the_order_of_people() -> None:
    devices = {name: Device(name, "1:2", "it") for name in ("usb/1-10", "usb/1-2", "pci/0000:3b:00.0")}
    found = rows({"usb/1-2": Claim("usb/1-2", "ns/a", "p1")}, {}, devices)
    assert [(row.device, row.kind, row.vm, row.pod_uid, row.state) for row in found] == [
        ("pci/0000:3b:00.0", "pci", "", "", "free"),
        ("usb/1-2", "usb", "ns/a", "p1", "reserved"),
        ("usb/1-10", "usb", "", "", "free"),
    ]


def test_in_use_names_the_process() -> None:
    runs = {"p1": Run("p1", "ns/a", life=Life.ALIVE, open={STICK.name: 42})}
    row = only(Claim(STICK.name, "ns/a", "p1", stage=Stage.IN_USE), STICK, runs=runs)
    assert (row.state, row.description) == ("in-use", "046d:c52b a stick; open in process 42 of ns/a")


def test_used_against_its_claim_is_one_row_that_names_both() -> None:
    runs = {"p9": Run("p9", "ns/b", life=Life.ALIVE, open={STICK.name: 42})}
    row = only(Claim(STICK.name, "ns/a", "p1", stage=Stage.HELD), STICK, runs=runs)
    assert (row.vm, row.pod_uid, row.state) == ("ns/a", "p9", "held")
    assert "open in process 42 of ns/b" in row.description


def test_absent_and_where_it_may_have_gone() -> None:
    claim = Claim(STICK.name, "ns/a", identity="046d:c52b", serial="S1", description="a stick")
    assert (only(claim).state, only(claim).description) == ("absent", "a stick; not there now")
    moved = Device("usb/1-3", "046d:c52b", serial="S1")
    assert only(claim, moved).description == "a stick; not there now; one like it is at usb/1-3"
    twins = (moved, Device("usb/1-4", "046d:c52b", serial="S1"))
    assert "like it" not in only(claim, *twins).description


def test_mismatch_says_what_was_claimed() -> None:
    claim = Claim(STICK.name, "ns/a", identity="046d:c52b", serial="S9", description="another stick")
    row = only(claim, STICK)
    assert row.state == "mismatch"
    assert row.description == "046d:c52b a stick; claimed was 046d:c52b (serial S9): another stick"
    (conflict,) = conflicts({STICK.name: claim}, {}, {STICK.name: STICK}).values()
    assert conflict.vm == "ns/a"
    assert "046d:c52b (serial S1) is there now, 046d:c52b (serial S9) was claimed" in conflict.reason


def test_a_vm_has_what_it_opened_and_what_is_kept_for_it() -> None:
    runs = {"p1": Run("p1", "ns/a", life=Life.ALIVE, open={"usb/1-2": 1, "usb/1-1": 1}), "p2": Run("p2", "ns/b")}
    claims = {"usb/1-10": Claim("usb/1-10", "ns/a", "p1"), "usb/1-3": Claim("usb/1-3", "ns/c", "gone")}
    assert devices_of(claims, runs) == {"p1": ("usb/1-1", "usb/1-2", "usb/1-10"), "p2": ()}
