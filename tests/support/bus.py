"""A bus of the test's own, clients that are not hostd's adapter, and the adapter under either library.

async with PrivateBus(tmp_path) as bus:
    client = await Client.connect(bus.address)
    body = await client.call(names.ROOT, names.MANAGER, "ListVMs")
    out = await busctl(bus, "call", ...)
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hostd.bus import names
from hostd.metrics import Metrics
from tests.support.fake_service import FakeService
from tests.support.wait import DEADLINE, eventually, until

POLICY_OPEN = """
  <policy context="default">
    <allow user="*"/> <allow own="*"/> <allow send_destination="*"/> <allow receive_sender="*"/>
  </policy>"""

_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  {policy}
  <limit name="max_connections_per_user">4096</limit>
  <limit name="max_completed_connections">4096</limit>
  {more}
</busconfig>
"""


class PrivateBus:
    """A dbus-daemon with its own configuration and socket, which lives as long as the `with`."""

    def __init__(self, directory: Path, policy: str = POLICY_OPEN, more: str = "", mount_namespace: str = "") -> None:
        """`mount_namespace`: where it runs, with the user database and the policy files that are there."""
        self._enter = ["nsenter", f"--mount={mount_namespace}", "--"] if mount_namespace else []
        self._config = directory / "bus.conf"
        self._socket = directory / "bus"
        self._config.write_text(_CONFIG.format(socket=self._socket, policy=policy, more=more))
        # Others may come in, where the test is about them.
        directory.chmod(0o755)
        self.address = f"unix:path={self._socket}"
        self._daemon: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it takes connections."""
        self._spawn()
        await eventually(self._answers)

    def start_now(self) -> None:
        """`start` for tests that run no loop."""
        self._spawn()
        until(self._answers)

    def _spawn(self) -> None:
        command = [
            *self._enter,
            "dbus-daemon",
            f"--config-file={self._config}",
            "--nofork",
            "--nopidfile",
            "--nosyslog",
        ]
        self._daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
            return True

    @property
    def pid(self) -> int:
        """The daemon's."""
        assert self._daemon is not None
        return self._daemon.pid

    def freeze(self) -> None:
        """It takes nothing more, until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """It is gone, as after a crash."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class Program:
    """How a program ended and what it said."""

    code: int
    out: str
    error: str


async def run(
    *command: str, environment: dict[str, str] | None = None, user: int | None = None, groups: Sequence[int] = ()
) -> Program:
    """Runs a program while the loop goes on."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
        user=user,
        group=user,
        extra_groups=list(groups) if user is not None else None,
    )
    out, error = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode is not None
    return Program(process.returncode, out.decode(), error.decode())


async def busctl(bus: PrivateBus, *arguments: str, user: int | None = None, groups: Sequence[int] = ()) -> Program:
    """busctl on this bus, as this user."""
    return await run("busctl", f"--address={bus.address}", "--no-pager", *arguments, user=user, groups=groups)


async def call_manager(
    bus: PrivateBus, *arguments: str, user: int | None = None, groups: Sequence[int] = ()
) -> Program:
    """`busctl call` of one of the manager's methods."""
    return await busctl(bus, "call", names.BUS_NAME, names.ROOT, names.MANAGER, *arguments, user=user, groups=groups)


async def gdbus(
    bus: PrivateBus, command: str, *arguments: str, user: int | None = None, groups: Sequence[int] = ()
) -> Program:
    """gdbus on this bus, as this user. It shows an error's own sentence; busctl has words of its own for some."""
    if shutil.which("gdbus") is None:
        pytest.skip("gdbus is not installed: it is in Debian's libglib2.0-bin")
    return await run("gdbus", command, f"--address={bus.address}", *arguments, user=user, groups=groups)


class Failed(Exception):
    """A call was answered with an error."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Client:
    """A client through the bare low level of a library; never the one the server runs on, where there are two."""

    def __init__(self, library: str, bus: Any) -> None:
        self.library = importlib.import_module(library)
        self.bus = bus
        self.signals: list[Any] = []
        self.bus.add_message_handler(self._message)

    @classmethod
    async def connect(cls, address: str, library: str | None = None) -> Client:
        """With the library that the server does not use."""
        if library is None:
            from hostd.bus import library as chosen

            library = "dbus_next" if chosen.NAME == "dbus_fast" else "dbus_fast"
        module = importlib.import_module(f"{library}.aio")
        bus = module.MessageBus(bus_address=address, negotiate_unix_fd=True)
        await bus.connect()
        return cls(library, bus)

    def _message(self, message: Any) -> None:
        if message.message_type is self.library.MessageType.SIGNAL and message.member != "NameAcquired":
            self.signals.append(message)

    @property
    def unique_name(self) -> str:
        return str(self.bus.unique_name)

    def variant(self, signature: str, value: Any) -> Any:
        """A variant of its library."""
        return self.library.Variant(signature, value)

    def message(
        self, path: str, interface: str | None, member: str, signature: str = "", *body: Any, **more: Any
    ) -> Any:
        """A call's message."""
        more.setdefault("destination", names.BUS_NAME)
        return self.library.Message(
            path=path, interface=interface, member=member, signature=signature, body=list(body), **more
        )

    async def ask(self, message: Any) -> Any:
        """The answer's message. Raises Failed."""
        answer = await asyncio.wait_for(self.bus.call(message), DEADLINE)
        if answer.message_type is self.library.MessageType.ERROR:
            raise Failed(answer.error_name, answer.body[0])
        return answer

    async def call(
        self, path: str, interface: str | None, member: str, signature: str = "", *body: Any, **more: Any
    ) -> list[Any]:
        """The answer's body. Raises Failed."""
        answer = await self.ask(self.message(path, interface, member, signature, *body, **more))
        return list(answer.body)

    async def manager(self, member: str, signature: str = "", *body: Any, **more: Any) -> list[Any]:
        """Asks the manager."""
        return await self.call(names.ROOT, names.MANAGER, member, signature, *body, **more)

    async def get(self, path: str, interface: str, name: str) -> Any:
        """A property's value."""
        (value,) = await self.call(path, names.PROPERTIES, "Get", "ss", interface, name)
        return value.value

    async def get_all(self, path: str, interface: str) -> dict[str, Any]:
        """An interface's values."""
        (values,) = await self.call(path, names.PROPERTIES, "GetAll", "s", interface)
        return {name: value.value for name, value in values.items()}

    async def subscribe(self, rule: str = f"type='signal',sender='{names.BUS_NAME}'") -> None:
        """Signals of hostd go to `signals` from now on."""
        await self.call(names.DBUS_PATH, names.DBUS, "AddMatch", "s", rule, destination=names.DBUS)

    def close(self) -> None:
        """Gone at once. Closed without a word to the loop, its socket would be taken for the next of its number."""
        self.bus.disconnect()
        if self.bus._sock is not None and self.bus._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.bus._sock.fileno())
            asyncio.get_running_loop().remove_writer(self.bus._sock.fileno())
            with contextlib.suppress(OSError):
                self.bus._stream.close()
            self.bus._sock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bus.disconnect()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.bus.wait_for_disconnect(), DEADLINE)
        self.close()


@contextlib.contextmanager
def adapter_on(library_name: str) -> Iterator[str]:
    """hostd.bus on this library; everything in it looks at the module anew for what it uses of the library."""
    from hostd.bus import library

    def load() -> None:
        try:
            importlib.reload(library)
        except ImportError:
            pytest.skip(f"{library_name} is not installed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTD_DBUS_LIBRARY", library_name)
        load()
        assert library_name.replace("-", "_") == library.NAME
        yield library.NAME
    load()


@contextlib.asynccontextmanager
async def staged(*vms: Any, policy: str = POLICY_OPEN, more: str = "") -> AsyncIterator[tuple[PrivateBus, FakeService]]:
    """A private bus with a fake service on it."""
    async with private_bus(policy, more) as bus:
        service = FakeService(*vms)
        metrics = Metrics(service)
        metrics.listen()
        async with serving(bus, service, metrics=metrics.render):
            yield bus, service
        service.close()


@contextlib.asynccontextmanager
async def private_bus(policy: str = POLICY_OPEN, more: str = "") -> AsyncIterator[PrivateBus]:
    """A private bus in a directory of its own, which other users can reach."""
    with tempfile.TemporaryDirectory(prefix="hostd-bus-") as directory:
        async with PrivateBus(Path(directory), policy, more) as bus:
            yield bus


@contextlib.asynccontextmanager
async def serving(bus: PrivateBus, service: Any, **options: Any) -> AsyncIterator[Any]:
    """A BusServer in this process, whose name is on the bus."""
    from hostd.bus.server import BusServer

    server = BusServer(service, address=bus.address, **options)
    task = asyncio.create_task(server.run())
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
    ready.cancel()
    if task.done():
        task.result()
    try:
        yield server
    finally:
        server.stop()
        await asyncio.wait_for(task, DEADLINE)


class Bare:
    """A client of a socket and nothing else, for messages that no library lets out."""

    def __init__(self, bus: PrivateBus) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(bus.address.partition("=")[2])
        self.sock.sendall(b"\0AUTH EXTERNAL %s\r\n" % str(os.getuid()).encode().hex().encode())
        self._line()
        self.sock.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        self._line()
        self.sock.sendall(b"BEGIN\r\n")
        self.serial = 0
        self.send(names.DBUS, names.DBUS_PATH, names.DBUS, "Hello")

    def _line(self) -> None:
        while (byte := self.sock.recv(1)) != b"\n":
            assert byte, "the bus hung up during the login"

    def send(
        self,
        destination: str,
        path: str,
        interface: str | None,
        member: str,
        signature: str = "",
        body: bytes = b"",
        *,
        flags: int = 0,
        fields: bytes = b"",
        fds: list[int] | None = None,
        kind: int = 1,
    ) -> int:
        """Sends a message made by hand; its serial."""
        self.serial += 1
        out = b""
        given = [
            (1, "o", path),
            (6, "s", destination),
            (2, "s", interface),
            (3, "s", member),
            (8, "g", signature or None),
        ]
        for code, type_, text in given:
            if text is not None:
                out += bytes(-len(out) % 8) + bytes([code, 1]) + type_.encode() + b"\0"
                raw = text.encode()
                out += (
                    bytes([len(raw)]) + raw + b"\0"
                    if type_ == "g"
                    else bytes(-len(out) % 4) + struct.pack("<I", len(raw)) + raw + b"\0"
                )
        if fds:
            out += bytes(-len(out) % 8) + b"\x09\x01u\0" + struct.pack("<I", len(fds))
        out += fields
        head = struct.pack("<cBBBIII", b"l", kind, flags, 1, len(body), self.serial, len(out)) + out
        data = head + bytes(-len(head) % 8) + body
        if fds:
            sent = socket.send_fds(self.sock, [data], fds)
            data = data[sent:]
        self.sock.sendall(data)
        return self.serial

    def close(self) -> None:
        self.sock.close()


def open_fds(pid: int | str = "self") -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))
