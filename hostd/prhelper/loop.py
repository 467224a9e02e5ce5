"""The loop that keeps the helper as it should be: look, decide, act, tell; whoever runs it.

Events say when to look: a helper's death, a change in the socket's directory, a rival's end, an answer or none, a
request, a timer. Each look is at everything, so no event has to be understood, and one that is lost costs time only.
While it is disabled nothing is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hostd.errors import HostdError
from hostd.linux.clock import boottime_usec
from hostd.log import Message, event, plain
from hostd.prhelper import path as paths
from hostd.prhelper.backoff import LONGEST_USEC, Backoff
from hostd.prhelper.checkup import INTERVAL, Checkup
from hostd.prhelper.choice import choose
from hostd.prhelper.decision import Action, At, Decision, Facts, State, decide
from hostd.prhelper.memory import Memory
from hostd.prhelper.path import Kind, Sight
from hostd.prhelper.preflight import Places, Preflight, Verdict, judge
from hostd.prhelper.rival import Rival
from hostd.prhelper.upkeep import Upkeep
from hostd.prhelper.watch import DirectoryWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.config import PRHelper
    from hostd.prhelper.backend import Backend, Found

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000
#: Most steps without a pause; what does not settle in as many is looked at again a moment later.
_MOST_STEPS: Final = 8
_MOMENT_USEC: Final = 50_000
#: How long a rival may take from unlinking our socket to binding its own.
_RIVAL_BINDS_USEC: Final = 200_000
#: How often is looked where no event tells: for a rival out of sight or an unkillable helper; for a rival in sight; for
#: retired helpers' clients.
_BLIND_USEC, _RIVAL_USEC, _RETIRED_USEC = _SECOND // 2, 10 * _SECOND, 5 * _SECOND


class Loop:
    """Keeps the helper of one path. `start` first; `close` leaves the helper running."""

    def __init__(
        self,
        config: PRHelper,
        state_dir: bytes,
        runtime_dir: bytes,
        *,
        places: Places | None = None,
        interval: float = INTERVAL,
        on_probe: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`interval`: seconds between two deep probes. `on_probe` is told of each question whether it was answered."""
        self._places = places or Places()
        self._memory = Memory(state_dir, runtime_dir)
        self._preflight = Preflight(self._places)
        self._backoff = Backoff()
        self._interval, self._on_probe = interval, on_probe
        self._backend: Backend | None = None
        self._rival: Rival | None = None
        self._wake = asyncio.Event()
        self._told = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._set_up(config)
        self._listeners: list[Callable[[], None]] = []
        self._enabled = self._memory.enabled(config.enabled)
        self._decision = Decision(State.STARTING if self._enabled else State.DISABLED, Action.NOTHING)
        self._verdict = Verdict()
        self._pids: tuple[int, tuple[int, ...]] = (0, ())
        self._restarts = 0
        self._new_ends = 0
        self._last_failure = ""
        self._pause_usec = _SECOND
        #: CLOCK_BOOTTIME µs: since when our socket is not at its path any more.
        self._taken_at = 0
        self._stopped = not self._memory.known.backend

    def _set_up(self, config: PRHelper) -> None:
        """Everything that is of one path. The back end follows, when it is needed."""
        self._config = self._next_config = config
        self._path = config.socket
        self._checkup = Checkup(self._path, self._wake_up, self._interval, self._on_probe)
        self._watch = DirectoryWatch(self._path, self._wake_up)
        self._upkeep = Upkeep(config, self._places.selinux)

    # -- its life

    async def start(self) -> None:
        """Begins; what runs already is taken over within moments."""
        self._task = asyncio.create_task(self._run(), name="qemu-pr-helper supervisor")

    async def close(self) -> None:
        """Ends the supervision; helper and clients stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._let_go()

    def _let_go(self) -> None:
        """Looks after nothing any more; all stays as it runs."""
        self._checkup.forget()
        self._watch.close()
        self._drop_rival()
        if self._backend is not None:
            self._backend.detach()
        self._backend = None

    def _wake_up(self) -> None:
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._take_config()
            try:
                pause = await self._settle()
            except (HostdError, OSError) as error:
                pause = self._on_trouble(error)
            except Exception as error:  # the edge of a task: supervision goes on, and the log has it all
                log.exception("qemu-pr-helper cannot be looked after just now")
                pause = self._on_trouble(error)
            async with self._told:
                self._told.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if pause is None else pause / 1e6):
                    await self._wake.wait()

    def _take_config(self) -> None:
        """What a reload brought, between two looks: for another path or back end everything begins anew."""
        new, old = self._next_config, self._config
        if new == old:
            return
        if (new.socket, new.backend) == (old.socket, old.backend):
            self._config = new
            self._upkeep.change(new)
        else:
            self._let_go()
            self._set_up(new)
            self._stopped, self._pids = False, (0, ())
            self._decide(Decision(State.STARTING if self._enabled else State.DISABLED, Action.NOTHING))

    def _on_trouble(self, error: Exception) -> int:
        what = str(error) if isinstance(error, HostdError) else f"no helper at {plain(self._path)}: {error}"
        self._note_failure(what)
        self._backoff.failed(boottime_usec())
        self._decide(Decision(State.BACKING_OFF if self._enabled else State.DISABLED, Action.NOTHING, what))
        return max(self._backoff.retry_at - boottime_usec(), _MOMENT_USEC)

    # -- one look after the other

    async def _settle(self) -> int | None:
        """Looks and acts until nothing is to be done; how long that holds unless something happens (µs)."""
        for _ in range(_MOST_STEPS):
            if self._stopped and not self._enabled:
                self._decide(Decision(State.DISABLED, Action.NOTHING))
                return None
            if self._backend is None:
                self._backend = await choose(
                    self._config.backend, self._config, self._memory, self._wake_up, self._places
                )
            if await self._step(self._backend):
                return self._pause()
        return _MOMENT_USEC

    async def _step(self, backend: Backend) -> bool:
        """One look and what follows from it; whether all is as it should be."""
        found = await backend.find()
        self._account(backend, found)
        sight = self._look(found)
        decision = decide(self._facts(found, sight))
        self._mind_rival(sight if decision.state is State.STANDBY else None)
        decision = self._explained(decision)
        if decision.state is State.READY or decision.action is Action.ASK:
            # Before it is called ready, and whenever somebody changed it.
            trouble = self._upkeep.correct(found.inode)
            if trouble:
                self._note_failure(trouble)
        self._decide(decision)
        if self._enabled:
            self._watch.look()
        else:
            self._watch.close()
        return await self._act(backend, decision.action, found, sight)

    def _account(self, backend: Backend, found: Found) -> None:
        """Books the helpers that ended and came since the last look."""
        now = boottime_usec()
        ends = backend.take_ends()
        ready_usec = now - self._checkup.ready_at if self._checkup.ready_at else None
        for end in ends:
            self._note_failure(end.words)
            self._backoff.died(now, ready_usec, killed=end.killed, again=end.again)
        self._new_ends += len(ends)
        main = found.pid
        if main != self._pids[0]:
            self._checkup.forget()
            if main:
                self._restarts += self._new_ends
                self._new_ends = 0
        self._pids = (main, found.retired)

    def _look(self, found: Found) -> Sight | None:
        """What is at the path; None: our own socket."""
        if found.inode is not None and paths.inode_at(self._path) == found.inode:
            return None
        return paths.look(self._path)

    def _facts(self, found: Found, sight: Sight | None) -> Facts:
        self._verdict = judge(self._preflight.look(found.program, found.capabilities, helper_pid=found.pid))
        at, now = At.OURS if sight is None else _AT[sight.kind], boottime_usec()
        return Facts(
            enabled=self._enabled,
            at=at,
            listening=found.listening,
            running=found.process is not None,
            retired=bool(found.retired),
            health=self._checkup.health,
            waiting=self._backoff.waits(now),
            dying=self._backoff.ends(now),
            refusal=self._verdict.refusal,
            failure=self._verdict.failure,
            obstacle=sight.why if sight is not None and at is At.OBSTACLE else "",
        )

    async def _act(self, backend: Backend, action: Action, found: Found, sight: Sight | None) -> bool:
        being_replaced = self._is_being_replaced(found, sight)
        match action:
            case Action.NOTHING:
                self._stopped = not self._enabled
                if self._decision.state is State.READY and boottime_usec() >= self._checkup.due_at:
                    self._checkup.ask(found.pid)
                return True
            case Action.ASK:
                self._checkup.ask(found.pid)
                return True
            case Action.KILL:
                backend.end(f"{self._checkup.trouble}; it was killed")
                return True
            case Action.START | Action.RENEW:
                if being_replaced:
                    return True
                await self._start(backend, sight)
            case Action.RETIRE:
                await backend.retire()
            case Action.STOP:
                await backend.stop()
        return False

    def _is_being_replaced(self, found: Found, sight: Sight | None) -> bool:
        """Whether a rival may be about to bind, which has unlinked our socket before: one that we make now would make
        it fail."""
        now = boottime_usec()
        if sight is None or sight.kind is not Kind.MISSING or not (found.listening or found.pid):
            self._taken_at = 0
            return False
        self._taken_at = self._taken_at or now
        return now < self._taken_at + _RIVAL_BINDS_USEC

    async def _start(self, backend: Backend, sight: Sight | None) -> None:
        if (
            sight is not None
            and sight.kind is Kind.STALE
            and sight.inode
            and not paths.clear_stale(self._path, sight.inode)
        ):
            return  # somebody was faster: the next look tells who
        self._upkeep.prepare()
        try:
            await backend.start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # As above: it bound between our look and our bind.

    # -- a rival

    def _mind_rival(self, sight: Sight | None) -> None:
        if sight is None:
            self._drop_rival()
        elif self._rival is None or not self._rival.watched or self._rival.inode != sight.inode:
            self._drop_rival()
            self._rival = Rival(self._path, sight, self._wake_up)

    def _drop_rival(self) -> None:
        if self._rival is not None:
            self._rival.close()
            self._rival = None

    # -- telling

    def _decide(self, decision: Decision) -> None:
        before, self._decision = self._decision, decision
        if (before.state, before.why) != (decision.state, decision.why):
            self._pause_usec = _SECOND
            if decision.state in (State.FAILED, State.REFUSED):
                self._last_failure = decision.why
            level = logging.WARNING if decision.state in _BAD else logging.INFO
            extra = event(Message.HELPER_STATE, state=decision.state)
            why = f": {decision.why}" if decision.why else ""
            log.log(level, "qemu-pr-helper: %s%s", decision.state, why, extra=extra)
        self._publish()

    def _publish(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _explained(self, decision: Decision) -> Decision:
        match decision.state:
            case State.STANDBY if self._rival is not None:
                who = f"process {self._rival.pid} ({self._rival.name})" if self._rival.pid else "a process out of sight"
                why = f"{who} serves {plain(self._path)}; hostd takes over when it is gone"
                return replace(decision, why=why)
            case State.UNHEALTHY:
                return replace(decision, why=self._checkup.trouble)
            case State.BACKING_OFF:
                return replace(decision, why=self._last_failure)
        return decision

    def _note_failure(self, what: str) -> None:
        self._last_failure = what
        log.warning("%s", what, extra=event(Message.HELPER_FAILED))

    def _pause(self) -> int | None:
        """How long nothing has to be looked at (µs), None = until something happens."""
        now = boottime_usec()
        pauses = [_RETIRED_USEC] if self._pids[1] else []
        if self._taken_at:
            pauses.append(_MOMENT_USEC)
        if self._enabled and not self._watch.watching:
            pauses.append(_BLIND_USEC)
        match self._decision.state:
            case State.READY:
                pauses.append(max(self._checkup.due_at - now, _MOMENT_USEC))
            case State.UNHEALTHY:
                pauses.append(_BLIND_USEC)
            case State.BACKING_OFF:
                pauses.append(max(self._backoff.retry_at - now, 0))
            case State.STANDBY:
                watched = self._rival is not None and self._rival.watched
                pauses.append(_RIVAL_USEC if watched else _BLIND_USEC)
            case State.FAILED | State.REFUSED:
                pauses.append(self._pause_usec)
                self._pause_usec = min(self._pause_usec * 2, LONGEST_USEC)
        return min(pauses, default=None)


_AT = {Kind.MISSING: At.FREE, Kind.STALE: At.FREE, Kind.LIVE: At.FOREIGN, Kind.OBSTACLE: At.OBSTACLE}
_BAD = frozenset({State.UNHEALTHY, State.BACKING_OFF, State.FAILED, State.REFUSED})
