"""qemu-pr-helper's supervisor as the bus and the app see it: what can be asked of it, and how it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from hostd.core.model import HelperStatus
from hostd.errors import HelperFailed, NotEnabled
from hostd.log import plain
from hostd.prhelper import protocol
from hostd.prhelper.decision import Action, Decision, State
from hostd.prhelper.listener import clients
from hostd.prhelper.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hostd.config import PRHelper

#: s: how long a request waits for what it asked for.
_SETTLE_SECONDS: Final = 10.0
#: s: how long a helper that is asked to end has before it is killed.
_END_SECONDS: Final = 2.0
_SETTLING = frozenset({State.STARTING, State.UNHEALTHY})


class Supervisor(Loop):
    """The helper of this node, for the bus (see `HelperService` there). `start` first, `close` last."""

    @property
    def status(self) -> HelperStatus:
        """Now."""
        main, retired = self._pids
        return HelperStatus(
            enabled=self._enabled,
            state=str(self._decision.state),
            main_pid=main,
            socket_path=plain(self._path),
            restarts=self._restarts,
            last_failure=self._last_failure,
            multipath=str(self._verdict.multipath),
            clients=sum(clients(pid) or 0 for pid in (main, *retired) if pid),
            owner_pid=self._rival.pid if self._rival is not None else 0,
            why=self._decision.why,
        )

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` when `status` has changed (its clients apart); the result ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def enable(self) -> None:
        """Durable on return; waits a while for what comes of it. Raises HelperFailed where it cannot be kept."""
        self._switch(enabled=True)
        await self._until(lambda: self._decision.state not in _SETTLING | {State.DISABLED})

    async def disable(self) -> None:
        """Durable on return, and then no helper of ours runs. Raises HelperFailed when it does not end."""
        self._switch(enabled=False)
        if not await self._until(lambda: self._decision.state is State.DISABLED and self._stopped):
            raise HelperFailed(f"it is disabled, but still runs: {self._last_failure or 'it does not end'}")

    def _switch(self, *, enabled: bool) -> None:
        try:
            self._memory.choose(enabled, self._config.enabled)
        except OSError as error:
            raise HelperFailed(f"the choice cannot be saved ({error.strerror}), so nothing was changed") from None
        self._enabled = enabled
        self._stopped = False
        self._backoff.reset()
        self._decision = Decision(State.STARTING if enabled else self._decision.state, Action.NOTHING)
        self._publish()
        self._wake_up()

    async def restart(self) -> None:
        """Another helper on the same listener; or the next attempt at once. Raises NotEnabled, HelperFailed."""
        self._refuse_disabled()
        self._backoff.reset()
        old = self._pids[0]
        if old and self._backend is not None:
            self._backend.end()
            if not await self._until(lambda: self._pids[0] != old, _END_SECONDS):
                self._backend.end(f"qemu-pr-helper {old} did not end when it was asked to; it was killed")
        else:
            self._decision = Decision(State.STARTING, Action.NOTHING)
            self._wake_up()
        await self._until(lambda: (self._pids[0] != old or not old) and self._decision.state not in _SETTLING)
        if self._decision.state is not State.READY:
            why = self._decision.why or self._last_failure or "it did not come up in time"
            raise HelperFailed(f"qemu-pr-helper is {self._decision.state}: {why}")

    async def probe(self) -> Mapping[str, str | int | bool]:
        """Asks whoever serves the path, all the way through its worker. Raises NotEnabled."""
        self._refuse_disabled()
        status = self.status
        found: dict[str, str | int | bool] = {
            "State": status.state, "Why": status.why, "MainPID": status.main_pid, "OwnerPID": status.owner_pid,
            "Multipath": status.multipath, "Clients": status.clients,
        }  # fmt: skip
        try:
            answer = await protocol.ask(self._path, deep=True, timeout=_END_SECONDS)
        except protocol.NoAnswer as error:
            return found | {"Answered": False, "Error": str(error)}
        key, code, qualifier = answer.sense or (0, 0, 0)
        return found | {"Answered": True, "TimeUSec": answer.usec, "Sense": f"{key:02x}/{code:02x}/{qualifier:02x}"}

    def _refuse_disabled(self) -> None:
        if not self._enabled:
            raise NotEnabled("qemu-pr-helper is disabled; `hostctl pr-helper enable` switches it on")

    def reload(self, config: PRHelper) -> None:
        """A new configuration, all of which counts at once; of `enabled` what is news.

        A listener at an old path is closed, and its helper stays for the clients that it has.
        """
        self._next_config = config
        enabled = self._memory.enabled(config.enabled)
        if enabled != self._enabled:
            self._enabled, self._stopped = enabled, False
        self._backoff.reset()
        self._wake_up()

    async def _until(self, condition: Callable[[], bool], seconds: float = _SETTLE_SECONDS) -> bool:
        """Waits until it is so; False when it is not within that time."""
        try:
            async with asyncio.timeout(seconds), self._told:
                await self._told.wait_for(condition)
        except TimeoutError:
            return False
        return True
