"""The runs of VMs whose devices are looked at: which QEMUs they have, and what those have open."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hostd.core.model import VM, State
from hostd.devices.claim import Life, Run
from hostd.devices.open_files import Number, device_numbers
from hostd.devices.run_index import RunIndex
from hostd.linux.pidfd import Identity, Process

if TYPE_CHECKING:
    from hostd.devices.sysfs import Sysfs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """What is remembered beside a pod's run, from one look to the next."""

    qemus: tuple[Identity, ...] = ()
    #: What each number led to while sysfs could tell: a device that was torn out is still open.
    behind: dict[Number, tuple[str, ...]] = field(default_factory=dict)


class RunTable:
    """`runs` is as they were when they were last looked at."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._entries: dict[str, _Entry] = {}
        self._order = 0
        self.runs = RunIndex()

    def qemus(self, pod_uid: str) -> tuple[Identity, ...]:
        """The QEMUs of a pod, as the keeper told of them."""
        entry = self._entries.get(pod_uid)
        return entry.qemus if entry else ()

    def see(self, vm: VM) -> tuple[bool, bool]:
        """Takes in what the keeper knows of a VM: (anything is new, there are other QEMUs to look at)."""
        entry = self._entries.get(vm.pod_uid)
        if entry is None:
            self._order += 1
            entry = self._entries[vm.pod_uid] = _Entry()
            self.runs[vm.pod_uid] = Run(vm.pod_uid, order=self._order)
        before, qemus_before = self.runs[vm.pod_uid], entry.qemus
        entry.qemus = tuple(vm.qemus) if vm.state is State.RUNNING else ()
        run = _seen(before, vm)
        other = bool(entry.qemus) and entry.qemus != qemus_before
        if other and not qemus_before:
            # A new QEMU in a pod whose last one is dead: what it has open is to be found out.
            run = replace(run, life=Life.UNSEEN, settled=False)
            entry.behind.clear()
        self.runs[vm.pod_uid] = run
        return run != before or entry.qemus != qemus_before, other

    def forget(self, pod_uid: str) -> bool:
        """A VM is forgotten. Whether it was known."""
        self._entries.pop(pod_uid, None)
        return self.runs.pop(pod_uid, None) is not None

    def settle(self, pod_uid: str) -> None:
        """The run has been alive for so long that what it has not opened it will not open."""
        entry = self._entries.get(pod_uid)
        if entry is not None and entry.qemus:
            self.runs[pod_uid] = replace(self.runs[pod_uid], settled=True)

    def look(self, pod_uid: str) -> bool:
        """Looks at what the pod's QEMUs have open. Whether anything is new; a QEMU that is dead has nothing to tell."""
        entry = self._entries.get(pod_uid)
        if entry is None or not entry.qemus:
            return False
        before = self.runs[pod_uid]
        numbers = {qemu.pid: found for qemu in entry.qemus if (found := _numbers_of(qemu)) is not None}
        if numbers:
            self.runs[pod_uid] = replace(before, life=Life.ALIVE, open=self._named(entry, numbers))
        return self.runs[pod_uid] != before

    def _named(self, entry: _Entry, numbers: dict[int, frozenset[Number]]) -> dict[str, int]:
        open_now = {number for found in numbers.values() for number in found}
        behind = {number: self._sysfs.behind(number) or entry.behind.get(number, ()) for number in open_now}
        entry.behind = behind
        return {name: pid for pid in sorted(numbers) for number in numbers[pid] for name in behind[number]}


def _seen(run: Run, vm: VM) -> Run:
    name = f"{vm.namespace}/{vm.name}" if vm.name else ""
    if vm.state is State.RUNNING:
        return replace(run, vm=name, vmi_uid=vm.vmi_uid)
    if vm.state is State.PENDING:
        return replace(run, vm=name, vmi_uid=vm.vmi_uid, life=Life.UNSEEN, open={}, settled=False)
    return replace(run, vm=name, vmi_uid=vm.vmi_uid, life=Life.DEAD, open={}, settled=False)


def _numbers_of(qemu: Identity) -> frozenset[Number] | None:
    """What a QEMU has open; None if it is dead, or another process has its pid, or it may not be looked at."""
    try:
        with Process.open(qemu.pid) as process:
            if not process.identity.same_as(qemu):
                return None
            found = device_numbers(qemu.pid)
            # What was read after its death was perhaps another's.
            return found if process.alive() else None
    except ProcessLookupError:
        return None
    except OSError as error:
        log.warning("what QEMU process %d has open cannot be seen: %s", qemu.pid, error)
        return None
