"""A small file of hostd's own, read whole. Whatever lies under its name instead is told, and never waited for."""

from __future__ import annotations

import os
import stat

from hostd.linux.descriptor import Descriptor


def read(path: str, largest: int, directory: int | None = None) -> bytes:
    """A regular file of at most `largest` bytes; a relative path is below the descriptor `directory`.

    Raises OSError (ELOOP for a symbolic link), and ValueError for what is no regular file, or larger.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with Descriptor(os.open(path, flags, dir_fd=directory)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("not a regular file")
        with open(opened.fileno(), "rb", closefd=False) as file:
            data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"larger than {largest} bytes")
    return data
