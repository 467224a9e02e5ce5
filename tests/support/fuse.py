"""File systems that hang for tests, without libfuse: a FUSE server that says hello and never answers again.

    with DeadFileSystem(host, target) as dead:       # stat, open and lookups on it hang
    with DeadFileSystem(host, target, block=True):   # the last umount of it hangs too, even against SIGKILL
        ...
        dead.end()                                   # the server dies: whatever hung returns

With `block` it is a `fuseblk` mount on a loop device: for those the kernel sends DESTROY within umount(2) and waits for
the answer uninterruptibly. The mount has left the mount table by then. The server is a child of the test that dies with
it, and with the server's descriptor the connection is aborted: nothing can hang beyond the test.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from tests.support.mountns import Child, MountNamespace, enter, mount

_INIT = 26
_LOOP_CTL_GET_FREE, _LOOP_SET_FD, _LOOP_CLR_FD = 0x4C82, 0x4C00, 0x4C01


def attach_loop(image: bytes) -> bytes:
    """Attaches a file to a free loop device and gives the device's path; `detach_loop` ends it."""
    with open("/dev/loop-control", "rb") as control, open(image, "r+b") as backing:
        while True:
            path = b"/dev/loop%d" % fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            with open(path, "r+b", buffering=0) as device, contextlib.suppress(OSError):
                fcntl.ioctl(device, _LOOP_SET_FD, backing.fileno())
                return path


def detach_loop(device: bytes) -> None:
    """Detaches a loop device (at its last close); one that is free already is fine."""
    with open(device, "rb") as opened, contextlib.suppress(OSError):
        fcntl.ioctl(opened, _LOOP_CLR_FD)


class DeadFileSystem:
    """A mount on `target` (an existing directory inside `namespace`) whose server never answers. See the module."""

    def __init__(self, namespace: MountNamespace, target: bytes, *, block: bool = False) -> None:
        self._loop = b""
        if block:
            image = namespace.write(namespace.base + b"/.fuse-%d" % id(self), b"\0" * (1 << 20))
            self._loop = attach_loop(namespace.outside(image))

        def body(tell: Callable[[object], None]) -> None:
            enter(namespace.path)
            self._serve(target, tell)

        self.server = Child(body)
        try:
            self.server.hear()
        except BaseException:
            self.end()
            raise

    def _serve(self, target: bytes, tell: Callable[[object], None]) -> NoReturn:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % fd
        mount(self._loop or b"dead", target, b"fuseblk" if self._loop else b"fuse", 0, options)
        _length, opcode, unique = struct.unpack("<IIQ", os.read(fd, 1 << 16)[:16])
        assert opcode == _INIT, opcode
        answer = struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 16, 12, 4096, 1, 1, 0, 0, *[0] * 7)
        os.write(fd, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
        tell(None)
        while True:
            signal.pause()

    def end(self) -> None:
        """Ends the server: all that hangs on it returns with an error. May be called again."""
        self.server.end()
        if self._loop:
            detach_loop(self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
