"""The process that speaks to systemd, over pystemd.

A process of its own and no thread: pystemd calls sd_bus_call without letting go of the interpreter's lock, so while
PID 1 is busy with itself (daemon-reload, daemon-reexec) every thread of the caller would stand still. It is started
when there is something to ask, and ends when its socket closes.

It speaks to PID 1 directly, as systemctl does for root: the bus may be away.

Requests and replies are JSON, one a datagram of the SOCK_SEQPACKET socket that it is given.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET_UNIT: Final = "hostd-pr-helper.socket"
SERVICE_UNIT: Final = "hostd-pr-helper.service"
#: s: how long systemd is waited for; the service's own stop time-out is shorter.
PATIENCE: Final = 10.0

_PRIVATE = b"unix:path=/run/systemd/private"
_NAME = b"org.freedesktop.systemd1"
_MANAGER = b"/org/freedesktop/systemd1"
_MANAGER_INTERFACE = b"org.freedesktop.systemd1.Manager"
_UNSETTLED = frozenset({"activating", "deactivating", "reloading", "maintenance"})
#: As sd-bus has it, negative; as Python has it.
_CLOSED = frozenset(sign * code for sign in (1, -1) for code in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN))
_HELPER = re.compile(rb"""/[^\s'"]*qemu-pr-helper""")
_POLL_SECONDS = 0.02
#: Runs of a service that are met while it is waited for: the first may have ended before, the last goes on. So these
#: are two that came up and died, after which hostd starts no helper at once either (see `backoff`).
_FLAPPING: Final = 4
_SCOPE = b"hostd-pr-helper-retired-%d.scope"
#: What bounds a unit by its cgroup; all else of the sandbox sticks to the process.
_BOUNDS = {"DevicePolicy": "s", "DeviceAllow": "a(ss)", "TasksMax": "t", "MemoryMax": "t"}
#: How pystemd wants containers to be spelled.
_ARRAY, _STRUCT, _STRING, _VARIANT = b"arsv"
_END = (-1, None)


class Systemd:
    """PID 1's units, of which ours are two. Raises what pystemd raises, and TimeoutError."""

    def __init__(self) -> None:
        from pystemd.dbuslib import DBusAddress, apply_signature, path_encode

        self._sign, self._encode = apply_signature, path_encode
        self._bus = DBusAddress(_PRIVATE, peer_to_peer=True)
        self._bus.open()

    def _get(self, unit: str, interface: str, name: str, kind: str) -> object:
        path = self._encode(b"/org/freedesktop/systemd1/unit", unit.encode())
        owner = b"%s.%s" % (_NAME, interface.encode())
        found: object = self._bus.get_property(_NAME, path, owner, name.encode(), kind.encode())
        return found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else found

    def _call(self, method: str, signature: str = "", *arguments: str) -> None:
        arguments_signed = self._sign(signature.encode(), [argument.encode() for argument in arguments])
        self._bus.call_method(_NAME, _MANAGER, _MANAGER_INTERFACE, method.encode(), arguments_signed)

    def _active(self, unit: str) -> str:
        return str(self._get(unit, "Unit", "ActiveState", "s"))

    def _wait(self, unit: str, patience: float = PATIENCE) -> tuple[str, str]:
        """The unit's state once nothing is under way, and ""; or its state now, and why it does not come to rest.

        A job that waits to be run has not changed the state yet. A service that dies as soon as it is started, by
        systemd itself or for a connection that waits at its socket, is hardly ever met between two of its runs: to
        build its sandbox takes longer than it lives.
        """
        deadline = time.monotonic() + patience
        runs = set()
        while True:
            job = self._get(unit, "Unit", "Job", "(uo)")
            state = self._active(unit)
            if state not in _UNSETTLED and isinstance(job, tuple | list) and not job[0]:
                return state, ""
            runs.add(str(self._get(unit, "Unit", "InvocationID", "ay")))
            if len(runs) >= _FLAPPING:
                return state, f"{unit} dies as soon as it is started; see `journalctl -u {unit}`"
            if time.monotonic() > deadline:
                raise TimeoutError(f"{unit} is {state} for more than {patience:g} s; see `journalctl -u {unit}`")
            time.sleep(_POLL_SECONDS)

    def _settled(self, unit: str) -> str:
        state, trouble = self._wait(unit)
        if trouble:
            raise OSError(trouble)
        return state

    def query(self) -> dict[str, Any]:
        """What is with both units, once they have settled; `trouble`: why the service does not."""
        socket_state = self._settled(SOCKET_UNIT)
        service_state, trouble = self._wait(SERVICE_UNIT)
        return {
            "load": {unit: self._get(unit, "Unit", "LoadState", "s") for unit in (SOCKET_UNIT, SERVICE_UNIT)},
            "socket": socket_state,
            "service": service_state,
            "trouble": trouble,
            "main_pid": self._get(SERVICE_UNIT, "Service", "MainPID", "u"),
            "result": self._get(SERVICE_UNIT, "Service", "Result", "s"),
            "program": _program(self._get(SERVICE_UNIT, "Service", "ExecStart", "a(sasbttttuii)")),
            "capabilities": self._get(SERVICE_UNIT, "Service", "CapabilityBoundingSet", "t"),
        }

    def listen(self, *, reload: bool = False) -> dict[str, Any]:
        """The listener alone. `reload`: our drop-in has changed."""
        if reload:
            self._call("Reload")
        if self._settled(SOCKET_UNIT) != "active":
            # systemd gives a listener to a service only as the service starts.
            self._stop(SERVICE_UNIT)
            self._reset(SOCKET_UNIT)
            self._call("StartUnit", "ss", SOCKET_UNIT, "replace")
            if self._settled(SOCKET_UNIT) != "active":
                why = self._get(SOCKET_UNIT, "Socket", "Result", "s")
                raise OSError(f"{SOCKET_UNIT} did not start: {why}; see `journalctl -u {SOCKET_UNIT}`")
        return {}

    def start(self) -> dict[str, Any]:
        """The service on the listener that there is."""
        self._reset(SERVICE_UNIT)
        self._call("StartUnit", "ss", SERVICE_UNIT, "replace")
        return self.query()

    def _reset(self, unit: str) -> None:
        with suppress(Exception):  # a unit that is not loaded has nothing to be reset
            self._call("ResetFailedUnit", "s", unit)

    def _stop(self, unit: str) -> None:
        if self._active(unit) != "inactive":
            self._call("StopUnit", "ss", unit, "replace")
            self._settled(unit)

    def set_apart(self, pid: int) -> dict[str, Any]:
        """Moves a helper out of the service into a scope of its own, in which the service's bounds go on to hold."""
        bounds = {name: (kind, self._get(SERVICE_UNIT, "Service", name, kind)) for name, kind in _BOUNDS.items()}
        properties = bounds | {"Description": ("s", "qemu-pr-helper for those still connected"), "PIDs": ("au", [pid])}
        arguments = self._sign(b"ss", [_SCOPE % pid, b"fail"])
        arguments += [(_ARRAY, b"(sv)")]
        for name, (kind, value) in properties.items():
            signed = self._sign(kind.encode(), [value.encode() if isinstance(value, str) else value])
            arguments += [(_STRUCT, b"sv"), (_STRING, name.encode()), (_VARIANT, kind.encode()), *signed, _END, _END]
        arguments += [_END, (_ARRAY, b"(sa(sv))"), _END]
        self._bus.call_method(_NAME, _MANAGER, _MANAGER_INTERFACE, b"StartTransientUnit", arguments)
        self._settled((_SCOPE % pid).decode())
        return {}

    def stop(self) -> dict[str, Any]:
        """Neither listener nor service."""
        self._stop(SOCKET_UNIT)
        self._stop(SERVICE_UNIT)
        self._reset(SERVICE_UNIT)
        return self.query()


def _program(commands: object) -> str:
    """The helper that an ExecStart= runs, by itself or through a shell."""
    if not isinstance(commands, list) or not commands:
        return ""
    path, arguments = commands[0][:2]
    named = _HELPER.findall(b" ".join([path, *arguments]))
    return os.fsdecode(named[-1] if named else path)


def serve(sock: socket.socket, connect: Callable[[], Systemd] = Systemd) -> None:
    """Answers until the other end closes."""
    systemd: Systemd | None = None
    while request := sock.recv(65536):
        reply, systemd = _answer(json.loads(request), systemd, connect)
        sock.send(json.dumps(reply, default=lambda value: value.decode("utf-8", "backslashreplace")).encode())


def _answer(
    wanted: dict[str, Any], systemd: Systemd | None, connect: Callable[[], Systemd]
) -> tuple[dict[str, Any], Systemd | None]:
    """The reply, and the connection for the next request."""
    old = systemd is not None
    try:
        systemd = systemd or connect()
        return {"found": getattr(systemd, wanted["do"])(**wanted["with"])}, systemd
    except Exception as error:  # noqa: BLE001 - the edge of the process: the caller gets whatever it was in words
        # PID 1 closes its connections when it executes itself anew, which is nothing that a caller should hear of.
        if old and getattr(error, "errno", 0) in _CLOSED:
            return _answer(wanted, None, connect)
        return {"error": getattr(error, "err_message", "") or str(error) or type(error).__name__}, None


def main(fd: int) -> None:
    """The process's whole life."""
    with socket.socket(fileno=fd) as sock:
        serve(sock)
