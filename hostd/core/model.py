"""What hostd knows of a VM: plain data, changed only by the keeper.

A VM here is one launcher pod's run, keyed by the pod's UID: one VMI may have two pods on a node (migration).
All times are microseconds. Those named `*_usec` are CLOCK_REALTIME, to be shown and never computed with; those
named `*_at` are CLOCK_BOOTTIME, which no clock step moves and which restarts of hostd share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from hostd.kubevirt.qemu import looks_like_qemu

if TYPE_CHECKING:
    from hostd.kubevirt.targets import Target
    from hostd.linux.pidfd import Identity


class State(StrEnum):
    """Where a VM is in its life; the words are those of the bus."""

    PENDING = "pending"
    RUNNING = "running"
    EXITED = "exited"
    HELD = "held"
    CLEANING = "cleaning"
    BLOCKED = "blocked"
    RELEASED = "released"


class LayerState(StrEnum):
    """Where a layer is; the words are those of the bus."""

    MOUNTED = "mounted"
    BUSY = "busy"
    HUNG = "hung"
    DETACHED = "detached"
    GONE = "gone"


class Policy(StrEnum):
    """What happens to a VM's layers after its death."""

    CLEAN = "clean"
    KEEP = "keep"


class ExitReason(StrEnum):
    """Why a QEMU ended, as far as the kernel tells."""

    POWEROFF = "poweroff"
    ERROR = "error"
    SIGNAL = "signal"
    OOM = "oom"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the last QEMU ended: its exit status or its signal, -1 where unknown or not so."""

    status: int = -1
    signal: int = -1
    reason: ExitReason = ExitReason.UNKNOWN


@dataclass(frozen=True, slots=True)
class Holder:
    """One that keeps a layer busy: a process (host pid), a loop device or a mount (pid 0)."""

    pid: int
    name: str
    #: open, cwd, root, exe, map, loop, namespace, mount, or `umount` for a worker that hangs in it.
    how: str
    pod_uid: str

    @property
    def qemu(self) -> bool:
        """The holder is a QEMU, so the layer may not be detached from under it."""
        return looks_like_qemu(self.name.encode())

    def __str__(self) -> str:
        pod = f" of pod {self.pod_uid}" if self.pod_uid else ""
        return f"{self.name}[{self.pid}]{pod} ({self.how})" if self.pid else f"{self.name}{pod} ({self.how})"


@dataclass(slots=True)
class Layer:
    """One target of a VM and what became of it."""

    target: Target
    state: LayerState = LayerState.MOUNTED
    #: Why it is not gone, in words; empty while nothing is wrong.
    error: str = ""
    errno: int = 0
    #: Attempts to unmount it that did not succeed.
    attempts: int = 0
    #: Not to be tried again before this; 0 = at once.
    retry_at: int = 0
    #: When the last attempt failed; not saved, for the next hostd tries at once.
    tried_at: int = 0
    #: When it was first seen mounted.
    seen_at: int = 0
    #: Device (`major:minor`) and root within it of what is mounted; empty until seen, and for a block node.
    source: tuple[str, bytes] = ("", b"")
    #: The kind of file system that is mounted; not saved, for what hangs is tried by one hostd only.
    fstype: bytes = b""
    #: Ids of the mounts that were stacked on it; they tell its users once it is detached.
    mount_ids: tuple[int, ...] = ()
    #: Ids of the mounts that were detached and pinned still when it was mounted again: they pin it once that is gone.
    pinned_ids: tuple[int, ...] = ()
    holders: tuple[Holder, ...] = ()
    #: When its holders were looked for last (CLOCK_BOOTTIME, µs); not saved, for the next hostd looks again.
    held_at: int = 0
    #: The worker that hangs in the umount of it, perhaps one of an earlier hostd.
    worker: Identity | None = None
    #: How often it was mounted again after it had been unmounted.
    remounts: int = 0
    #: When it was found gone.
    gone_at: int = 0
    #: An agent named it (TrackLayer), so it stays listed though it is not mounted yet.
    tracked: bool = False


@dataclass(frozen=True, slots=True)
class Inhibitor:
    """Somebody who wants a VM's clean-up to wait; `pod_uid` is empty for all VMs."""

    pod_uid: str
    who: str
    why: str


@dataclass(slots=True)
class VM:
    """One launcher pod's run."""

    pod_uid: str
    vmi_uid: str = ""
    namespace: str = ""
    name: str = ""
    state: State = State.PENDING
    #: The QEMU that stands for the VM: the one that an agent named, or the first one found.
    leader: Identity | None = None
    #: All QEMUs of the pod that were alive when last looked at, the leader among them.
    qemus: list[Identity] = field(default_factory=list)
    layers: dict[bytes, Layer] = field(default_factory=dict)
    exit: Exit = Exit()
    policy: Policy = Policy.CLEAN
    #: The VM's own grace, or None for the configuration's.
    grace_usec: int | None = None
    #: An agent registered it (and may acknowledge or withdraw it).
    registered: bool = False
    #: The pod's cgroup was seen at least once: its later absence is evidence of death.
    cgroup_seen: bool = False
    #: A QEMU of this pod was seen at least once.
    had_qemu: bool = False
    #: OOM kills that the pod's cgroup had counted when the leader was found; -1 = unknown.
    oom_kills: int = -1
    started_usec: int = 0
    exited_usec: int = 0
    released_usec: int = 0
    first_seen_at: int = 0
    exited_at: int = 0
    released_at: int = 0
    #: Devices by name (`pci/0000:3b:00.0`), as the devices part sees them.
    devices: tuple[str, ...] = ()
    #: What keeps the VM from going on, in words; empty while nothing does.
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A host device: `device` is its name (`pci/0000:3b:00.0`), `vm` is `namespace/name` or empty."""

    device: str
    kind: str
    vm: str
    pod_uid: str
    state: str
    description: str


@dataclass(frozen=True, slots=True)
class DeviceConflict:
    """A device is used against its claim, or is not the one that was claimed; `vm` is the claim's."""

    device: str
    vm: str
    reason: str


@dataclass(frozen=True, slots=True)
class HelperStatus:
    """How it is with qemu-pr-helper. All but the last field are PRHelper's properties on the bus."""

    enabled: bool = False
    state: str = "absent"
    #: Our helper; 0 where none takes connections at the path.
    main_pid: int = 0
    socket_path: str = ""
    restarts: int = 0
    last_failure: str = ""
    multipath: str = "unknown"
    clients: int = 0
    #: Who else serves the path (standby); 0 = nobody, or out of our sight.
    owner_pid: int = 0
    #: Why the state is what it is, in a sentence; empty where the word says it all.
    why: str = ""
