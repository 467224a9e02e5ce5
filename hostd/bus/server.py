"""The life of the connection: found, lost and found again for ever, while the core goes on without it."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING

from hostd.bus import access, helper_object, names
from hostd.bus.connection import CallFailed, Connection
from hostd.bus.dispatch import Dispatcher
from hostd.bus.helper_object import HelperObject
from hostd.bus.log_control import LogControl
from hostd.bus.long_answer import LongAnswers
from hostd.bus.manager import Manager
from hostd.bus.object_tree import ObjectTree
from hostd.bus.protocols import DeviceService, HelperService, HelperStatus
from hostd.bus.signals import Signals
from hostd.bus.vm_object import VMObject
from hostd.log import Message as LogMessage
from hostd.log import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.bus.library import Message
    from hostd.core.service import Event, VMService

log = logging.getLogger(__name__)

#: Between two attempts to reach a bus (s): doubled from the first to the second.
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
#: For what is queued to be sent when hostd stops (s).
FAREWELL = 1.0
_DO_NOT_QUEUE = 4
_PRIMARY_OWNER, _EXISTS = 1, 3


class NameTaken(Exception):
    """Another process owns the bus name: a second hostd must not work beside it."""


class State(StrEnum):
    """How it is with the bus, in a word for the status line."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"


class BusServer:
    """Serves a VMService on the bus. See the package's docstring for how to use it."""

    def __init__(
        self,
        service: VMService,
        *,
        devices: DeviceService | None = None,
        helper: HelperService | None = None,
        log_control: LogControl | None = None,
        metrics: Callable[[], bytes] | None = None,
        address: str | None = None,
    ) -> None:
        self._service = service
        self._devices = devices
        self._helper = helper
        self._address = address
        answers = LongAnswers(service)
        self._manager = Manager(service, devices, helper, answers, metrics)
        self._manager.on_reload = self.refresh
        self._helper_object = HelperObject(helper)
        tree = ObjectTree(
            service,
            {
                names.ROOT: [self._manager],
                names.HELPER_PATH: [self._helper_object],
                names.LOG_CONTROL_PATH: [log_control or LogControl()],
            },
            lambda pod_uid: [VMObject(service, pod_uid)],
        )
        self._dispatcher = Dispatcher(tree, answers)
        self._signals = Signals(service)
        self._connection: Connection | None = None
        self._access: access.Access | None = None
        self._told = self._manager_values()
        self._helper_told = helper.status if helper is not None else HelperStatus()
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()
        self._owned_once = False
        self.ready = asyncio.Event()
        self.state = State.CONNECTING
        self.on_state: Callable[[State], None] = lambda _: None

    @property
    def connected(self) -> bool:
        """The name is ours now."""
        return self.ready.is_set()

    async def settled(self) -> None:
        """Waits for the outcome of the first attempt: the name is ours, or there is no bus yet."""
        await self._settled.wait()

    def stop(self) -> None:
        """Ends `run`, after what is queued has been sent."""
        self._stopping.set()

    async def run(self) -> None:
        """Keeps the connection until `stop` or cancelled. Raises NameTaken at the first connect alone."""
        unsubscribe = [self._service.subscribe(self._on_event)]
        if self._devices is not None:
            unsubscribe.append(self._devices.subscribe(self._signals.tell))
        if self._helper is not None:
            unsubscribe.append(self._helper.subscribe(self._on_helper))
        try:
            await self._keep_connected()
        finally:
            for end in unsubscribe:
                end()
            self._let_go()
            await self._dispatcher.close()

    async def _keep_connected(self) -> None:
        pause, quiet = FIRST_PAUSE, False
        while not self._stopping.is_set():
            try:
                connection = await self._connect()
            except NameTaken:
                if not self._owned_once:
                    raise
                self._complain(
                    "%s is owned by another process; hostd goes on without its name", names.BUS_NAME, quiet=quiet
                )
            except Exception as reason:  # noqa: BLE001 - the edge of the bus: the libraries raise anything here
                self._complain("the bus cannot be reached; hostd goes on without it: %s", reason, quiet=quiet)
            else:
                pause, quiet = FIRST_PAUSE, False
                await self._serve(connection)
                continue
            finally:
                self._settled.set()
            quiet = True
            await self._sleep(pause)
            pause = min(pause * 2, LAST_PAUSE)

    def _complain(self, words: str, about: object, *, quiet: bool) -> None:
        """Once a spell; the attempts that follow are for those who read debug messages."""
        log.log(logging.DEBUG if quiet else logging.WARNING, words, about, extra=event(LogMessage.BUS_LOST))

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _connect(self) -> Connection:
        """A connection that owns the name. What is asked before the name is ours is answered all the same."""
        connection = await Connection.open(self._address, self._on_call, self._on_signal)
        self._connection = connection
        self._access = access.Access(connection)
        try:
            await connection.call_bus("AddMatch", "s", [access.GONE_RULE])
            await self._own_name(connection)
        except BaseException:
            self._let_go()
            raise
        return connection

    async def _own_name(self, connection: Connection) -> None:
        try:
            (reply,) = await connection.call_bus("RequestName", "su", [names.BUS_NAME, _DO_NOT_QUEUE])
        except CallFailed as failure:
            raise ConnectionRefusedError(
                f"the bus does not let hostd own {names.BUS_NAME}: {failure}; is its policy file installed, and does "
                "hostd run as root?"
            ) from None
        if reply == _EXISTS:
            raise NameTaken(f"{names.BUS_NAME} is owned already: another hostd runs on this bus; stop that one first")
        if reply != _PRIMARY_OWNER and reply != 4:
            raise ConnectionRefusedError(f"the bus answered {reply} to the request for {names.BUS_NAME}")

    async def _serve(self, connection: Connection) -> None:
        self._owned_once = True
        self._settled.set()
        self._signals.outlet = connection
        self._told = self._manager_values()
        self._change(State.READY)
        log.debug("%s is on the bus as %s", names.BUS_NAME, connection.unique_name)
        ended = asyncio.ensure_future(connection.wait_closed())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            ended.cancel()
        if self._stopping.is_set():
            await self._farewell(connection)
        else:
            log.warning(
                "the bus is lost; hostd goes on without it and looks for it: %s", await connection.wait_closed(),
                extra=event(LogMessage.BUS_LOST),
            )  # fmt: skip
        self._let_go()

    async def _farewell(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(FAREWELL):
                await connection.drain()
        except TimeoutError:
            log.debug("the bus does not take our last words")

    def _let_go(self) -> None:
        self._signals.outlet = None
        if self._connection is not None:
            self._connection.close()
        self._connection = self._access = None
        self._change(State.LOST)

    def _change(self, state: State) -> None:
        if state is State.READY:
            self.ready.set()
        else:
            self.ready.clear()
        if state is not self.state and (state is not State.LOST or self._owned_once):
            self.state = state
            self.on_state(state)

    # In

    def _on_call(self, message: Message, fds: list[int]) -> None:
        assert self._connection is not None
        assert self._access is not None
        self._dispatcher.handle(self._connection, self._access, message, fds)
        if message.path == names.ROOT and message.interface == names.PROPERTIES:
            # Health may have become another without an event: who reads it is not the only one to know.
            self.refresh()

    def _on_signal(self, message: Message) -> None:
        if message.sender != names.DBUS or self._access is None or self._connection is None:
            return
        if message.member == "NameOwnerChanged":
            self._access.forget(message.body[0])
        elif message.member == "NameLost" and message.body[0] == names.BUS_NAME:
            log.warning("%s was taken away", names.BUS_NAME)
            self._connection.close()

    # Out

    def _on_event(self, what: Event) -> None:
        self._signals.tell(what)
        self.refresh()

    def _on_helper(self) -> None:
        assert self._helper is not None
        before, self._helper_told = self._helper_told, self._helper.status
        changed = helper_object.changed(before, self._helper_told)
        self._signals.properties_changed(names.HELPER_PATH, self._helper_object, changed)

    def refresh(self) -> None:
        """Tells of Mode and Health where they are not what was told last."""
        now = self._manager_values()
        changed = [name for name, value in now.items() if self._told[name] != value]
        self._told = now
        self._signals.properties_changed(names.ROOT, self._manager, changed)

    def _manager_values(self) -> dict[str, object]:
        return {"Mode": self._manager.mode(), "Health": self._manager.health()}
