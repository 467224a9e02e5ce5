"""What the bus asks of the core, and what the core tells the bus: the only words between the two.

`VMService` is implemented by the keeper (and by a small fake in the bus tests). Pod UIDs are canonical lower-case
UUIDs here; paths are bytes. Every method may raise the errors of `hostd.errors` that its docstring names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hostd.core.model import VM, Exit, Holder, Inhibitor, Layer, Policy, State


@dataclass(frozen=True, slots=True)
class Registration:
    """What an agent says of a VM. None = not said.

    The leader is named by `leader_pidfd` (owned by the callee from here on: it closes it), or by `leader_pid`, which
    is trusted only together with `leader_start_time` (ticks) or `leader_pidfd_id` (pidfs inode), where given.
    """

    vmi_uid: str | None = None
    namespace: str | None = None
    name: str | None = None
    leader_pid: int | None = None
    leader_start_time: int | None = None
    leader_pidfd_id: int | None = None
    leader_pidfd: int | None = None
    grace_usec: int | None = None
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """One target in an answer of Release: `action` is what is (or would be) done, `result` what came of it."""

    target: bytes
    action: str
    result: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One finding of Sweep."""

    pod_uid: str
    target: bytes
    action: str
    result: str


# Events, in the order in which they happen. State is saved before any of them is told.


@dataclass(frozen=True, slots=True)
class VMNew:
    """A VM is known from now on."""

    vm: VM


@dataclass(frozen=True, slots=True)
class VMChanged:
    """Fields of a VM changed (names of `VM`'s fields); one event for one transition."""

    vm: VM
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class VMExited:
    """The last QEMU of a VM died."""

    vm: VM
    exit: Exit


@dataclass(frozen=True, slots=True)
class VMReleased:
    """Every layer of a VM is gone. `elapsed_usec`: from the death seen to the last layer gone, 0 where unknown."""

    vm: VM
    layers: int
    elapsed_usec: int


@dataclass(frozen=True, slots=True)
class VMRemoved:
    """A VM is forgotten."""

    vm: VM


@dataclass(frozen=True, slots=True)
class LayerBlocked:
    """A layer cannot be unmounted; told once a spell, and again only when the reason changes."""

    vm: VM
    layer: Layer
    holders: tuple[Holder, ...]


Event = VMNew | VMChanged | VMExited | VMReleased | VMRemoved | LayerBlocked
Listener = Callable[[Event], None]


class VMService(Protocol):
    """The VMs of this node."""

    @property
    def mode(self) -> str:
        """`enforce` or `observe`."""
        ...

    @property
    def config_files(self) -> Sequence[str]:
        """The files that the configuration was read from, the least important first."""
        ...

    @property
    def health(self) -> Mapping[str, str]:
        """What is wrong with hostd's own parts, by part, in words; a part that is well is not in it."""
        ...

    def vms(self) -> Iterable[VM]:
        """All VMs, oldest first. The caller does not change them."""
        ...

    def vm(self, pod_uid: str) -> VM:
        """Raises NoSuchVM."""
        ...

    def vm_by_pid(self, pid: int) -> VM:
        """The VM of which this living process (host pid) is a part, by its cgroup. Raises NoSuchProcess, NoSuchVM."""
        ...

    def vms_by_vmi(self, vmi_uid: str) -> list[VM]:
        """The VMs of a VMI, oldest first; may be empty."""
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` for each event from now on, in order; the result ends it."""
        ...

    async def register(self, pod_uid: str, said: Registration) -> tuple[VM, bool]:
        """The VM, and whether it was known so already. Durable on return.

        Raises InvalidArgs, VMExists, NoSuchProcess, ProcessMismatch, LimitExceeded.
        """
        ...

    async def unregister(self, pod_uid: str) -> None:
        """Acknowledges a released VM, else withdraws what was registered. Raises NoSuchVM."""
        ...

    async def track_layer(self, pod_uid: str, path: bytes) -> bool:
        """Whether the layer was known already. Raises NoSuchVM, NotATarget, LimitExceeded."""
        ...

    async def holders(self, pod_uid: str, path: bytes) -> list[Holder]:
        """Who holds this layer now. Raises NoSuchVM, NotATarget."""
        ...

    async def release(self, pod_uid: str, *, dry_run: bool, lazy: bool) -> list[ReleaseRow]:
        """Cleans without waiting for grace; joins a pass under way. Raises NoSuchVM, VMAlive."""
        ...

    async def sweep(self, *, dry_run: bool) -> list[SweepRow]:
        """Looks at everything now. Findings: each target with what was (or would be) done."""
        ...

    async def set_policy(self, pod_uid: str, policy: Policy) -> None:
        """Durable on return. Raises NoSuchVM."""
        ...

    async def set_grace(self, pod_uid: str, grace_usec: int) -> None:
        """Durable on return. Raises NoSuchVM, InvalidArgs."""
        ...

    async def inhibit(self, pod_uid: str, who: str, why: str) -> int:
        """An fd for the caller (who closes it after sending): clean-up waits while any copy of it is open.

        Raises NoSuchVM, LimitExceeded.
        """
        ...

    def inhibitors(self, pod_uid: str) -> list[Inhibitor]:
        """Those that hold this VM, the ones for all VMs among them."""
        ...

    async def reload(self) -> None:
        """Reads the configuration again. Raises InvalidArgs naming file and key; then nothing has changed."""
        ...


#: States in which a VM's QEMU is dead and its layers are on their way out.
ENDED = frozenset({State.EXITED, State.HELD, State.CLEANING, State.BLOCKED, State.RELEASED})
