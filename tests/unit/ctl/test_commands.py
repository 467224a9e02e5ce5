"""Each command against the bus side with a service in memory: what it shows, its JSON, and its exit code."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import hostd.client
from hostd.client.node import Node
from hostd.core.model import Exit, ExitReason, Holder, Policy, State
from hostd.ctl.parser import parse
from hostd.ctl.screen import Screen
from hostd.ctl.session import Session
from hostd.errors import HostdError, NotSupported
from tests.support.bus import PrivateBus, staged
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

ONE, TWO = pod_uid(1), pod_uid(2)


@pytest.fixture
async def stage() -> AsyncIterator[tuple[PrivateBus, FakeService, Node]]:
    """A running VM, and one that is blocked: layer 0 of 3 is held by cat."""
    async with staged(vm(1), vm(2, layers=3)) as (bus, service), hostd.client.connect(bus.address) as node:
        service.die(TWO, Exit(-1, 9, ExitReason.SIGNAL))
        service.block(TWO, "held by cat[42] (open)", Holder(42, "cat", "open", ""))
        yield bus, service, node


@pytest.fixture
def service(stage: tuple[PrivateBus, FakeService, Node]) -> FakeService:
    return stage[1]


class Hostctl:
    """hostctl within the test."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def __call__(self, *words: str, asks: bool = False, width: int | None = None) -> tuple[int, str]:
        options = parse(words)
        out = io.StringIO()
        screen = Screen(out, width=width, as_json=getattr(options, "json", False), asks=asks)
        return int(await options.run(Session(self._node, screen), options)), out.getvalue()

    async def json(self, *words: str) -> Any:
        return json.loads((await self(*words, "--json"))[1])


@pytest.fixture
def hostctl(stage: tuple[PrivateBus, FakeService, Node]) -> Hostctl:
    return Hostctl(stage[2])


async def test_status_of_a_blocked_node(hostctl: Hostctl) -> None:
    code, out = await hostctl("status")
    assert code == 3
    assert out.startswith("This node is blocked")
    assert "shop/vm2: 1 layer busy, held by cat[42] (open)" in out
    assert "`hostctl holders shop/vm2` tells" in out
    assert "Health:    all is well" in out
    code, out = await hostctl("status", "--short")
    assert (code, out) == (3, "blocked: shop/vm2: 1 layer busy, held by cat[42] (open)\n")
    data = await hostctl.json("status")
    assert (data["clean"], data["state"], data["vms"]) == (False, "blocked", {"running": 1, "blocked": 1})
    assert data["hostd"]["n_blocked"] == 1
    assert data["pr_helper"]["state"] == "absent"


async def test_status_of_a_clean_node(hostctl: Hostctl, service: FakeService) -> None:
    service.finish(TWO)
    code, out = await hostctl("status")
    assert code == 0
    assert out.startswith("This node is clean: every layer on this node is a living VM's.")
    assert "1 running, 1 released" in out
    assert (await hostctl.json("status"))["clean"] is True


async def test_status_names_what_health_says(hostctl: Hostctl, service: FakeService) -> None:
    service.finish(TWO)
    service.health["workers"] = "1 hang: pods/x in worker 7"
    code, out = await hostctl("status")
    assert code == 3
    assert out.startswith("This node is unhealthy: ")
    assert "\n  workers: 1 hang: pods/x in worker 7\n" in out
    assert "\nHealth:    not well: workers\n" in out
    assert (await hostctl("status", "--short"))[1] == "unhealthy: workers: 1 hang: pods/x in worker 7\n"
    assert (await hostctl.json("status"))["hostd"]["health"] == {"workers": "1 hang: pods/x in worker 7"}


async def test_list(hostctl: Hostctl) -> None:
    code, out = await hostctl("list")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].split()[:4] == ["shop/vm1", "running", "1", "10001"]
    assert lines[2].split()[:4] == ["shop/vm2", "blocked", "3", "-"]
    assert lines[2].endswith("was killed (SIGKILL)")
    assert (await hostctl("list", "--state", "pending"))[1] == "No VMs.\n"
    assert len(await hostctl.json("list", "-n", "shop")) == 2
    assert (await hostctl("list", "--names"))[1].split() == ["shop/vm1", "shop/vm2", ONE, TWO]


async def test_list_fits_a_terminal(hostctl: Hostctl) -> None:
    _, out = await hostctl("list", width=80)
    assert all(len(line) <= 80 for line in out.splitlines())


async def test_show(hostctl: Hostctl) -> None:
    code, out = await hostctl("show", "shop/vm2")
    assert code == 3
    assert "Ended:      2023-11-14" in out
    assert "was killed (SIGKILL)" in out
    assert "3 of 3 mounted" in out
    assert (await hostctl("show", ONE))[0] == 0
    data = await hostctl.json("show", "vm2")
    assert [layer["state"] for layer in data["layers"]] == ["busy", "mounted", "mounted"]
    with pytest.raises(HostdError, match="no VM nobody"):
        await hostctl("show", "nobody")


async def test_layers(hostctl: Hostctl) -> None:
    code, out = await hostctl("layers")
    assert (code, len(out.splitlines())) == (0, 5)
    assert "/var/lib/kubelet" not in out
    assert "/var/lib/kubelet" in (await hostctl("layers", "vm1", "--paths"))[1]
    assert [row["volume"] for row in await hostctl.json("layers", "--state", "busy")] == ["disk_0"]
    assert (await hostctl("layers", "--kind", "hotplug-block"))[1] == "No layers.\n"


async def test_holders(hostctl: Hostctl, service: FakeService) -> None:
    code, out = await hostctl("holders", "vm2")
    assert code == 3
    assert out.startswith("disk_0 (containerdisk) is busy: held by cat[42] (open)\n")
    assert "process 42, cat, has a file of it open." in out
    assert "To do: `ls -l /proc/42/fd`" in out
    assert f"hostctl release {TWO}" in out
    (found,) = await hostctl.json("holders", "vm2", "disk_0")
    assert found["holders"] == [{"pid": 42, "name": "cat", "how": "open", "pod_uid": ""}]
    code, out = await hostctl("holders", "vm1")
    assert code == 0
    assert "its layers stay while it lives" in out
    assert "To do" not in out
    service.finish(TWO)
    assert (await hostctl("holders", "vm2"))[1] == f"No layer of shop/vm2 ({TWO}) is mounted any more.\n"


async def test_release(hostctl: Hostctl, service: FakeService) -> None:
    code, out = await hostctl("release", "vm2", "--dry-run")
    assert code == 0
    assert "disk_0.img: planned" in out
    assert ("release", (TWO, True, False)) in service.asked
    code, out = await hostctl("release", "vm2", "--lazy")
    assert (code, out.count(": gone")) == (0, 3)
    assert ("release", (TWO, False, True)) in service.asked
    code, out = await hostctl("release", "vm1", "vm2")
    assert code == 1
    assert "a QEMU of pod" in out
    assert out.count(": gone") == 3
    data = await hostctl.json("release", "vm1", "vm2")
    assert data[0]["error"]["name"] == "io.kubevirt.hostd1.Error.VMAlive"
    assert (data[1]["error"], len(data[1]["layers"])) == (None, 3)
    with pytest.raises(HostdError, match="--all"):
        await hostctl("release")


async def test_a_layer_that_is_left_is_3(
    hostctl: Hostctl, monkeypatch: pytest.MonkeyPatch, service: FakeService
) -> None:
    from hostd.core.service import ReleaseRow

    async def stuck(uid: str, **_: bool) -> list[ReleaseRow]:
        return [ReleaseRow(b"/a", "unmount", "gone"), ReleaseRow(b"/b", "unmount", "busy: held by cat")]

    monkeypatch.setattr(service, "release", stuck)
    assert (await hostctl("release", "vm2"))[0] == 3
    assert (await hostctl("release", "vm2", "--dry-run"))[0] == 0


async def test_release_all_takes_what_ended(hostctl: Hostctl, service: FakeService) -> None:
    assert (await hostctl("release", "--all"))[0] == 0
    assert [said for what, said in service.asked if what == "release"] == [(TWO, False, False)]
    service.finish(TWO)
    assert (await hostctl("release", "--all"))[1].startswith("Nothing to release")


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
async def test_a_person_is_asked_before_two_vms_are_touched(
    hostctl: Hostctl, service: FakeService, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    service.add(vm(3, state=State.EXITED))
    for words in (["release", "--all"], ["sweep"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        service.asked.clear()
        assert (await hostctl(*words, asks=True))[0] == code
        acted = [said for what, said in service.asked if what == "release" or (what, said) == ("sweep", (False,))]
        assert bool(acted) == (code == 0)
        assert (await hostctl(*words, "--yes", asks=True))[0] == 0
        assert (await hostctl(*words))[0] == 0


async def test_sweep(hostctl: Hostctl, service: FakeService) -> None:
    code, out = await hostctl("sweep", "--dry-run")
    assert code == 0
    assert len(out.splitlines()) == 5
    assert [said for what, said in service.asked if what == "sweep"] == [(True,)]
    assert len(await hostctl.json("sweep")) == 4
    service.known.clear()
    assert (await hostctl("sweep"))[1] == "Nothing is left of any VM that ended.\n"


async def test_hold_while_a_command_runs(hostctl: Hostctl, service: FakeService) -> None:
    code, _ = await hostctl("hold", "vm1", "--why", "looks", "--", "sh", "-c", "exit 7")
    assert code == 7
    what, (uid, who, why) = next(each for each in service.asked if each[0] == "inhibit")
    assert (what, uid, why) == ("inhibit", ONE, "looks")
    assert who.startswith("hostctl (")
    assert (await hostctl("hold", "--all", "--", "sh", "-c", "kill -9 $$"))[0] == 128 + 9
    with pytest.raises(HostdError, match="not found"):
        await hostctl("hold", "vm1", "--", "no-such-program")
    service.close()


async def test_hold_by_policy(hostctl: Hostctl, service: FakeService) -> None:
    code, out = await hostctl("hold", "vm1", "--keep")
    assert code == 0
    assert f"hostctl hold --end {ONE}" in out
    assert service.known[ONE].policy is Policy.KEEP
    assert (await hostctl.json("hold", "vm1", "--end"))["policy"] == "clean"
    for words in (
        ["hold"],
        ["hold", "vm1", "--all"],
        ["hold", "--all", "--keep"],
        ["hold", "vm1", "--keep", "--", "ls"],
    ):
        with pytest.raises(HostdError):
            await hostctl(*words)


async def test_devices_and_helper(hostctl: Hostctl) -> None:
    assert await hostctl("devices") == (0, "No devices.\n")
    assert await hostctl.json("devices", "--claimed") == []
    with pytest.raises(NotSupported):
        await hostctl("devices", "claim", "usb/1-2", "shop/vm1")
    with pytest.raises(NotSupported):
        await hostctl("devices", "release", "usb/1-2", "shop/vm1")
    code, out = await hostctl("pr-helper", "status")
    assert code == 0
    assert out.startswith("State:     absent - ")
    for word in ("enable", "disable", "restart", "probe"):
        with pytest.raises(HostdError):
            await hostctl("pr-helper", word)


async def test_metrics(hostctl: Hostctl) -> None:
    code, out = await hostctl("metrics")
    assert code == 0
    assert 'hostd_vms{state="blocked"} 1.0' in out
    assert 'hostd_layers{kind="containerdisk",state="busy"} 1.0' in out
    assert "hostd_blocked_since_timestamp_seconds 1.700000001e+09" in out
    assert 'hostd_vm_exits_total{reason="signal"} 1.0' in out
    assert "hostd_layers_blocked_total 1.0" in out
    assert 'hostd_cleanup_seconds_bucket{le="+Inf"} 0.0' in out
    data = await hostctl.json("metrics")
    assert {"name": "hostd_vms", "labels": {"state": "blocked"}, "value": 1.0} in data


async def test_monitor(stage: tuple[PrivateBus, FakeService, Node]) -> None:
    _, service, node = stage
    out = io.StringIO()
    options = parse(["monitor"])
    task = asyncio.create_task(options.run(Session(node, Screen(out)), options))
    await eventually(lambda: "1 running, 1 blocked" in out.getvalue())
    service.finish(TWO, 4_200)
    service.die(ONE, Exit(0, -1, ExitReason.POWEROFF))
    service.remove(TWO)
    await eventually(lambda: "is forgotten" in out.getvalue())
    task.cancel()
    text = [line.partition("  ")[2] for line in out.getvalue().splitlines()]
    assert f"shop/vm2 ({TWO}) is released" in text
    assert f"shop/vm2 ({TWO}): 3 layers released 4.2 ms after its end" in text
    assert f"shop/vm1 ({ONE}) powered off" in text


async def test_monitor_in_json(stage: tuple[PrivateBus, FakeService, Node]) -> None:
    _, service, node = stage
    out = io.StringIO()
    options = parse(["monitor", "--json"])
    task = asyncio.create_task(options.run(Session(node, Screen(out, as_json=True)), options))
    await eventually(out.getvalue)
    service.die(ONE, Exit(0, -1, ExitReason.POWEROFF))
    await eventually(lambda: "VMExited" in out.getvalue())
    task.cancel()
    data = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (data[0]["event"], len(data[0]["vms"]), data[0]["status"]["mode"]) == ("Resync", 2, "enforce")
    exited = next(each for each in data if each["event"] == "VMExited")
    assert (exited["reason"], exited["vm"]["name"]) == ("poweroff", "vm1")
    assert all(each["seen_usec"] > 1_600_000_000_000_000 for each in data)
