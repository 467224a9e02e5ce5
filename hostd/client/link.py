"""A connection to the bus that comes back: for calls, and for those who listen.

Who listens gets what hostd sends, in order, and between it a mark where something may have been missed: `Here` when
hostd is there from now on, `Gone` when it or the bus is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hostd.bus import library, names
from hostd.bus.connection import MAX_REPLY, CallFailed, Connection
from hostd.bus.stream import close_all
from hostd.client.failures import NOT_RUNNING, Unreachable, as_error

if TYPE_CHECKING:
    from hostd.bus.library import Message

log = logging.getLogger(__name__)

#: Between two attempts to reach a bus (s): doubled from the first to the second.
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
#: For an answer (s); hostd itself gives up waiting for umounts sooner.
TIMEOUT = 60.0
#: Messages kept for a listener that does not take them; one more, and it gets a fresh start instead.
MOST_WAITING = 10_000
_OWNER_RULE = f"type='signal',sender='{names.DBUS}',member='NameOwnerChanged',arg0='{names.BUS_NAME}'"
_HOSTD_RULE = f"type='signal',sender='{names.BUS_NAME}'"


@dataclass(frozen=True, slots=True)
class Here:
    """hostd answers as `owner` (its unique name) from here on."""

    owner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The `bus`, or `hostd`, is gone."""

    what: str


class Feed:
    """What one listener has not taken yet."""

    def __init__(self) -> None:
        self._waiting: deque[Message | Here | Gone] = deque()
        self._some = asyncio.Event()
        self._last_mark: Here | Gone | None = None

    def put(self, item: Message | Here | Gone) -> None:
        """Adds one; when there are too many, all of them give way to one mark that stands for them."""
        if isinstance(item, (Here, Gone)):
            self._last_mark = item
        elif len(self._waiting) >= MOST_WAITING:
            self._waiting.clear()
            mark = self._last_mark
            item = Here(mark.owner, "overflow") if isinstance(mark, Here) else Gone("hostd")
        self._waiting.append(item)
        self._some.set()

    async def get(self) -> Message | Here | Gone:
        """The next one."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft()


class Link:
    """Use `open` and `close`. It belongs to the loop that opened it."""

    def __init__(self, address: str | None, *, interactive: bool = False) -> None:
        self._address = address
        self._interactive = interactive
        self._connection: Connection | None = None
        self._feeds: set[Feed] = set()
        self._task: asyncio.Task[None] | None = None
        self._told_owner: str | None = None
        self._subscribed = False
        self.owner = ""

    async def open(self) -> None:
        """Connects. Raises Unreachable where there is no bus now; later it is waited for."""
        try:
            connection = await self._connect()
        except Exception as reason:  # noqa: BLE001 - the edge of the bus: the libraries raise anything here
            raise Unreachable(_no_bus(reason, self._address)) from None
        self._task = asyncio.create_task(self._keep(connection), name="the link to hostd")

    async def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Calls

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *body: Any,  # noqa: ANN401 - whatever D-Bus can carry
        fds: list[int] | None = None,
        to: str = names.BUS_NAME,
    ) -> tuple[Message, list[int]]:
        """Asks hostd; takes over `fds`, and the descriptors of the answer belong to the caller.

        Raises the errors of `hostd.errors`, and Unreachable.
        """
        connection = self._connection
        if connection is None or connection.closed:
            close_all(fds or ())
            raise Unreachable("the connection to the bus is lost; it is looked for")
        try:
            return await connection.exchange(
                to, path, interface, member, signature, list(body),
                fds=fds, interactive=self._interactive, timeout=TIMEOUT,
            )  # fmt: skip
        except CallFailed as failure:
            raise as_error(failure) from None
        except TimeoutError:
            raise Unreachable(f"hostd did not answer {member} within {TIMEOUT:.0f} s") from None
        except ConnectionError as reason:
            raise Unreachable(f"the bus was lost before hostd answered: {reason}") from None

    # Listening

    async def listen(self) -> Feed:
        """A feed of what hostd sends from now on; it begins with a mark."""
        feed = Feed()
        connection = self._connection
        self._feeds.add(feed)
        try:
            if connection is not None and not self._subscribed:
                self._subscribed = True
                await connection.call_bus("AddMatch", "s", [_HOSTD_RULE])
        except (ConnectionError, TimeoutError, CallFailed) as reason:
            log.debug("the link was lost while a listener came: %s", reason)
        except BaseException:
            self._feeds.discard(feed)
            raise
        feed.put(self._mark("start"))
        return feed

    def forget(self, feed: Feed) -> None:
        """Ends a feed."""
        self._feeds.discard(feed)

    def _mark(self, reason: str) -> Here | Gone:
        if self._connection is None or self._connection.closed:
            return Gone("bus")
        return Here(self.owner, reason) if self.owner else Gone("hostd")

    def _tell(self, item: Message | Here | Gone) -> None:
        for feed in self._feeds:
            feed.put(item)

    # The connection

    async def _connect(self) -> Connection:
        connection = await Connection.open(self._address, _refuse, self._on_signal, max_frame=MAX_REPLY)
        try:
            await connection.call_bus("AddMatch", "s", [_OWNER_RULE])
            self._subscribed = bool(self._feeds)
            if self._subscribed:
                await connection.call_bus("AddMatch", "s", [_HOSTD_RULE])
            self._told_owner = None
            answered = await _owner(connection)
            self.owner = self._newest_owner(answered)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _newest_owner(self, answered: str) -> str:
        """The answer, or a change that came after it and before anybody took it."""
        return answered if self._told_owner is None else self._told_owner

    async def _keep(self, connection: Connection) -> None:
        """One connection after another."""
        while True:
            reason = await connection.wait_closed()
            log.debug("the bus is lost: %s", reason)
            self.owner, self._connection = "", None
            self._tell(Gone("bus"))
            connection = await self._connect_again()
            self._tell(self._mark("bus"))

    async def _connect_again(self) -> Connection:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connect()
            except Exception as reason:  # noqa: BLE001 - the edge of the bus: the libraries raise anything here
                log.debug("the bus cannot be reached yet: %s", reason)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LAST_PAUSE)

    def _on_signal(self, message: Message) -> None:
        if message.sender == names.DBUS and message.member == "NameOwnerChanged":
            if message.body[0] == names.BUS_NAME:
                self._on_owner(message.body[2])
        elif message.sender and message.sender == self.owner:
            self._tell(message)

    def _on_owner(self, owner: str) -> None:
        if self._connection is None:
            # A connection begins: its first mark is still to come.
            self._told_owner = owner
            return
        before, self.owner = self.owner, owner
        if owner == before:
            return
        if before:
            self._tell(Gone("hostd"))
        if owner:
            self._tell(Here(owner, "hostd"))


def _no_bus(reason: Exception, address: str | None) -> str:
    words = (reason.strerror if isinstance(reason, OSError) else "") or str(reason) or type(reason).__name__
    if address:
        return f"the bus cannot be reached ({words}: {address}); does it run, and is that its address?"
    if named := os.environ.get("DBUS_SYSTEM_BUS_ADDRESS"):
        return f"the bus cannot be reached ({words}: {named}); does it run, and is DBUS_SYSTEM_BUS_ADDRESS right?"
    return f"the bus cannot be reached ({words}: {library.SYSTEM_BUS}); does it run? DBUS_SYSTEM_BUS_ADDRESS is not set"


def _refuse(message: Message, fds: list[int]) -> None:
    """Nobody calls a client; a call that comes all the same is left unanswered."""
    close_all(fds)
    log.debug("a call for %s came, and nothing here answers calls", message.member)


async def _owner(connection: Connection) -> str:
    try:
        (owner,) = await connection.call_bus("GetNameOwner", "s", [names.BUS_NAME])
    except CallFailed:
        log.debug(NOT_RUNNING)
        return ""
    return str(owner)
