"""What comes in that no library lets out, and what must not go out."""

from __future__ import annotations

import os
import struct

import pytest

from hostd.bus import connection, names, stream
from tests.support.bus import Bare, Client, Failed, PrivateBus, open_fds
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

UID = pod_uid(1)


async def lives(client: Client) -> bool:
    return bool(await client.manager("GetVM", "s", UID))


@pytest.mark.parametrize("flags", [0x8, 0x80, 0xF0, 0xFF])
async def test_flags_that_nobody_knows(bus: PrivateBus, client: Client, flags: int) -> None:
    bare = Bare(bus)
    bare.send(names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs", flags=flags)
    assert await lives(client)
    bare.close()


async def test_header_fields_that_nobody_knows(bus: PrivateBus, client: Client) -> None:
    bare = Bare(bus)
    bare.send(names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs", fields=b"\0" * 7 + b"\xc8\x01s\0" + b"\1\0\0\0x\0")
    bare.close()
    bare = Bare(bus)
    bare.send(names.BUS_NAME, names.ROOT, names.MANAGER, "ListVMs", kind=9)
    assert await lives(client)
    bare.close()


async def test_a_message_that_is_too_long(client: Client) -> None:
    for member, signature, body in (
        ("GetVM", "s", "x" * (stream.MAX_FRAME + 1)),
        ("ListVMs", "as", ["x"] * 1_000_000),
    ):
        with pytest.raises(Failed, match="too long") as failure:
            await client.manager(member, signature, body)
        assert failure.value.name == "io.kubevirt.hostd1.Error.LimitExceeded"
    assert await lives(client)


async def test_an_answer_that_is_too_long(
    client: Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_REPLY", 10_000)
    service.add(vm(2, layers=500))
    with pytest.raises(Failed, match="ask for less") as failure:
        await client.manager("ListLayers", "a{sv}", {})
    assert failure.value.name == "io.kubevirt.hostd1.Error.LimitExceeded"
    assert await lives(client)


def registration(depth: int) -> bytes:
    """RegisterVM's body with one detail, a byte in that many variants."""
    uid = struct.pack("<I", len(UID)) + UID.encode() + b"\0"
    uid += bytes(-len(uid) % 4)
    entry = struct.pack("<I", 1) + b"x\0" + b"\1v\0" * depth + b"\1y\0\7"
    array = struct.pack("<I", len(entry))
    return uid + array + bytes(-len(uid + array) % 8) + entry


async def test_variants_in_variants(bus: PrivateBus, client: Client) -> None:
    """As deep as the bus lets through."""
    for depth in (10, 40, 60, 63):
        bare = Bare(bus)
        bare.send(names.BUS_NAME, names.ROOT, names.MANAGER, "RegisterVM", "sa{sv}", registration(depth))
        assert await lives(client)
        bare.close()


async def test_no_answer_where_none_is_wanted(client: Client, service: FakeService) -> None:
    message = client.message(
        names.ROOT, names.MANAGER, "Inhibit", "sss", "", "a", "b", flags=client.library.MessageFlag.NO_REPLY_EXPECTED
    )
    await client.bus.send(message)
    await client.bus.send(client.message("/nope", "a.b", "C", flags=client.library.MessageFlag.NO_REPLY_EXPECTED))
    await eventually(lambda: service.handles)
    (end,) = service.handles
    os.set_blocking(end, False)

    def closed() -> bool:
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:
            return False

    await eventually(closed, why="the handle that nobody wants is kept")


@pytest.mark.parametrize(
    ("path", "interface", "member"),
    [
        (names.ROOT, names.MANAGER, "ListVMs"),
        (names.ROOT, names.MANAGER, "Nope"),
        ("/nope", "a.b", "C"),
        (names.ROOT, names.PEER, "Ping"),
        (names.ROOT, names.PROPERTIES, "GetAll"),
    ],
)
async def test_descriptors_that_nobody_wants(client: Client, path: str, interface: str, member: str) -> None:
    await lives(client)
    before = open_fds()
    with open("/dev/null", "rb") as file:
        for _ in range(30):
            with pytest.raises(Failed, match=r"InvalidArgs|Unknown(Method|Object)"):
                await client.call(path, interface, member, "h", 0, unix_fds=[file.fileno()] * 3)
    await eventually(lambda: open_fds() == before)


async def test_signals_and_answers_with_descriptors(client: Client) -> None:
    await lives(client)
    before = open_fds()
    library = client.library
    with open("/dev/null", "rb") as file:
        for _ in range(30):
            for kind, more in (
                (library.MessageType.SIGNAL, {"path": "/a", "interface": "a.b", "member": "C"}),
                (library.MessageType.METHOD_RETURN, {"reply_serial": 77}),
            ):
                message = library.Message(
                    destination=names.BUS_NAME,
                    message_type=kind,
                    signature="h",
                    body=[0],
                    unix_fds=[file.fileno()],
                    **more,
                )
                await client.bus.send(message)
    assert await lives(client)
    await eventually(lambda: open_fds() == before)
