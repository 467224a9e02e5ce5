"""A small file of hostd's own, read and replaced whole. Whatever lies under its name instead is told, and never waited
for."""

from __future__ import annotations

import contextlib
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


def replace(directory: int, name: str, data: bytes) -> None:
    """Durable on return, in the directory of that descriptor; for root alone to read.

    Raises OSError, and then the old file is as it was, and no litter is left.
    """
    temporary = f".{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):  # what went wrong first is what is told
            os.unlink(temporary, dir_fd=directory)
        raise
    os.fsync(directory)
