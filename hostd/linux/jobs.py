"""What a worker can be asked, from the daemon's side: each operation with its answer checked and typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hostd.linux import worker
from hostd.linux.holders import Held
from hostd.linux.link import Job, Link, WorkerDied, WorkerHung
from hostd.linux.umount import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from hostd.linux.copies import Wanted

#: One target of an umount job: path relative to the kubelet's root, lazy, block node.
Item: TypeAlias = tuple[bytes, bool, bool]

#: Bytes of one request; a row is its path and at most this much around it.
_REQUEST_MAX: Final = worker.MESSAGE_MAX // 2
_AROUND: Final = 32
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

    def unmount(
        self,
        items: Sequence[Item],
        on_outcome: Callable[[Outcome], None] | None = None,
        *,
        not_after: int = _NEVER,
    ) -> Umounts:
        """Has the targets unmounted one by one, see `hostd.linux.umount`: the job is sent on return, and awaited
        for the outcomes.

        `on_outcome` is called as each is done. No target is begun after `not_after` (CLOCK_BOOTTIME, µs): then there
        are fewer outcomes. The `done` of an error has the outcomes until then.
        """
        return Umounts(self.link, items, not_after, on_outcome)

    async def list_directory(self, path: bytes) -> list[tuple[bytes, int]]:
        """(name, d_type) of an absolute path in the host's namespace, or of one below the kubelet's root.

        Below the root no symlink is followed. Raises OSError (EOVERFLOW for absurdly many entries).
        """
        rows: list[tuple[bytes, int]] = []
        await self.link.call("list_directory", path, name=lambda _: path, on_part=lambda part: _add_names(part, rows))
        return rows

    async def list_block_nodes(self, path: bytes) -> tuple[list[bytes], int]:
        """The names of the block devices' nodes in such a directory, whatever else is in it, and the pool's inotify
        watch that tells once of a change in it since (-1: there is none). Raises OSError."""
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
    or the error of `Worker`."""

    def __init__(
        self, link: Link, items: Sequence[Item], not_after: int, on_outcome: Callable[[Outcome], None] | None
    ) -> None:
        self._link = link
        self._not_after = not_after
        self._on_outcome = on_outcome
        self._done: list[Outcome] = []
        self._chunks = _requests(items)
        self._job = self._send_next()

    def __await__(self) -> Generator[Any, None, list[Outcome]]:
        return self._outcomes().__await__()

    async def _outcomes(self) -> list[Outcome]:
        try:
            while self._job:
                await self._link.answer(self._job)
                self._job = self._send_next()
        except (WorkerHung, WorkerDied) as error:
            error.done = self._done
            raise
        return self._done

    def _send_next(self) -> Job | None:
        items = next(self._chunks, None)
        if items is None:
            return None
        names = iter(items)

        def on_part(value: object) -> None:
            outcome = _outcome(value, next(names)[0])
            self._done.append(outcome)
            if self._on_outcome:
                self._on_outcome(outcome)

        def name(part: int) -> bytes:
            return items[min(part, len(items) - 1)][0]

        return self._link.send("unmount", items, self._not_after, name=name, on_part=on_part)


def _requests(items: Sequence[Item]) -> Iterator[list[Item]]:
    return worker.chunks(items, lambda item: len(item[0]) + _AROUND, _REQUEST_MAX)


def _wanted(rows: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    def size(one: Wanted) -> int:
        return len(one.target) + len(one.root) + 8 * len(one.mount_ids) + 2 * _AROUND

    return worker.chunks(rows, size, _REQUEST_MAX)


def _not_understood(value: object) -> ValueError:
    return ValueError(f"a worker's answer is not understood: {str(value)[:200]}")


def _outcome(value: object, expected: bytes) -> Outcome:
    match value:
        case (
            bytes() as relative,
            int() as done,
            int() as errno,
            str() as error,
            bool() as removed,
            bool() as mounted,
            bool() as detached,
        ) if relative == expected:
            return Outcome(relative, done, errno, error, removed, mounted, detached)
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
