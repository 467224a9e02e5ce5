"""What a worker can be asked, from the daemon's side: each operation with its answer checked and typed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hostd.linux import worker
from hostd.linux.holders import Held
from hostd.linux.link import Job, Link, WorkerDied, WorkerHung, settle
from hostd.linux.note import NONE
from hostd.linux.umount import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from hostd.linux.copies import Wanted
    from hostd.linux.pidfd import Identity

#: One target of an umount job: path relative to the kubelet's root, lazy, block node.
Item: TypeAlias = tuple[bytes, bool, bool]
#: Told of the end of an umount job: its outcomes, and what cut it short.
OnEnd: TypeAlias = "Callable[[list[Outcome], Exception | None], None]"

#: Bytes of one request; a row is its path and at most this much around it.
_REQUEST_MAX: Final = worker.MESSAGE_MAX // 2
_AROUND: Final = 32
#: What a worker tells of a target: an `Outcome`.
_OUTCOME: Final = (bytes, int, int, str, bool, bool, bool)
#: A time that does not come (CLOCK_BOOTTIME, µs).
_NEVER: Final = (1 << 63) - 1


class Worker:
    """A ready worker, for the time of `WorkerPool.worker()`.

    All operations raise WorkerHung, WorkerDied or WorkerError, and the OSError that the worker met where that is no
    part of the answer. After the first two the worker is of no more use.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self.link.pid

    @property
    def identity(self) -> Identity | None:
        """Who that is, for another hostd; None where that could not be found out."""
        return self.link.identity

    def unmount(self, items: Sequence[Item], *, not_after: int = _NEVER) -> Umounts:
        """Has the targets unmounted one by one, see `hostd.linux.umount`: the job is sent on return, and awaited
        for the outcomes.

        No target is begun after `not_after` (CLOCK_BOOTTIME, µs): then there are fewer outcomes. The `done` of an error
        has the outcomes until then.
        """
        return Umounts(self.link, items, not_after)

    async def list_directory(self, path: bytes) -> list[tuple[bytes, int]]:
        """(name, d_type) of an absolute path in the host's namespace, or of one below the kubelet's root.

        Below the root no symlink is followed. Raises OSError (EOVERFLOW for absurdly many entries).
        """
        rows: list[tuple[bytes, int]] = []
        await self.link.call("list_directory", path, name=lambda _: path, on_part=lambda part: _add_names(part, rows))
        return rows

    async def list_block_nodes(self, path: bytes) -> tuple[list[bytes], int]:
        """The names of the block devices' nodes in such a directory, whatever else is in it, and the pool's inotify
        watch that tells once of what comes there since, and of what goes if there are any (-1: there is none).

        Raises OSError.
        """
        names: list[bytes] = []
        watch = await self.link.call(
            "list_block_nodes", path, name=lambda _: path, on_part=lambda part: _add_nodes(part, names)
        )
        if not isinstance(watch, int):
            raise _not_understood(watch)
        return names, watch

    async def read_file(self, path: bytes, limit: int) -> bytes:
        """At most `limit` bytes of a regular file (absolute path, last component not followed). Raises OSError."""
        data = bytearray()
        await self.link.call("read_file", path, limit, name=lambda _: path, on_part=lambda part: _add_data(part, data))
        return bytes(data)

    async def command_lines(self, pids: Sequence[int]) -> dict[int, list[bytes] | None]:
        """The arguments of processes; None for those that are gone. Long ones are cut."""
        lines: dict[int, list[bytes] | None] = {}
        asked = list(pids)[: _REQUEST_MAX // 8]
        await self.link.call(
            "command_lines",
            asked,
            name=lambda part: b"/proc/%d/cmdline" % asked[min(part, len(asked) - 1)] if asked else b"/proc",
            on_part=lambda part: _add_line(part, lines),
        )
        return lines

    async def holders(self, wanted: Sequence[Wanted]) -> list[Held]:
        """Who keeps these layers busy, see `hostd.linux.holders`."""
        rows: list[Held] = []
        for chunk in _wanted(wanted):
            what = b", ".join(one.target for one in chunk)[:4096]
            await self._holders(chunk, what, rows)
        return rows

    async def _holders(self, wanted: list[Wanted], what: bytes, rows: list[Held]) -> None:
        plain = [tuple(one) for one in wanted]
        await self.link.call("holders", plain, name=lambda _: what, on_part=lambda part: _add_held(part, rows))

    async def resolve_root(self) -> tuple[bytes | None, str]:
        """The kubelet's root with symlinks resolved, or None and why not."""
        match await self.link.call("root", name=lambda _: b"the kubelet's root"):
            case (bytes() | None as root, str() as why):
                return root, why
            case other:
                raise _not_understood(other)


class Umounts:
    """An umount job under way, in as many requests as it takes; the first is sent at once. Await it for the outcomes,
    or the error of `Worker`; or have `on_end` called with the outcomes until then and the error, if there is one."""

    def __init__(self, link: Link, items: Sequence[Item], not_after: int) -> None:
        self._link = link
        self._not_after = not_after
        self._done: list[Outcome] = []
        self._chunks = _requests(items)
        #: How many targets were in the requests that are done, and how many in the one under way.
        self._before = self._now = 0
        self._bound = len(items)
        self._names: Iterator[bytes] = iter(())
        self._job: Job | None = None
        self._end: tuple[list[Outcome], Exception | None] | None = None
        self._on_end: OnEnd | None = None
        self._send_next()

    def on_end(self, callback: OnEnd) -> None:
        """Calls it once the job has ended, or now; it does not raise."""
        self._on_end = callback
        if self._end:
            callback(*self._end)

    @property
    def at(self) -> int:
        """The number of the target that the worker is at."""
        return self._before + min(self._link.note.at, self._now - 1)

    def take_back(self, number: int) -> None:
        """From this target on they are not to be begun. The worker may just have begun the first of them."""
        self._bound = number
        self._link.note.bound = max(0, number - self._before)

    def __await__(self) -> Generator[Any, None, list[Outcome]]:
        return self._outcomes().__await__()

    async def _outcomes(self) -> list[Outcome]:
        outcomes: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self.on_end(lambda done, error: settle(outcomes, done, error))
        return await (self._link.answer(self._job, outcomes) if self._job else outcomes)

    def _send_next(self) -> None:
        self._before += self._now
        items = next(self._chunks, None) if self._before < self._bound else None
        if items is None:
            self._finish(None)
            return
        items = items[: self._bound - self._before]
        self._names, self._now = (item[0] for item in items), len(items)
        self._link.note.at, self._link.note.bound = 0, NONE

        def name(_: int) -> bytes:
            return items[min(self._link.note.at, len(items) - 1)][0]

        send = self._link.send
        self._job = send("unmount", items, self._not_after, name=name, on_part=self._take, on_end=self._on_answer)

    def _take(self, value: object) -> None:
        if not isinstance(value, list):
            raise _not_understood(value)
        for each in value:
            self._done.append(_outcome(each, next(self._names, b"")))

    def _on_answer(self, answer: object, error: Exception | None) -> None:
        if error is None:
            try:
                self._take(answer)
                self._send_next()
            except Exception as unexpected:  # noqa: BLE001  whatever it is, this worker cannot be trusted
                self._link.kill()
                self._finish(unexpected)
        else:
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        self._job = None
        if isinstance(error, WorkerHung | WorkerDied):
            error.done = self._done
        self._end = (self._done, error)
        if self._on_end:
            self._on_end(*self._end)


def _requests(items: Sequence[Item]) -> Iterator[list[Item]]:
    return worker.chunks(items, lambda item: len(item[0]) + _AROUND, _REQUEST_MAX)


def _wanted(rows: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    def size(one: Wanted) -> int:
        return len(one.target) + len(one.root) + 8 * len(one.mount_ids) + 2 * _AROUND

    return worker.chunks(rows, size, _REQUEST_MAX)


def _not_understood(value: object) -> ValueError:
    return ValueError(f"a worker's answer is not understood: {str(value)[:200]}")


def _outcome(value: object, expected: bytes) -> Outcome:
    if isinstance(value, tuple) and tuple(map(type, value)) == _OUTCOME and value[0] == expected:
        return Outcome._make(value)
    raise _not_understood(value)


def _add_names(part: object, rows: list[tuple[bytes, int]]) -> None:
    if not isinstance(part, list):
        raise _not_understood(part)
    for row in part:
        match row:
            case (bytes() as name, int() as kind):
                rows.append((name, kind))
            case _:
                raise _not_understood(row)


def _add_nodes(part: object, names: list[bytes]) -> None:
    match part:
        case list() as more if all(isinstance(name, bytes) for name in more):
            names += more
        case _:
            raise _not_understood(part)


def _add_data(part: object, data: bytearray) -> None:
    if not isinstance(part, bytes):
        raise _not_understood(part)
    data += part


def _add_line(part: object, lines: dict[int, list[bytes] | None]) -> None:
    match part:
        case (int() as pid, None):
            lines[pid] = None
        case (int() as pid, list() as line) if all(isinstance(argument, bytes) for argument in line):
            lines[pid] = line
        case _:
            raise _not_understood(part)


def _add_held(part: object, rows: list[Held]) -> None:
    if not isinstance(part, list):
        raise _not_understood(part)
    for row in part:
        match row:
            case (bytes() as target, int() as pid, str() as name, str() as how, list() as cgroups) if all(
                isinstance(path, bytes) for path in cgroups
            ):
                rows.append(Held(target, pid, name, how, tuple(cgroups)))
            case _:
                raise _not_understood(row)
