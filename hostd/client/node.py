"""The node's hostd: everything that the bus offers, as methods."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hostd.bus import library, names
from hostd.bus.arguments import DRY_RUN, LAZY
from hostd.bus.stream import close_all
from hostd.bus.text import escape
from hostd.client import model
from hostd.client.link import Link
from hostd.client.watch import vms_of, watch
from hostd.errors import InvalidArgs, NoSuchProcess

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Mapping

    from hostd.client.events import Event
    from hostd.client.model import VM, Device, Helper, Holder, Layer, ReleaseRow, Status, SweepRow


@contextlib.asynccontextmanager
async def connect(address: str | None = None, *, interactive: bool = False) -> AsyncIterator[Node]:
    """hostd on the bus at `address` (None: DBUS_SYSTEM_BUS_ADDRESS, else the system's).

    `interactive`: a person is there whom polkit may ask for a password. A bus that is lost later is looked for again.
    Raises Unreachable where there is no bus; hostd itself need not be there yet.
    """
    link = Link(address, interactive=interactive)
    await link.open()
    try:
        yield Node(link)
    finally:
        await link.close()


class Node:
    """Use `connect`. Every method raises Unreachable where nobody answers, and what its docstring names."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pr_helper = PRHelper(link)

    @property
    def running(self) -> bool:
        """Whether hostd is on the bus now."""
        return bool(self._link.owner)

    def watch(self) -> AsyncIterator[Event]:
        """Everything that happens, beginning with a Resync (or Lost, while hostd is not there).

        It never ends by itself. Raises AccessDenied.
        """
        return watch(self._link)

    # hostd itself

    async def status(self) -> Status:
        """Version, mode, counts, health."""
        return model.Status(**model.status_changes(await self._properties(names.ROOT, names.MANAGER)))

    async def reload(self) -> None:
        """Lets hostd read its configuration again. Raises InvalidArgs that names file and key."""
        await self._manager("Reload")

    async def metrics(self) -> str:
        """Metrics in Prometheus' text format. Raises NotSupported where hostd lacks the library for it."""
        (text,) = await self._manager("GetMetrics")
        return str(text)

    # VMs

    async def list(self, *, state: str = "", namespace: str = "", vmi_uid: str = "") -> builtins.list[VM]:
        """All VMs, oldest first, or those that match what is given."""
        (objects,) = await _body(self._link, names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects")
        return [
            vm
            for vm in vms_of(objects)
            if state in ("", vm.state) and namespace in ("", vm.namespace) and vmi_uid in ("", vm.vmi_uid)
        ]

    async def get(self, pod_uid: str) -> VM:
        """One VM. Raises NoSuchVM, InvalidArgs."""
        (path,) = await self._manager("GetVM", "s", pod_uid)
        return await self._vm(path)

    async def find_by_pid(self, pid: int) -> VM:
        """The VM that this process (as the host counts) is part of. Raises NoSuchVM, NoSuchProcess, InvalidArgs."""
        (path,) = await self._manager("GetVMByPID", "u", _unsigned(pid, 32, "the process"))
        return await self._vm(path)

    async def find_by_vmi(self, vmi_uid: str) -> builtins.list[VM]:
        """The VMs of a VMI: none, one, or two while it migrates within the node."""
        (paths,) = await self._manager("GetVMsByVMI", "s", vmi_uid)
        return [await self._vm(path) for path in paths]

    async def register(
        self,
        pod_uid: str,
        *,
        pid: int | None = None,
        pidfd: int | None = None,
        vmi_uid: str | None = None,
        namespace: str | None = None,
        name: str | None = None,
        grace_usec: int | None = None,
        policy: str | None = None,
    ) -> bool:
        """Tells hostd of a VM; whether it was known so already.

        The QEMU is named by `pid` in the *caller's* pid namespace, which is opened here, or by a `pidfd`, which stays
        the caller's. Raises InvalidArgs, VMExists, NoSuchProcess, ProcessMismatch, LimitExceeded, AccessDenied.
        """
        if pid is not None and pidfd is not None:
            raise InvalidArgs("name the process by pid or by pidfd, not by both")
        words = {"VMIUID": vmi_uid, "Namespace": namespace, "Name": name, "Policy": policy}
        details = {key: library.variant("s", value) for key, value in words.items() if value is not None}
        if grace_usec is not None:
            details["GraceUSec"] = library.variant("t", _unsigned(grace_usec, 64, "the grace"))
        fds = _pidfds(pid, pidfd)
        if fds:
            details["LeaderPIDFD"] = library.variant("h", 0)
        _, existing = await self._manager("RegisterVM", "sa{sv}", pod_uid, details, fds=fds)
        return bool(existing)

    async def unregister(self, pod_uid: str) -> None:
        """Acknowledges a released VM, which is then forgotten; of others it withdraws what was registered."""
        await self._manager("UnregisterVM", "s", pod_uid)

    async def set_policy(self, pod_uid: str, policy: str) -> None:
        """`clean`, or `keep` until it is clean again. Raises NoSuchVM, InvalidArgs, AccessDenied."""
        await self._of_vm(pod_uid, "SetPolicy", "s", policy)

    async def set_grace(self, pod_uid: str, grace_usec: int) -> None:
        """How long to wait after its death. Raises NoSuchVM, InvalidArgs, AccessDenied."""
        await self._of_vm(pod_uid, "SetGrace", "t", _unsigned(grace_usec, 64, "the grace"))

    # Layers

    async def layers(
        self, pod_uid: str = "", *, state: str = "", kind: str = "", namespace: str = ""
    ) -> builtins.list[Layer]:
        """Layers of all VMs, or those that match what is given. Raises InvalidArgs."""
        given = {"PodUID": pod_uid, "State": state, "Kind": kind, "Namespace": namespace}
        (rows,) = await self._manager("ListLayers", "a{sv}", _filter(given))
        return [model.Layer(*row[:7]) for row in rows]

    async def track_layer(self, pod_uid: str, target: str | bytes) -> bool:
        """Names a target that hostd does not find by itself; whether it was known. Raises NoSuchVM, NotATarget."""
        (existing,) = await self._manager("TrackLayer", "ssa{sv}", pod_uid, _text(target), {})
        return bool(existing)

    async def holders(self, pod_uid: str, target: str | bytes) -> builtins.list[Holder]:
        """Who holds this layer, by a look of now. Raises NoSuchVM, NotATarget."""
        (rows,) = await self._manager("ListHolders", "ss", pod_uid, _text(target))
        return [model.Holder(*row[:4]) for row in rows]

    async def release(self, pod_uid: str, *, dry_run: bool = False, lazy: bool = False) -> builtins.list[ReleaseRow]:
        """Cleans up without waiting for grace. Raises NoSuchVM, VMAlive, AccessDenied."""
        flags = (DRY_RUN if dry_run else 0) | (LAZY if lazy else 0)
        (rows,) = await self._manager("Release", "st", pod_uid, flags)
        return [model.ReleaseRow(*row[:3]) for row in rows]

    async def sweep(self, *, dry_run: bool = False) -> builtins.list[SweepRow]:
        """Looks at everything now. Raises AccessDenied."""
        (rows,) = await self._manager("Sweep", "t", DRY_RUN if dry_run else 0)
        return [model.SweepRow(*row[:4]) for row in rows]

    @contextlib.asynccontextmanager
    async def inhibit(self, pod_uid: str = "", *, who: str, why: str) -> AsyncIterator[int]:
        """Clean-up of this VM (of all, where none is named) waits in here, also while hostd restarts.

        Gives the descriptor that does it: a copy of it, in a child say, holds it as well. Raises NoSuchVM,
        LimitExceeded, AccessDenied.
        """
        message, fds = await self._link.call(names.ROOT, names.MANAGER, "Inhibit", "sss", pod_uid, who, why)
        try:
            yield fds[message.body[0]]
        finally:
            close_all(fds)

    # Devices

    async def devices(
        self, *, kind: str = "", vm: str = "", pod_uid: str = "", state: str = ""
    ) -> builtins.list[Device]:
        """Host devices and claims on them, all or those that match what is given."""
        given = {"Kind": kind, "VM": vm, "PodUID": pod_uid, "State": state}
        (rows,) = await self._manager("ListDevices", "a{sv}", _filter(given))
        return [model.Device(*row[:6]) for row in rows]

    async def claim_device(self, device: str, vm: str, *, vmi_uid: str = "") -> None:
        """Claims a device for a VM (namespace/name). Raises NoSuchDevice, DeviceBusy, NotSupported, AccessDenied."""
        await self._manager("ClaimDevice", "ssa{sv}", device, vm, _filter({"VMIUID": vmi_uid}))

    async def release_device(self, device: str, vm: str) -> None:
        """Ends a claim on a device that is not in use. Raises NoSuchDevice, DeviceBusy, NotSupported, AccessDenied."""
        await self._manager("ReleaseDevice", "ss", device, vm)

    # How it is asked

    async def _manager(
        self,
        member: str,
        signature: str = "",
        *body: Any,  # noqa: ANN401 - whatever D-Bus can carry
        fds: builtins.list[int] | None = None,
    ) -> builtins.list[Any]:
        return await _body(self._link, names.ROOT, names.MANAGER, member, signature, *body, fds=fds)

    async def _of_vm(self, pod_uid: str, member: str, signature: str, *body: Any) -> None:  # noqa: ANN401
        (path,) = await self._manager("GetVM", "s", pod_uid)
        await _body(self._link, path, names.VM, member, signature, *body)

    async def _vm(self, path: str) -> VM:
        return model.vm_of(names.pod_uid_of(path), await self._properties(path, names.VM))

    async def _properties(self, path: str, interface: str) -> dict[str, Any]:
        return await _get_all(self._link, path, interface)


class PRHelper:
    """qemu-pr-helper. Its methods raise HelperFailed, NotSupported, AccessDenied."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def status(self) -> Helper:
        """How it is."""
        return model.Helper(**model.helper_changes(await _get_all(self._link, names.HELPER_PATH, names.HELPER)))

    async def enable(self) -> None:
        """On, now and after a restart."""
        await self._call("Enable")

    async def disable(self) -> None:
        """Off, now and after a restart."""
        await self._call("Disable")

    async def restart(self) -> None:
        """Starts it anew; its socket stays. Raises NotEnabled, too."""
        await self._call("Restart")

    async def probe(self) -> dict[str, Any]:
        """Findings by name. Raises NotEnabled, too."""
        (found,) = await self._call("Probe")
        return {name: value.value for name, value in found.items()}

    async def _call(self, member: str) -> list[Any]:
        return await _body(self._link, names.HELPER_PATH, names.HELPER, member)


async def _body(
    link: Link,
    path: str,
    interface: str,
    member: str,
    signature: str = "",
    *body: Any,  # noqa: ANN401 - whatever D-Bus can carry
    fds: list[int] | None = None,
) -> list[Any]:
    message, received = await link.call(path, interface, member, signature, *body, fds=fds)
    close_all(received)
    return message.body


async def _get_all(link: Link, path: str, interface: str) -> dict[str, Any]:
    (values,) = await _body(link, path, names.PROPERTIES, "GetAll", "s", interface)
    return dict(values)


def _filter(given: Mapping[str, str]) -> dict[str, Any]:
    return {key: library.variant("s", value) for key, value in given.items() if value}


def _text(target: str | bytes) -> str:
    return escape(target) if isinstance(target, bytes) else target


def _unsigned(value: int, bits: int, what: str) -> int:
    if not 0 <= value < 1 << bits:
        raise InvalidArgs(f"{what} {value} is out of range: it is from 0 to 2^{bits} - 1")
    return value


def _pidfds(pid: int | None, pidfd: int | None) -> list[int]:
    """The descriptor to be sent, our own."""
    if pidfd is not None:
        return [os.dup(pidfd)]
    if pid is None:
        return []
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        raise NoSuchProcess(f"no process {pid} lives") from None
    except OSError as error:
        raise InvalidArgs(f"process {pid} cannot be opened: {error.strerror}") from None
