"""udev's events, taken from the kernel itself: synthetic ones of a device that every machine has."""

from __future__ import annotations

import sys
from typing import Self

import pytest

from hostd.devices.sysfs import Names
from hostd.devices.udev import Database, DeviceEvents
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")

_NULL = "/sys/devices/virtual/mem/null/uevent"


def trigger(action: str = "change", times: int = 1) -> None:
    """What `udevadm trigger` does."""
    for _ in range(times):
        with open(_NULL, "w") as file:
            file.write(action)


class Heard:
    def __init__(self, *subsystems: str) -> None:
        self.times = 0
        self.events = DeviceEvents(self._count, subsystems or ("mem",), source="kernel")
        self.events.start()

    def _count(self) -> None:
        self.times += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.close()


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.devices.udev.BUFFER", 4096)


async def test_an_event_is_heard() -> None:
    with Heard() as heard:
        assert heard.events.problem == ""
        trigger()
        await eventually(lambda: heard.times)


async def test_a_removal_of_what_nobody_knows_does_no_harm() -> None:
    with Heard() as heard:
        trigger("remove")
        trigger("add")
        await eventually(lambda: heard.times)
        heard.times = 0
        trigger()
        await eventually(lambda: heard.times)


async def test_other_subsystems_are_not_heard() -> None:
    with Heard("pci") as others, Heard("mem") as heard:
        trigger()
        await eventually(lambda: heard.times)
        assert others.times == 0


async def test_an_overflow_is_survived_and_makes_room(small_buffer: None) -> None:
    with Heard() as heard:
        trigger(times=2000)
        await eventually(lambda: heard.events.overflows)
        assert heard.events._buffer > 4096
        assert heard.times
        heard.times = 0
        trigger()
        await eventually(lambda: heard.times)
        assert heard.events.problem == ""


async def test_a_burst_is_one_call_for_many_events() -> None:
    with Heard() as heard:
        trigger(times=1000)
        await eventually(lambda: heard.times)
        assert heard.times < 100


async def test_a_broken_monitor_is_set_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.devices.udev._ANEW_SECONDS", 0.01)
    with Heard() as heard:

        def fail(timeout: float) -> None:
            raise OSError(5, "Input/output error")

        heard.events._monitor.poll = fail
        trigger()
        await eventually(lambda: heard.times >= 2, why="it is looked again after it was set up")
        assert heard.events.problem == ""
        heard.times = 0
        trigger()
        await eventually(lambda: heard.times)


async def test_without_pyudev_hostd_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyudev", None)
    with Heard() as heard:
        assert "pyudev cannot be used" in heard.events.problem
        assert Database()(b"/sys/devices/virtual/mem/null") == Names()


def test_the_database_gives_empty_names_for_what_it_does_not_know() -> None:
    names = Database()
    assert names(b"/sys/devices/nothing") == Names()
    assert names(b"/sys/devices/virtual/mem/null") == Names()


def test_names_are_the_first_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyudev

    def from_path(context: object, path: str) -> object:
        assert path == "/sys/x"
        return type("Device", (), {"properties": {"ID_VENDOR": "raw", "ID_MODEL": "m", "ID_SERIAL_SHORT": "S1"}})

    monkeypatch.setattr(pyudev.Devices, "from_path", from_path)
    assert Database()(b"/sys/x") == Names("raw", "m", "S1")
