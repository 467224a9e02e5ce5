"""A VM without a guest: a real QEMU whose SCSI controller is driven from here, register by register, over qtest.

What a guest's kernel would send to its disk goes the same way through QEMU, and nothing has to be booted. The
controller is a virtio-scsi of the legacy kind: a few I/O ports, and queues in guest memory.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

_SLOT, _PORTS = 4, 0xC000
_QUEUE, _BUFFERS = 0x100000, 0x200000
_REQUEST_QUEUE = 2
_PAGE = 4096
#: Descriptor flags: another one follows; the device writes to it.
_NEXT, _WRITE = 1, 2
_RESPONSE = struct.Struct("<IIHBB96s")
_UNIT_ATTENTION = 6
DEADLINE = 60.0


class Guest:
    """One QEMU as 107:107, with `options` of its own and a disk named d0. A qtest and a monitor stand beside it."""

    def __init__(self, options: Sequence[str], device: str = "scsi-block") -> None:
        self._sockets = [socket.socketpair() for _ in range(2)]
        fds = [theirs.fileno() for _, theirs in self._sockets]
        command = [
            "setpriv", "--reuid=107", "--regid=107", "--clear-groups", "qemu-system-x86_64", "-nodefaults",
            "-display", "none", "-machine", "pc,accel=tcg", "-m", "16", "-S",
            "-chardev", f"socket,id=qtest,fd={fds[0]}", "-qtest", "chardev:qtest", "-qtest-log", "none",
            "-chardev", f"socket,id=m,fd={fds[1]}", "-mon", "chardev=m,mode=control", *options,
            "-device", f"virtio-scsi-pci,id=s0,disable-modern=on,disable-legacy=off,addr={_SLOT}",
            "-device", f"{device},drive=d0,bus=s0.0,scsi-id=0,lun=0",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        self._qtest, self._monitor = (self._stream(ours, theirs) for ours, theirs in self._sockets)
        try:
            self._read(self._monitor)
            self.monitor("qmp_capabilities")
            self._set_up()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _stream(ours: socket.socket, theirs: socket.socket) -> socket.SocketIO:
        theirs.close()
        ours.settimeout(DEADLINE)
        return ours.makefile("rwb", buffering=0)

    def _read(self, stream: socket.SocketIO) -> bytes:
        line = stream.readline()
        if not line:
            assert self.process.stderr is not None
            raise EOFError(f"QEMU has ended: {self.process.stderr.read()}")
        return line

    # -- its monitor

    def monitor(self, command: str) -> Any:
        """One command's result."""
        self._monitor.write(json.dumps({"execute": command}).encode() + b"\n")
        while "event" in (reply := json.loads(self._read(self._monitor))):
            pass
        return reply["return"]

    # -- its hardware

    def _ask(self, words: str) -> str:
        self._qtest.write(words.encode() + b"\n")
        while not (answer := self._read(self._qtest).decode().split()) or answer[0] == "IRQ":
            pass
        assert answer[0] == "OK", (words, answer)
        return answer[-1]

    def _write(self, address: int, data: bytes) -> None:
        self._ask(f"write {address:#x} {len(data):#x} 0x{data.hex()}")

    def _memory(self, address: int, size: int) -> bytes:
        return bytes.fromhex(self._ask(f"read {address:#x} {size:#x}")[2:])

    def _configure(self, register: int, value: int) -> None:
        self._ask(f"outl 0xcf8 {0x80000000 | _SLOT << 11 | register:#x}")
        self._ask(f"outl 0xcfc {value:#x}")

    def _set_up(self) -> None:
        self._configure(0x10, _PORTS)
        self._configure(0x04, 7)
        for status in (1, 3):
            self._ask(f"outb {_PORTS + 0x12:#x} {status}")
        self._ask(f"outw {_PORTS + 0x0E:#x} {_REQUEST_QUEUE}")
        self._size = int(self._ask(f"inw {_PORTS + 0x0C:#x}"), 16)
        self._available = _QUEUE + 16 * self._size
        self._used = -(-(self._available + 6 + 2 * self._size) // _PAGE) * _PAGE
        self._ask(f"outl {_PORTS + 0x08:#x} {_QUEUE // _PAGE:#x}")
        self._ask(f"outb {_PORTS + 0x12:#x} 7")
        self._sent = 0

    # -- its disk

    def send(self, command: bytes, data: bytes = b"", answer: int = 0) -> None:
        """Gives the disk a command, with data for it or room for what it answers."""
        header = struct.pack("<8sQ3B32s", b"\x01\x00\x40", 1, 0, 0, 0, command)
        buffers = [(header, 0), *([(data, 0)] if data else []), (bytes(_RESPONSE.size), _WRITE)]
        buffers += [(bytes(answer), _WRITE)] if answer else []
        table, address = b"", _BUFFERS
        for number, (content, flag) in enumerate(buffers):
            more = _NEXT if number + 1 < len(buffers) else 0
            self._write(address, content)
            table += struct.pack("<QIHH", address, len(content), flag | more, (number + 1) * bool(more))
            address += _PAGE
        self._response, self._answer = _BUFFERS + _PAGE * (1 + bool(data)), answer
        self._write(_QUEUE, table)
        self._write(self._available + 4 + 2 * (self._sent % self._size), bytes(2))
        self._sent += 1
        self._write(self._available, struct.pack("<HH", 0, self._sent & 0xFFFF))
        self._ask(f"outw {_PORTS + 0x10:#x} {_REQUEST_QUEUE}")

    @property
    def done(self) -> bool:
        """Whether the command that was sent last is done."""
        (index,) = struct.unpack("<2xH", self._memory(self._used, 4))
        return bool(index == self._sent & 0xFFFF)

    def result(self) -> tuple[int, bytes, bytes]:
        """Waits for it: SCSI status, sense, answer."""
        deadline = time.monotonic() + DEADLINE
        while not self.done:
            assert time.monotonic() < deadline, "the disk does not answer"
            time.sleep(0.01)
        _, _, _, status, response, sense = _RESPONSE.unpack(self._memory(self._response, _RESPONSE.size))
        assert response == 0, f"the controller answers {response}"
        return status, sense, self._memory(self._response + _PAGE, self._answer) if self._answer else b""

    def command(self, command: bytes, data: bytes = b"", answer: int = 0) -> tuple[int, bytes]:
        """Sends one, once more for each unit attention, and waits: SCSI status, answer."""
        while True:
            self.send(command, data, answer)
            status, sense, answered = self.result()
            if status != 2 or sense[2] & 0xF != _UNIT_ATTENTION:
                return status, answered

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        for stream in (self._qtest, self._monitor):
            stream.close()
        for ours, _ in self._sockets:
            ours.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
