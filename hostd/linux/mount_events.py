"""Which mounts came into a mount namespace or left it: fanotify(7) with FAN_REPORT_MNT, since Linux 6.15.

As tried on 6.18: an event is in the queue before mount(2), move_mount(2), umount2(2) or the unlink(2) of a mountpoint
comes back, whatever namespace it was called in; every mount of a tree that comes or goes has its own. When a tree is
moved within the namespace only its top is told of, though all have other paths then. Nothing is told of a renamed
directory above a mountpoint, of a changed propagation, or of a mount under which another was put (MOVE_MOUNT_BENEATH).
"""

from __future__ import annotations

import os
import struct
from typing import Final

from hostd.linux import libc
from hostd.linux.descriptor import Descriptor

#: struct fanotify_event_metadata: length, version, where its records begin, what happened; the rest is not for mounts.
_EVENT: Final = struct.Struct("=IBxHQ8x")
_VERSION: Final = 3
#: struct fanotify_event_info_mnt: kind, length, mount.
_RECORD: Final = struct.Struct("=BxH4xQ")
_BUFFER: Final = 1 << 16


class MountEvents(Descriptor):
    """A fanotify group on the namespace that the fd `namespace` names. Raises OSError where it cannot be had.

    The kernel keeps up to 16384 events (fs.fanotify.max_queued_events) until they are read.
    """

    def __init__(self, namespace: int) -> None:
        super().__init__(libc.fanotify_init(libc.FAN_REPORT_MNT | libc.FAN_CLOEXEC | libc.FAN_NONBLOCK))
        try:
            mask = libc.FAN_MNT_ATTACH | libc.FAN_MNT_DETACH
            libc.fanotify_mark(self._fd, libc.FAN_MARK_ADD | libc.FAN_MARK_MNTNS, mask, namespace)
        except BaseException:
            self.close()
            raise

    def read(self) -> dict[int, bool] | None:
        """The mounts (numbers of `MountRows`) of all events until now: True for those that came, False for those that
        went, perhaps after they had come.

        None when events were lost, or a mount was moved: look at everything.
        """
        found: dict[int, bool] | None = {}
        while data := self._chunk():
            told = parse(data)
            found = None if found is None or told is None else found | told
        return found

    def _chunk(self) -> bytes:
        try:
            return os.read(self._fd, _BUFFER)
        except BlockingIOError:
            return b""


def parse(data: bytes) -> dict[int, bool] | None:
    """The mounts that one read(2) tells of; None where events were lost, one is not understood, or one is a move."""
    found: dict[int, bool] = {}
    offset = 0
    while offset < len(data):
        if len(data) - offset < _EVENT.size:
            return None
        length, version, records, mask = _EVENT.unpack_from(data, offset)
        end = min(offset + length, len(data))
        if version != _VERSION or mask & libc.FAN_Q_OVERFLOW or end < offset + records + _RECORD.size:
            return None
        kind, _, number = _RECORD.unpack_from(data, offset + records)
        came, went = mask & libc.FAN_MNT_ATTACH, mask & libc.FAN_MNT_DETACH
        if kind != libc.FAN_EVENT_INFO_TYPE_MNT or bool(came) == bool(went):
            return None
        found[number] = bool(came)
        offset += length
    return found
