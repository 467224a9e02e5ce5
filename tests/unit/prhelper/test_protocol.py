from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hostd.prhelper import protocol
from hostd.prhelper.protocol import NoAnswer

SENSE = bytes([0x70, 0, 0x0B, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x00, 0x06]).ljust(96, b"\0")
Talk = Callable[[socket.socket], Awaitable[None]]


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path / "pr.sock")


@asynccontextmanager
async def helper(path: bytes, talk: Talk) -> AsyncIterator[None]:
    """Serves one connection."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4)
        listener.setblocking(False)

        async def serve() -> None:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                sock.setblocking(False)
                await talk(sock)

        task = asyncio.create_task(serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def greet(sock: socket.socket, features: int = 0) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, struct.pack(">I", features))
    assert await loop.sock_recv(sock, 4) == bytes(4)


async def request(sock: socket.socket) -> tuple[bytes, list[int]]:
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sock, ready.set)
    await ready.wait()
    loop.remove_reader(sock)
    data, control, _, _ = sock.recvmsg(64, 64)
    fds = array.array("i")
    for _level, _kind, content in control:
        fds.frombytes(content)
    return data, list(fds)


async def test_the_deep_probe_is_read_keys_on_dev_null(path: bytes) -> None:
    seen = []

    async def talk(sock: socket.socket) -> None:
        await greet(sock, 1)
        cdb, fds = await request(sock)
        seen.append((cdb[:2], len(cdb), [os.fstat(fd).st_rdev for fd in fds]))
        for fd in fds:
            os.close(fd)
        # In pieces, as a stream may deliver it.
        answer = struct.pack(">iI", 2, 0) + SENSE
        for piece in (answer[:3], answer[3:50], answer[50:]):
            await asyncio.get_running_loop().sock_sendall(sock, piece)
            await asyncio.sleep(0)

    async with helper(path, talk):
        answer = await protocol.ask(path, deep=True, timeout=5)
    assert (answer.greeting, answer.sense) == (1, (0x0B, 0x00, 0x06))
    assert seen == [(b"\x5e\x00", 16, [os.stat(os.devnull).st_rdev])]


async def test_the_handshake_alone_asks_nothing(path: bytes) -> None:
    async with helper(path, greet):
        answer = await protocol.ask(path, deep=False, timeout=5)
    assert answer.sense is None


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (struct.pack(">iI", 0, 0) + SENSE, "status 0"),
        (struct.pack(">iI", 2, 8) + SENSE, "8 bytes"),
        (struct.pack(">iI", 2, 0) + bytes(96), "check condition"),
        (b"", "closed the connection"),
        (bytes(10), "closed the connection"),
    ],
)
async def test_other_answers_are_none(path: bytes, answer: bytes, word: str) -> None:
    async def talk(sock: socket.socket) -> None:
        await greet(sock)
        _, fds = await request(sock)
        for fd in fds:
            os.close(fd)
        await asyncio.get_running_loop().sock_sendall(sock, answer)

    async with helper(path, talk):
        with pytest.raises(NoAnswer, match=word):
            await protocol.ask(path, deep=True, timeout=5)


@pytest.mark.parametrize("deep", [True, False])
async def test_silence_ends_with_the_time_out(path: bytes, deep: bool) -> None:
    async def talk(sock: socket.socket) -> None:
        if deep:
            await greet(sock)
        await asyncio.sleep(60)

    async with helper(path, talk):
        with pytest.raises(NoAnswer, match="did not answer READ KEYS within" if deep else "did not greet within"):
            await protocol.ask(path, deep=deep, timeout=0.05)


async def test_a_full_queue_is_waited_for(path: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(NoAnswer, match="did not accept a connection within"):
            await protocol.ask(path, deep=False, timeout=0.05)
        asking = asyncio.create_task(protocol.ask(path, deep=False, timeout=5))
        await asyncio.sleep(0)
        listener.accept()[0].close()
        listener.setblocking(False)
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            sock.send(bytes(4))
            assert (await asking).greeting == 0


async def test_nobody_there_is_said(path: bytes) -> None:
    with pytest.raises(NoAnswer, match="No such file"):
        await protocol.ask(path, deep=False, timeout=5)


async def test_nothing_stays_open(path: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NoAnswer):
            await protocol.ask(path, deep=True, timeout=5)
    assert len(os.listdir("/proc/self/fd")) == before
