"""A worker's note: which targets it is about to unmount, which of them it is at, and how far it may go.

It is for the next daemon. A mount leaves the table before an umount that hangs in it comes back, so of all that a
daemon knows when it is killed, this alone cannot be found again by looking. And it spares a message for each target.

The worker writes it, before it does what it says, but for the bound, which is the daemon's. The file is locked (flock):
as long as that is so, the worker or its daemon lives. A kill can cut a note off only together with the worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import mmap
import os
import secrets
import sys
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The file: two numbers of 64 bits, which both ends have mapped, and after that page the targets.
_BOUND, _AT, _PAGE = 0, 1, mmap.PAGESIZE
#: No bound.
NONE = (1 << 63) - 1
#: Bytes of targets that are read: as many as a request has.
_LARGEST = 128 << 10


class Left(NamedTuple):
    """A worker that an earlier daemon left behind, and what it is at: a path relative to the kubelet's root."""

    pid: int
    target: bytes


class _Number:
    """One of the two numbers, as an attribute of a note."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, note: Note, _: object) -> int:
        return note._numbers[self._place]  # noqa: SLF001  they are one thing

    def __set__(self, note: Note, number: int) -> None:
        note._numbers[self._place] = number  # noqa: SLF001


class Note:
    """One end of it: owns the descriptor `fd` of a file that `create` made."""

    #: The number of the target that the worker is at.
    at = _Number(_AT)
    #: From this target on the job is taken back. The worker may just have begun the first of them.
    bound = _Number(_BOUND)

    def __init__(self, fd: int, path: str = "") -> None:
        self._fd = fd
        self._path = path
        self._mapped = mmap.mmap(fd, _PAGE)
        self._numbers = memoryview(self._mapped).cast("Q")

    @classmethod
    def create(cls, directory: str | None = None) -> Self:
        """A new one in `directory`, or in memory where that cannot be: then no next daemon reads it.

        Raises OSError.
        """
        made = None
        if directory is not None:
            with contextlib.suppress(OSError):  # the disk is full, say: no reason not to unmount
                made = cls._in(directory)
        if made is None:
            fd = os.memfd_create("hostd-worker")
            os.ftruncate(fd, _PAGE)
            made = cls(fd)
        made.bound = NONE
        return made

    @classmethod
    def _in(cls, directory: str) -> Self:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        path = os.path.join(directory, secrets.token_hex(8))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, _PAGE)  # a page that cannot be had when it is written to is a SIGBUS
            return cls(fd, path)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise

    def fileno(self) -> int:
        """What the worker inherits."""
        return self._fd

    def write(self, targets: Sequence[bytes]) -> None:
        """The worker is about to unmount these. Raises OSError."""
        os.pwrite(self._fd, marshal.dumps((os.getpid(), list(targets))), _PAGE)

    def close(self) -> None:
        """The worker is left to itself: the next daemon may want to read it."""
        self._numbers.release()
        self._mapped.close()
        os.close(self._fd)

    def remove(self) -> None:
        """The worker has ended."""
        self.close()
        if self._path:
            with contextlib.suppress(OSError):  # the next start removes it
                os.unlink(self._path)


def left(directory: str) -> list[Left]:
    """What workers of earlier daemons that live still are at. Removes the notes that nobody writes any more."""
    found: list[Left] = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):  # what is no note says nothing
                found += _left(os.path.join(directory, name))
    return found


def _left(path: str) -> list[Left]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # marshal reads no further than what was written last, which may be shorter than what was there before.
        with contextlib.suppress(ValueError, EOFError, TypeError, IndexError):  # it is at nothing
            pid, targets = marshal.loads(os.pread(fd, _LARGEST, _PAGE))  # noqa: S302  root's alone to write
            at = int.from_bytes(os.pread(fd, 8, 8 * _AT), sys.byteorder)
            return [Left(int(pid), bytes(targets[at]))]
    else:
        os.unlink(path)
    finally:
        os.close(fd)
    return []
