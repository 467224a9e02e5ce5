"""The worker: a process of hostd's that does all that can hang, so that only it hangs.

Started by `hostd.linux.link` with one end of a SOCK_SEQPACKET pair and an eventfd, the bell. It serves one request
after the other, each one message `(op, arguments)`, with any number of `(PART, value)` and at last `(END, value)` or
`(ERROR, errno, text)`. The daemon reads when the bell rings. Quick targets are told together, because a message costs
more than an umount; which one it is at, its note says (`hostd.linux.note`), should it hang there.

It ends when the other end closes, or stops sending: then also before the next target of a job under way, so that a
job given up by the daemon touches nothing more, however late it is taken up.

It joins the host's mount namespace at `hello`. Everything is imported before that: afterwards paths mean another tree.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import signal
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from hostd.linux import clock, holders, libc, process, umount, walk
from hostd.linux.note import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Rises with every change of the messages: after an upgrade an old daemon may start a new worker.
PROTOCOL: Final = 4
PART: Final = 0
END: Final = 1
ERROR: Final = 2

#: Largest message, bytes; and what one part of a long answer holds at most.
MESSAGE_MAX: Final = 128 << 10
PART_MAX: Final = 32 << 10
#: ns: outcomes of targets are told at least so often.
TELL_EVERY: Final = 10_000_000
#: Outcomes in one message, whose words may be long.
TELL_MOST: Final = 64
#: Entries of one directory; more is an error, for the directory may be an attacker's.
ENTRIES_MAX: Final = 65536
#: Entries that are passed over between two signs of progress.
_PROGRESS_EVERY: Final = 16384

_T = TypeVar("_T")

#: What tells once that something came to a directory, or came to or went from it.
_CAME: Final = libc.IN_CREATE | libc.IN_MOVED_TO | libc.IN_ONLYDIR | libc.IN_ONESHOT
_CAME_OR_WENT: Final = _CAME | libc.IN_DELETE | libc.IN_MOVED_FROM

_DT_UNKNOWN, _DT_DIR, _DT_REG, _DT_LNK = 0, 4, 8, 10


class Worker:
    """The state of one worker: its socket and, after `hello`, the configured kubelet root."""

    def __init__(self, fd: int, bell: int, note_fd: int, inotify: int = -1) -> None:
        self._fd = fd
        self._bell = bell
        self._note = Note(note_fd)
        self._inotify = inotify
        self._root = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLRDHUP)
        self._ops: dict[str, Callable[..., Any]] = {
            "hello": self.hello,
            "root": self.root,
            "unmount": self.unmount,
            "list_directory": self.list_directory,
            "list_block_nodes": self.list_block_nodes,
            "read_file": self.read_file,
            "command_lines": self.command_lines,
            "holders": self.holders,
        }

    def serve(self) -> None:
        """Until the daemon closes its end. SIGTERM ends it between jobs."""
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            request = os.read(self._fd, MESSAGE_MAX)
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
            if not request:
                return
            self._answer(*marshal.loads(request))  # noqa: S302  only the daemon holds the other end

    def _answer(self, op: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._send(END, self._ops[op](*arguments))
        except BrokenPipeError:
            raise
        except OSError as error:
            name = f": {os.fsdecode(error.filename)!r}" if error.filename is not None else ""
            self._send(ERROR, error.errno or errno.EIO, f"{error.strerror or error}{name}"[:4096])
        except Exception as error:  # noqa: BLE001  the edge of a job: the daemon is told, and names it
            self._send(ERROR, 0, f"{type(error).__name__}: {error}"[:4096])

    def _send(self, *message: object) -> None:
        os.write(self._fd, marshal.dumps(message))  # type: ignore[arg-type]
        os.eventfd_write(self._bell, 1)

    def _part(self, value: object) -> None:
        """Sends a part of the answer; ends the process when the daemon has given the job up."""
        self._send(PART, value)
        self._end_if_given_up()

    def _end_if_given_up(self) -> None:
        if self._poll.poll(0):
            sys.exit(0)

    # -- the operations; what they return is the END of the answer

    def hello(self, protocol: int, namespace: str, kubelet_root: bytes) -> tuple[int, bytes | None, str]:
        """Joins the mount namespace; then PROTOCOL, and the answer of `root`."""
        if protocol != PROTOCOL:
            return PROTOCOL, None, "another version"
        # A hung worker must not keep open what the daemon's starter may be reading to its end.
        os.dup2(1, 2)
        _join(namespace)
        self._root = kubelet_root
        self._part(None)
        return PROTOCOL, *self.root()

    def root(self) -> tuple[bytes | None, str]:
        """The kubelet's root with all symlinks resolved, or None and why not."""
        try:
            path = os.path.realpath(self._root, strict=True)
            os.close(os.open(path, os.O_PATH | os.O_DIRECTORY))
        except OSError as error:
            return None, error.strerror or str(error)
        return path, ""

    def _open_root(self) -> int:
        # Anew for each job: it may appear, or be mounted over, after the worker started.
        return os.open(self._root, os.O_PATH | os.O_DIRECTORY)

    def unmount(self, items: list[tuple[bytes, bool, bool]], not_after: int) -> list[tuple[Any, ...]]:
        """Outcomes (as tuples) in the order of the targets, in parts and at the end.

        No target is begun after `not_after` (CLOCK_BOOTTIME, µs): what was seen of the pod is too old then.
        """
        try:
            root_fd = self._open_root()
        except OSError as error:
            reason = f"the kubelet's root {os.fsdecode(self._root)!r} cannot be opened: {error.strerror}"
            number = error.errno or errno.EIO
            failed = [tuple(umount.Outcome(relative, 0, number, reason, False, True)) for relative, _, _ in items]
            while len(failed) > TELL_MOST:
                self._part(failed[:TELL_MOST])
                del failed[:TELL_MOST]
            return failed
        with contextlib.suppress(OSError):  # the disk is full, say: no reason not to unmount
            self._note.write([relative for relative, _, _ in items])
        neighbours = umount.Neighbours(root_fd)
        try:
            return self._unmount(neighbours, items, not_after)
        finally:
            neighbours.leave()
            os.close(root_fd)
            with contextlib.suppress(OSError):
                self._note.write([])

    def _unmount(
        self, neighbours: umount.Neighbours, items: list[tuple[bytes, bool, bool]], not_after: int
    ) -> list[tuple[Any, ...]]:
        untold: list[tuple[Any, ...]] = []
        told_at = time.monotonic_ns()
        for number, (relative, lazy, block_node) in enumerate(items):
            self._note.at = number
            # Between the two, a system call: whoever takes this target back sees either that or is seen.
            self._end_if_given_up()
            if clock.boottime_usec() > not_after or number >= self._note.bound:
                break
            untold.append(tuple(neighbours.unmount(relative, lazy=lazy, block_node=block_node)))
            if (now := time.monotonic_ns()) - told_at >= TELL_EVERY or len(untold) >= TELL_MOST:
                neighbours.leave()
                self._part(untold)
                untold, told_at = [], now
        return untold

    def list_directory(self, path: bytes) -> None:
        """Lists of (name, d_type): of an absolute path, or of one below the kubelet's root (no symlink followed)."""
        fd = self._open_directory(path)
        try:
            with os.scandir(fd) as entries:
                rows = ((os.fsencode(entry.name), _d_type(entry)) for entry in _bounded(entries, path))
                for chunk in chunks(rows, lambda row: len(row[0]) + 16):
                    self._part(chunk)
        finally:
            os.close(fd)

    def list_block_nodes(self, path: bytes) -> int:
        """Lists of names: the block devices' nodes in such a directory, which only root can make. However many other
        entries its owner makes, they are passed over; an empty list is a sign of progress. Then the watch on it."""
        fd = self._open_directory(path)
        try:
            # Before the look, so that nothing comes unseen in between. A watch that tells more than this goes on to do
            # so: whoever needs that may be looking beside us, or we may be killed before we come to it.
            watch = self._watch(fd, _CAME | libc.IN_MASK_ADD)
            if names := self._block_nodes(fd):
                # Elsewhere what goes is what we unmounted, and the end of a watch is much work for the kernel.
                watch = self._watch(fd, _CAME_OR_WENT)
                names = self._block_nodes(fd)
            for chunk in chunks(names, len):
                self._part(chunk)
            return watch
        finally:
            os.close(fd)

    def _block_nodes(self, directory: int) -> list[bytes]:
        names = []
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries, 1):
                if _is_block_node(entry):
                    names.append(os.fsencode(entry.name))
                if count % _PROGRESS_EVERY == 0:
                    self._part([])
        return names

    def _watch(self, directory: int, what: int) -> int:
        """The daemon's inotify tells once of that in the directory; -1 where that is not to be had."""
        if self._inotify < 0:
            return -1
        try:
            os.fchdir(directory)
            return libc.inotify_add_watch(self._inotify, b".", what)
        except OSError:  # too many watches: then only a look tells
            return -1
        finally:
            os.chdir(b"/")

    def _open_directory(self, path: bytes) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
        if path.startswith(b"/"):
            return os.open(path, flags)
        root_fd = self._open_root()
        try:
            return walk.open_beneath(root_fd, path, flags)
        finally:
            os.close(root_fd)

    def read_file(self, path: bytes, limit: int) -> None:
        """The first `limit` bytes of a regular file, in parts. A FIFO, device or symlink is EINVAL or ELOOP."""
        _must_be_regular(os.lstat(path), path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
        try:
            _must_be_regular(os.fstat(fd), path)
            while limit > 0 and (data := os.read(fd, min(limit, PART_MAX))):
                limit -= len(data)
                self._part(data)
        finally:
            os.close(fd)

    def command_lines(self, pids: list[int]) -> None:
        """(pid, arguments) a part; None for a process that is gone or may not be read. Long ones are cut."""
        for pid in pids:
            try:
                line = process.command_line(pid)
            except OSError:
                self._part((pid, None))
            else:
                cut = (argument[:PART_MAX] for argument in line)
                self._part((pid, next(chunks(cut, len), [])))

    def holders(self, wanted: list[tuple[bytes, str, bytes, tuple[int, ...]]]) -> None:
        """Lists of rows as `hostd.linux.holders` finds them; an empty list is a sign of progress."""
        found = holders.find([holders.Wanted(*one) for one in wanted], on_progress=lambda: self._part([]))
        rows = ((held.target, held.pid, held.name, held.how, list(held.cgroups)) for held in found)
        for chunk in chunks(rows, lambda row: 64 + len(row[0]) + len(row[2]) + sum(len(path) + 8 for path in row[4])):
            self._part(chunk)


def _join(namespace: str) -> None:
    fd = os.open(namespace, os.O_RDONLY)
    try:
        if not os.path.samestat(os.fstat(fd), os.stat("/proc/self/ns/mnt")):
            libc.setns(fd, libc.CLONE_NEWNS)
    finally:
        os.close(fd)
    os.chdir(b"/")


def _d_type(entry: os.DirEntry[str]) -> int:
    """As in readdir(3), for files, directories and links. Other kinds count as unknown: no layer is mounted on such."""
    if entry.is_symlink():
        return _DT_LNK
    if entry.is_dir(follow_symlinks=False):
        return _DT_DIR
    return _DT_REG if entry.is_file(follow_symlinks=False) else _DT_UNKNOWN


def _is_block_node(entry: os.DirEntry[str]) -> bool:
    """Only what is neither file, directory nor link is asked for more."""
    try:
        return _d_type(entry) == _DT_UNKNOWN and stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _bounded(entries: Iterable[os.DirEntry[str]], path: bytes) -> Iterator[os.DirEntry[str]]:
    for count, entry in enumerate(entries):
        if count >= ENTRIES_MAX:
            raise OSError(errno.EOVERFLOW, f"more than {ENTRIES_MAX} entries", path)
        yield entry


def chunks(rows: Iterable[_T], size: Callable[[_T], int], limit: int = PART_MAX) -> Iterator[list[_T]]:
    """`rows` in lists of at most `limit` bytes together; a larger row comes alone."""
    chunk: list[_T] = []
    room = limit
    for row in rows:
        room -= size(row)
        if room < 0 and chunk:
            yield chunk
            chunk, room = [], limit - size(row)
        chunk.append(row)
    if chunk:
        yield chunk


def _must_be_regular(found: os.stat_result, path: bytes) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a symlink, which is not followed", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def main() -> NoReturn:
    """`worker FD BELL NOTE INOTIFY`: serves the socket FD until its other end is closed."""
    libc.set_process_name(b"hostd-worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Worker(*map(int, sys.argv[3:])).serve()
    except (BrokenPipeError, ConnectionResetError):
        # The daemon is gone; there is nobody to tell.
        sys.exit(0)
    sys.exit(0)


if __name__ == "__main__":
    main()
