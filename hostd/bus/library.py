"""The D-Bus library: dbus-fast where it is installed, else dbus-next. This module alone knows which.

What is used of it: finding and logging in to a bus (`MessageBus.connect`), and reading a message's bytes. The rest is
left aside, because it loses the connection over a full socket or an unknown flag, leaks descriptors, answers for
objects that do not exist, shows callers a traceback, and sends what no bus takes (`marshal` says more). Three of the
things used are private to the library (`MessageBus._sock` and `._auth_readline`, `_private.unmarshaller`);
tests/unit/bus/test_library.py pins them for every release that is supported.

HOSTD_DBUS_LIBRARY=dbus_fast|dbus_next forces one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import io
import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hostd.bus.marshal import Elements, Variant, marshal
from hostd.errors import NotSupported

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_CHOICES = ("dbus_fast", "dbus_next")
LOGIN_TIMEOUT = 10.0
#: The default of the specification, where DBUS_SYSTEM_BUS_ADDRESS is not set.
SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"

NO_REPLY_EXPECTED = 0x1
ALLOW_INTERACTIVE_AUTHORIZATION = 0x4
METHOD_CALL, METHOD_RETURN, ERROR, SIGNAL = 1, 2, 3, 4


def choose() -> str:
    """The library's module: the one that the environment forces, else the first that is installed."""
    forced = os.environ.get("HOSTD_DBUS_LIBRARY", "").replace("-", "_")
    if forced:
        if forced not in _CHOICES:
            raise NotSupported(f"HOSTD_DBUS_LIBRARY={forced}: it may be {' or '.join(_CHOICES)}")
        return forced
    for name in _CHOICES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise NotSupported("no D-Bus library is installed: install python3-dbus-fast or python3-dbus-next")


NAME = choose()
_aio = importlib.import_module(f"{NAME}.aio")
_unmarshaller = importlib.import_module(f"{NAME}._private.unmarshaller")

#: Whatever D-Bus can carry, and objects of a library that is only chosen at run time.
Value: TypeAlias = Any


def _fast_body() -> Callable[[str, list[Any]], bytes] | None:
    """dbus-fast's own marshalling, compiled and five times as fast, in the releases that have it right."""
    if NAME != "dbus_fast":
        return None
    marshaller = importlib.import_module("dbus_fast._private.marshaller").Marshaller

    def body(signature: str, values: list[Any]) -> bytes:
        return bytes(marshaller(signature, values).marshall())

    # 1.84 counts characters for bytes. (It also swallows errors, but the first is enough to tell.)
    return body if body("s", ["ä"]) == bytes(marshal("s", ["ä"])) else None


_body = _fast_body() or marshal
_variant_type: Value = Variant if _body is marshal else importlib.import_module(NAME).Variant


def variant(signature: str, value: Value) -> Value:
    """A variant of one complete type, whose value is looked at when it is marshalled and not before."""
    if _variant_type is Variant:
        return Variant(signature, value)
    return _variant_type(signature, value, False)


def element(signature: str, value: Value) -> bytes:
    """One element for `Elements`, of a struct's signature (an entry of a dictionary travels as one). Raises what
    `marshal` raises."""
    return bytes(_body(signature, [value]))


def marshals(signature: str, value: Value) -> bool:
    """Whether this value can travel as this type."""
    try:
        _body(signature, [value])
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it cannot travel
        return False
    return True


class Message(NamedTuple):
    """A message as it came. `sender` is the bus's word, never the peer's."""

    kind: int
    flags: int
    serial: int
    reply_serial: int
    sender: str
    path: str
    interface: str | None
    member: str
    error_name: str
    signature: str
    body: list[Any]


def parse(frame: bytes) -> Message:
    """One whole message. Raises whatever the library raises for what it cannot read.

    It has to come from a bus, which lets no body through that is not as its signature says (dbus-daemon and dbus-broker
    look at each): dbus-fast's compiled reader does not look where a message ends, and 5.2.0 dies of a signal.
    """
    flags = frame[2]
    # Unknown flags are to be ignored, says the specification; dbus-fast 1.84 raises for them.
    known = io.BytesIO(frame[:2] + bytes([flags & 0x7]) + frame[3:])
    message = _unmarshaller.Unmarshaller(known).unmarshall()
    if message is None:
        raise ValueError("the message is shorter than it says")
    return Message(
        kind=message.message_type.value,
        flags=flags,
        serial=message.serial,
        reply_serial=message.reply_serial or 0,
        sender=message.sender or "",
        path=message.path or "",
        interface=message.interface,
        member=message.member or "",
        error_name=message.error_name or "",
        signature=message.signature,
        body=message.body,
    )


_FIELDS = {
    "path": (1, "o"),
    "interface": (2, "s"),
    "member": (3, "s"),
    "error_name": (4, "s"),
    "reply_serial": (5, "u"),
    "destination": (6, "s"),
    "signature": (8, "g"),
    "n_fds": (9, "u"),
}


def _frame(kind: int, flags: int, serial: int, body: list[Any], **fields: Value) -> bytes:
    """A whole message; fields that are empty are left out. Raises what `marshal` raises."""
    # Elements are for our own marshalling alone.
    write = marshal if any(isinstance(each, Elements) for each in body) else _body
    content = write(fields["signature"], body)
    header = [[_FIELDS[name][0], Variant(_FIELDS[name][1], value)] for name, value in fields.items() if value]
    frame = marshal("yyyyuua(yv)", [ord("l"), kind, flags, 1, len(content), serial, header])
    return bytes(frame + bytes(-len(frame) % 8) + content)


def call(
    serial: int,
    destination: str,
    path: str,
    interface: str,
    member: str,
    signature: str,
    body: list[Any],
    *,
    n_fds: int = 0,
    interactive: bool = False,
) -> bytes:
    """The frame of a method call; `n_fds` descriptors go with it. `interactive`: a person can be asked by polkit."""
    return _frame(
        METHOD_CALL, ALLOW_INTERACTIVE_AUTHORIZATION if interactive else 0, serial, body,
        path=path, interface=interface, member=member, destination=destination, signature=signature, n_fds=n_fds,
    )  # fmt: skip


def method_return(serial: int, to: Message, signature: str, body: list[Any], n_fds: int = 0) -> bytes:
    """The frame of an answer; `n_fds` descriptors go with it."""
    return _frame(
        METHOD_RETURN, NO_REPLY_EXPECTED, serial, body,
        reply_serial=to.serial, destination=to.sender, signature=signature, n_fds=n_fds,
    )  # fmt: skip


def error(serial: int, to: Message, name: str, text: str) -> bytes:
    """The frame of an error."""
    return _frame(
        ERROR, NO_REPLY_EXPECTED, serial, [text],
        error_name=name, reply_serial=to.serial, destination=to.sender, signature="s",
    )  # fmt: skip


def signal(serial: int, path: str, interface: str, member: str, signature: str, body: list[Any]) -> bytes:
    """The frame of a signal to everybody."""
    return _frame(
        SIGNAL, NO_REPLY_EXPECTED, serial, body, path=path, interface=interface, member=member, signature=signature
    )


class _Bus(_aio.MessageBus):  # type: ignore[misc, name-defined]  # of a library that is only chosen at run time
    """The library's, which notices when the bus hangs up in the middle of the login.

    dbus-next 0.2.3 and dbus-fast 1.84 read the end of the stream again and again there and never let the loop go on,
    so that no timeout ends it.
    """

    async def _auth_readline(self) -> str:
        line = b""
        while not line.endswith(b"\r\n"):
            # One byte at a time: what follows the line is not for us to take.
            byte = await asyncio.get_running_loop().sock_recv(self._sock, 1)
            if not byte:
                raise ConnectionResetError("the bus hung up during the login")
            line += byte
        return line[:-2].decode()


async def log_in(address: str | None = None) -> tuple[socket.socket, str]:
    """A socket on which a bus has said hello to us, and our unique name there.

    The library finds the bus, authenticates and says Hello; then its hands are taken off the socket. Raises OSError,
    TimeoutError, or an error of the library's own.
    """
    where = address or os.environ.get("DBUS_SYSTEM_BUS_ADDRESS") or SYSTEM_BUS
    # dbus-next connects in the constructor: made in two steps, there is something to let go of when that fails.
    bus: Value = _Bus.__new__(_Bus)
    try:
        bus.__init__(bus_address=where, negotiate_unix_fd=True)
        # Without a bound, a bus that accepts and then says nothing holds us for ever.
        async with asyncio.timeout(LOGIN_TIMEOUT):
            await bus.connect()
        return bus._sock.dup(), bus.unique_name  # noqa: SLF001 - private in both libraries; pinned by a test
    finally:
        _let_go(bus)


def _let_go(bus: Value) -> None:
    """Closes the library's own descriptor of the socket and stops its reading of it."""
    library_socket: socket.socket | None = getattr(bus, "_sock", None)
    if library_socket is None:
        return
    if library_socket.fileno() >= 0:
        loop = asyncio.get_running_loop()
        loop.remove_reader(library_socket.fileno())
        loop.remove_writer(library_socket.fileno())
    with contextlib.suppress(OSError):  # what is left of the login is thrown away
        bus._stream.close()  # noqa: SLF001 - the file object that holds the socket open
    library_socket.close()
