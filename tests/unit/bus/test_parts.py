"""The interfaces over other parts: devices, qemu-pr-helper, the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest

from hostd.bus import names
from hostd.bus.log_control import LogControl
from hostd.bus.protocols import DeviceConflict, DeviceRow, HelperStatus
from hostd.errors import DeviceBusy, NotEnabled
from tests.support.bus import Client, Failed, private_bus, serving
from tests.support.fake_service import FakeService, pod_uid, vm

ROW = DeviceRow("pci/0000:3b:00.0", "pci", "shop/vm1", pod_uid(1), "used", "A\x00 card")
OTHER = DeviceRow("usb/1-2", "usb", "", "", "free", "")


class FakeDevices:
    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.listeners: list[Callable[[DeviceConflict], None]] = []

    def devices(self) -> Iterable[DeviceRow]:
        return [ROW, OTHER]

    async def claim(self, device: str, vm: str, *, vmi_uid: str | None, on_exit: str | None) -> None:  # noqa: ARG002
        self.asked.append(("claim", device, vm, vmi_uid or ""))
        if device == ROW.device:
            raise DeviceBusy("in use by shop/vm1 (running)")

    async def release(self, device: str, vm: str) -> None:
        self.asked.append(("release", device, vm))

    def subscribe(self, listener: Callable[[DeviceConflict], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


class FakeHelper:
    def __init__(self) -> None:
        self.status = HelperStatus(True, "running", 44, "/run/x\udcff", 2, "", "ok", 3)
        self.asked: list[str] = []
        self.listeners: list[Callable[[], None]] = []

    async def enable(self) -> None:
        self.asked.append("enable")

    async def disable(self) -> None:
        self.asked.append("disable")

    async def restart(self) -> None:
        raise NotEnabled("switch it on with Enable")

    async def probe(self) -> Mapping[str, str | int | bool]:
        return {"Handshake": True, "Keys": 3, "Error": "no\nne"}

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


Parts = tuple[Client, FakeDevices, FakeHelper]


@pytest.fixture
async def parts(bus_library: str) -> AsyncIterator[Parts]:
    devices, helper = FakeDevices(), FakeHelper()
    async with (
        private_bus() as bus,
        serving(bus, FakeService(vm(1)), devices=devices, helper=helper),
        await Client.connect(bus.address) as client,
    ):
        yield client, devices, helper
    assert not devices.listeners
    assert not helper.listeners


async def test_devices(parts: Parts) -> None:
    client, devices, _ = parts
    (rows,) = await client.manager("ListDevices", "a{sv}", {})
    assert [list(row) for row in rows] == [
        ["pci/0000:3b:00.0", "pci", "shop/vm1", pod_uid(1), "used", r"A\x00 card"],
        ["usb/1-2", "usb", "", "", "free", ""],
    ]
    for key, value in (("Kind", "pci"), ("VM", "shop/vm1"), ("PodUID", pod_uid(1)), ("State", "used")):
        (rows,) = await client.manager("ListDevices", "a{sv}", {key: client.variant("s", value)})
        assert [row[0] for row in rows] == [ROW.device]
    await client.manager("ClaimDevice", "ssa{sv}", "usb/1-2", "a/b", {"VMIUID": client.variant("s", "v")})
    await client.manager("ReleaseDevice", "ss", "usb/1-2", "a/b")
    assert devices.asked == [("claim", "usb/1-2", "a/b", "v"), ("release", "usb/1-2", "a/b")]
    with pytest.raises(Failed, match=r"DeviceBusy: in use by shop/vm1 \(running\)"):
        await client.manager("ClaimDevice", "ssa{sv}", ROW.device, "a/b", {})
    for device, name in (("disk/1", "a/b"), ("pci/", "a/b"), ("usb/1/2", "a/b"), ("usb/1", "b"), ("usb/1", "a/b/c")):
        with pytest.raises(Failed, match="InvalidArgs"):
            await client.manager("ReleaseDevice", "ss", device, name)
    assert await client.get(names.ROOT, names.MANAGER, "Features") == [
        *(each for each in await client.get(names.ROOT, names.MANAGER, "Features") if "library" in each),
        "devices",
        "pr-helper",
    ]


async def test_a_conflict(parts: Parts) -> None:
    client, devices, _ = parts
    await client.subscribe()
    devices.listeners[0](DeviceConflict("usb/1-2", "a/b", "opened by\nanother"))
    await client.call("/", names.PEER, "Ping")
    assert [(each.member, each.body) for each in client.signals] == [
        ("DeviceConflict", ["usb/1-2", "a/b", r"opened by\x0aanother"])
    ]


async def test_the_helper(parts: Parts) -> None:
    client, _, helper = parts
    assert await client.get_all(names.HELPER_PATH, names.HELPER) == {
        "Enabled": True,
        "State": "running",
        "MainPID": 44,
        "SocketPath": r"/run/x\xff",
        "NRestarts": 2,
        "LastFailure": "",
        "Multipath": "ok",
        "OwnerPID": 0,
        "Clients": 3,
    }
    await client.call(names.HELPER_PATH, names.HELPER, "Enable")
    await client.call(names.HELPER_PATH, names.HELPER, "Disable")
    assert helper.asked == ["enable", "disable"]
    with pytest.raises(Failed, match="NotEnabled"):
        await client.call(names.HELPER_PATH, names.HELPER, "Restart")
    (found,) = await client.call(names.HELPER_PATH, names.HELPER, "Probe")
    assert {name: (value.signature, value.value) for name, value in found.items()} == {
        "Handshake": ("b", True),
        "Keys": ("x", 3),
        "Error": ("s", r"no\x0ane"),
    }


async def test_the_helper_changes(parts: Parts) -> None:
    client, _, helper = parts
    await client.subscribe()
    helper.status = replace(helper.status, main_pid=45, restarts=3, clients=9, owner_pid=77)
    helper.listeners[0]()
    helper.listeners[0]()
    await client.call("/", names.PEER, "Ping")
    ((path, body),) = [(each.path, each.body) for each in client.signals]
    assert path == names.HELPER_PATH
    assert body[0] == names.HELPER
    assert {name: value.value for name, value in body[1].items()} == {
        "MainPID": 45, "NRestarts": 3, "OwnerPID": 77
    }  # fmt: skip


async def test_without_a_helper(client: Client) -> None:
    assert (await client.get_all(names.HELPER_PATH, names.HELPER))["State"] == "absent"
    for member in ("Enable", "Disable", "Restart", "Probe"):
        with pytest.raises(Failed, match="NotSupported"):
            await client.call(names.HELPER_PATH, names.HELPER, member)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("hostd-test-log")
    yield found
    found.setLevel(logging.NOTSET)
    found.propagate, found.handlers[:] = True, []


async def test_the_log(bus_library: str, logger: logging.Logger) -> None:
    async with private_bus() as bus:
        control = LogControl(logger.name, target="console")
        async with serving(bus, FakeService(), log_control=control), await Client.connect(bus.address) as client:

            async def set_(name: str, value: str) -> None:
                body = [names.LOG_CONTROL, name, client.variant("s", value)]
                await client.call(names.LOG_CONTROL_PATH, names.PROPERTIES, "Set", "ssv", *body)

            async def get(name: str) -> str:
                return str(await client.get(names.LOG_CONTROL_PATH, names.LOG_CONTROL, name))

            assert await get("SyslogIdentifier") == "hostd"
            for word, level in (
                ("debug", 10),
                ("info", 20),
                ("notice", 29),
                ("warning", 30),
                ("err", 40),
                ("crit", 50),
            ):
                await set_("LogLevel", word)
                assert await get("LogLevel") == word
                assert logger.level == level
            with pytest.raises(Failed, match="one of: emerg, alert"):
                await set_("LogLevel", "loud")
            await set_("LogTarget", "null")
            assert await get("LogTarget") == "null"
            assert logger.handlers
            await set_("LogTarget", "auto")
            assert await get("LogTarget") == "console"
            assert (logger.propagate, logger.handlers) == (True, [])
            with pytest.raises(Failed, match="NotSupported"):
                await set_("LogTarget", "journal")
            with pytest.raises(Failed, match="InvalidArgs"):
                await set_("LogTarget", "printer")
