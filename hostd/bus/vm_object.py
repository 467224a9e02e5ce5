"""io.kubevirt.hostd1.VM: one VM's object. It holds the pod's UID and nothing else; each answer is a fresh look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostd.bus import arguments, names, rows
from hostd.bus.interface import Exported, getter, method
from hostd.bus.manager import inhibit, release
from hostd.bus.text import sentence
from hostd.core.model import VM, Policy
from hostd.errors import InvalidArgs

if TYPE_CHECKING:
    from hostd.core.service import VMService

#: A year: more is a slip of the unit.
MAX_GRACE_USEC = 366 * 86400 * 1_000_000
#: Field of the model → properties that show it; `qemus` and the rest that is not here is nobody's property.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "vmi_uid": ("VMIUID",),
    "namespace": ("Namespace",),
    "name": ("Name",),
    "state": ("State",),
    "leader": ("Leader", "LeaderPIDFDID"),
    "started_usec": ("StartedUSec",),
    "exited_usec": ("ExitedUSec", "ExitStatus", "ExitSignal", "ExitReason"),
    "exit": ("ExitStatus", "ExitSignal", "ExitReason"),
    "released_usec": ("ReleasedUSec",),
    "policy": ("Policy",),
    "grace_usec": ("GraceUSec",),
    "layers": ("Layers",),
    "devices": ("Devices",),
    "error": ("Error",),
}


class VMObject(Exported, interface=names.VM):
    """One launcher pod's run."""

    changed_by = {"Policy": "SetPolicy", "GraceUSec": "SetGrace"}

    def __init__(self, service: VMService, pod_uid: str) -> None:
        self._service = service
        self._pod_uid = pod_uid

    @property
    def _vm(self) -> VM:
        return self._service.vm(self._pod_uid)

    @method("Release")
    async def release(self, flags: int) -> list[Any]:
        """Cleans up after it."""
        return await release(self._service, self._pod_uid, flags)

    @method("SetPolicy")
    async def set_policy(self, policy: str) -> None:
        """Clean or keep."""
        await self._service.set_policy(self._pod_uid, arguments.word(Policy, policy, "the policy"))

    @method("SetGrace")
    async def set_grace(self, grace_usec: int) -> None:
        """How long to wait."""
        if grace_usec > MAX_GRACE_USEC:
            raise InvalidArgs(f"a grace of {grace_usec} µs is more than a year")
        await self._service.set_grace(self._pod_uid, grace_usec)

    @method("Inhibit")
    async def inhibit(self, who: str, why: str) -> int:
        """A handle that holds its clean-up."""
        return await inhibit(self._service, self._pod_uid, who, why)

    @getter("PodUID")
    def pod_uid(self) -> str:
        """Its pod's."""
        return self._pod_uid

    @getter("VMIUID")
    def vmi_uid(self) -> str:
        """As told or found."""
        return sentence(self._vm.vmi_uid)

    @getter("Namespace")
    def namespace(self) -> str:
        """As told or found."""
        return sentence(self._vm.namespace)

    @getter("Name")
    def name(self) -> str:
        """As told or found."""
        return sentence(self._vm.name)

    @getter("State")
    def state(self) -> str:
        """Now."""
        return self._vm.state.value

    @getter("Leader")
    def leader(self) -> int:
        """Its QEMU."""
        return rows.leader_pid(self._vm)

    @getter("LeaderPIDFDID")
    def leader_pidfd_id(self) -> int:
        """Its QEMU's pidfd inode."""
        leader = self._vm.leader
        return leader.inode if leader is not None else 0

    @getter("StartedUSec")
    def started_usec(self) -> int:
        """First seen running."""
        return self._vm.started_usec

    @getter("ExitedUSec")
    def exited_usec(self) -> int:
        """Seen dead."""
        return self._vm.exited_usec

    @getter("ExitStatus")
    def exit_status(self) -> int:
        """Of the last QEMU."""
        return self._vm.exit.status

    @getter("ExitSignal")
    def exit_signal(self) -> int:
        """Of the last QEMU."""
        return self._vm.exit.signal

    @getter("ExitReason")
    def exit_reason(self) -> str:
        """Of the last QEMU; empty before."""
        vm = self._vm
        return vm.exit.reason.value if vm.exited_usec else ""

    @getter("ReleasedUSec")
    def released_usec(self) -> int:
        """Last layer gone."""
        return self._vm.released_usec

    @getter("Policy")
    def policy(self) -> str:
        """Clean or keep."""
        return self._vm.policy.value

    @getter("GraceUSec")
    def grace_usec(self) -> int:
        """Its own, or the largest number."""
        grace = self._vm.grace_usec
        return rows.AS_CONFIGURED if grace is None else grace

    @getter("Inhibitors")
    def inhibitors(self) -> list[Any]:
        """Who holds it and why."""
        return [[sentence(each.who), sentence(each.why)] for each in self._service.inhibitors(self._pod_uid)]

    @getter("Layers")
    def layers(self) -> list[Any]:
        """All that are known."""
        return [rows.layer_of_vm(layer) for layer in self._vm.layers.values()]

    @getter("Devices")
    def devices(self) -> list[str]:
        """By name."""
        return [sentence(name) for name in self._vm.devices]

    @getter("Error")
    def error(self) -> str:
        """In words."""
        return sentence(self._vm.error)
