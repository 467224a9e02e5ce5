"""A file descriptor with one owner, who closes it once: its number may be somebody else's afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Descriptor:
    """Owns one descriptor, until `close` or the end of a `with`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Its number, for `add_reader` and the like; -1 once it is closed."""
        return self._fd

    def close(self) -> None:
        """Closes it; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
