"""The question to polkit: may this caller do that? Where polkit does not run, the answer is no."""

from __future__ import annotations

import logging
from itertools import count

from hostd.bus import library, names
from hostd.bus.connection import CallFailed, Connection
from hostd.errors import AccessDenied

log = logging.getLogger(__name__)

POLKIT = "org.freedesktop.PolicyKit1"
_PATH = "/org/freedesktop/PolicyKit1/Authority"
_AUTHORITY = POLKIT + ".Authority"
#: For an answer that needs no person, and for one that does (s).
TIMEOUT = 5.0
INTERACTIVE_TIMEOUT = 120.0

_cancellations = count(1)


async def check(connection: Connection, sender: str, action: str, *, interactive: bool) -> None:
    """Returns when polkit lets `sender` do `action`. Raises AccessDenied with what would help otherwise."""
    full = f"{names.BUS_NAME}.{action}"
    try:
        owner = await _owner(connection)
    except TimeoutError:
        raise AccessDenied(f"the bus could not start polkit, which would say whether {full} is allowed") from None
    if owner is None:
        raise AccessDenied(f"only root may do this: polkit, which could allow {full} to others, does not run here")
    cancellation = f"hostd{next(_cancellations)}"
    body = [["system-bus-name", {"name": library.variant("s", sender)}], full, {}, int(interactive), cancellation]
    timeout = INTERACTIVE_TIMEOUT if interactive else TIMEOUT
    try:
        (answer,) = await connection.call(
            owner, _PATH, _AUTHORITY, "CheckAuthorization", "(sa{sv})sa{ss}us", body, timeout=timeout
        )
    except TimeoutError:
        await _cancel(connection, owner, cancellation)
        raise AccessDenied(f"polkit gave no answer within {timeout:.0f} s whether {full} is allowed") from None
    except CallFailed as failure:
        raise AccessDenied(f"polkit could not say whether {full} is allowed: {failure}") from None
    authorized, challenge, _details = answer
    if not authorized:
        how = (
            "authenticate when asked to (busctl: do not pass --allow-interactive-authorization=no)"
            if challenge
            else (f"call as root, or allow {full} in a polkit rule")
        )
        raise AccessDenied(f"not authorized for {full}: {how}")


async def _owner(connection: Connection) -> str | None:
    """Polkit's unique name, which alone may answer for it; it is started where it can be."""
    try:
        return await _named(connection)
    except CallFailed:
        log.debug("polkit does not run yet")
    try:
        # A service that nobody can start is unknown here even while it runs, so this comes second.
        await connection.call_bus("StartServiceByName", "su", [POLKIT, 0])
        return await _named(connection)
    except CallFailed as reason:
        log.debug("polkit cannot be started: %s", reason)
        return None


async def _named(connection: Connection) -> str:
    (owner,) = await connection.call_bus("GetNameOwner", "s", [POLKIT])
    return str(owner)


async def _cancel(connection: Connection, owner: str, cancellation: str) -> None:
    """Takes the question back, so that no dialogue is left on somebody's screen."""
    try:
        await connection.call(
            owner, _PATH, _AUTHORITY, "CancelCheckAuthorization", "s", [cancellation], timeout=TIMEOUT
        )
    except (CallFailed, TimeoutError) as reason:
        log.debug("polkit kept its question: %s", reason)
