"""The wire protocol of qemu-pr-helper, as far as it takes to ask whether a helper is well.

    helper → client   4 bytes: what it can do (0 or 1)
    client → helper   4 bytes: what we want of that (0: nothing)
    client → helper   16 bytes CDB, with exactly one descriptor in SCM_RIGHTS
    helper → client   104 bytes: status (big endian, signed), length of data, 96 bytes of sense; then the data

The handshake tells that a helper runs and takes connections. The deep probe is PERSISTENT RESERVE IN, READ KEYS, on
/dev/null: it goes all the way through the helper's worker and touches no device. The kernel refuses it there, and the
helper answers CHECK CONDITION with sense 0b/00/06. A helper that is stopped answers neither; only a time-out tells.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from dataclasses import dataclass

from hostd.errors import HelperFailed

_WORD = struct.Struct(">I")
_RESPONSE = struct.Struct(">iI96s")
#: PERSISTENT RESERVE IN (0x5e), READ KEYS (0), with room for 8 bytes of header.
_READ_KEYS = bytes([0x5E, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0])
_CHECK_CONDITION = 2
#: Fixed format sense data, current and deferred.
_FIXED_SENSE = (0x70, 0x71)
#: s: between two attempts to get into a full queue; no event tells when there is room.
_QUEUE_SECONDS = 0.02


class NoAnswer(HelperFailed):
    """A helper was asked and did not answer, or not as a helper does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a helper answered: its greeting, in which time (µs), and to the deep probe the sense (key, asc, ascq)."""

    greeting: int
    usec: int
    sense: tuple[int, int, int] | None = None


async def ask(path: bytes, *, deep: bool, timeout: float) -> Answer:  # noqa: ASYNC109 - a time-out is the only verdict on a hung one
    """Asks the helper that listens at `path`. Raises NoAnswer with what happened instead, within `timeout` seconds."""
    begin = time.monotonic_ns()
    stage = "accept a connection"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(timeout):
                await _connect(sock, path)
                stage = "greet"
                greeting = await _shake_hands(sock)
                stage = "answer READ KEYS"
                sense = await _read_keys(sock) if deep else None
    except TimeoutError:
        raise NoAnswer(f"the helper at {os.fsdecode(path)} did not {stage} within {timeout:g} s") from None
    except OSError as error:
        raise NoAnswer(f"the helper at {os.fsdecode(path)} did not {stage}: {error.strerror or error}") from None
    return Answer(greeting, (time.monotonic_ns() - begin) // 1000, sense)


async def _connect(sock: socket.socket, path: bytes) -> None:
    # Not the loop's sock_connect: a full queue is EAGAIN here, which it would take for a connection under way.
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(_QUEUE_SECONDS)
        else:
            return


async def _shake_hands(sock: socket.socket) -> int:
    greeting: int = _WORD.unpack(await _receive(sock, _WORD.size))[0]
    sock.send(_WORD.pack(0))
    return greeting


async def _read_keys(sock: socket.socket) -> tuple[int, int, int]:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(sock, [_READ_KEYS], [nothing])
    finally:
        os.close(nothing)
    status, size, sense = _RESPONSE.unpack(await _receive(sock, _RESPONSE.size))
    if status != _CHECK_CONDITION or size or sense[0] not in _FIXED_SENSE:
        raise OSError(f"status {status} with {size} bytes, where a check condition was due")
    return sense[2] & 0x0F, sense[12], sense[13]


async def _receive(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise OSError("it closed the connection")
        data += piece
    return data
