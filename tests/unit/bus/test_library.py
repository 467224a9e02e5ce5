"""What the adapter relies on in each library, private things among it: a release that changes them fails here."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Iterator

import pytest

from hostd.bus import library, names
from hostd.errors import NotSupported
from tests.support.bus import adapter_on, open_fds, private_bus
from tests.support.wait import eventually


@pytest.fixture(autouse=True)
def bus_library(dbus_library: str) -> Iterator[str]:
    with adapter_on(dbus_library) as name:
        yield name


def call_frame(*, flags: int = 0, kind: int = library.METHOD_CALL, fields: bytes = b"") -> bytes:
    """A call to /a, a.b.M, from :1.7, by hand."""
    out = b""
    for code, type_, text in ((1, b"o", b"/a"), (2, b"s", b"a.b"), (3, b"s", b"M"), (7, b"s", b":1.7")):
        out += bytes(-len(out) % 8) + bytes([code, 1]) + type_ + b"\0"
        out += bytes(-len(out) % 4) + struct.pack("<I", len(text)) + text + b"\0"
    out += fields
    head = struct.pack("<cBBBIII", b"l", kind, flags, 1, 0, 9, len(out)) + out
    return head + bytes(-len(head) % 8)


def test_a_call_is_read() -> None:
    message = library.parse(call_frame())
    assert (message.kind, message.serial, message.sender) == (library.METHOD_CALL, 9, ":1.7")
    assert (message.path, message.interface, message.member) == ("/a", "a.b", "M")
    assert (message.signature, message.body) == ("", [])


def test_unknown_flags_are_kept_and_do_no_harm() -> None:
    # dbus-fast 1.84 loses its connection over them.
    assert library.parse(call_frame(flags=0xF4)).flags == 0xF4


@pytest.mark.parametrize("frame", [call_frame()[:40], call_frame(kind=0), b"l\1\0\2" + call_frame()[4:]])
def test_what_cannot_be_read_raises(frame: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - each library has its own
        library.parse(frame)


def test_frames_come_back_as_they_went() -> None:
    to = library.parse(call_frame())
    body = ["x", {"k": library.variant("(su)", ["y", 7])}, [["a", 1]], 5]
    answer = library.parse(library.method_return(3, to, "sa{sv}a(su)t", body))
    assert (answer.kind, answer.reply_serial, answer.serial, answer.signature) == (2, 9, 3, "sa{sv}a(su)t")
    assert answer.body[0] == "x"
    assert list(answer.body[1]["k"].value) == ["y", 7]
    assert [list(row) for row in answer.body[2]] == [["a", 1]]
    failed = library.parse(library.error(4, to, "a.b.Error", "why"))
    assert (failed.kind, failed.error_name, failed.body) == (3, "a.b.Error", ["why"])
    told = library.parse(library.signal(5, "/p", "a.b", "S", "s", ["z"]))
    assert (told.kind, told.path, told.member, told.body) == (4, "/p", "S", ["z"])
    asked = library.parse(library.call(6, "a.c", "/p", "a.b", "M", "u", [8]))
    assert (asked.kind, asked.path, asked.body) == (1, "/p", [8])


@pytest.mark.parametrize(("signature", "value"), [("u", -1), ("u", 2**32), ("s", 5), ("s", "\udcff"), ("t", None)])
def test_a_value_that_cannot_travel_is_found(signature: str, value: object) -> None:
    assert not library.marshals("v", library.variant(signature, value))


@pytest.mark.parametrize(
    ("signature", "value"), [("u", 0), ("a(ss)", [["a", "b"]]), ("a(ss)", []), ("a{ss}", {}), ("s", "größe 雪")]
)
def test_a_value_that_can(signature: str, value: object) -> None:
    assert library.marshals("v", library.variant(signature, value))


async def test_login_leaves_one_socket_and_no_reader() -> None:
    async with private_bus() as bus:
        before = open_fds()
        sock, name = await library.log_in(bus.address)
        assert name.startswith(":1.")
        assert open_fds() == before + 1
        sock.setblocking(False)
        # Nobody but us reads it: an answer to a call made by hand is still there.
        sock.send(library.call(2, names.DBUS, names.DBUS_PATH, names.DBUS, "GetId", "", []))
        received = b""

        def whole() -> bool:
            nonlocal received
            try:
                received += sock.recv(4096)
            except BlockingIOError:
                return False
            return re.search(rb"[0-9a-f]{32}", received) is not None

        await eventually(whole)
        assert not sock.get_inheritable()
        sock.close()
        assert open_fds() == before


async def test_a_bus_that_is_not_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = open_fds()
    with pytest.raises(OSError):  # noqa: PT011 - ENOENT or ECONNREFUSED
        await library.log_in(f"unix:path={tmp_path_factory.mktemp('none')}/bus")
    assert open_fds() == before


async def test_a_bus_that_says_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LOGIN_TIMEOUT", 0.05)
    path = str(tmp_path_factory.mktemp("mute") / "bus")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        before = open_fds()
        with pytest.raises(TimeoutError):
            await library.log_in(f"unix:path={path}")
        await asyncio.sleep(0)
        assert open_fds() == before


@pytest.mark.parametrize("said", [b"", b"OK 0123456789abcdef0123456789abcdef\r\n", b"OK 01234", b"REJECTED"])
async def test_a_bus_that_hangs_up_during_the_login(tmp_path_factory: pytest.TempPathFactory, said: bytes) -> None:
    """As one that is restarted in that moment. dbus-next turned in its reading for ever, and the whole loop with it."""
    path = str(tmp_path_factory.mktemp("short") / "bus")

    async def accept() -> None:
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        with peer:
            await asyncio.get_running_loop().sock_recv(peer, 4096)
            peer.sendall(said)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(path)
        listener.listen()
        before = open_fds()
        accepting = asyncio.create_task(accept())
        with pytest.raises(OSError):  # noqa: PT011 - the peer is gone, while reading or while writing
            await library.log_in(f"unix:path={path}")
        await accepting
        await asyncio.sleep(0)
        assert open_fds() == before


def test_an_unknown_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTD_DBUS_LIBRARY", "sdbus")
    with pytest.raises(NotSupported, match="dbus_fast or dbus_next"):
        library.choose()
