"""doctor's look at the bus, polkit, and hostd itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import hostd.client
from hostd.bus.connection import CallFailed, Connection
from hostd.client.failures import Unreachable
from hostd.client.model import Status
from hostd.ctl.findings import Finding, bad, good, note, warning
from hostd.ctl.verdict import blocked, is_stuck, judge
from hostd.ctl.words import name_of
from hostd.errors import HostdError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hostd.client.node import Node

_POLKIT = "org.freedesktop.PolicyKit1"


async def check(address: str | None) -> AsyncIterator[Finding]:
    """Everything here."""
    try:
        async with hostd.client.connect(address) as node:
            yield good("bus", "the bus can be reached")
            async for finding in hostd_itself(node):
                yield finding
        yield await polkit(address)
    except Unreachable as error:
        yield bad(
            "bus",
            f"{error}",
            "hostd cleans up without a bus, but nobody can ask it; systemctl status dbus, or name the bus with --bus",
        )


async def config_files(address: str | None) -> tuple[str, ...] | None:
    """The files that the hostd on this bus has read its configuration from; None where it does not tell."""
    try:
        async with hostd.client.connect(address) as node:
            return (await node.status()).config_files
    except HostdError:  # `check` says why
        return None


async def hostd_itself(node: Node) -> AsyncIterator[Finding]:
    """Whether it answers, and what it says of itself."""
    try:
        status, vms, helper = await node.status(), await node.list(), await node.pr_helper.status()
    except Unreachable as error:
        yield bad("hostd", f"{error}", "systemctl start hostd")
        return
    except HostdError as error:
        yield bad("hostd", f"it does not tell: {error}", "run as root, or join the group hostd")
        return
    yield good("hostd", f"version {status.version} answers, mode {status.mode}, {status.n_vms} VMs")
    for part, trouble in status.health:
        yield bad("hostd", f"{part}: {trouble}", _HEALTH.get(part, "journalctl -x -u hostd"))
    for vm in filter(is_stuck, vms):
        yield bad("hostd", blocked(vm), f"`hostctl holders {name_of(vm)}` tells who holds a layer and what to do")
    for reason in judge(Status(), [], helper).reasons:
        yield bad("pr-helper", reason, "`hostctl pr-helper` says more")


#: What to do about the parts that `Health` names.
_HEALTH = {
    "workers": "storage that does not answer: bring it back, and the workers end by themselves",
    "state": "is /run full, or read-only? `df /run`",
    "cgroups": "see the findings on cgroups",
}


async def polkit(address: str | None) -> Finding:
    """Whether somebody else than root could be allowed to change things."""
    connection = await Connection.open(address, lambda _, __: None, lambda _: None)
    try:
        (names,) = await connection.call_bus("ListNames")
        (startable,) = await connection.call_bus("ListActivatableNames")
    except (CallFailed, TimeoutError, ConnectionError) as error:
        return warning("polkit", f"the bus does not say whether it is there: {error}", "try again")
    finally:
        connection.close()
    if _POLKIT in names or _POLKIT in startable:
        return good("polkit", "others than root can be allowed to change things (polkit)")
    whoami = "" if os.geteuid() == 0 else "; you are not root, so you can only look"
    return note(
        "polkit", f"polkit is not here: root alone may change things{whoami}", "install polkitd, if others should"
    )
