"""Frames in and frames out of one socket: nothing here waits, and nothing is lost or kept open by mistake.

Reading takes each message's bytes and no more, so that descriptors belong to the message they came with. They are
close-on-exec from the start (MSG_CMSG_CLOEXEC). Writing is a bounded queue: when the bus stops taking, the reading of
new calls stops with it (so the bus holds the callers), and when even that does not help the stream ends.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import time
from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from hostd.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FIXED_HEADER = 16
#: A longer message is not taken in: no member of the interface needs a tenth of it, and parsing it would hold the loop.
MAX_FRAME = 1024 * 1024
#: Bytes of a message that is too long which are kept: its header, so that its sender gets an answer.
MAX_HEADER = 64 * 1024
#: Of D-Bus: dbus-daemon lets through 16 by default, brokers up to 253.
MAX_FDS = 253
#: Above this many bytes queued no new calls are read; above the second the stream is given up.
HIGH_WATER = 4 * 1024 * 1024
GIVE_UP = 64 * 1024 * 1024
#: The loop's other work (deaths!) gets its turn after this many seconds of reading.
SLICE = 0.001
#: Messages that are handed over at once, at most.
_TOGETHER = 64


class Frame(NamedTuple):
    """One message's bytes; `cut` when only its header was kept. The receiver owns `fds`."""

    data: bytes
    fds: list[int]
    cut: bool


class _Outgoing:
    __slots__ = ("data", "fds")

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self.data = memoryview(data)
        self.fds = fds


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors that nobody took over."""
    for fd in fds:
        os.close(fd)


def frame_lengths(head: bytes | bytearray) -> tuple[int, int]:
    """Bytes of a message's header with its padding, and of its body, from its first sixteen bytes."""
    order = {0x6C: "<", 0x42: ">"}.get(head[0])
    if order is None:
        raise ConnectionError(f"the bus sent byte order {head[0]:#x}: the stream is out of step")
    body, _serial, fields = struct.unpack_from(f"{order}III", head, 4)
    return FIXED_HEADER + fields + (-fields % 8), body


def headed(data: bytes, header: int) -> bytes:
    """A message's header alone, as a message without body."""
    return data[:4] + bytes(4) + data[8:header]


class Stream:
    """One connection's socket, which it owns. `on_frame` gets each message, `on_end` once the reason for the end."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._max_frame = max_frame
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_end = on_end
        self._in = bytearray()
        self._in_fds: list[int] = []
        self._skip = 0
        self._out: deque[_Outgoing] = deque()
        self._writing = False
        #: What sends all that this turn of the loop has queued.
        self._flushing: asyncio.Handle | None = None
        self._reading = False
        self._held = False
        self._drained = asyncio.Event()
        self._drained.set()
        self.queued = 0
        self.closed = False
        self._read_on()

    # Reading

    def _read_on(self) -> None:
        if not self._reading and not self._held and not self.closed:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def _hold_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def hold(self) -> None:
        """Takes nothing more in until `go_on`."""
        self._held = True
        self._hold_reading()

    def go_on(self) -> None:
        """Ends a hold."""
        self._held = False
        self._balance()

    def _readable(self) -> None:
        until = time.monotonic() + SLICE
        try:
            while self._reading and time.monotonic() < until and self._receive():
                pass
        except OSError as reason:
            self._end(reason)

    def _receive(self) -> bool:
        """Reads what is missing of the message under way; whether there may be more."""
        wanted = self._wanted()
        try:
            data, ancillary, _flags, _address = self._sock.recvmsg(
                wanted, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except (BlockingIOError, InterruptedError):
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % 4
                self._in_fds.extend(array.array("i", payload[:whole]))
        if not data:
            raise ConnectionResetError("the bus closed the connection")
        self._take(data)
        return True

    def _wanted(self) -> int:
        if self._skip:
            return min(self._skip, MAX_FRAME)
        if len(self._in) < FIXED_HEADER:
            return FIXED_HEADER - len(self._in)
        return self._keep()[0] - len(self._in)

    def _keep(self) -> tuple[int, int]:
        """How many bytes of the message are kept, and how many are thrown away."""
        header, body = frame_lengths(self._in)
        if header + body <= self._max_frame:
            return header + body, 0
        kept = header if header <= MAX_HEADER else FIXED_HEADER
        return kept, header + body - kept

    def _take(self, data: bytes) -> None:
        if self._skip:
            self._skip -= len(data)
            if self._skip == 0:
                self._deliver(cut=True)
            return
        self._in += data
        if len(self._in) < FIXED_HEADER:
            return
        kept, skipped = self._keep()
        if len(self._in) == kept:
            self._skip = skipped
            if not skipped:
                self._deliver(cut=False)

    def _deliver(self, *, cut: bool) -> None:
        frame = Frame(bytes(self._in), self._in_fds, cut)
        self._in.clear()
        self._in_fds = []
        self._on_frame(frame)

    # Writing

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        """Queues one message. It goes out when what the loop is at now is done, with all that is said until
        then: umounts come first. Takes over `fds`: they are closed when sent or lost.

        Raises ConnectionError when the stream has ended, LimitExceeded when the bus takes nothing any more.
        """
        if self.closed:
            close_all(fds or ())
            raise ConnectionResetError("the connection to the bus has ended")
        self._out.append(_Outgoing(data, fds or []))
        self.queued += len(data)
        if not self._writing and not self._flushing:
            self._flushing = self._loop.call_soon(self._flush)
        self._balance()
        if self.queued > GIVE_UP:
            self._end(LimitExceeded(f"the bus left {self.queued} bytes of ours untaken"))

    def _flush(self) -> None:
        self._flushing = None
        if self.closed:
            return
        try:
            while self._out and self._send_some():
                pass
        except OSError as reason:
            self._end(reason)
            return
        self._want_writable(wanted=bool(self._out))
        self._balance()

    def _send_some(self) -> bool:
        first, *others = islice(self._out, _TOGETHER)
        # Descriptors go with the first byte, so a message that has some is the first of its lot.
        together = [first, *takewhile(lambda one: not one.fds, others)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.fds))] if first.fds else []
        try:
            data = [one.data for one in together]
            sent = self._sock.sendmsg(data, rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        close_all(first.fds)
        first.fds = []
        self.queued -= sent
        for one in together:
            count = min(sent, len(one.data))
            one.data, sent = one.data[count:], sent - count
            if one.data:
                break
            self._out.popleft()
        return True

    def _want_writable(self, *, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._flush)
        elif not wanted and self._writing:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _balance(self) -> None:
        if self.queued > HIGH_WATER:
            self._hold_reading()
        elif self.queued <= HIGH_WATER // 2:
            self._read_on()
        if self._out:
            self._drained.clear()
        else:
            self._drained.set()

    async def drain(self) -> None:
        """Waits until all that is queued has been handed to the bus, or the stream has ended."""
        await self._drained.wait()

    # End

    def close(self) -> None:
        """Ends it; closes the socket and all descriptors that were under way."""
        self._end(None)

    def _end(self, reason: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        self._hold_reading()
        self._want_writable(wanted=False)
        self._sock.close()
        close_all(self._in_fds)
        self._in_fds = []
        while self._out:
            close_all(self._out.popleft().fds)
        self.queued = 0
        self._drained.set()
        self._on_end(reason)
