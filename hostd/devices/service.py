"""The keeper of devices: it owns the claims, and is woken to look, settle, save and tell.

    a VM's change, an open or close, udev, a call ─▶ look (open files, sysfs) ─▶ settle (pure) ─▶ save ─▶ tell

Everything runs in one event loop, and nothing is awaited between the last look at a claim and its saving: of two
callers who want one device exactly one gets it. A claim is durable before its caller is answered. What a change costs
grows with the claims and with the VMs that have devices, and with no others (`RunIndex.concerned`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from hostd.devices import asking, listing
from hostd.devices.claim import Claim, settle
from hostd.devices.device import Device, device_name
from hostd.devices.open_files import holders
from hostd.devices.open_watch import OpenWatch
from hostd.devices.run_table import RunTable
from hostd.devices.teller import Teller, log_changes
from hostd.devices.udev import DeviceEvents
from hostd.errors import HostdError, NoSuchDevice
from hostd.log import Message, event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hostd.config import OnExit
    from hostd.core.model import VM, DeviceConflict, DeviceRow
    from hostd.devices.claim import Runs
    from hostd.devices.claims_store import ClaimsStore
    from hostd.devices.sysfs import Sysfs

log = logging.getLogger(__name__)

#: VMs die together, a QEMU opens several files, and a device's coming is several events: one look serves all (seconds).
_CHANGING, _OPENING, _COMING = 0.02, 0.02, 0.1
#: No more than this part of the time goes into scans of sysfs, however many events there are.
_SCAN_SHARE = 10
#: When a QEMU whose device files cannot be watched is looked at again (seconds after the look before).
_BLIND = (1.0, 4.0, 15.0, 60.0)
#: How soon a failed save is tried again (seconds).
_SAVE_AGAIN = 10.0
#: What a QEMU has not opened after this long it will not open (seconds).
SETTLED = 30.0


class DeviceKeeper:
    """Which VM has which device. `on_exit` gives the configuration's choice; `publish` is told what a pod's VM has."""

    def __init__(
        self,
        store: ClaimsStore,
        sysfs: Sysfs,
        on_exit: Callable[[], OnExit],
        publish: Callable[[str, tuple[str, ...]], None],
        *,
        listen: Callable[[Callable[[], None]], DeviceEvents] = DeviceEvents,
        settled: float = SETTLED,
    ) -> None:
        self._store = store
        self._sysfs = sysfs
        self._on_exit = on_exit
        self._settled = settled
        self._events = listen(self._on_device_event)
        self._watch: OpenWatch | None = None
        self._table = RunTable(sysfs)
        self._claims: dict[str, Claim] = {}
        self._devices: dict[str, Device] = {}
        #: Pods whose QEMUs are to be looked at; whether sysfs is.
        self._due: set[str] = set()
        self._scan_due = False
        self._scan_cost = 0.0
        #: Pods whose device files cannot be watched: looked at now and then, and whenever somebody asks.
        self._blind: set[str] = set()
        self._turn: asyncio.TimerHandle | None = None
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}
        self._teller = Teller(publish)
        #: Why the claims on disk are behind, in words; empty while they are not.
        self._unsaved = ""
        #: Claims files that could not be used, by where they are kept now: why.
        self.problems: dict[str, str] = {}

    # --- life ---

    def start(self, vms: Iterable[VM]) -> None:
        """Takes up the claims, looks at all devices and QEMUs, and listens from then on. `vms`: all that are known."""
        self._claims, bad = self._store.load()
        if bad is not None:
            self.problems[bad.kept_as or self._store.path] = bad.why
            log.error(
                "the claims in %s cannot be used (%s); kept as %s; what is in use is found again by looking, what was "
                "reserved or held has to be claimed again", self._store.path, bad.why, bad.kept_as or "it was",
                extra=event(Message.BAD_STATE_FILE, file=bad.kept_as),
            )  # fmt: skip
        try:
            self._watch = OpenWatch(self._touched)
        except OSError as error:
            log.warning("opened devices are found by looking now and then, for there is no inotify: %s", error)
        self._events.start()
        self._scan()
        for vm in vms:
            self.on_vm(vm)
        self._work()

    def close(self) -> None:
        """Stops looking; claims stay for the next hostd."""
        for pod_uid in list(self._timers):
            self._cancel_timers(pod_uid)
        if self._turn is not None:
            self._turn.cancel()
        self._events.close()
        if self._watch is not None:
            self._watch.close()

    @property
    def health(self) -> Mapping[str, str]:
        """What is wrong, by part, in words."""
        parts = {"claims": self._unsaved, "udev": self._events.problem}
        return {part: problem for part, problem in parts.items() if problem}

    # --- events ---

    def on_vm(self, vm: VM) -> None:
        """Something of a VM has changed, or it is new. Cheap where it does not matter here."""
        if vm.pod_uid not in self._table.runs:
            self._teller.assume(vm.pod_uid, vm.devices)
        new, other_qemus = self._table.see(vm)
        if other_qemus:
            self._begin(vm.pod_uid)
        elif new and not self._table.qemus(vm.pod_uid):
            self._end(vm.pod_uid)
        if new:
            self._wake(_CHANGING)

    def on_vm_removed(self, vm: VM) -> None:
        """A VM is forgotten. What is held for it stays, to be released by name."""
        if self._table.forget(vm.pod_uid):
            self._end(vm.pod_uid)
            self._wake(_CHANGING)

    def _begin(self, pod_uid: str) -> None:
        """New QEMUs: watched first, then looked at, so that nothing is opened unseen in between."""
        self._end(pod_uid)
        seen = [self._watch is not None and self._watch.watch(pod_uid, qemu.pid) for qemu in self._table.qemus(pod_uid)]
        self._due.add(pod_uid)
        loop = asyncio.get_running_loop()
        timers = self._timers.setdefault(pod_uid, [])
        timers.append(loop.call_later(self._settled, self._on_settled, pod_uid))
        if not all(seen):
            self._blind.add(pod_uid)
            timers += [loop.call_later(after, self._touched, pod_uid) for after in _BLIND]

    def _end(self, pod_uid: str) -> None:
        self._cancel_timers(pod_uid)
        self._blind.discard(pod_uid)
        if self._watch is not None:
            self._watch.forget(pod_uid)

    def _cancel_timers(self, pod_uid: str) -> None:
        for timer in self._timers.pop(pod_uid, ()):
            timer.cancel()

    def _on_settled(self, pod_uid: str) -> None:
        self._table.look(pod_uid)
        self._table.settle(pod_uid)
        self._wake(_CHANGING)

    def _touched(self, pod_uid: str) -> None:
        self._due.add(pod_uid)
        self._wake(_OPENING)

    def _on_device_event(self) -> None:
        self._scan_due = True
        self._wake(max(_COMING, self._scan_cost * _SCAN_SHARE))

    # --- look, settle, save, tell ---

    def _wake(self, delay: float) -> None:
        """Has the work done after `delay` seconds at the latest."""
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            if self._turn.when() <= loop.time() + delay:
                return
            self._turn.cancel()
        self._turn = loop.call_later(delay, self._work)

    def _catch_up(self) -> None:
        """Takes in at once what has happened so far, for a caller who wants to know how it is now."""
        if self._watch is not None:
            self._watch.drain()
        self._due |= self._blind
        if self._turn is not None or self._due:
            self._work()

    def _work(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._scan_due:
            self._sysfs.forget_names()
            self._scan()
            # What a group is made of, and what a file leads to, may have changed.
            self._due |= {pod_uid for pod_uid, run in self._concerned.items() if run.open}
        due, self._due = self._due, set()
        for pod_uid in due:
            self._table.look(pod_uid)
        self._settle()

    def _scan(self) -> None:
        self._scan_due = False
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._devices = self._sysfs.scan(self._claims.keys())
        self._scan_cost = loop.time() - begun

    @property
    def _concerned(self) -> Runs:
        return self._table.runs.concerned(self._claims)

    def _settle(self) -> None:
        runs = self._concerned
        for name in {name for run in runs.values() for name in run.open} - self._devices.keys():
            self._look_at(name)
        before, self._claims = self._claims, settle(self._claims, runs, self._devices, self._on_exit())
        if self._claims != before:
            log_changes(before, self._claims)
        if self._claims != before or self._unsaved:
            self._save()
        self._teller.tell(self._claims, runs, self._devices)

    def _look_at(self, name: str) -> Device | None:
        device = self._sysfs.device(name)
        if device is None:
            self._devices.pop(name, None)
        else:
            self._devices[name] = device
        return device

    def _save(self) -> None:
        """Saves what was seen. Without the file it could be found again in part, so hostd goes on, and tries again."""
        try:
            self._store.save(self._claims.values())
        except OSError as error:
            if not self._unsaved:
                log.error(  # noqa: TRY400 - the sentence says it all
                    "claims cannot be saved in %s: %s; going on without", self._store.path, error.strerror,
                    extra=event(Message.STATE_NOT_SAVED, file=self._store.path),
                )  # fmt: skip
            self._unsaved = f"{self._store.path} cannot be written: {error.strerror}"
            self._wake(_SAVE_AGAIN)
            return
        self._unsaved = ""

    # --- what the bus asks (see the protocol DeviceService) ---

    def devices(self) -> list[DeviceRow]:
        """All devices that a VM can have, and all that are claimed, each once, in an order that stays."""
        self._catch_up()
        return listing.rows(self._claims, self._concerned, self._devices)

    def subscribe(self, listener: Callable[[DeviceConflict], None]) -> Callable[[], None]:
        """Calls `listener` for each conflict from now on; the result ends it."""
        return self._teller.subscribe(listener)

    async def claim(self, device: str, vm: str, *, vmi_uid: str | None = None, on_exit: str | None = None) -> None:
        """Claims a device for a VM (`namespace/name`), ahead of its start or while it has it. Durable on return.

        `on_exit` ("release", "hold") counts for all devices of the VM, as long as it has a claim. The same again is
        fine. Raises InvalidArgs, NoSuchDevice, DeviceBusy, LimitExceeded.
        """
        wish = asking.Wish(device_name(device), asking.vm_name(vm), vmi_uid, asking.exit_choice(on_exit))
        # From here to the saving nothing is awaited.
        self._catch_up()
        found = self._look_at(wish.device)
        claims = asking.claimed(self._claims, wish, found, self._concerned, self._devices)
        if claims != self._claims or self._unsaved:
            self._commit(claims)

    async def release(self, device: str, vm: str) -> None:
        """Gives a VM's claim up, whatever is left of the VM. Durable on return; a second time does nothing.

        Raises InvalidArgs, NoSuchDevice, and DeviceBusy that names the process where anybody has the device open.
        """
        name, vm = device_name(device), asking.vm_name(vm)
        while True:
            self._catch_up()
            found = self._look_at(name)
            claim = self._claims.get(name)
            if claim is None:
                _refuse_unknown(name, found)
                log.info("%s is not claimed, so there is nothing to release for %s", name, vm)
                return
            asking.refuse_release(claim, vm, self._concerned, ())
            numbers = self._sysfs.numbers(found) if found else set()
            asking.refuse_release(claim, vm, self._concerned, await holders(numbers) if numbers else ())
            # While all processes were looked at, others may have come and gone: then it is looked at anew.
            self._catch_up()
            if self._claims.get(name) is claim:
                break
        self._commit({key: claim for key, claim in self._claims.items() if key != name})

    def _commit(self, claims: dict[str, Claim]) -> None:
        """Saves, and only then makes it so. Raises HostdError where it cannot be saved; then nothing has changed."""
        try:
            self._store.save(claims.values())
        except OSError as error:
            raise HostdError(
                f"claims cannot be saved in {self._store.path}: {error.strerror}; nothing was changed"
            ) from error
        log_changes(self._claims, claims)
        self._claims, self._unsaved = claims, ""
        self._wake(0)


def _refuse_unknown(name: str, found: Device | None) -> None:
    if found is None:
        raise NoSuchDevice(f"there is no device {name} on this host now, and no claim on one; ListDevices shows all")
