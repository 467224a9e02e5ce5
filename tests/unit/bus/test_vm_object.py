"""VM objects."""

from __future__ import annotations

import os

import pytest

from hostd.bus import names
from hostd.core.model import Exit, ExitReason, Inhibitor, Policy, State
from tests.support.bus import Client, Failed
from tests.support.fake_service import FakeService, pod_uid, vm

UID = pod_uid(1)
PATH = names.vm_path(UID)


async def test_properties(client: Client, service: FakeService) -> None:
    service.held.append(Inhibitor("", "agent", "because"))
    values = await client.get_all(PATH, names.VM)
    layers = values.pop("Layers")
    path = next(iter(service.known[UID].layers)).decode()
    assert [list(row) for row in layers] == [[path, "containerdisk", "disk_0", "mounted", ""]]
    assert [list(row) for row in values.pop("Inhibitors")] == [["agent", "because"]]
    assert values == {
        "PodUID": UID,
        "VMIUID": vm(1).vmi_uid,
        "Namespace": "shop",
        "Name": "vm1",
        "State": "running",
        "Leader": 10_001,
        "LeaderPIDFDID": 4_001,
        "StartedUSec": 1_700_000_000_000_000,
        "ExitedUSec": 0,
        "ExitStatus": -1,
        "ExitSignal": -1,
        "ExitReason": "",
        "ReleasedUSec": 0,
        "Policy": "clean",
        "GraceUSec": 2**64 - 1,
        "Devices": [],
        "Error": "",
    }


async def test_after_its_death(client: Client, service: FakeService) -> None:
    service.die(UID, Exit(signal=9, reason=ExitReason.OOM))
    values = await client.get_all(PATH, names.VM)
    assert (values["ExitStatus"], values["ExitSignal"], values["ExitReason"]) == (-1, 9, "oom")
    assert values["ExitedUSec"] > 0


async def test_without_a_leader(client: Client, service: FakeService) -> None:
    service.add(vm(2, leader=None, state=State.PENDING, grace_usec=0))
    values = await client.get_all(names.vm_path(pod_uid(2)), names.VM)
    assert (values["Leader"], values["LeaderPIDFDID"], values["GraceUSec"]) == (0, 0, 0)


async def test_methods(client: Client, service: FakeService) -> None:
    await client.call(PATH, names.VM, "SetPolicy", "s", "keep")
    assert service.known[UID].policy is Policy.KEEP
    await client.call(PATH, names.VM, "SetGrace", "t", 77)
    assert await client.get(PATH, names.VM, "GraceUSec") == 77
    service.known[UID].state = State.HELD
    (rows,) = await client.call(PATH, names.VM, "Release", "t", 1)
    assert rows[0][2] == "planned"
    answer = await client.ask(client.message(PATH, names.VM, "Inhibit", "ss", "a", "b"))
    os.close(answer.unix_fds[0])
    assert service.asked[-1] == ("inhibit", (UID, "a", "b"))


@pytest.mark.parametrize(
    ("member", "signature", "value", "words"),
    [
        ("SetPolicy", "s", "never", "one of: clean, keep"),
        ("SetPolicy", "u", 1, "takes .s policy."),
        ("SetGrace", "t", 2**64 - 1, "more than a year"),
        ("Release", "t", 8, "flag 0x8"),
    ],
)
async def test_wrong_calls(client: Client, member: str, signature: str, value: object, words: str) -> None:
    with pytest.raises(Failed, match=words) as failure:
        await client.call(PATH, names.VM, member, signature, value)
    assert failure.value.name.endswith(".InvalidArgs")


async def test_a_vm_that_is_gone(client: Client, service: FakeService) -> None:
    service.remove(UID)
    for member, signature, body in (("Get", "ss", ["State"]), ("GetAll", "s", [])):
        with pytest.raises(Failed) as failure:
            await client.call(PATH, names.PROPERTIES, member, signature, names.VM, *body)
        assert failure.value.name == "org.freedesktop.DBus.Error.UnknownObject"
    with pytest.raises(Failed, match="UnknownObject"):
        await client.call(PATH, names.INTROSPECTABLE, "Introspect")
    with pytest.raises(Failed, match="UnknownObject"):
        await client.call(PATH, names.VM, "SetPolicy", "s", "keep")
