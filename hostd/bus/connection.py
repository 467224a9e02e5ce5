"""One connection to a bus: messages in, calls and signals out. It begins logged in and ends for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from hostd.bus import library, names
from hostd.bus.library import Message
from hostd.bus.stream import MAX_FRAME, Frame, Stream, close_all, frame_lengths, headed
from hostd.errors import HostdError, InvalidArgs, LimitExceeded

log = logging.getLogger(__name__)

#: dbus-daemon throws out who sends more (32 MiB on the system bus); half of it leaves room for other brokers.
MAX_REPLY = 16 * 1024 * 1024
#: For a call to the bus itself or to a service on it.
CALL_TIMEOUT = 10.0
_LAST_SERIAL = 0xFFFF_FFFF


class CallFailed(Exception):
    """A peer answered a call of ours with an error."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text} ({name})")
        self.name = name


#: Gets each method call with its descriptors, and owns those.
OnCall = Callable[[Message, list[int]], None]
OnSignal = Callable[[Message], None]


class Connection:
    """Use `Connection.open`. All methods belong to the loop that opened it."""

    def __init__(self, on_call: OnCall, on_signal: OnSignal) -> None:
        self.unique_name = ""
        self._on_call = on_call
        self._on_signal = on_signal
        self._serial = 1  # the login's Hello was number one
        self._waiting: dict[int, tuple[str, asyncio.Future[tuple[Message, list[int]]]]] = {}
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._stream: Stream

    @classmethod
    async def open(
        cls, address: str | None, on_call: OnCall, on_signal: OnSignal, *, max_frame: int = MAX_FRAME
    ) -> Connection:
        """Logs in to the bus at `address` (None: the system bus). Raises what `library.log_in` raises.

        `max_frame` (bytes) bounds what is taken in: a client's answers may be longer than a service's calls.
        """
        sock, unique_name = await library.log_in(address)
        sock.setblocking(False)
        self = cls(on_call, on_signal)
        self.unique_name = unique_name
        self._stream = Stream(sock, self._frame, self._end, max_frame)
        return self

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._stream.closed

    @property
    def queued(self) -> int:
        """Bytes that the bus has not taken yet."""
        return self._stream.queued

    def hold(self) -> None:
        """Takes no more messages from the bus until `go_on`: it keeps those who call waiting."""
        self._stream.hold()

    def go_on(self) -> None:
        """Ends a hold."""
        if not self.closed:
            self._stream.go_on()

    async def wait_closed(self) -> Exception | None:
        """Waits for its end; the reason, or None when `close` was called."""
        return await asyncio.shield(self._ended)

    async def drain(self) -> None:
        """Waits until what is queued has been taken, or the end."""
        await self._stream.drain()

    def close(self) -> None:
        """Ends it at once."""
        self._stream.close()

    # Out

    def signal(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> None:
        """Tells everybody. Raises what marshalling raises; a connection that has ended is no error."""
        if not self.closed:
            self._send(library.signal(self._next_serial(), path, interface, member, signature, body))

    def reply(self, to: Message, signature: str, body: list[Any], fds: list[int] | None = None) -> None:
        """Answers a call. Takes over `fds`. Raises what marshalling raises, and LimitExceeded."""
        handed = False
        try:
            if not self.closed and not to.flags & library.NO_REPLY_EXPECTED:
                data = library.method_return(self._next_serial(), to, signature, body, len(fds or ()))
                handed = True
                self._send(data, fds)
        finally:
            if not handed:
                close_all(fds or ())

    def error(self, to: Message, name: str, text: str) -> None:
        """Answers a call with an error."""
        if not self.closed and not to.flags & library.NO_REPLY_EXPECTED:
            self._send(library.error(self._next_serial(), to, name, text))

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        *,
        timeout: float = CALL_TIMEOUT,  # noqa: ASYNC109 - part of the call, as in every D-Bus library
    ) -> list[Any]:
        """Asks a peer; its answer's body. Raises CallFailed, TimeoutError, ConnectionError."""
        message, fds = await self.exchange(destination, path, interface, member, signature, body, timeout=timeout)
        close_all(fds)
        return message.body

    async def exchange(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        *,
        fds: list[int] | None = None,
        interactive: bool = False,
        timeout: float = CALL_TIMEOUT,  # noqa: ASYNC109 - part of the call, as in every D-Bus library
    ) -> tuple[Message, list[int]]:
        """`call` with descriptors: takes over `fds`; gives the whole answer, and its descriptors to be closed."""
        serial = self._next_serial()
        try:
            frame = library.call(
                serial, destination, path, interface, member, signature, body or [],
                n_fds=len(fds or ()), interactive=interactive,
            )  # fmt: skip
        except BaseException:
            close_all(fds or ())
            raise
        answer: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting[serial] = (destination, answer)
        try:
            self._send(frame, fds)
            async with asyncio.timeout(timeout):
                message, received = await answer
        except BaseException:
            # An answer that came in the very moment in which nobody waited any more.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                close_all(answer.result()[1])
            raise
        finally:
            self._waiting.pop(serial, None)
        if message.kind == library.ERROR:
            close_all(received)
            text = message.body[0] if message.body and isinstance(message.body[0], str) else "no reason given"
            raise CallFailed(message.error_name, text)
        return message, received

    async def call_bus(self, member: str, signature: str = "", body: list[Any] | None = None) -> list[Any]:
        """Asks the bus itself."""
        return await self.call(names.DBUS, names.DBUS_PATH, names.DBUS, member, signature, body)

    def _send(self, frame: bytes, fds: list[int] | None = None) -> None:
        if len(frame) > MAX_REPLY:
            close_all(fds or ())
            raise LimitExceeded(
                f"the answer would be {len(frame)} bytes, more than a bus takes: ask for less at a time"
            )
        self._stream.send(frame, fds)

    def _next_serial(self) -> int:
        self._serial = self._serial % _LAST_SERIAL + 1
        return self._serial

    # In

    def _frame(self, frame: Frame) -> None:
        try:
            message = library.parse(frame.data if not frame.cut else _header(frame.data))
        except Exception as reason:  # noqa: BLE001 - the edge of the bus: one unreadable message ends nothing
            self._unreadable(frame, reason)
            return
        if frame.cut:
            close_all(frame.fds)
            self._refuse(message, LimitExceeded("the message is too long: no call of hostd needs 1 MiB"))
            self._fail(message, LimitExceeded("the answer is longer than is taken in: ask for less at a time"))
        elif message.kind == library.METHOD_CALL:
            self._on_call(message, frame.fds)
        elif message.kind == library.SIGNAL:
            close_all(frame.fds)
            self._on_signal(message)
        elif (answer := self._asked(message)) is not None:
            answer.set_result((message, frame.fds))
        else:
            close_all(frame.fds)

    def _asked(self, message: Message) -> asyncio.Future[tuple[Message, list[int]]] | None:
        """What waits for this answer, if anything does."""
        destination, answer = self._waiting.get(message.reply_serial, ("", None))
        # Only who was asked may answer, and the bus, which says so when that one is gone.
        exact = destination.startswith(":") or destination == names.DBUS
        if answer is None or answer.done() or (exact and message.sender not in (destination, names.DBUS)):
            return None
        return answer

    def _fail(self, message: Message, failure: Exception) -> None:
        """Ends the wait for an answer that cannot be used."""
        if message.kind in (library.METHOD_RETURN, library.ERROR) and (answer := self._asked(message)) is not None:
            answer.set_exception(failure)

    def _unreadable(self, frame: Frame, reason: Exception) -> None:
        close_all(frame.fds)
        log.warning("a message on the bus cannot be read and is dropped: %s", reason)
        try:
            message = library.parse(_header(frame.data))
        except Exception:  # noqa: BLE001 - the edge of the bus: said above; there is nobody to answer
            return
        self._refuse(message, InvalidArgs("the message's body cannot be read"))
        self._fail(message, ConnectionError("the answer cannot be read"))

    def _refuse(self, message: Message, failure: HostdError) -> None:
        if message.kind == library.METHOD_CALL:
            self.error(message, failure.dbus_name, failure.message)

    def _end(self, reason: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
        for _destination, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the connection to the bus has ended"))


def _header(data: bytes) -> bytes:
    return headed(data, frame_lengths(data)[0])
