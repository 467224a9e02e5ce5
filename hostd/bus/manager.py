"""io.kubevirt.hostd1.Manager: what it is asked goes to the service, and what it says is the service's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostd import __version__
from hostd.bus import arguments, library, names, registration, rows
from hostd.bus.interface import Exported, getter, method
from hostd.bus.text import sentence
from hostd.core.model import VM, LayerState, State
from hostd.errors import InvalidArgs, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostd.bus.call import Call
    from hostd.bus.long_answer import LongAnswers
    from hostd.bus.marshal import Elements
    from hostd.bus.protocols import DeviceService, HelperService
    from hostd.core.service import VMService

#: Rows of one page of ListVMsEx.
PAGE = 1000
RELEASE_FLAGS = {arguments.DRY_RUN: "dry run", arguments.LAZY: "lazy"}
SWEEP_FLAGS = {arguments.DRY_RUN: "dry run"}
_VM_FILTER = {"State": "s", "Namespace": "s", "VMIUID": "s"}
_LAYER_FILTER = {"PodUID": "s", "VMIUID": "s", "Namespace": "s", "Kind": "s", "State": "s"}
_DEVICE_FILTER = {"Kind": "s", "VM": "s", "PodUID": "s", "State": "s"}


class Manager(Exported, interface=names.MANAGER):
    """The node's VMs."""

    def __init__(
        self,
        service: VMService,
        devices: DeviceService | None,
        helper: HelperService | None,
        answers: LongAnswers,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        self._service = service
        self._answers = answers
        self._metrics = metrics
        #: The configuration was read again, which may have changed what no event tells.
        self.on_reload: Callable[[], None] = lambda: None
        self._devices = devices
        self._features = _features(devices, helper)

    # VMs

    @method("RegisterVM")
    async def register_vm(self, call: Call, pod_uid: str, details: arguments.Details) -> list[Any]:
        """Tells of a VM."""
        uid = arguments.pod_uid(pod_uid)
        vm, existing = await self._service.register(uid, registration.read(call, details))
        return [names.vm_path(vm.pod_uid), existing]

    @method("UnregisterVM")
    async def unregister_vm(self, pod_uid: str) -> None:
        """Acknowledges or withdraws."""
        await self._service.unregister(arguments.pod_uid(pod_uid))

    @method("GetVM")
    def get_vm(self, pod_uid: str) -> str:
        """By pod."""
        return names.vm_path(self._service.vm(arguments.pod_uid(pod_uid)).pod_uid)

    @method("GetVMByPID")
    def get_vm_by_pid(self, pid: int) -> str:
        """By process."""
        return names.vm_path(self._service.vm_by_pid(arguments.pid(pid)).pod_uid)

    @method("GetVMsByVMI")
    def get_vms_by_vmi(self, vmi_uid: str) -> list[str]:
        """By VMI."""
        return [names.vm_path(vm.pod_uid) for vm in self._service.vms_by_vmi(arguments.name(vmi_uid, "the VMI UID"))]

    @method("ListVMs")
    async def list_vms(self) -> Elements:
        """All."""
        return await self._answers.of_vms(_row)

    @method("ListVMsEx")
    async def list_vms_ex(self, filter: arguments.Details, cursor: str, limit: int) -> list[Any]:  # noqa: A002
        """A page."""
        wanted = arguments.details(filter, _VM_FILTER, "ListVMsEx")
        if "State" in wanted:
            arguments.word(State, wanted["State"], "State")
        # A cursor is the last pod UID given: it holds whatever comes and goes between two pages.
        after = arguments.pod_uid(cursor) if cursor else ""
        size = min(limit or PAGE, PAGE)

        def found() -> list[VM]:
            those = (vm for vm in self._service.vms() if vm.pod_uid > after and _matches(vm, wanted))
            return sorted(those, key=lambda vm: vm.pod_uid)

        page = await self._answers.of_vms(_row, lambda: found()[:size])
        here = found()
        return [page, here[size - 1].pod_uid if len(here) > size else ""]

    # Layers

    @method("TrackLayer")
    async def track_layer(self, pod_uid: str, target: str, options: arguments.Details) -> bool:
        """Names a target."""
        arguments.details(options, {}, "TrackLayer")
        return await self._service.track_layer(arguments.pod_uid(pod_uid), arguments.path(target))

    @method("ListLayers")
    async def list_layers(self, filter: arguments.Details) -> Elements:  # noqa: A002
        """Of all VMs."""
        wanted = arguments.details(filter, _LAYER_FILTER, "ListLayers")
        kind = wanted.pop("Kind", None)
        if kind is not None and kind not in rows.LAYER_KINDS:
            raise InvalidArgs(f"Kind {kind[:64]!r} is not known; it is one of: {', '.join(rows.LAYER_KINDS)}")
        state = arguments.word(LayerState, wanted.pop("State"), "State") if "State" in wanted else None
        if "PodUID" in wanted:
            wanted["PodUID"] = arguments.pod_uid(wanted["PodUID"])

        def found(vm: VM) -> list[bytes]:
            return [
                library.element("(ssssssu)", rows.layer_row(vm, layer))
                for layer in (vm.layers.values() if _matches(vm, wanted) else ())
                if kind in (None, layer.target.kind) and state in (None, layer.state)
            ]

        return await self._answers.of_vms(found)

    @method("ListHolders")
    async def list_holders(self, pod_uid: str, target: str) -> list[Any]:
        """Who holds a layer."""
        found = await self._service.holders(arguments.pod_uid(pod_uid), arguments.path(target))
        return [rows.holder_row(holder) for holder in found]

    @method("Release")
    async def release(self, pod_uid: str, flags: int) -> list[Any]:
        """Cleans up after a VM."""
        return await release(self._service, arguments.pod_uid(pod_uid), flags)

    @method("Sweep")
    async def sweep(self, flags: int) -> list[Any]:
        """Looks at everything."""
        arguments.flags(flags, SWEEP_FLAGS)
        return [rows.sweep_row(row) for row in await self._service.sweep(dry_run=bool(flags & arguments.DRY_RUN))]

    @method("Inhibit")
    async def inhibit(self, pod_uid: str, who: str, why: str) -> int:
        """A handle that holds clean-up."""
        return await inhibit(self._service, arguments.pod_uid(pod_uid) if pod_uid else "", who, why)

    @method("Reload")
    async def reload(self) -> None:
        """Reads the configuration."""
        await self._service.reload()
        self.on_reload()

    @method("GetMetrics")
    def get_metrics(self) -> str:
        """Prometheus' text."""
        if self._metrics is None:
            raise NotSupported("this hostd counts nothing")
        return self._metrics().decode()

    # Devices

    @method("ListDevices")
    def list_devices(self, filter: arguments.Details) -> list[Any]:  # noqa: A002
        """All, or those that match."""
        wanted = arguments.details(filter, _DEVICE_FILTER, "ListDevices")
        if "PodUID" in wanted:
            wanted["PodUID"] = arguments.pod_uid(wanted["PodUID"])
        fields = {"Kind": "kind", "VM": "vm", "PodUID": "pod_uid", "State": "state"}
        return [
            [sentence(each) for each in (row.device, row.kind, row.vm, row.pod_uid, row.state, row.description)]
            for row in (self._devices.devices() if self._devices is not None else ())
            if all(getattr(row, fields[key]) == value for key, value in wanted.items())
        ]

    @method("ClaimDevice")
    async def claim_device(self, device: str, vm: str, options: arguments.Details) -> None:
        """Claims."""
        said = arguments.details(options, {"VMIUID": "s", "OnExit": "s"}, "ClaimDevice")
        vmi_uid = arguments.name(said["VMIUID"], "VMIUID") if "VMIUID" in said else None
        await self._with_devices().claim(_device(device), _vm_name(vm), vmi_uid=vmi_uid, on_exit=said.get("OnExit"))

    @method("ReleaseDevice")
    async def release_device(self, device: str, vm: str) -> None:
        """Gives back."""
        await self._with_devices().release(_device(device), _vm_name(vm))

    def _with_devices(self) -> DeviceService:
        if self._devices is None:
            raise NotSupported("this hostd keeps no devices: Features has no `devices`")
        return self._devices

    # Properties

    @getter("Version")
    def version(self) -> str:
        """The package's."""
        return __version__

    @getter("Features")
    def features(self) -> list[str]:
        """Fixed for the life of the process."""
        return self._features

    @getter("Mode")
    def mode(self) -> str:
        """As configured."""
        return self._service.mode

    @getter("ConfigFiles")
    def config_files(self) -> list[str]:
        """As read last."""
        return [sentence(file) for file in self._service.config_files]

    @getter("NVMs")
    def n_vms(self) -> int:
        """Counted now."""
        return sum(1 for _ in self._service.vms())

    @getter("NLayers")
    def n_layers(self) -> int:
        """Counted now."""
        return sum(layer.state is not LayerState.GONE for vm in self._service.vms() for layer in vm.layers.values())

    @getter("NBlocked")
    def n_blocked(self) -> int:
        """Counted now."""
        return sum(vm.state is State.BLOCKED for vm in self._service.vms())

    @getter("Health")
    def health(self) -> dict[str, str]:
        """Of the service."""
        return {sentence(part): sentence(trouble) for part, trouble in self._service.health.items()}


async def release(service: VMService, pod_uid: str, flags: int) -> list[Any]:
    """Release, of Manager and of VM."""
    arguments.flags(flags, RELEASE_FLAGS)
    done = await service.release(pod_uid, dry_run=bool(flags & arguments.DRY_RUN), lazy=bool(flags & arguments.LAZY))
    return [rows.release_row(row) for row in done]


async def inhibit(service: VMService, pod_uid: str, who: str, why: str) -> int:
    """Inhibit, of Manager and of VM."""
    return await service.inhibit(pod_uid, arguments.words(who, "who"), arguments.words(why, "why"))


def _row(vm: VM) -> list[bytes]:
    return [library.element("(sssssuo)", rows.vm_row(vm))]


def _matches(vm: VM, wanted: dict[str, str]) -> bool:
    has = {"State": vm.state.value, "Namespace": vm.namespace, "VMIUID": vm.vmi_uid, "PodUID": vm.pod_uid}
    return all(has[key] == value for key, value in wanted.items())


def _device(name: str) -> str:
    arguments.string(name, "the device", arguments.MAX_NAME)
    kind, slash, rest = name.partition("/")
    if kind not in ("pci", "mdev", "usb") or not slash or not rest or "/" in rest:
        raise InvalidArgs(f"{name!r} is not a device: it is pci/0000:3b:00.0, mdev/UUID or usb/1-2")
    return name


def _vm_name(name: str) -> str:
    namespace, slash, rest = name.partition("/")
    if not slash:
        raise InvalidArgs(f"{name[:64]!r} is not a VM: name it namespace/name")
    return f"{arguments.name(namespace, 'the namespace')}/{arguments.name(rest, 'the name')}"


def _features(devices: DeviceService | None, helper: HelperService | None) -> list[str]:
    parts = {"devices": devices, "pr-helper": helper}
    return [f"dbus-library={library.NAME}", *(name for name, part in parts.items() if part is not None)]
