"""What the bus tells, as typed values. States and kinds are plain words: a newer hostd may know more of them.

All times are microseconds of the realtime clock, 0 where they have not come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hostd.bus.rows import AS_CONFIGURED
from hostd.bus.text import unescape
from hostd.core.model import LayerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Layer:
    """One target of a VM. `attempts`: umounts of it that failed; known of `Node.layers` alone, else 0."""

    pod_uid: str
    target: str
    kind: str
    volume: str
    state: str
    error: str
    attempts: int = 0

    @property
    def path(self) -> bytes:
        """The target's own bytes."""
        return unescape(self.target)

    @property
    def gone(self) -> bool:
        """Whether it is released."""
        return self.state == LayerState.GONE


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a layer: `pid` as the host counts (0: no process), `how` as open, cwd, map, loop, namespace…"""

    pid: int
    name: str
    how: str
    pod_uid: str

    def __str__(self) -> str:
        pid = f"[{self.pid}]" if self.pid else ""
        pod = f" of pod {self.pod_uid}" if self.pod_uid else ""
        return f"{self.name}{pid}{pod} ({self.how})"


@dataclass(frozen=True, slots=True)
class Inhibitor:
    """Who holds a VM's clean-up, and why."""

    who: str
    why: str


@dataclass(frozen=True, slots=True)
class Device:
    """A host device: `device` is pci/0000:3b:00.0, mdev/UUID or usb/1-2; `vm` is namespace/name or empty."""

    device: str
    kind: str
    vm: str
    pod_uid: str
    state: str
    description: str


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A target in the answer of release: what is (or would be) done, and what came of it."""

    target: str
    action: str
    result: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A finding of sweep."""

    pod_uid: str
    target: str
    action: str
    result: str


@dataclass(frozen=True, slots=True)
class VM:
    """One launcher pod's run. `leader` is a pid as the host counts, 0 where no QEMU was seen; it stays after its death.

    `grace_usec` None: as configured. `exit_status` and `exit_signal` are -1 where unknown or not so.
    """

    pod_uid: str
    vmi_uid: str = ""
    namespace: str = ""
    name: str = ""
    state: str = ""
    leader: int = 0
    leader_pidfd_id: int = 0
    started_usec: int = 0
    exited_usec: int = 0
    exit_status: int = -1
    exit_signal: int = -1
    exit_reason: str = ""
    released_usec: int = 0
    policy: str = "clean"
    grace_usec: int | None = None
    inhibitors: tuple[Inhibitor, ...] = ()
    layers: tuple[Layer, ...] = ()
    devices: tuple[str, ...] = ()
    error: str = ""

    @property
    def unreleased(self) -> tuple[Layer, ...]:
        """Its layers that are not gone."""
        return tuple(layer for layer in self.layers if not layer.gone)

    @property
    def full_name(self) -> str:
        """`namespace/name`, or nothing where the name is not known."""
        return f"{self.namespace}/{self.name}" if self.name else ""

    def __str__(self) -> str:
        return f"{self.full_name} ({self.pod_uid})" if self.name else self.pod_uid


@dataclass(frozen=True, slots=True)
class Status:
    """hostd itself. `health`: what is wrong with its parts, by part; empty where all is well."""

    version: str = ""
    features: tuple[str, ...] = ()
    mode: str = ""
    config_files: tuple[str, ...] = ()
    n_vms: int = 0
    n_layers: int = 0
    n_blocked: int = 0
    health: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Helper:
    """qemu-pr-helper, and how hostd keeps it."""

    enabled: bool = False
    state: str = ""
    main_pid: int = 0
    socket_path: str = ""
    restarts: int = 0
    last_failure: str = ""
    multipath: str = ""
    clients: int = 0
    #: Another live helper that has the path (state standby); 0: none, or it is out of sight.
    owner_pid: int = 0


#: Property on the bus → field. One that is not here is newer than this library, and is left out.
VM_FIELDS = {
    "VMIUID": "vmi_uid",
    "Namespace": "namespace",
    "Name": "name",
    "State": "state",
    "Leader": "leader",
    "LeaderPIDFDID": "leader_pidfd_id",
    "StartedUSec": "started_usec",
    "ExitedUSec": "exited_usec",
    "ExitStatus": "exit_status",
    "ExitSignal": "exit_signal",
    "ExitReason": "exit_reason",
    "ReleasedUSec": "released_usec",
    "Policy": "policy",
    "GraceUSec": "grace_usec",
    "Inhibitors": "inhibitors",
    "Layers": "layers",
    "Devices": "devices",
    "Error": "error",
}
STATUS_FIELDS = {
    "Version": "version",
    "Features": "features",
    "Mode": "mode",
    "ConfigFiles": "config_files",
    "NVMs": "n_vms",
    "NLayers": "n_layers",
    "NBlocked": "n_blocked",
    "Health": "health",
}
HELPER_FIELDS = {
    "Enabled": "enabled",
    "State": "state",
    "MainPID": "main_pid",
    "SocketPath": "socket_path",
    "NRestarts": "restarts",
    "LastFailure": "last_failure",
    "Multipath": "multipath",
    "Clients": "clients",
    "OwnerPID": "owner_pid",
}
#: How a value of the bus becomes the field's; the others are taken as they are.
_READ: dict[str, Callable[[Any], object]] = {
    "grace_usec": lambda value: None if value == AS_CONFIGURED else value,
    "inhibitors": lambda rows: tuple(Inhibitor(*row[:2]) for row in rows),
    "devices": tuple,
    "features": tuple,
    "config_files": tuple,
    "health": lambda table: tuple(sorted(table.items())),
}


def vm_changes(pod_uid: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of a VM (variants) as values of the fields of `VM`."""
    found = _fields(VM_FIELDS, values)
    if "layers" in found:
        found["layers"] = tuple(Layer(pod_uid, *row[:5]) for row in found["layers"])
    return found


def vm_of(pod_uid: str, values: Mapping[str, Any]) -> VM:
    """A VM from all its properties."""
    return VM(pod_uid, **vm_changes(pod_uid, values))


def status_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of the manager as values of the fields of `Status`."""
    return _fields(STATUS_FIELDS, values)


def helper_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of PRHelper as values of the fields of `Helper`."""
    return _fields(HELPER_FIELDS, values)


def _fields(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {names[name]: value.value for name, value in values.items() if name in names}
    return {name: _READ[name](value) if name in _READ else value for name, value in known.items()}


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can hold, from whatever a dataclass here holds
    """A value of this module as JSON has it: the stable form of `hostctl --json`."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        found = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        # A table by part, kept as pairs so that the value stays hashable.
        return found | {"health": dict(value.health)} if isinstance(value, Status) else found
    return value
