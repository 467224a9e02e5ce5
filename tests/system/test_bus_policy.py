"""The bus policy file on a real dbus-daemon, with a system bus's defaults around it; busctl's and hostctl's users."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostd.bus import access, names
from hostd.metrics import Metrics
from tests.support.bus import PrivateBus, Program, busctl, private_bus, run, serving
from tests.support.daemon import TREE
from tests.support.fake_service import FakeService, vm
from tests.support.polkit import SYSTEM_POLICY
from tests.support.wait import DEADLINE

POLICY_FILE = Path(__file__).parents[2] / "dbus/io.kubevirt.hostd1.conf"
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
    async with private_bus(SYSTEM_POLICY, f"<include>{policy}</include>") as private:
        service = FakeService(vm(1))
        private.service = service  # type: ignore[attr-defined]
        async with serving(private, service, metrics=Metrics(service).render):
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


# -- hostctl

#: The user may reach neither this Python nor the tree: all is loaded before it is that user.
_AS = """
import encodings.ascii, json, os, sys
from hostd.ctl import main, parser
parser.build()
user, words = json.loads(sys.argv[1])
os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
sys.exit(main.main(words))
"""


async def hostctl(bus: PrivateBus, user: int, *words: str) -> Program:
    done = await run(
        sys.executable, "-P", "-c", _AS, json.dumps([user, words]),
        environment={"DBUS_SYSTEM_BUS_ADDRESS": bus.address, "PYTHONPATH": TREE},
    )  # fmt: skip
    assert "Traceback" not in done.error
    return done


LOOKS = ("status", "list", "show vm1", "layers", "holders vm1", "devices", "pr-helper", "metrics", "doctor")
CHANGES = (
    "release vm1",
    "sweep",
    "hold vm1 --keep",
    "hold vm1 -- true",
    "pr-helper enable",
    "devices claim usb/1-2 a/b",
)


@pytest.mark.parametrize("line", LOOKS)
async def test_a_member_of_the_group_looks_with_hostctl(bus: PrivateBus, line: str) -> None:
    done = await hostctl(bus, MEMBER, *line.split())
    assert (done.code in (0, 3), done.error) == (True, ""), done


@pytest.mark.parametrize("line", CHANGES)
async def test_a_member_changes_nothing_and_hears_why(bus: PrivateBus, line: str) -> None:
    done = await hostctl(bus, MEMBER, *line.split())
    assert done.code == 1, done
    assert "only root may do this" in done.out + done.error
    assert "polkit" in done.out + done.error


@pytest.mark.parametrize("line", [*LOOKS[:-1], *CHANGES, "monitor"])
async def test_a_stranger_hears_what_to_become(bus: PrivateBus, line: str) -> None:
    done = await hostctl(bus, OTHER, *line.split())
    assert (done.code, done.out) == (1, ""), done
    assert "be root, or a member of the group hostd" in done.error


async def test_doctor_tells_a_stranger_the_same(bus: PrivateBus) -> None:
    done = await hostctl(bus, OTHER, "doctor", "--json")
    assert done.code == 3
    (found,) = [each for each in json.loads(done.out) if each["area"] == "hostd"]
    assert (found["level"], found["to_do"]) == ("bad", "run as root, or join the group hostd")
