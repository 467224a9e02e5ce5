"""Asking hostd."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from tests.node.checks.node import MANAGER, NAME, call, until

if TYPE_CHECKING:
    from tests.node.checks.pods import Pod


def states() -> dict[str, str]:
    """Pod UID → state, as hostd says; empty while it does not answer."""
    done = call("ListVMs", check=False)
    return {row[0]: row[4] for row in _data(done.stdout)} if done.returncode == 0 else {}


def _data(output: str) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(output)["data"][0]
    return rows


def reaches(pod: Pod, state: str) -> None:
    """Waits until hostd has a VM in that state."""
    until(lambda: states().get(pod.uid) == state, f"{pod.name} ({pod.uid}) is {state}")


def released(pod: Pod) -> None:
    """Waits until a VM's layers are gone, by PID 1's own table and by hostd's word."""
    until(lambda: pod.mounted == [], f"the layers of {pod.name} are gone: {pod.mounted}")
    reaches(pod, "released")


def layers(pod: Pod) -> dict[str, str]:
    """Target's name → state of a pod's layers."""
    rows = call("ListLayers", "a{sv}", "1", "PodUID", "s", pod.uid)
    return {row[1].rpartition("/")[2]: row[4] for row in rows}


def inhibit(pod: Pod, who: str, why: str) -> int:
    """Takes an inhibitor for a VM as an agent would: the descriptor holds until it is closed."""
    return asyncio.run(_inhibit(pod.uid, who, why))


async def _inhibit(pod_uid: str, who: str, why: str) -> int:
    library = "dbus_fast" if importlib.util.find_spec("dbus_fast") else "dbus_next"
    dbus, aio = importlib.import_module(library), importlib.import_module(f"{library}.aio")
    bus = await aio.MessageBus(bus_type=dbus.BusType.SYSTEM, negotiate_unix_fd=True).connect()
    reply = await bus.call(dbus.Message(NAME, MANAGER, f"{NAME}.Manager", "Inhibit", signature="sss",
                                        body=[pod_uid, who, why]))  # fmt: skip
    assert reply is not None
    assert reply.message_type.name == "METHOD_RETURN", reply.body
    bus.disconnect()
    fd: int = reply.unix_fds[reply.body[0]]
    return fd
