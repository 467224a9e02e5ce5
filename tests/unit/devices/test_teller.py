"""What is told, and that it is told once."""

from __future__ import annotations

import logging

import pytest

from hostd.core.model import DeviceConflict
from hostd.devices.claim import Claim, Life, Run, Stage
from hostd.devices.device import Device
from hostd.devices.teller import Teller, log_changes

STICK = Device("usb/1-2", "046d:c52b")
HERE = {STICK.name: STICK}
CLAIMS = {STICK.name: Claim(STICK.name, "ns/a", "p1", stage=Stage.HELD, identity=STICK.identity)}
THIEF = {"p9": Run("p9", "ns/b", life=Life.ALIVE, open={STICK.name: 42})}


class Told:
    def __init__(self) -> None:
        self.published: list[tuple[str, tuple[str, ...]]] = []
        self.conflicts: list[DeviceConflict] = []
        self.teller = Teller(lambda pod_uid, names: self.published.append((pod_uid, names)))
        self.end = self.teller.subscribe(self.conflicts.append)


def test_a_conflict_is_told_once_a_spell() -> None:
    told = Told()
    for _ in range(3):
        told.teller.tell(CLAIMS, THIEF, HERE)
    assert len(told.conflicts) == 1
    told.teller.tell(CLAIMS, {}, HERE)
    told.teller.tell(CLAIMS, THIEF, HERE)
    assert len(told.conflicts) == 2


def test_one_who_listens_no_more_hears_nothing() -> None:
    told = Told()
    told.end()
    told.teller.tell(CLAIMS, THIEF, HERE)
    assert told.conflicts == []


def test_a_listener_that_fails_keeps_it_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.end()

    def fail(conflict: DeviceConflict) -> None:
        raise RuntimeError(conflict.device)

    told.teller.subscribe(fail)
    told.teller.subscribe(told.conflicts.append)
    told.teller.tell(CLAIMS, THIEF, HERE)
    assert len(told.conflicts) == 1
    assert "a listener failed on a conflict about usb/1-2" in caplog.text


def test_what_a_vm_has_is_published_when_it_changes() -> None:
    told = Told()
    run = Run("p1", "ns/a", life=Life.ALIVE)
    for claims in ({}, CLAIMS, CLAIMS, {}):
        told.teller.tell(claims, {"p1": run}, HERE)
    assert told.published == [("p1", (STICK.name,)), ("p1", ())]
    told.teller.tell(CLAIMS, {"p1": run}, HERE)
    told.teller.tell(CLAIMS, {}, HERE)
    assert told.published[2:] == [("p1", (STICK.name,)), ("p1", ())], "whom nothing concerns any more has nothing"


def test_what_a_vm_had_before_is_corrected_once() -> None:
    told = Told()
    told.teller.assume("p1", (STICK.name,))
    told.teller.assume("p2", (STICK.name,))
    told.teller.assume("p3", ())
    for _ in range(2):
        told.teller.tell(CLAIMS, {"p1": Run("p1", "ns/a", life=Life.ALIVE)}, HERE)
    assert told.published == [("p2", ())]


def test_an_absence_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    for _ in range(3):
        told.teller.tell(CLAIMS, {}, {})
    assert caplog.text.count("usb/1-2, claimed by ns/a, is not there") == 1


def test_changes_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_changes({}, CLAIMS)
    log_changes(CLAIMS, CLAIMS)
    log_changes(CLAIMS, {})
    assert [record.message for record in caplog.records] == [
        "usb/1-2 is held for ns/a",
        "usb/1-2 is free again; ns/a had it",
    ]
