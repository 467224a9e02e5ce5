"""What happens in the socket's directory: another helper binds there, somebody changes owner or mode, or it goes."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from hostd.linux import libc
from hostd.linux.inotify import Inotify

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_MASK: Final = (
    libc.IN_CREATE | libc.IN_DELETE | libc.IN_MOVED_FROM | libc.IN_MOVED_TO | libc.IN_ATTRIB
    | libc.IN_DELETE_SELF | libc.IN_MOVE_SELF | libc.IN_ONLYDIR
)  # fmt: skip
#: The watch is of another directory now than the one at the path, or of none.
_LOST: Final = libc.IN_IGNORED | libc.IN_MOVE_SELF | libc.IN_DELETE_SELF | libc.IN_UNMOUNT


class DirectoryWatch:
    """Calls `changed` when something happens to the path or to its directory itself; nothing before `look`."""

    def __init__(self, path: bytes, changed: Callable[[], None]) -> None:
        self._directory, self._name = os.path.split(path)
        self._changed = changed
        self._inotify: Inotify | None = None
        self._watching: tuple[int, int] | None = None
        self._complained = False

    @property
    def watching(self) -> bool:
        """Whether changes are told of."""
        return self._watching is not None

    def look(self) -> None:
        """Watches the directory that is there now, if it is not watched already."""
        try:
            found = os.stat(self._directory)
            if self._watching == (found.st_dev, found.st_ino):
                return
            # A new instance drops the watch on a directory that was moved away or mounted over.
            self.close()
            inotify = Inotify()
        except OSError as error:
            self._complain(error)
            return
        try:
            inotify.add(self._directory, _MASK)
        except OSError as error:
            inotify.close()
            self._complain(error)
            return
        self._inotify, self._watching, self._complained = inotify, (found.st_dev, found.st_ino), False
        asyncio.get_running_loop().add_reader(inotify.fileno(), self._on_events, inotify)
        # What happened between the caller's look and this watch was told to nobody.
        self._changed()

    def _complain(self, error: OSError) -> None:
        self._watching = None
        if not self._complained and not isinstance(error, FileNotFoundError):
            self._complained = True
            log.warning("%s cannot be watched, so it is looked at often: %s", os.fsdecode(self._directory), error)

    def _on_events(self, inotify: Inotify) -> None:
        events = inotify.read()
        if any(event.mask & _LOST for event in events):
            self._watching = None
        if any(event.mask & (_LOST | libc.IN_Q_OVERFLOW) or event.name in (b"", self._name) for event in events):
            self._changed()

    def close(self) -> None:
        """Watches nothing; `look` begins anew."""
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
        self._inotify = self._watching = None
