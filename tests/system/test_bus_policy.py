"""The bus policy file on a real dbus-daemon, with a system bus's defaults around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostd.bus import access, names
from tests.support.bus import PrivateBus, busctl, private_bus, run, serving
from tests.support.fake_service import FakeService, vm
from tests.support.wait import DEADLINE

POLICY_FILE = Path(__file__).parents[2] / "dbus/io.kubevirt.hostd1.conf"
#: As in dbus's own system.conf.
SYSTEM = """
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/> <deny send_type="method_call"/>
    <allow send_type="signal"/> <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/> <allow receive_type="method_return"/>
    <allow receive_type="error"/> <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
  </policy>"""
#: Users that every machine has. dbus-daemon asks the user database for a user's groups, so `nobody`'s own stands for
#: `hostd` here.
MEMBER = GROUP = 65534
OTHER = 1


@pytest.fixture
async def bus(root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PrivateBus]:
    """The group `hostd` need not exist on this machine: it has a number here."""
    monkeypatch.setattr(access, "_gid", lambda _: GROUP)
    policy = tmp_path / "hostd.conf"
    policy.write_text(POLICY_FILE.read_text().replace('group="hostd"', f'group="{GROUP}"'))
    async with private_bus(SYSTEM, f"<include>{policy}</include>") as private:
        service = FakeService(vm(1))
        private.service = service  # type: ignore[attr-defined]
        async with serving(private, service):
            yield private


async def listed(bus: PrivateBus, user: int | None) -> bool:
    done = await busctl(bus, "call", names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs", user=user)
    return "vm1" in done.out


async def test_who_may_ask(bus: PrivateBus) -> None:
    assert await listed(bus, None)
    assert await listed(bus, MEMBER)
    assert not await listed(bus, OTHER)


async def test_who_hears_signals(bus: PrivateBus) -> None:
    """Signals tell of VMs, so they are reading, too."""
    listeners = []
    for user in (MEMBER, OTHER):
        listener = await asyncio.create_subprocess_exec(
            "gdbus", "monitor", f"--address={bus.address}", "--dest", names.BUS_NAME,
            stdout=asyncio.subprocess.PIPE, user=user, group=user, extra_groups=[],
        )  # fmt: skip
        assert listener.stdout is not None
        # It says who owns the name when it listens.
        while b"owned" not in await asyncio.wait_for(listener.stdout.readline(), DEADLINE):
            pass
        listeners.append(listener)
    bus.service.add(vm(2))  # type: ignore[attr-defined]
    member, other = listeners
    assert member.stdout is not None
    while b"VMNew" not in await asyncio.wait_for(member.stdout.readline(), DEADLINE):
        pass
    member.terminate()
    other.terminate()
    assert b"VMNew" not in (await other.communicate())[0]
    await member.communicate()


async def test_nobody_else_may_own_the_name(bus: PrivateBus) -> None:
    done = await run(
        "busctl", f"--address={bus.address}", "call", names.DBUS, names.DBUS_PATH, names.DBUS, "RequestName", "su",
        names.BUS_NAME, "0", user=MEMBER,
    )  # fmt: skip
    assert done.code != 0
