"""Who may call what; docs/access.md is the same for people.

The bus says who calls (never the message), once for each connection. Root may do everything. Members of the group
`hostd` may read. Changes by anybody else are a question to polkit. The bus policy keeps all others out before they get
here; this is the second lock.
"""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
from typing import TYPE_CHECKING, NamedTuple

from hostd.bus import polkit
from hostd.bus.connection import CallFailed, Connection
from hostd.errors import AccessDenied

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

GROUP = "hostd"
ROOT_ONLY = "root"
#: Callers remembered; a bus has a few hundred, and one that is forgotten is asked for again.
MAX_CALLERS = 1024
GONE_RULE = "type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg2=''"


class Caller(NamedTuple):
    """A process on the bus, as the kernel told the bus; uid -1: the bus knows it no more."""

    uid: int
    groups: frozenset[int] = frozenset()


NOBODY = Caller(-1)


class Access:
    """The callers of one connection to the bus."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._callers: dict[str, Caller] = {}
        self._asked: dict[str, list[Callable[[Caller], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = _gid(GROUP)

    def with_caller(self, sender: str, then: Callable[[Caller], None]) -> None:
        """Calls `then` with who `sender` is: at once where that is known. In the order of the calls of one sender."""
        known = self._callers.get(sender)
        if known is not None:
            then(known)
        elif sender in self._asked:
            self._asked[sender].append(then)
        else:
            self._asked[sender] = [then]
            task = asyncio.get_running_loop().create_task(self._ask(sender), name=f"who is {sender}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def forget(self, unique_name: str) -> None:
        """A connection is gone from the bus."""
        self._callers.pop(unique_name, None)

    async def _ask(self, sender: str) -> None:
        try:
            (given,) = await self._connection.call_bus("GetConnectionCredentials", "s", [sender])
            caller = _caller({key: value.value for key, value in given.items()})
        except (CallFailed, TimeoutError, ConnectionError) as reason:
            log.debug("the bus does not say who %s is: %s", sender, reason)
            caller = NOBODY
        if caller is not NOBODY:
            if len(self._callers) >= MAX_CALLERS:
                del self._callers[next(iter(self._callers))]
            self._callers[sender] = caller
        for then in self._asked.pop(sender):
            then(caller)

    def check_read(self, caller: Caller) -> None:
        """Raises AccessDenied for who may not even read."""
        if caller.uid != 0 and (self._group is None or self._group not in caller.groups):
            raise AccessDenied(
                f"only root and members of the group {GROUP} may ask hostd; user {caller.uid} is neither"
            )

    async def check_change(self, caller: Caller, sender: str, action: str, *, interactive: bool) -> None:
        """Raises AccessDenied unless `caller` may do `action` (a polkit action's last word, or `root`)."""
        if caller.uid == 0:
            return
        if action == ROOT_ONLY or caller is NOBODY:
            raise AccessDenied("only root may do this")
        await polkit.check(self._connection, sender, action, interactive=interactive)


def _caller(given: dict[str, object]) -> Caller:
    uid, groups = given.get("UnixUserID"), given.get("UnixGroupIDs")
    if not isinstance(uid, int):
        return NOBODY
    return Caller(uid, frozenset(groups) if isinstance(groups, list) else _groups(uid))


def _groups(uid: int) -> frozenset[int]:
    """For a bus that does not tell groups: those of the user database."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None
