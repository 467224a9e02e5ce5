"""Every call, against the real bus side with a service in memory behind it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

import hostd.client
from hostd.client.failures import Unreachable
from hostd.client.node import Node
from hostd.core.model import Exit, ExitReason, Holder, Policy
from hostd.errors import (
    HelperFailed,
    HostdError,
    InvalidArgs,
    NoSuchProcess,
    NoSuchVM,
    NotATarget,
    NotSupported,
    VMAlive,
)
from tests.support.bus import PrivateBus, open_fds, private_bus, serving
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

ONE, TWO, NONE = pod_uid(1), pod_uid(2), pod_uid(99)


async def test_status(node: Node, service: FakeService) -> None:
    service.health["state"] = "cannot be saved"
    found = await node.status()
    assert (found.mode, found.n_vms, found.n_layers, found.n_blocked) == ("enforce", 2, 4, 0)
    assert found.health == (("state", "cannot be saved"),)
    assert found.config_files == ("/etc/hostd/hostd.toml",)
    assert node.running


async def test_metrics(node: Node) -> None:
    assert 'hostd_vms{state="running"} 2.0\n' in await node.metrics()


async def test_list_and_get(node: Node) -> None:
    one, two = await node.list()
    assert (one.pod_uid, one.full_name, one.state, one.leader) == (ONE, "shop/vm1", "running", 10_001)
    assert [layer.volume for layer in two.layers] == ["disk_0", "disk_1", "disk_2"]
    assert one.exit_reason == ""
    assert await node.get(TWO) == two
    assert await node.list(namespace="other") == []
    assert await node.list(state="running", vmi_uid=two.vmi_uid) == [two]
    assert await node.find_by_vmi(one.vmi_uid) == [one]


async def test_find_by_pid(node: Node, service: FakeService) -> None:
    service.pids[4711] = TWO
    assert (await node.find_by_pid(4711)).pod_uid == TWO
    with pytest.raises(NoSuchVM):
        await node.find_by_pid(4712)
    with pytest.raises(InvalidArgs, match="2\\^32"):
        await node.find_by_pid(-1)


async def test_errors_are_the_daemons(node: Node, service: FakeService) -> None:
    with pytest.raises(NoSuchVM, match=NONE):
        await node.get(NONE)
    with pytest.raises(InvalidArgs, match="not a pod UID"):
        await node.get("../etc")
    with pytest.raises(VMAlive):
        await node.release(ONE)
    with pytest.raises(NotATarget):
        await node.track_layer(ONE, "/etc/passwd")
    service.failing["holders"] = RuntimeError("a slip")
    with pytest.raises(HostdError) as raised:
        await node.holders(ONE, "/x")
    assert "Traceback" not in str(raised.value)


async def test_layers(node: Node) -> None:
    assert len(await node.layers()) == 4
    assert [layer.pod_uid for layer in await node.layers(ONE)] == [ONE]
    assert await node.layers(state="busy") == []
    with pytest.raises(InvalidArgs):
        await node.layers(state="asleep")


async def test_holders_by_text_and_by_bytes(node: Node, service: FakeService) -> None:
    target = (await node.layers(ONE))[0]
    service.known[ONE].layers[target.path].holders = (Holder(42, "cat", "open", ""),)
    for given in (target.target, target.path):
        assert [str(holder) for holder in await node.holders(ONE, given)] == ["cat[42] (open)"]


async def test_release_and_sweep(node: Node, service: FakeService) -> None:
    service.die(TWO, Exit(0, -1, ExitReason.POWEROFF))
    assert {row.result for row in await node.release(TWO, dry_run=True)} == {"planned"}
    assert {row.result for row in await node.release(TWO, lazy=True)} == {"gone"}
    assert ("release", (TWO, True, False)) in service.asked
    assert ("release", (TWO, False, True)) in service.asked
    assert len(await node.sweep(dry_run=True)) == 4
    assert service.asked[-1] == ("sweep", (True,))


async def test_register_with_a_pid(node: Node, service: FakeService) -> None:
    before = open_fds()
    existing = await node.register(NONE, pid=os.getpid(), namespace="shop", name="new", grace_usec=5, policy="keep")
    assert existing is False
    (what, (uid, said)) = service.asked[-1]
    assert (what, uid, said.namespace, said.name, said.grace_usec) == ("register", NONE, "shop", "new", 5)
    assert said.policy is Policy.KEEP
    assert said.leader_pidfd is not None
    assert said.leader_pid is None
    assert open_fds() == before


async def test_register_with_a_pidfd_that_stays_the_callers(node: Node) -> None:
    pidfd = os.pidfd_open(os.getpid())
    await node.register(NONE, pidfd=pidfd)
    os.close(pidfd)


async def test_register_without_a_process(node: Node, service: FakeService) -> None:
    assert await node.register(ONE) is True
    assert service.asked[-1][1][1].leader_pidfd is None


async def test_register_refuses_what_cannot_be(node: Node) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(NoSuchProcess):
        await node.register(NONE, pid=gone.pid)
    with pytest.raises(InvalidArgs, match="both"):
        await node.register(NONE, pid=1, pidfd=1)
    with pytest.raises(InvalidArgs):
        await node.register(NONE, pid=-5)
    with pytest.raises(InvalidArgs, match="grace"):
        await node.register(NONE, grace_usec=-1)


async def test_policy_grace_unregister_reload(node: Node, service: FakeService) -> None:
    await node.set_policy(ONE, "keep")
    await node.set_grace(ONE, 3_000_000)
    found = await node.get(ONE)
    assert (found.policy, found.grace_usec) == ("keep", 3_000_000)
    await node.reload()
    await node.unregister(ONE)
    assert [each[0] for each in service.asked] == ["set_policy", "set_grace", "reload", "unregister"]


async def test_inhibit_lasts_as_long_as_the_block(node: Node, service: FakeService) -> None:
    before = open_fds()
    async with node.inhibit(ONE, who="backup", why="reads") as fd:
        assert not os.get_inheritable(fd)
        (handle,) = service.handles
        os.set_blocking(handle, False)
        with pytest.raises(BlockingIOError):
            os.read(handle, 1)
        assert [each.who for each in (await node.get(ONE)).inhibitors] == ["backup"]
    await eventually(lambda: os.read(handle, 1) == b"")
    service.close()
    assert open_fds() == before


async def test_devices_and_helper_where_there_are_none(node: Node) -> None:
    assert await node.devices(kind="usb") == []
    with pytest.raises(NotSupported):
        await node.claim_device("usb/1-2", "shop/vm1", vmi_uid="x")
    with pytest.raises(NotSupported):
        await node.release_device("usb/1-2", "shop/vm1")
    assert (await node.pr_helper.status()).state == "absent"
    for method in (node.pr_helper.enable, node.pr_helper.disable, node.pr_helper.restart, node.pr_helper.probe):
        with pytest.raises((NotSupported, HelperFailed)):
            await method()


async def test_no_bus(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="bus"):
        async with hostd.client.connect(f"unix:path={tmp_path}/none"):
            pass


async def test_a_bus_without_hostd() -> None:
    async with private_bus() as bus, hostd.client.connect(bus.address) as node:
        assert not node.running
        with pytest.raises(Unreachable, match="systemctl status hostd"):
            await node.list()
        service = FakeService(vm(1))
        async with serving(bus, service):
            assert len(await node.list()) == 1


async def test_the_bus_goes_while_a_call_waits_and_comes_back(
    node: Node, bus: PrivateBus, service: FakeService
) -> None:
    bus.freeze()
    asked = asyncio.create_task(node.list())
    await asyncio.sleep(0)
    bus.stop()
    with pytest.raises(Unreachable):
        await asked
    with pytest.raises(Unreachable):
        await node.list()
    await bus.start()
    await eventually(lambda: node.running)
    assert len(await node.list()) == 2


async def test_an_answer_longer_than_a_call_may_be(node: Node, service: FakeService) -> None:
    for number in range(3, 900):
        service.known[pod_uid(number)] = vm(number, layers=8)
    assert len(await node.list()) == 899
    assert len(await node.layers()) == 4 + 897 * 8
