"""Introspectable, Peer, Properties and ObjectManager."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from hostd.bus import contract, names
from hostd.bus.vm_object import VMObject
from tests.support.bus import Client, Failed
from tests.support.fake_service import FakeService, pod_uid, vm

UID = pod_uid(1)
PATH = names.vm_path(UID)
NODES = {
    "/": ["io", "org"],
    "/io": ["kubevirt"],
    "/io/kubevirt": ["hostd1"],
    names.ROOT: ["pr_helper", "vm"],
    names.VM_PREFIX: [names.escape_label(UID)],
    PATH: [],
    names.HELPER_PATH: [],
    "/org": ["freedesktop"],
    "/org/freedesktop": ["LogControl1"],
    names.LOG_CONTROL_PATH: [],
}


@pytest.mark.parametrize("path", NODES)
async def test_introspect(client: Client, path: str) -> None:
    (xml,) = await client.call(path, names.INTROSPECTABLE, "Introspect")
    node = ET.fromstring(xml)
    assert [each.attrib["name"] for each in node.findall("node")] == NODES[path]
    shown = contract.parse(xml)
    for name, interface in shown.items():
        assert interface.methods.keys() == contract.contract()[name].methods.keys()
    own = {
        names.ROOT: {names.MANAGER, names.OBJECT_MANAGER, names.PROPERTIES},
        PATH: {names.VM, names.PROPERTIES},
        names.HELPER_PATH: {names.HELPER, names.PROPERTIES},
        names.LOG_CONTROL_PATH: {names.LOG_CONTROL, names.PROPERTIES},
    }
    assert shown.keys() == own.get(path, set()) | {names.PEER, names.INTROSPECTABLE}


@pytest.mark.parametrize(
    "path", ["/nope", names.ROOT + "/nope", names.vm_path(pod_uid(8)), names.VM_PREFIX + "/_6", "/i"]
)
async def test_nothing_there(client: Client, path: str) -> None:
    for interface, member, signature, body in (
        (names.INTROSPECTABLE, "Introspect", "", []),
        (names.PROPERTIES, "GetAll", "s", [names.VM]),
        (names.OBJECT_MANAGER, "GetManagedObjects", "", []),
        (names.MANAGER, "ListVMs", "", []),
        (None, "ListVMs", "", []),
    ):
        with pytest.raises(Failed) as failure:
            await client.call(path, interface, member, signature, *body)
        assert failure.value.name == "org.freedesktop.DBus.Error.UnknownObject"


async def test_peer_is_everywhere(client: Client) -> None:
    for path in ("/", "/nope", PATH):
        assert await client.call(path, names.PEER, "Ping") == []
    (machine_id,) = await client.call(names.ROOT, names.PEER, "GetMachineId")
    assert len(machine_id) == 32
    with pytest.raises(Failed, match="UnknownMethod"):
        await client.call("/", names.PEER, "Pong")
    with pytest.raises(Failed, match="InvalidArgs"):
        await client.call("/", names.PEER, "Ping", "s", "x")


@pytest.mark.parametrize(
    ("path", "interface", "member", "error"),
    [
        (names.ROOT, names.MANAGER, "Nope", "UnknownMethod"),
        (names.ROOT, "a.b", "ListVMs", "UnknownInterface"),
        (names.ROOT, None, "Nope", "UnknownMethod"),
        (names.ROOT, names.VM, "Release", "UnknownInterface"),
        (names.VM_PREFIX, names.PROPERTIES, "GetAll", "UnknownInterface"),
        (PATH, names.OBJECT_MANAGER, "GetManagedObjects", "UnknownInterface"),
    ],
)
async def test_wrong_members(client: Client, path: str, interface: str | None, member: str, error: str) -> None:
    with pytest.raises(Failed) as failure:
        await client.call(path, interface, member)
    assert failure.value.name == f"org.freedesktop.DBus.Error.{error}"


async def test_without_an_interface(client: Client) -> None:
    (rows,) = await client.call(names.ROOT, None, "ListVMs")
    assert len(rows) == 1
    (value,) = await client.call(PATH, names.PROPERTIES, "Get", "ss", "", "State")
    assert value.value == "running"


async def test_get(client: Client) -> None:
    assert await client.get(PATH, names.VM, "State") == "running"
    for interface, name, error in (
        (names.VM, "Nope", "UnknownProperty"),
        ("a.b", "State", "UnknownInterface"),
        (names.PEER, "State", "UnknownInterface"),
        ("", "Nope", "UnknownInterface"),
    ):
        with pytest.raises(Failed, match=error):
            await client.get(PATH, interface, name)
    assert await client.get_all(PATH, names.PEER) == {}
    with pytest.raises(Failed, match="UnknownInterface"):
        await client.get_all(PATH, names.MANAGER)


@pytest.mark.parametrize(
    ("path", "interface", "name", "words"),
    [
        (PATH, names.VM, "Policy", "SetPolicy changes it"),
        (PATH, names.VM, "GraceUSec", "SetGrace changes it"),
        (PATH, names.VM, "State", "cannot be set"),
        (names.ROOT, names.MANAGER, "Mode", "cannot be set"),
        (names.HELPER_PATH, names.HELPER, "Enabled", "Enable or Disable changes it"),
    ],
)
async def test_read_only(client: Client, path: str, interface: str, name: str, words: str) -> None:
    value = client.variant("s", "x")
    with pytest.raises(Failed, match=words) as failure:
        await client.call(path, names.PROPERTIES, "Set", "ssv", interface, name, value)
    assert failure.value.name == "org.freedesktop.DBus.Error.PropertyReadOnly"


async def test_set(client: Client) -> None:
    value = client.variant("u", 1)
    for interface, name, error in (
        (names.LOG_CONTROL, "LogLevel", "InvalidArgs"),
        (names.LOG_CONTROL, "Nope", "UnknownProperty"),
        (names.PEER, "Nope", "UnknownInterface"),
    ):
        with pytest.raises(Failed, match=error):
            await client.call(names.LOG_CONTROL_PATH, names.PROPERTIES, "Set", "ssv", interface, name, value)


async def test_managed_objects(client: Client, service: FakeService) -> None:
    service.add(vm(2))
    (objects,) = await client.call(names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects")
    assert objects.keys() == {names.HELPER_PATH, PATH, names.vm_path(pod_uid(2))}
    assert objects[PATH].keys() == {names.VM}
    values = {name: value.value for name, value in objects[PATH][names.VM].items()}
    assert values == await client.get_all(PATH, names.VM)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One property whose source fails, and one whose value cannot travel."""

    def fails(_: object) -> str:
        raise RuntimeError("/secret/path.py line 3")

    monkeypatch.setattr(VMObject, "error", fails)
    monkeypatch.setattr(VMObject, "leader", lambda _: -5)


async def test_one_bad_property_takes_no_other_with_it(broken: None, client: Client, service: FakeService) -> None:
    left = contract.contract()[names.VM].properties.keys() - {"Error", "Leader"}
    assert (await client.get_all(PATH, names.VM)).keys() == left
    (objects,) = await client.call(names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects")
    assert objects[PATH][names.VM].keys() == left
    for name in ("Error", "Leader"):
        with pytest.raises(Failed) as failure:
            await client.get(PATH, names.VM, name)
        assert failure.value.name == "org.freedesktop.DBus.Error.Failed"
        assert "secret" not in failure.value.text


async def test_a_bad_property_is_told_as_invalid(broken: None, client: Client, service: FakeService) -> None:
    await client.subscribe()
    service.change(UID, error="x", leader=None, name="new")
    await client.call("/", names.PEER, "Ping")
    ((interface, changed, invalidated),) = [each.body for each in client.signals if each.member == "PropertiesChanged"]
    assert interface == names.VM
    assert {name: value.value for name, value in changed.items()} == {"Name": "new", "LeaderPIDFDID": 0}
    assert sorted(invalidated) == ["Error", "Leader"]


async def test_one_failing_vm_source(client: Client, service: FakeService) -> None:
    service.failing["vm"] = RuntimeError("/secret")
    with pytest.raises(Failed) as failure:
        await client.get_all(PATH, names.VM)
    assert failure.value.name == "org.freedesktop.DBus.Error.Failed"
    assert "secret" not in failure.value.text
