"""Which back end runs the helper here."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hostd.config import Backend as Wanted
from hostd.errors import HelperFailed
from hostd.log import plain
from hostd.prhelper.child import ChildBackend
from hostd.prhelper.systemd import SystemdBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.config import PRHelper
    from hostd.prhelper.backend import Backend
    from hostd.prhelper.memory import Memory
    from hostd.prhelper.preflight import Places

log = logging.getLogger(__name__)

#: sd_booted(3).
_BOOTED: Final = "/run/systemd/system"


async def choose(
    wanted: Wanted, config: PRHelper, memory: Memory, changed: Callable[[], None], places: Places
) -> Backend:
    """The back end that is wanted; `auto` is systemd where it runs and has our units, else a child of hostd.

    A listener at another path is closed, and what the other back end left running is ended. Raises HelperFailed,
    OSError.
    """
    if memory.known.path not in ("", os.fsdecode(config.socket)):
        await _move_away(config, memory, changed, places)
    systemd = await _systemd(wanted, config, memory, changed)
    if systemd is not None:
        if memory.known.backend == ChildBackend.name:
            await _end(ChildBackend(config.socket, memory, changed, places.program))
        return systemd
    if memory.known.backend == SystemdBackend.name and os.path.isdir(_BOOTED):
        await _end(SystemdBackend(config, memory, changed))
    return ChildBackend(config.socket, memory, changed, places.program)


async def _systemd(
    wanted: Wanted, config: PRHelper, memory: Memory, changed: Callable[[], None]
) -> SystemdBackend | None:
    if wanted is Wanted.CHILD or (wanted is Wanted.AUTO and not os.path.isdir(_BOOTED)):
        return None
    backend = SystemdBackend(config, memory, changed)
    trouble = await backend.trouble()
    if not trouble:
        return backend
    backend.detach()
    if wanted is Wanted.SYSTEMD:
        raise HelperFailed(trouble)
    log.info("qemu-pr-helper runs as a child of hostd: %s", trouble)
    return None


async def _move_away(config: PRHelper, memory: Memory, changed: Callable[[], None], places: Places) -> None:
    """Closes the listener at the path of an earlier configuration; those connected there keep their helper."""
    path = os.fsencode(memory.known.path)
    log.info("pr-helper.socket was %s: that listener is closed", plain(path))
    other: Backend = (
        SystemdBackend(replace(config, socket=path), memory, changed)
        if memory.known.backend == SystemdBackend.name
        else ChildBackend(path, memory, changed, places.program)
    )
    try:
        await other.retire()
    finally:
        other.detach()


async def _end(other: Backend) -> None:
    log.info("ending the qemu-pr-helper that the %s back end left", other.name)
    try:
        await other.stop()
    finally:
        other.detach()
