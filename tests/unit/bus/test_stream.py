"""Frames over a real socket pair: cut anywhere, with descriptors, too long, too many."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from hostd.bus import stream
from hostd.bus.stream import Frame, Stream, frame_lengths, headed
from hostd.errors import LimitExceeded
from tests.support.bus import open_fds
from tests.support.wait import eventually


def frame(body: int = 0, fields: int = 0, order: str = "<") -> bytes:
    mark = b"l" if order == "<" else b"B"
    head = struct.pack(f"{order}cBBBIII", mark, 1, 0, 1, body, 7, fields) + bytes(fields)
    return head + bytes(-len(head) % 8) + b"x" * body


class Peer:
    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX)
        ours.setblocking(False)
        self.sock.setblocking(False)
        self.frames: list[Frame] = []
        self.ended: list[Exception | None] = []
        self.stream = Stream(ours, self.frames.append, self.ended.append)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    before = open_fds()
    made = Peer()
    yield made
    made.stream.close()
    made.sock.close()
    for each in made.frames:
        stream.close_all(each.fds)
    assert open_fds() == before


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("body", "fields"), [(0, 0), (0, 5), (9, 8), (1000, 123)])
def test_lengths(body: int, fields: int, order: str) -> None:
    data = frame(body, fields, order)
    assert sum(frame_lengths(data)) == len(data)
    assert frame_lengths(headed(data, frame_lengths(data)[0]))[1] == 0


async def test_cut_at_every_byte(peer: Peer) -> None:
    data = frame(10, 6) + frame(0, 0) + frame(3, 9)
    for index in range(len(data)):
        peer.sock.send(data[index : index + 1])
        await asyncio.sleep(0)
    await eventually(lambda: len(peer.frames) == 3)
    assert b"".join(each.data for each in peer.frames) == data


async def test_descriptors_belong_to_their_message(peer: Peer) -> None:
    with open("/dev/null", "rb") as file:
        peer.sock.send(frame(1))
        socket.send_fds(peer.sock, [frame(2)], [file.fileno()])
        peer.sock.send(frame(3))
        socket.send_fds(peer.sock, [frame(4)], [file.fileno()] * 5)
        await eventually(lambda: len(peer.frames) == 4)
    assert [len(each.fds) for each in peer.frames] == [0, 1, 0, 5]
    for fd in [*peer.frames[1].fds, *peer.frames[3].fds]:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


async def test_a_message_that_is_too_long_is_cut_and_the_next_is_whole(peer: Peer) -> None:
    data = frame(stream.MAX_FRAME + 5, 24) + frame(1)

    def push() -> bool:
        nonlocal data
        try:
            data = data[peer.sock.send(data) :]
        except BlockingIOError:
            return False
        return not data

    await eventually(push)
    await eventually(lambda: len(peer.frames) == 2)
    assert [each.cut for each in peer.frames] == [True, False]
    assert peer.frames[0].data == frame(stream.MAX_FRAME + 5, 24)[:40]


async def test_a_stream_out_of_step_ends(peer: Peer) -> None:
    peer.sock.send(b"GET / HTTP/1.1\r\n\r\n")
    await eventually(lambda: peer.ended)
    assert isinstance(peer.ended[0], ConnectionError)


async def test_the_end_of_the_peer(peer: Peer) -> None:
    peer.sock.close()
    await eventually(lambda: peer.ended)
    assert isinstance(peer.ended[0], ConnectionResetError)
    assert peer.stream.closed
    with pytest.raises(ConnectionResetError):
        peer.stream.send(frame(), [os.open("/dev/null", os.O_RDONLY)])


async def test_a_burst_waits_for_the_reader_and_keeps_its_order(peer: Peer) -> None:
    # The libraries end the connection here, and one of them turns the queue round.
    wanted = b""
    for index in range(5000):
        each = frame(index % 90)
        wanted += each
        peer.stream.send(each)
    assert peer.stream.queued > 0
    received = bytearray()

    def pull() -> bool:
        try:
            received.extend(peer.sock.recv(65536))
        except BlockingIOError:
            return False
        return len(received) >= len(wanted)

    await eventually(pull)
    assert received == wanted
    await peer.stream.drain()
    assert peer.stream.queued == 0
    assert not peer.ended


async def test_descriptors_go_out_once_and_are_closed(peer: Peer) -> None:
    before = open_fds()
    read, write = os.pipe()
    peer.stream.send(frame(1), [write])
    await peer.stream.drain()
    assert open_fds() == before + 1
    data, fds, _flags, _address = socket.recv_fds(peer.sock, 4096, 4)
    assert data == frame(1)
    os.write(fds[0], b"!")
    assert os.read(read, 1) == b"!"
    os.close(read)
    os.close(fds[0])


async def test_what_is_said_at_once_goes_out_at_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as few system calls as there are messages with descriptors, which go with their own message."""
    sent: list[int] = []
    whole = peer.stream._send_some

    def counted() -> bool:
        sent.append(len(peer.stream._out))
        return whole()

    monkeypatch.setattr(peer.stream, "_send_some", counted)
    read, write = os.pipe()
    frames = [frame(number) for number in range(1, 8)]
    for number, each in enumerate(frames):
        peer.stream.send(each, [write] if number == 4 else None)
    assert not sent, "nothing stands before the loop's other work"
    await peer.stream.drain()
    assert sent == [7, 3]
    received, fds, _flags, _address = socket.recv_fds(peer.sock, 4096, 4)
    assert received == b"".join(frames)
    assert len(fds) == 1
    stream.close_all([read, *fds])


async def test_descriptors_that_were_never_sent_are_closed(peer: Peer) -> None:
    before = open_fds()
    while peer.stream.queued == 0:
        peer.stream.send(frame(60_000))
    read, write = os.pipe()
    peer.stream.send(frame(1), [write])
    peer.stream.close()
    assert os.read(read, 1) == b"", "the writing end is still open"
    os.close(read)
    assert open_fds() == before - 1


async def test_a_peer_that_takes_nothing_is_not_read_either(peer: Peer) -> None:
    big = frame(stream.MAX_FRAME - 16)
    while peer.stream.queued <= stream.HIGH_WATER:
        peer.stream.send(big)
    peer.sock.send(frame(1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not peer.frames, "calls are read although their answers cannot go out"

    def pull() -> bool:
        with contextlib.suppress(BlockingIOError):
            peer.sock.recv(1 << 20)
        return bool(peer.frames)

    await eventually(pull)


async def test_it_gives_up_in_the_end(peer: Peer) -> None:
    big = frame(stream.MAX_FRAME - 16)
    while not peer.stream.closed:
        peer.stream.send(big)
    assert isinstance(peer.ended[0], LimitExceeded)


async def test_other_work_gets_its_turn_in_a_flood(peer: Peer) -> None:
    turns = 0
    stop = asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            await asyncio.sleep(0)

    def slow(_: Frame) -> None:
        peer.frames.append(Frame(b"", [], False))
        end = asyncio.get_running_loop().time() + stream.SLICE
        while asyncio.get_running_loop().time() < end:
            pass

    peer.stream._on_frame = slow
    worker = asyncio.create_task(other())
    for _ in range(20):
        peer.sock.send(frame(1))
    await eventually(lambda: len(peer.frames) == 20)
    stop.set()
    await worker
    assert turns >= 19
