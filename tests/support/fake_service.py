"""A VMService in memory: what the bus asks is noted and answered by the rules of the protocol, without a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hostd.core.model import VM, Exit, Holder, Inhibitor, Layer, LayerState, Policy, State
from hostd.core.service import (
    Event,
    LayerBlocked,
    Listener,
    Registration,
    ReleaseRow,
    SweepRow,
    VMChanged,
    VMExited,
    VMNew,
    VMReleased,
    VMRemoved,
)
from hostd.errors import NoSuchVM, NotATarget, VMAlive, VMExists
from hostd.kubevirt.targets import Kind, Target
from hostd.linux.pidfd import Identity

ROOT = b"/var/lib/kubelet"


def pod_uid(number: int) -> str:
    """A pod UID for each number; the smaller comes first."""
    return f"{number:08x}-0c5a-4b6e-9d53-2f1f0d3c1a77"


def layer(uid: str, name: bytes = b"disk_0.img", **fields: Any) -> Layer:
    """A containerDisk's layer."""
    relative = b"pods/%s/volumes/kubernetes.io~empty-dir/container-disks/%s" % (uid.encode(), name)
    volume = name.removesuffix(b".img").decode("utf-8", "surrogateescape")
    return Layer(Target(uid, Kind.CONTAINERDISK, volume, ROOT + b"/" + relative, relative), **fields)


def vm(number: int = 1, *, layers: int = 1, **fields: Any) -> VM:
    """A running VM."""
    uid = pod_uid(number)
    found = VM(
        uid,
        vmi_uid=f"{number:08x}-aaaa-4b6e-9d53-2f1f0d3c1a77",
        namespace="shop",
        name=f"vm{number}",
        state=State.RUNNING,
        leader=Identity(pid=10_000 + number, start_time=77, boot_id="b", inode=4_000 + number),
        started_usec=1_700_000_000_000_000,
    )
    for index in range(layers):
        each = layer(uid, b"disk_%d.img" % index)
        found.layers[each.target.path] = each
    return replace(found, **fields)


class FakeService:
    """The VMs of a node that is not there. `asked` lists what came, `failing` what is to be raised instead."""

    def __init__(self, *vms: VM) -> None:
        self.mode = "enforce"
        self.config_files: tuple[str, ...] = ("/etc/hostd/hostd.toml",)
        self.health: dict[str, str] = {}
        self.known = {each.pod_uid: each for each in vms}
        self.asked: list[tuple[str, Any]] = []
        self.failing: dict[str, Exception] = {}
        self.handles: list[int] = []
        self.held: list[Inhibitor] = []
        self.pids: dict[int, str] = {}
        self._listeners: list[Listener] = []

    # What a test makes happen

    def tell(self, event: Event) -> None:
        """To all listeners."""
        for listener in list(self._listeners):
            listener(event)

    def add(self, new: VM) -> VM:
        """A VM is found."""
        self.known[new.pod_uid] = new
        self.tell(VMNew(new))
        return new

    def change(self, uid: str, **fields: Any) -> VM:
        """One transition."""
        for name, value in fields.items():
            setattr(self.known[uid], name, value)
        self.tell(VMChanged(self.known[uid], frozenset(fields)))
        return self.known[uid]

    def die(self, uid: str, how: Exit) -> None:
        """The last QEMU dies."""
        self.change(uid, state=State.EXITED, exit=how, exited_usec=1_700_000_001_000_000)
        self.tell(VMExited(self.known[uid], how))

    def block(self, uid: str, error: str, *holders: Holder) -> None:
        """The first layer is busy."""
        first = next(iter(self.known[uid].layers.values()))
        first.state, first.error, first.holders = LayerState.BUSY, error, holders
        self.change(uid, state=State.BLOCKED, layers=self.known[uid].layers)
        self.tell(LayerBlocked(self.known[uid], first, holders))

    def finish(self, uid: str, elapsed_usec: int = 4_200) -> None:
        """All layers are gone."""
        for each in self.known[uid].layers.values():
            each.state = LayerState.GONE
        self.change(uid, state=State.RELEASED, layers=self.known[uid].layers, released_usec=1_700_000_002_000_000)
        self.tell(VMReleased(self.known[uid], len(self.known[uid].layers), elapsed_usec))

    def remove(self, uid: str) -> None:
        """It is forgotten."""
        self.tell(VMRemoved(self.known.pop(uid)))

    def _note(self, what: str, *said: Any) -> None:
        self.asked.append((what, said))
        if what in self.failing:
            raise self.failing[what]

    # VMService

    def vms(self) -> Iterable[VM]:
        return list(self.known.values())

    def vm(self, pod_uid: str) -> VM:
        if "vm" in self.failing:
            raise self.failing["vm"]
        try:
            return self.known[pod_uid]
        except KeyError:
            raise NoSuchVM(f"no VM of pod {pod_uid} is known; ListVMs tells which are") from None

    def vm_by_pid(self, pid: int) -> VM:
        self._note("vm_by_pid", pid)
        if pid not in self.pids:
            raise NoSuchVM(f"process {pid} is no VM's")
        return self.vm(self.pids[pid])

    def vms_by_vmi(self, vmi_uid: str) -> list[VM]:
        return [each for each in self.known.values() if each.vmi_uid == vmi_uid]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def register(self, pod_uid: str, said: Registration) -> tuple[VM, bool]:
        try:
            self._note("register", pod_uid, said)
        finally:
            if said.leader_pidfd is not None:
                os.close(said.leader_pidfd)
        before = self.known.get(pod_uid)
        if before is None:
            return self.add(VM(pod_uid, said.vmi_uid or "", said.namespace or "", said.name or "")), False
        if said.leader_pid not in (None, before.leader.pid if before.leader else None):
            raise VMExists(f"pod {pod_uid} is registered with another process")
        return before, True

    async def unregister(self, pod_uid: str) -> None:
        self._note("unregister", pod_uid)
        self.vm(pod_uid)
        self.remove(pod_uid)

    async def track_layer(self, pod_uid: str, path: bytes) -> bool:
        self._note("track_layer", pod_uid, path)
        if b"/volumes/kubernetes.io~empty-dir/" not in path:
            raise NotATarget(f"{path!r} is not below the two directories of pod {pod_uid}")
        return path in self.vm(pod_uid).layers

    async def holders(self, pod_uid: str, path: bytes) -> list[Holder]:
        self._note("holders", pod_uid, path)
        layers = self.vm(pod_uid).layers
        if path not in layers:
            raise NotATarget(f"{path!r} is no layer of pod {pod_uid}")
        return list(layers[path].holders)

    async def release(self, pod_uid: str, *, dry_run: bool, lazy: bool) -> list[ReleaseRow]:
        self._note("release", pod_uid, dry_run, lazy)
        found = self.vm(pod_uid)
        if found.state in (State.PENDING, State.RUNNING):
            raise VMAlive(f"a QEMU of pod {pod_uid} lives; end it first")
        return [ReleaseRow(path, "unmount", "planned" if dry_run else "gone") for path in found.layers]

    async def sweep(self, *, dry_run: bool) -> list[SweepRow]:
        self._note("sweep", dry_run)
        return [SweepRow(uid, path, "none", "ok") for uid, each in self.known.items() for path in each.layers]

    async def set_policy(self, pod_uid: str, policy: Policy) -> None:
        self._note("set_policy", pod_uid, policy)
        self.change(pod_uid, policy=policy)

    async def set_grace(self, pod_uid: str, grace_usec: int) -> None:
        self._note("set_grace", pod_uid, grace_usec)
        self.change(pod_uid, grace_usec=grace_usec)

    async def inhibit(self, pod_uid: str, who: str, why: str) -> int:
        self._note("inhibit", pod_uid, who, why)
        if pod_uid:
            self.vm(pod_uid)
        ours, theirs = os.pipe()
        self.handles.append(ours)
        self.held.append(Inhibitor(pod_uid, who, why))
        return theirs

    def inhibitors(self, pod_uid: str) -> list[Inhibitor]:
        return [each for each in self.held if each.pod_uid in ("", pod_uid)]

    async def reload(self) -> None:
        self._note("reload")

    def close(self) -> None:
        """The ends of the handles that it gave."""
        for fd in self.handles:
            os.close(fd)
        self.handles.clear()
