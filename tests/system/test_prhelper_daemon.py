"""The real daemon with the real qemu-pr-helper on a bus: asked through it, reloaded, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest

import hostd.client
from hostd.bus import names
from hostd.client import events
from hostd.client.model import Helper as Status
from hostd.client.node import PRHelper
from hostd.errors import HelperFailed, NotEnabled
from hostd.linux.process import read_comm
from tests.support.bus import Client as BusClient
from tests.support.bus import Failed, run
from tests.support.daemon import TREE
from tests.support.node import Node
from tests.support.prhelper import PROGRAM, Client, Rival, attributes, end_helpers, serves
from tests.support.wait import DEADLINE, eventually, until
from tests.support.watcher import watching

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"needs {PROGRAM}"),
]

HELPER, INTERFACE = names.HELPER_PATH, names.HELPER


@pytest.fixture
def node() -> Iterator[Node]:
    """hostd does not run yet; the helper is a child of it, below the node's own directory."""
    with Node() as made:
        made.configure({"pr-helper": {"socket": socket_of(made), "backend": "child"}})
        try:
            yield made
        finally:
            if made.hostd.running:
                made.hostd.kill()
            end_helpers(made.runtime_dir)


@pytest.fixture
async def helper(node: Node) -> AsyncIterator[PRHelper]:
    """hostd.client's part of it, with hostd running."""
    node.hostd.start()
    async with hostd.client.connect(node.bus.address) as client:
        yield client.pr_helper


def socket_of(node: Node, name: str = "pr") -> str:
    return f"{node.directory}/daemons/{name}/pr-helper.sock"


async def reaches(helper: PRHelper, **wanted: object) -> None:
    """Waits until the status has these values."""
    async with asyncio.timeout(DEADLINE):
        while True:
            now = await helper.status()
            if all(getattr(now, name) == value for name, value in wanted.items()):
                return
            await asyncio.sleep(0.01)


def vars_of(status: Status) -> dict[str, object]:
    """The status, but for a connection that hostd itself may have had at that moment."""
    return asdict(status) | {"clients": 0}


# -- asked through the bus


async def test_its_life_on_the_bus(node: Node, dbus_library: str) -> None:
    path = socket_of(node)
    node.hostd.start()
    async with await BusClient.connect(node.bus.address) as client:
        await client.subscribe()

        async def get(name: str) -> Any:
            return await client.get(HELPER, INTERFACE, name)

        async def call(member: str) -> list[Any]:
            return await client.call(HELPER, INTERFACE, member)

        assert await client.get_all(HELPER, INTERFACE) == {
            "Enabled": False, "State": "disabled", "MainPID": 0, "SocketPath": path, "NRestarts": 0,
            "LastFailure": "", "Multipath": "none", "OwnerPID": 0, "Clients": 0,
        }  # fmt: skip
        for member in ("Restart", "Probe"):
            with pytest.raises(Failed, match=r"NotEnabled: .*hostctl pr-helper enable"):
                await call(member)

        await call("Enable")
        assert (await get("Enabled"), await get("State")) == (True, "ready")
        first = await get("MainPID")
        assert read_comm(first) == b"qemu-pr-helper"
        assert serves(os.fsencode(path))
        (found,) = await call("Probe")
        assert {name: found[name].value for name in ("Answered", "Sense", "MainPID", "OwnerPID", "State")} == {
            "Answered": True, "Sense": "0b/00/06", "MainPID": first, "OwnerPID": 0, "State": "ready",
        }  # fmt: skip

        os.kill(first, signal.SIGKILL)
        await signalled(client, "NRestarts", 1)
        await signalled(client, "State", "ready")
        second = await get("MainPID")
        assert second not in (0, first)
        assert "was killed by SIGKILL" in await get("LastFailure")
        await call("Restart")
        assert await get("MainPID") not in (0, first, second)
        assert await get("NRestarts") == 1, "that is what happened by itself"

        await call("Disable")
        assert (await get("Enabled"), await get("State"), await get("MainPID")) == (False, "disabled", 0)
        assert os.listdir(os.path.dirname(path)) == []
        told = changes(client)
        assert {"Enabled", "State", "MainPID", "NRestarts", "LastFailure"} <= {name for each in told for name in each}
        assert not any("Clients" in each or "SocketPath" in each for each in told)
        assert [each["Enabled"] for each in told if "Enabled" in each] == [True, False]
        assert all(each["MainPID"] for each in told if each.get("State") == "ready" and "MainPID" in each)


def changes(client: BusClient) -> list[Mapping[str, Any]]:
    """What PropertiesChanged told of the helper, in order."""
    return [
        {name: value.value for name, value in each.body[1].items()}
        for each in client.signals
        if (each.path, each.member) == (HELPER, "PropertiesChanged")
    ]


async def signalled(client: BusClient, name: str, value: object) -> None:
    await eventually(
        lambda: [each[name] for each in changes(client) if name in each][-1:] == [value],
        why=lambda: f"{name} = {value}; told: {changes(client)}",
    )


async def test_its_life_through_the_client_library(node: Node) -> None:
    path = os.fsencode(socket_of(node))
    node.hostd.start()
    async with hostd.client.connect(node.bus.address) as client, watching(client) as watcher:
        helper = client.pr_helper
        assert (await watcher.first(events.Resync)).helper.state == "disabled"
        with pytest.raises(NotEnabled):
            await helper.probe()
        await helper.enable()
        ready = await watcher.first(events.HelperChanged, lambda event: event.helper.state == "ready")
        assert ready.helper.enabled
        with Client(path).greet():
            await reaches(helper, clients=1)
        await reaches(helper, clients=0)
        old = (await helper.status()).main_pid
        os.kill(old, signal.SIGKILL)
        again = await watcher.first(
            events.HelperChanged, lambda event: event.helper.state == "ready" and event.helper.restarts == 1
        )
        assert again.helper.main_pid not in (0, old)
        assert "SIGKILL" in again.helper.last_failure
        assert (await helper.probe())["Answered"] is True
        await helper.restart()
        assert (await helper.status()).main_pid not in (0, old, again.helper.main_pid)
        await helper.disable()
        gone = await watcher.first(
            events.HelperChanged, lambda event: (event.helper.state, event.helper.main_pid) == ("disabled", 0)
        )
        assert gone.helper.enabled is False


async def test_what_cannot_be_started_is_an_error_that_says_why(node: Node, helper: PRHelper) -> None:
    os.makedirs(os.path.dirname(socket_of(node)))
    with open(socket_of(node), "x"):
        pass
    await helper.enable()
    await reaches(helper, state="failed")
    assert "is no socket; remove it" in (await helper.status()).last_failure
    with pytest.raises(HelperFailed, match="is no socket; remove it"):
        await helper.restart()
    os.unlink(socket_of(node))
    await reaches(helper, state="ready")


async def test_a_rival_is_named_on_the_bus(node: Node, helper: PRHelper) -> None:
    path = os.fsencode(socket_of(node))
    async with await BusClient.connect(node.bus.address) as client:
        await client.subscribe()
        await helper.enable()
        with Rival(path) as rival:
            await reaches(helper, state="standby", owner_pid=rival.pid, main_pid=0)
            assert (await helper.probe())["OwnerPID"] == rival.pid
            await signalled(client, "OwnerPID", rival.pid)
            environment = {"DBUS_SYSTEM_BUS_ADDRESS": node.bus.address, "PYTHONPATH": TREE}
            shown = await run(sys.executable, "-P", "-m", "hostd.ctl.main", "pr-helper", environment=environment)
            assert f"process {rival.pid}\n" in shown.out
            rival.end(signal.SIGKILL)
            await reaches(helper, state="ready", owner_pid=0)
            assert serves(path)
        await signalled(client, "OwnerPID", 0)


# -- hostd's own end


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_helper_and_clients_outlive_hostd(node: Node, helper: PRHelper, how: str) -> None:
    path = os.fsencode(socket_of(node))
    await helper.enable()
    before, inode = await helper.status(), os.stat(path).st_ino
    with Client(path).greet() as client:
        getattr(node.hostd, how)()
        assert client.works()
        assert serves(path)
        os.chown(path, 0, 0)
        os.chmod(path, 0o600)
        node.hostd.start()
        await reaches(helper, state="ready", enabled=True, main_pid=before.main_pid, clients=1, last_failure="")
        assert attributes(path) == (107, 107, 0o660), "what is taken over is put right before it is called ready"
        assert client.works()
        os.kill(before.main_pid, signal.SIGKILL)
        assert client.cut_off()
        assert serves(path)
        await reaches(helper, state="ready", restarts=1)
        assert os.stat(path).st_ino == inode
    await helper.disable()
    getattr(node.hostd, how)()
    node.hostd.start()
    await reaches(helper, state="disabled", enabled=False)


# -- its configuration is read again


@pytest.fixture(params=["SIGHUP", "Reload"])
def reload(request: pytest.FixtureRequest, node: Node) -> Any:
    """Changes the configuration and lets hostd know."""

    def change(**settings: object) -> None:
        node.configure({"pr-helper": settings})
        if request.param == "Reload":
            node.call("Reload")
            return
        before = len(node.hostd.said("configuration read again"))
        node.hostd.send(signal.SIGHUP)
        until(lambda: len(node.hostd.said("configuration read again")) > before, why="hostd has read it")

    return change


async def test_enabled_by_the_configuration(node: Node, helper: PRHelper, reload: Any) -> None:
    reload(enabled=True)
    await reaches(helper, state="ready", enabled=True)
    await helper.disable()
    reload(mode="0600")
    assert (await helper.status()).enabled is False, "who spoke last is heard, and that was Disable"
    reload(enabled=False)
    reload(enabled=True)
    await reaches(helper, state="ready", enabled=True)
    assert attributes(socket_of(node)) == (107, 107, 0o600)
    reload(enabled=False)
    await reaches(helper, state="disabled", enabled=False)
    assert os.listdir(os.path.dirname(socket_of(node))) == []


async def test_owner_and_mode_change_with_no_restart(node: Node, helper: PRHelper, reload: Any) -> None:
    path = socket_of(node)
    await helper.enable()
    before, inode = await helper.status(), os.stat(path).st_ino
    reload(owner="4711:4712", mode="0600")
    await eventually(lambda: attributes(path) == (4711, 4712, 0o600), why="the socket has them")
    await eventually(
        lambda: attributes(os.path.dirname(path)) == (4711, 4712, 0o755), why="the directory has its owner"
    )
    await reaches(helper, **vars_of(before))
    assert os.stat(path).st_ino == inode


async def test_another_socket_and_those_connected_stay(node: Node, helper: PRHelper, reload: Any) -> None:
    old, new = socket_of(node), socket_of(node, "new")
    await helper.enable()
    first = (await helper.status()).main_pid
    async with await BusClient.connect(node.bus.address) as client:
        await client.subscribe()
        with Client(os.fsencode(old)).greet() as connected:
            reload(socket=new)
            await reaches(helper, state="ready", socket_path=new)
            assert (await helper.status()).main_pid not in (0, first)
            assert serves(os.fsencode(new))
            assert attributes(new) == (107, 107, 0o660)
            assert os.listdir(os.path.dirname(old)) == [], "nobody finds a dead socket"
            assert connected.works()
            await reaches(helper, clients=1)
            await signalled(client, "SocketPath", new)
            node.hostd.kill()
            node.hostd.start()
            await reaches(helper, state="ready", clients=1)
            assert connected.works()
            await helper.disable()
            assert connected.cut_off()


async def test_another_socket_while_hostd_was_away(node: Node, helper: PRHelper) -> None:
    old, new = socket_of(node), socket_of(node, "new")
    await helper.enable()
    with Client(os.fsencode(old)).greet() as connected:
        node.hostd.stop()
        node.configure({"pr-helper": {"socket": new}})
        node.hostd.start()
        await reaches(helper, state="ready", socket_path=new, clients=1)
        assert serves(os.fsencode(new))
        assert connected.works()
        assert os.listdir(os.path.dirname(old)) == []


async def test_another_socket_where_there_is_none(node: Node, helper: PRHelper, reload: Any) -> None:
    new = socket_of(node, "new")
    reload(socket=new)
    await reaches(helper, state="disabled", socket_path=new)
    assert not os.path.exists(os.path.dirname(new))
    await helper.enable()
    assert serves(os.fsencode(new))


async def test_a_configuration_that_is_wrong_changes_nothing(node: Node, helper: PRHelper) -> None:
    await helper.enable()
    before = await helper.status()
    node.configure({"pr-helper": {"mode": "0999"}})
    refused = await asyncio.to_thread(
        node.busctl, "call", names.BUS_NAME, names.ROOT, names.MANAGER, "Reload", check=False
    )
    assert "pr-helper.mode" in refused.stderr
    await reaches(helper, **vars_of(before))
    assert (await helper.probe())["Answered"] is True
