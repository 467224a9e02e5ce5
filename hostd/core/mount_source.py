"""Where the rows of the mount table come from, of which only those with a layer's directory in them matter.

Where the kernel tells which mounts changed, only these are asked for; elsewhere the table is read whole each time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from hostd.core.pod_mounts import NEEDLES
from hostd.linux.mount_events import MountEvents
from hostd.linux.mount_table import Mount, MountTable, parse, rows_naming
from hostd.linux.mount_watch import MountWatch
from hostd.linux.statmount import MountRows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)

#: How often both ways of looking are compared, for the mounts that are compared may go meanwhile.
_TRIES = 10


class MountSource(Protocol):
    """One mount namespace's rows that contain a needle, by a number that rises in the order of the table."""

    def fileno(self) -> int:
        """Readable after a change; to be waited on before the first look."""

    def whole(self) -> dict[int, Mount]:
        """All of them now, whatever was told. Raises OSError."""

    def changes(self, known: Collection[int], again: Iterable[int]) -> dict[int, Mount | None] | None:
        """What changed since the last look, by what the kernel told until now: rows that are new or may be other than
        they were, None for those that are gone. None when only the whole table tells. Raises OSError.

        `known`: the rows that there were. `again`: those that are looked at though nothing is told of them.
        """

    def close(self) -> None:
        """Ends it."""


class WholeTable:
    """The kernel tells that the table changed, not what: every look is at all of it, as bytes."""

    def __init__(self, table: MountTable) -> None:
        self._table = table
        self._watch = MountWatch(table)

    def fileno(self) -> int:
        """As MountSource has it."""
        return self._watch.fileno()

    def whole(self) -> dict[int, Mount]:
        """As MountSource has it."""
        self._watch.drain()
        return dict(enumerate(rows_naming(self._table.read(), *NEEDLES)))

    def changes(self, known: Collection[int], again: Iterable[int]) -> None:
        """None: it is not told."""

    def close(self) -> None:
        """As MountSource has it."""
        self._watch.close()
        self._table.close()


class ChangedRows:
    """The kernel tells which mounts came and went, and gives single rows: a change costs as much as it changes."""

    def __init__(self, rows: MountRows, events: MountEvents) -> None:
        self._rows = rows
        self._events = events

    def fileno(self) -> int:
        """As MountSource has it."""
        return self._events.fileno()

    def whole(self) -> dict[int, Mount]:
        """As MountSource has it."""
        # Before the look: what is told from here on is looked at once more.
        self._events.read()
        return _present((number, self._rows.row(number, *NEEDLES)) for number in self._rows.numbers())

    def changes(self, known: Collection[int], again: Iterable[int]) -> dict[int, Mount | None] | None:
        """As MountSource has it; None when the kernel lost events, or a tree was moved."""
        told = self._events.read()
        if told is None:
            return None
        asked = {number for number, came in told.items() if came or number in known}.union(again)
        rows = {number: self._rows.row(number, *NEEDLES) for number in asked}
        return {number: row for number, row in rows.items() if row is not None or number in known}

    def close(self) -> None:
        """As MountSource has it."""
        self._events.close()
        self._rows.close()


def _present(rows: Iterable[tuple[int, Mount | None]]) -> dict[int, Mount]:
    return {number: row for number, row in rows if row is not None}


def open_source(table_path: str, namespace: str) -> MountSource:
    """The best that this kernel allows. `table_path`, `namespace`: mountinfo and ns/mnt of a process in there."""
    table = MountTable(table_path)
    try:
        source = _changed_rows(table, namespace)
    except OSError as error:
        log.info("this kernel does not tell which mounts change (%s): the table is read whole", error.strerror)
        return WholeTable(table)
    if source is None:
        log.warning("statmount(2) and %s do not tell the same: the table is read whole", table_path)
        return WholeTable(table)
    table.close()
    return source


def _changed_rows(table: MountTable, namespace: str) -> ChangedRows | None:
    rows = MountRows(namespace)
    try:
        events = MountEvents(rows.fileno())
    except OSError:
        rows.close()
        raise
    if _agree(rows, table):
        return ChangedRows(rows, events)
    events.close()
    rows.close()
    return None


def _agree(rows: MountRows, table: MountTable) -> bool:
    """Whether both tell of the same mounts with the same paths. For another namespace than its caller's, statmount(2)
    takes for the root what is mounted first on the namespace's own: that is not so where processes have another.

    It is asked of mounts that are there all the while, whatever comes and goes beside them.
    """
    for _ in range(_TRIES):
        # Not splitlines: a path may hold a carriage return.
        before, lines = rows.numbers(), table.read().split(b"\n")[:-1]
        stayed = sorted(set(rows.numbers()).intersection(before))
        ends = [row for at in (0, -1) if stayed and (row := rows.row(stayed[at]))]
        ids = {b"%d" % row.mount_id for row in ends}
        same = parse(b"\n".join(line for line in lines if line.partition(b" ")[0] in ids))
        if len(ends) == 2 and len(stayed) <= len(lines) and _places(ends) == _places(same):
            return True
    return False


def _places(mounts: Iterable[Mount]) -> set[tuple[int, bytes]]:
    return {(mount.mount_id, mount.target) for mount in mounts}
