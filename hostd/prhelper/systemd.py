"""The back end with systemd: hostd-pr-helper.socket holds the listener, hostd-pr-helper.service is the helper.

The service's shell respawns a helper that dies, in milliseconds and without hostd, and systemd the shell; hostd looks
at what came of it, kills one that hangs, and stops both units when there is no use in going on. systemd is asked only
when something has changed: deaths are told by pidfds, everything else of interest shows at the socket's path.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from hostd.errors import HelperFailed
from hostd.prhelper import drop_in
from hostd.prhelper import path as paths
from hostd.prhelper.agent import SERVICE_UNIT, SOCKET_UNIT
from hostd.prhelper.backend import End, Found
from hostd.prhelper.helper import Helper
from hostd.prhelper.link import Agent
from hostd.prhelper.listener import clients, number_of
from hostd.prhelper.memory import Known
from hostd.prhelper.path import Kind
from hostd.prhelper.retired import Retired
from hostd.prhelper.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.config import PRHelper
    from hostd.prhelper.memory import Memory
    from hostd.prhelper.path import Inode

log = logging.getLogger(__name__)

_SYSTEMD_PID = 1
_INACTIVE: Final = frozenset({"inactive", "failed"})


class SystemdBackend:
    """See `backend.Backend`."""

    name = "systemd"

    def __init__(
        self,
        config: PRHelper,
        memory: Memory,
        changed: Callable[[], None],
        agent: Agent | None = None,
        drop_in_path: str = drop_in.PATH,
    ) -> None:
        self._config = config
        self._path = config.socket
        self._memory = memory
        self._changed = changed
        self._agent = agent or Agent()
        self._drop_in_path = drop_in_path
        #: What systemd said last; None: it has to be asked.
        self._units: dict[str, Any] | None = None
        #: What was at the path when systemd was asked last.
        self._seen: Inode | None = None
        self._service = Service(self._on_service_end)
        self._helper: Helper | None = None
        self._ends: list[End] = []
        known = memory.known if memory.known.backend == self.name else Known()
        self._retired = Retired(known.retired, self._on_death)

    async def trouble(self) -> str:
        """Why this back end is of no use here; "" = it is."""
        self._units = await self._agent.ask("query")
        for unit in (SOCKET_UNIT, SERVICE_UNIT):
            if self._units["load"][unit] != "loaded":
                return f"{unit} is {self._units['load'][unit]}; install or unmask the units of hostd's package"
        return ""

    async def find(self) -> Found:
        """See `Backend`."""
        units = await self._current()
        if units["socket"] != "active" and units["service"] not in _INACTIVE:
            # Somebody else stopped the listener: without it nobody reaches the helper.
            await self.retire()
            units = await self._current()
        self._retired.dismiss()
        listening = units["socket"] == "active"
        return Found(
            listening,
            self._memory.known.inode if listening else None,
            self._helper.process if self._helper is not None and listening else None,
            self._retired.pids,
            os.fsencode(units["program"]),
            int(units["capabilities"]),
        )

    async def _current(self) -> dict[str, Any]:
        units = self._units
        # Whatever is new at the path: it may be systemd's.
        if units is None or paths.inode_at(self._path) != self._seen or (units["trouble"] and not self._ends):
            units = await self._do("query")
            if units["socket"] == "active":
                self._recognise()
        elif self._helper is None and not units["trouble"]:
            await self._follow(units)
        return units

    def _recognise(self) -> None:
        """Whether what is at the path is systemd's listener: made by an earlier hostd, or anew by an administrator."""
        if paths.inode_at(self._path) != self._memory.known.inode:
            sight = paths.look(self._path)
            if sight.kind is Kind.LIVE and sight.pid == _SYSTEMD_PID:
                self._remember(sight.inode)

    def _is_rivals(self) -> bool:
        """Whether somebody else listens at the path: he may have bound just before we looked what systemd had made."""
        return paths.look(self._path).pid not in (0, _SYSTEMD_PID)

    def _remember(self, inode: Inode | None = None, *, active: bool = True) -> None:
        retired = self._retired.numbers
        if active:
            self._memory.remember(Known(self.name, inode, retired=retired, path=os.fsdecode(self._path)))
        else:
            self._memory.remember(Known(self.name, retired=retired) if retired else Known())

    async def _do(self, what: str, **arguments: int) -> dict[str, Any]:
        self._units = None
        self._seen = paths.inode_at(self._path)
        units = await self._agent.ask(what, **arguments)
        self._units = units
        await self._follow(units)
        return units

    async def _follow(self, units: dict[str, Any]) -> None:
        """Watches the helper that runs now."""
        if units["trouble"]:
            # Nothing will tell of the next one: it is asked again once this was told.
            self._ends.append(End(units["trouble"], again=True))
            self._changed()
            return
        pid = await self._service.helper(int(units["main_pid"]), os.path.basename(units["program"]))
        if pid and self._helper is None:
            try:
                self._helper = Helper.find(pid, self._on_death)
            except ProcessLookupError:
                self._on_service_end(f"qemu-pr-helper {pid} ended as soon as it was started")

    def _on_service_end(self, how: str) -> None:
        """The shell is gone, or the unit's own process was gone before it could be looked at."""
        self._units = None
        if how:
            self._ends.append(End(how))
        self._changed()

    def _on_death(self, helper: Helper) -> None:
        if helper is self._helper:
            self._helper = None
            if not helper.asked:
                self._ends.append(helper.end)
        self._retired.discard(helper)
        self._changed()

    def take_ends(self) -> list[End]:
        """See `Backend`."""
        ends, self._ends = self._ends, []
        return ends

    async def start(self) -> None:
        """See `Backend`."""
        await self._listen()
        units = await self._do("start")
        if units["main_pid"] and self._is_rivals():
            self._remember()
        if not units["main_pid"] and not units["trouble"]:
            why = f"{units['result']}; see `journalctl -u {SERVICE_UNIT}`"
            self._ends.append(End(f"{SERVICE_UNIT} did not start: {why}"))

    async def _listen(self) -> None:
        """Our listener is at the path, and remembered."""
        if paths.inode_at(self._path) != self._memory.known.inode and (await self._current())["socket"] == "active":
            await self.retire()
        changed = drop_in.write(drop_in.text(self._config), self._drop_in_path)
        known = self._memory.known
        ours = known.inode if known.backend == self.name and paths.inode_at(self._path) == known.inode else None
        self._remember(ours)
        self._units = None
        await self._agent.ask("listen", reload=changed)
        if ours is None:
            # At once: the service may take long to start, and who binds meanwhile is a rival. It is not connected to,
            # for each connection that waits makes systemd start the service once more.
            self._remember(paths.inode_at(self._path))

    def end(self, why: str = "") -> None:
        """See `Backend`."""
        if self._helper is not None and why:
            self._helper.kill(why)
        elif self._helper is not None:
            self._helper.ask_to_end()

    async def retire(self) -> None:
        """See `Backend`. A helper that has clients goes on in a unit of its own."""
        await self._current()
        helper = self._helper
        number = number_of(helper.pid) if helper is not None and clients(helper.pid) != 0 else 0
        if helper is None or not number:
            await self._down()
            return
        self._retired.add(helper, number)
        self._remember(self._memory.known.inode)
        self._helper = None
        try:
            await self._agent.ask("set_apart", pid=helper.pid)
        except HelperFailed as error:
            log.warning("the clients of qemu-pr-helper %d have to connect again: %s", helper.pid, error)
        await self._down()

    async def stop(self) -> None:
        """See `Backend`."""
        await self._down()
        try:
            await self._retired.end()
        finally:
            self._remember(active=False)

    async def _down(self) -> None:
        self._service.forget()
        if self._helper is not None:
            self._helper.release()
            self._helper = None
        await self._do("stop")
        if self._memory.known.inode is not None and not self._is_rivals():
            paths.remove(self._path, self._memory.known.inode)
        self._seen = paths.inode_at(self._path)
        self._remember(active=False)

    def detach(self) -> None:
        """See `Backend`."""
        self._service.forget()
        self._retired.release()
        if self._helper is not None:
            self._helper.release()
        self._agent.close()
