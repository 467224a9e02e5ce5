"""inotify(7): what happens in a directory."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from hostd.linux import libc
from hostd.linux.descriptor import Descriptor

_HEADER = struct.Struct("=iIII")
_BUFFER = 1 << 16


@dataclass(frozen=True, slots=True)
class Event:
    """One event: the watch, the IN_… bits of `hostd.linux.libc`, and the name in the directory (may be empty).

    With IN_Q_OVERFLOW (watch -1) events were lost: look at everything. With IN_IGNORED the watch is no more.
    """

    wd: int
    mask: int
    name: bytes


class Inotify(Descriptor):
    """An inotify instance, close-on-exec, never blocking; closed, it ends all watches."""

    def __init__(self) -> None:
        super().__init__(libc.inotify_init1(libc.IN_CLOEXEC | libc.IN_NONBLOCK))

    def add(self, path: bytes, mask: int) -> int:
        """The watch's number; that of the watch there is, with the new mask, for an inode that has one already."""
        return libc.inotify_add_watch(self._fd, path, mask)

    def remove(self, wd: int) -> None:
        """Ends a watch, if it has not ended by itself. IN_IGNORED is still told of it."""
        try:
            libc.inotify_rm_watch(self._fd, wd)
        except OSError as error:
            # EINVAL: its directory went first, and the notice of that is still in the queue.
            if error.errno != errno.EINVAL:
                raise

    def read(self) -> list[Event]:
        """The events that wait, at most 64 KiB of them; [] when there is none."""
        try:
            return parse(os.read(self._fd, _BUFFER))
        except BlockingIOError:
            return []


def parse(data: bytes) -> list[Event]:
    """The events of one read(2): each a header, then a name padded with NULs to the length that the header tells."""
    events = []
    offset = 0
    while offset < len(data):
        wd, mask, _cookie, length = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size
        events.append(Event(wd, mask, data[offset : offset + length].rstrip(b"\0")))
        offset += length
    return events
