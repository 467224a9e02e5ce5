"""The back end with systemd: hostd-pr-helper.socket holds the listener, hostd-pr-helper.service is the helper.

systemd respawns a helper that dies, in milliseconds and without hostd; hostd looks at what came of it, kills one that
hangs, and stops both units when there is no use in going on. systemd is asked only when something has changed: a
helper's death is told by its pidfd, everything else of interest shows at the socket's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from hostd.linux.pidfd import Process
from hostd.prhelper import drop_in
from hostd.prhelper import path as paths
from hostd.prhelper.agent import SERVICE_UNIT, SOCKET_UNIT
from hostd.prhelper.backend import Found
from hostd.prhelper.link import Agent
from hostd.prhelper.listener import clients
from hostd.prhelper.memory import Known
from hostd.prhelper.path import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.config import PRHelper
    from hostd.prhelper.memory import Memory
    from hostd.prhelper.path import Inode

_SYSTEMD_PID = 1


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
        self._units: dict[str, Any] | None = None
        #: What was at the path when systemd was asked last.
        self._seen: Inode | None = None
        self._process: Process | None = None
        self._ends: list[str] = []
        self._told = ""
        self._asked_pid = 0
        self._starting = False

    async def trouble(self) -> str:
        """Why this back end is of no use here; "" = it is."""
        self._units = await self._agent.ask("query")
        for unit in (SOCKET_UNIT, SERVICE_UNIT):
            if self._units["load"][unit] != "loaded":
                return f"{unit} is {self._units['load'][unit]}; install or unmask the units of hostd's package"
        return ""

    async def find(self) -> Found:
        """What runs now."""
        units = await self._current()
        listening = units["socket"] == "active"
        if not listening and self._process is not None and not clients(self._process.pid):
            units = await self._down("stop")
        return Found(
            listening,
            self._memory.known.inode if listening else None,
            self._process if listening else None,
            (self._process.pid,) if self._process is not None and not listening else (),
            os.fsencode(units["program"]),
            int(units["capabilities"]),
        )

    async def _current(self) -> dict[str, Any]:
        units = self._units
        # Whatever is new at the path: it may be systemd's.
        if units is None or paths.inode_at(self._path) != self._seen:
            units = await self._do("query")
            self._recognise(units)
        return units

    def _recognise(self, units: dict[str, Any]) -> None:
        """Whether what is at the path is systemd's listener: made by an earlier hostd, or anew by an administrator."""
        if units["socket"] == "active" and paths.inode_at(self._path) != self._memory.known.inode:
            sight = paths.look(self._path)
            if sight.kind is Kind.LIVE and sight.pid == _SYSTEMD_PID:
                self._memory.remember(Known(self.name, sight.inode))

    async def _do(self, what: str, **arguments: bool) -> dict[str, Any]:
        self._units = None
        self._seen = paths.inode_at(self._path)
        units = await self._agent.ask(what, **arguments)
        self._follow(units)
        return units

    def _follow(self, units: dict[str, Any]) -> None:
        """Watches the helper that runs now."""
        pid = int(units["main_pid"])
        if self._process is not None and (self._process.pid != pid or not self._process.alive()):
            self._book_end(self._process)
        if pid and self._process is None:
            try:
                self._process = Process.open(pid)
            except ProcessLookupError:
                self._ends.append(f"qemu-pr-helper {pid} ended as soon as it was started")
                return
            asyncio.get_running_loop().add_reader(self._process.fd, self._on_death)
        if self._starting and not pid:
            self._ends.append(f"{SERVICE_UNIT} did not start: {units['result']}; see `journalctl -u {SERVICE_UNIT}`")
        self._starting = False
        self._units = units

    def _on_death(self) -> None:
        if self._process is not None:
            self._book_end(self._process)
        self._units = None
        self._changed()

    def _book_end(self, process: Process) -> None:
        end = process.end()
        asyncio.get_running_loop().remove_reader(process.fd)
        process.close()
        self._process = None
        if process.pid == self._asked_pid:
            return
        how = "ended"
        if end is not None and end.signal > 0:
            how = f"was killed by signal {end.signal}"
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(end.signal).name}"
        elif end is not None and end.status >= 0:
            how = f"ended with status {end.status}"
        self._ends.append(self._told or f"qemu-pr-helper {process.pid} {how}")
        self._told = ""

    def take_ends(self) -> list[str]:
        """How helpers ended."""
        ends, self._ends = self._ends, []
        return ends

    async def start(self) -> None:
        """See `Backend`."""
        if paths.inode_at(self._path) != self._memory.known.inode and (await self._current())["socket"] == "active":
            await self.stop()
        changed = drop_in.write(drop_in.text(self._config), self._drop_in_path)
        self._memory.remember(Known(self.name))
        self._starting = True
        units = await self._do("start", reload=changed)
        if units["socket"] == "active":
            self._seen = paths.inode_at(self._path)
            self._memory.remember(Known(self.name, self._seen))

    def end(self, why: str = "") -> None:
        """See `Backend`."""
        if self._process is None:
            return
        self._told = why
        self._asked_pid = 0 if why else self._process.pid
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process.fd, signal.SIGKILL if why else signal.SIGTERM)

    async def retire(self) -> None:
        """See `Backend`."""
        await self._down("retire")

    async def stop(self) -> None:
        """See `Backend`."""
        await self._down("stop")

    async def _down(self, how: str) -> dict[str, Any]:
        if self._process is not None:
            self._asked_pid = self._process.pid
        units = await self._do(how)
        if self._memory.known.inode is not None:
            paths.remove(self._path, self._memory.known.inode)
        self._seen = paths.inode_at(self._path)
        self._memory.remember(Known() if how == "stop" else Known(self.name))
        return units

    def detach(self) -> None:
        """See `Backend`."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.fd)
            self._process.close()
            self._process = None
        self._agent.close()
