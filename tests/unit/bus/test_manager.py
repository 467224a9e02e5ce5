"""Manager, asked by a client of another library than the one that answers; each answer, and each wrong call."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hostd.bus import names
from hostd.core.model import Holder, LayerState, Policy, State
from hostd.core.service import Registration
from hostd.errors import InvalidArgs as InvalidArgsError
from hostd.errors import LimitExceeded, ProcessMismatch
from tests.support.bus import Client, Failed, PrivateBus, call_manager, open_fds
from tests.support.fake_service import FakeService, layer, pod_uid, vm
from tests.support.wait import eventually

UID = pod_uid(1)
INVALID = InvalidArgsError.dbus_name


def plain(rows: Any) -> list[list[Any]]:
    return [list(row) for row in rows]


async def test_list_vms(client: Client, service: FakeService) -> None:
    service.add(vm(2))
    (rows,) = await client.manager("ListVMs")
    assert plain(rows) == [
        [pod_uid(n), vm(n).vmi_uid, "shop", f"vm{n}", "running", 10_000 + n, names.vm_path(pod_uid(n))] for n in (1, 2)
    ]


async def test_pages(client: Client, service: FakeService) -> None:
    for number in range(2, 8):
        service.add(vm(number, namespace="shop" if number % 2 else "other"))
    seen: list[str] = []
    cursor = ""
    while True:
        rows, cursor = await client.manager("ListVMsEx", "a{sv}su", {}, cursor, 3)
        seen += [row[0] for row in rows]
        if seen[-1] == pod_uid(3):
            # The page's last one goes: the next page is where it was.
            service.remove(pod_uid(3))
        if not cursor:
            break
    assert seen == [pod_uid(n) for n in range(1, 8)]
    wanted = {"Namespace": client.variant("s", "shop"), "State": client.variant("s", "running")}
    rows, cursor = await client.manager("ListVMsEx", "a{sv}su", wanted, "", 0)
    assert [row[0] for row in rows] == [pod_uid(n) for n in (1, 5, 7)]
    assert cursor == ""
    wanted = {"VMIUID": client.variant("s", vm(5).vmi_uid)}
    rows, _ = await client.manager("ListVMsEx", "a{sv}su", wanted, "", 0)
    assert [row[0] for row in rows] == [pod_uid(5)]


async def test_find_a_vm(client: Client, service: FakeService) -> None:
    pid = os.getppid() if os.getppid() > 1 else 2
    service.pids[pid] = UID
    assert await client.manager("GetVM", "s", UID.upper()) == [names.vm_path(UID)]
    assert await client.manager("GetVMByPID", "u", pid) == [names.vm_path(UID)]
    assert await client.manager("GetVMsByVMI", "s", vm(1).vmi_uid) == [[names.vm_path(UID)]]
    assert await client.manager("GetVMsByVMI", "s", "unknown") == [[]]


async def test_register(client: Client, service: FakeService) -> None:
    details = {
        "VMIUID": client.variant("s", "v"),
        "Namespace": client.variant("s", "n"),
        "Name": client.variant("s", "w"),
        "LeaderPID": client.variant("u", 4242),
        "LeaderStartTime": client.variant("t", 99),
        "GraceUSec": client.variant("t", 5),
        "Policy": client.variant("s", "keep"),
    }
    uid = pod_uid(9)
    assert await client.manager("RegisterVM", "sa{sv}", uid, details) == [names.vm_path(uid), False]
    said = Registration("v", "n", "w", 4242, 99, None, None, 5, Policy.KEEP)
    assert service.asked == [("register", (uid, said))]
    assert await client.manager("RegisterVM", "sa{sv}", uid, {}) == [names.vm_path(uid), True]
    await client.manager("UnregisterVM", "s", uid)
    assert uid not in service.known


async def test_register_with_a_pidfd(client: Client, service: FakeService) -> None:
    before = open_fds()
    fd = os.pidfd_open(os.getpid())
    details = {"LeaderPIDFD": client.variant("h", 0)}
    await client.manager("RegisterVM", "sa{sv}", pod_uid(9), details, unix_fds=[fd])
    os.close(fd)
    given = service.asked[0][1][1].leader_pidfd
    assert given is not None
    assert open_fds() == before, "the service closed its own, and nobody holds another"


async def test_track_and_holders(client: Client, service: FakeService) -> None:
    known = next(iter(service.known[UID].layers.values()))
    path = known.target.path.decode()
    assert await client.manager("TrackLayer", "ssa{sv}", UID, path, {}) == [True]
    odd = path + r"\xff\x5c"
    assert await client.manager("TrackLayer", "ssa{sv}", UID, odd, {}) == [False]
    assert service.asked[-1] == ("track_layer", (UID, path.encode() + b"\xff\\"))
    known.holders = (Holder(77, "dd", "open", UID), Holder(0, "/dev/loop3", "loop", ""))
    (rows,) = await client.manager("ListHolders", "ss", UID, path)
    assert plain(rows) == [[77, "dd", "open", UID], [0, "/dev/loop3", "loop", ""]]


async def test_layers(client: Client, service: FakeService) -> None:
    other = vm(2, layers=0, namespace="other")
    odd = layer(other.pod_uid, b"a\xff\\b.img", state=LayerState.BUSY, error="busy\n", attempts=3)
    other.layers[odd.target.path] = odd
    service.add(other)
    (rows,) = await client.manager("ListLayers", "a{sv}", {})
    assert len(rows) == 2
    base = f"/var/lib/kubelet/pods/{other.pod_uid}/volumes/kubernetes.io~empty-dir/container-disks/"
    wanted = [other.pod_uid, base + r"a\xff\x5cb.img", "containerdisk", r"a\xff\x5cb", "busy", r"busy\x0a", 3]
    assert plain(rows)[1] == wanted
    filters = {"PodUID": other.pod_uid, "Namespace": "other", "State": "busy", "Kind": "containerdisk"}
    for key, value in filters.items():
        (rows,) = await client.manager("ListLayers", "a{sv}", {key: client.variant("s", value)})
        assert rows[-1][0] == other.pod_uid
        assert len(rows) == (2 if key == "Kind" else 1)
    (rows,) = await client.manager("ListLayers", "a{sv}", {"Kind": client.variant("s", "kernel-boot")})
    assert rows == []


async def test_release_and_sweep(client: Client, service: FakeService) -> None:
    path = next(iter(service.known[UID].layers)).decode()
    with pytest.raises(Failed, match=r"VMAlive.*end it first"):
        await client.manager("Release", "st", UID, 0)
    service.known[UID].state = State.HELD
    (rows,) = await client.manager("Release", "st", UID, 3)
    assert plain(rows) == [[path, "unmount", "planned"]]
    assert service.asked.pop() == ("release", (UID, True, True))
    (rows,) = await client.manager("Sweep", "t", 1)
    assert plain(rows) == [[UID, path, "none", "ok"]]
    assert service.asked.pop() == ("sweep", (True,))
    await client.manager("Reload")
    assert service.asked.pop() == ("reload", ())


async def test_inhibit(client: Client, service: FakeService) -> None:
    answer = await client.ask(client.message(names.ROOT, names.MANAGER, "Inhibit", "sss", UID, "agent", "backup"))
    assert answer.body == [0]
    (ours,) = answer.unix_fds
    (end,) = service.handles
    os.set_blocking(end, False)
    with pytest.raises(BlockingIOError):
        os.read(end, 1)
    os.close(ours)
    await eventually(lambda: os.read(end, 1) == b"", why="a copy of the handle is still open in the daemon")
    assert service.asked == [("inhibit", (UID, "agent", "backup"))]


async def test_an_inhibitor_that_is_gone_before_its_answer(bus: PrivateBus, service: FakeService) -> None:
    # busctl leaves at once; the handle dies with it.
    assert (await call_manager(bus, "Inhibit", "sss", "", "me", "test")).code == 0
    (end,) = service.handles
    os.set_blocking(end, False)

    def closed() -> bool:
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:
            return False

    await eventually(closed)


async def test_properties(client: Client, service: FakeService) -> None:
    service.health["store"] = "disk full"
    values = await client.get_all(names.ROOT, names.MANAGER)
    features = values.pop("Features")
    assert all(feature.startswith("dbus-library=") for feature in features)
    assert values == {
        "Version": "0.1.0",
        "Mode": "enforce",
        "ConfigFiles": ["/etc/hostd/hostd.toml"],
        "NVMs": 1,
        "NLayers": 1,
        "NBlocked": 0,
        "Health": {"store": "disk full"},
    }


async def test_without_devices(client: Client) -> None:
    assert await client.manager("ListDevices", "a{sv}", {}) == [[]]
    with pytest.raises(Failed, match="NotSupported"):
        await client.manager("ClaimDevice", "ssa{sv}", "pci/0000:00:01.0", "shop/vm1", {})
    with pytest.raises(Failed, match="NotSupported"):
        await client.manager("ReleaseDevice", "ss", "pci/0000:00:01.0", "shop/vm1")


LONG = "x" * (64 * 1024 + 1)
WRONG: list[tuple[str, str, list[Any], str]] = [
    ("RegisterVM", "s", [UID], "takes .s pod_uid, a.sv. details., not .s."),
    ("RegisterVM", "sa{sv}", ["nope", {}], "not a pod UID"),
    ("RegisterVM", "sa{sv}", [UID, {"Nope": ("s", "x")}], "does not know the key 'Nope'; known: VMIUID s"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("i", -4)}], "LeaderPID as u, not as i"),
    ("RegisterVM", "sa{sv}", [UID, {"Name": ("u", 4)}], "Name as s, not as u"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", 44)}], "LeaderPID with either"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderStartTime": ("t", 44)}], "a leader is named by"),
    (
        "RegisterVM",
        "sa{sv}",
        [UID, {"LeaderPID": ("u", 44), "LeaderStartTime": ("t", 1), "LeaderPIDFDID": ("t", 1)}],
        "a leader is named by",
    ),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", 0), "LeaderStartTime": ("t", 1)}], "process 0"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", 1), "LeaderStartTime": ("t", 1)}], "init"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", 2**32 - 1), "LeaderPIDFDID": ("t", 1)}], "process 4294967295"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", os.getpid()), "LeaderPIDFDID": ("t", 1)}], "hostd itself"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPID": ("u", 9), "LeaderStartTime": ("t", 2**64 - 1)}], "out of range"),
    ("RegisterVM", "sa{sv}", [UID, {"LeaderPIDFD": ("h", 0)}], "handle 0 has no descriptor"),
    ("RegisterVM", "sa{sv}", [UID, {"GraceUSec": ("t", 2**64 - 1)}], "out of range"),
    ("RegisterVM", "sa{sv}", [UID, {"Policy": ("s", "maybe")}], "one of: clean, keep"),
    ("RegisterVM", "sa{sv}", [UID, {"Name": ("s", "a\nb")}], "control character"),
    ("RegisterVM", "sa{sv}", [UID, {"Name": ("s", "a/b")}], "slash"),
    ("RegisterVM", "sa{sv}", [UID, {"Namespace": ("s", LONG)}], "65537 bytes"),
    ("RegisterVM", "sa{sv}", [LONG, {}], "65537 bytes"),
    ("GetVMByPID", "u", [0], "process 0"),
    ("GetVMByPID", "u", [1], "init"),
    ("GetVMByPID", "u", [os.getpid()], "hostd itself"),
    ("GetVMByPID", "i", [-1], "takes .u pid., not .i."),
    ("GetVMsByVMI", "s", [""], "not a name"),
    ("ListVMsEx", "a{sv}su", [{"Nope": ("s", "x")}, "", 0], "does not know the key"),
    ("ListVMsEx", "a{sv}su", [{"State": ("s", "x")}, "", 0], "one of: pending"),
    ("ListVMsEx", "a{sv}su", [{}, "x", 0], "not a pod UID"),
    ("ListLayers", "a{sv}", [{"Kind": ("s", "x")}], "one of: containerdisk"),
    ("ListLayers", "a{sv}", [{"State": ("s", "x")}], "one of: mounted"),
    ("ListLayers", "a{sv}", [{"PodUID": ("s", "x")}], "not a pod UID"),
    ("TrackLayer", "ssa{sv}", [UID, "relative", {}], "not an absolute path"),
    ("TrackLayer", "ssa{sv}", [UID, "/a\\b", {}], "x5c"),
    ("TrackLayer", "ssa{sv}", [UID, "/a\tb", {}], "control character"),
    ("TrackLayer", "ssa{sv}", [UID, "/" + LONG, {}], "65538 bytes"),
    ("TrackLayer", "ssa{sv}", [UID, "/a", {"Block": ("b", True)}], "known: none"),
    ("Release", "st", [UID, 4], "flag 0x4 is not known"),
    ("Release", "st", [UID, 2**64 - 1], "flag 0x4 is not known"),
    ("Sweep", "t", [2], "flag 0x2 is not known"),
    ("Inhibit", "sss", [UID, "", "why"], "who is empty"),
    ("Inhibit", "sss", [UID, "who", " "], "why is empty"),
    ("Inhibit", "sss", [UID, "who", LONG], "65537 bytes"),
    ("ListDevices", "a{sv}", [{"Nope": ("s", "x")}], "does not know the key"),
    ("ListVMs", "s", ["x"], "takes .., not .s."),
]


@pytest.mark.parametrize(("member", "signature", "body", "words"), WRONG)
async def test_a_wrong_call(
    client: Client, service: FakeService, member: str, signature: str, body: list[Any], words: str
) -> None:
    made = [
        {key: client.variant(*value) for key, value in each.items()} if isinstance(each, dict) else each
        for each in body
    ]
    with pytest.raises(Failed, match=words) as failure:
        await client.manager(member, signature, *made)
    assert failure.value.name == INVALID
    assert "Traceback" not in failure.value.text
    assert len(failure.value.text) < 500
    assert service.asked == []
    assert await client.manager("GetVM", "s", UID), "the connection lives"


async def test_unknown_vms(client: Client) -> None:
    nobody = pod_uid(99)
    for member, signature, body in (
        ("GetVM", "s", [nobody]),
        ("UnregisterVM", "s", [nobody]),
        ("Release", "st", [nobody, 0]),
        ("Inhibit", "sss", [nobody, "a", "b"]),
        ("TrackLayer", "ssa{sv}", [nobody, "/x/volumes/kubernetes.io~empty-dir/container-disks/d", {}]),
        ("GetVMByPID", "u", [4_000_000]),
    ):
        with pytest.raises(Failed) as failure:
            await client.manager(member, signature, *body)
        assert failure.value.name == "io.kubevirt.hostd1.Error.NoSuchVM"


async def test_errors_of_the_service_keep_their_names(client: Client, service: FakeService) -> None:
    for error in (ProcessMismatch("another\nprocess"), LimitExceeded("too many")):
        service.failing["register"] = error
        with pytest.raises(Failed) as failure:
            await client.manager("RegisterVM", "sa{sv}", UID, {})
        assert failure.value.name == error.dbus_name
        assert "\n" not in failure.value.text


async def test_thousands_of_layers(client: Client, service: FakeService) -> None:
    service.add(vm(2, layers=5000))
    (rows,) = await client.manager("ListLayers", "a{sv}", {})
    assert len(rows) == 5001
    assert len(await client.get(names.vm_path(pod_uid(2)), names.VM, "Layers")) == 5000
