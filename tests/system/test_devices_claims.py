"""The keeper of devices with real processes, real device files and a sysfs of the test's own.

The field reports on device claims have a test each, named by their source.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from hostd.config import OnExit
from hostd.core.model import VM, DeviceConflict, DeviceRow, State
from hostd.devices.claim import Claim
from hostd.devices.claims_store import ClaimsStore
from hostd.devices.service import DeviceKeeper
from hostd.devices.sysfs import Sysfs
from hostd.devices.udev import DeviceEvents
from hostd.errors import DeviceBusy, HostdError, InvalidArgs, NoSuchDevice
from tests.support.devices import FULL, NULL, RANDOM, URANDOM, ZERO, DevHost, DeviceUser, SysfsTree, ended, vm
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")

GPU = "pci/0000:3b:00.0"


class CountedStore(ClaimsStore):
    """The claims file of a desk, on a disk that may be full."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(str(desk.state_dir))
        self._desk = desk

    def save(self, claims: Iterable[Claim]) -> None:
        if self._desk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._desk.saves += 1
        super().save(claims)


class Desk:
    """A node with devices and one hostd's keeper of them, which can be started anew as after a crash or a reboot."""

    def __init__(self, directory: Path, host: DevHost) -> None:
        self.host = host
        self.tree = SysfsTree(directory / "sys")
        self.state_dir = directory / "state"
        self.on_exit = OnExit.RELEASE
        self.settled = 1000.0
        self.saves = 0
        self.full = False
        self.published: dict[str, tuple[str, ...]] = {}
        self.conflicts: list[DeviceConflict] = []
        self.vms: list[VM] = []
        self._keeper: DeviceKeeper | None = None

    @property
    def keeper(self) -> DeviceKeeper:
        if self._keeper is None:
            store = CountedStore(self)
            self._keeper = DeviceKeeper(
                store, Sysfs(self.tree.root), lambda: self.on_exit, self._publish, listen=_events, settled=self.settled
            )
            self._keeper.subscribe(self.conflicts.append)
            self._keeper.start(self.vms)
        return self._keeper

    def _publish(self, pod_uid: str, names: tuple[str, ...]) -> None:
        self.published[pod_uid] = names

    def restart(self) -> DeviceKeeper:
        """As after SIGKILL: nothing is said goodbye to."""
        self.close()
        return self.keeper

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def start(self, name: str, *users: DeviceUser, vmi_uid: str = "") -> VM:
        machine = vm(name, *users, vmi_uid=vmi_uid)
        self.vms.append(machine)
        self.keeper.on_vm(machine)
        return machine

    def end(self, machine: VM, *, forget: bool = False) -> None:
        self.keeper.on_vm(ended(machine))
        if forget:
            self.vms.remove(machine)
            self.keeper.on_vm_removed(machine)

    def gpu(self, identity: str = "10de:1eb8") -> bytes:
        """One GPU in group 12; gives the group's file."""
        self.tree.pci("0000:3b:00.0", identity, group="12", number=NULL)
        return self.host.node("vfio/12", NULL)

    def row(self, device: str = GPU) -> DeviceRow:
        return next(row for row in self.keeper.devices() if row.device == device)

    def state(self, device: str = GPU) -> tuple[str, str]:
        row = self.row(device)
        return row.state, row.vm

    def changed(self) -> None:
        """What udev's event does."""
        self.keeper._on_device_event()

    @property
    def saved(self) -> list[dict[str, str]]:
        claims: list[dict[str, str]] = json.loads((self.state_dir / "claims.json").read_text())["claims"]
        return claims


def _events(changed: object) -> DeviceEvents:
    return DeviceEvents(changed, ("mem",), source="kernel")  # type: ignore[arg-type]


@pytest.fixture
def host() -> Iterator[DevHost]:
    with DevHost() as made:
        yield made


@pytest.fixture
async def desk(tmp_path: Path, host: DevHost) -> AsyncIterator[Desk]:
    made = Desk(tmp_path, host)
    yield made
    made.close()


# --- lives ---


async def test_a_device_is_in_use_while_a_qemu_has_it_open(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    assert desk.state() == ("free", "")
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        assert desk.state() == ("in-use", "ns/a")
        assert f"open in process {user.pid}" in desk.row().description
        assert desk.published[machine.pod_uid] == (GPU,)
        user.kill()
        desk.end(machine)
        assert desk.state() == ("free", "")
        await eventually(lambda: desk.published[machine.pod_uid] == ())


async def test_what_is_opened_and_closed_later_is_seen_without_looking(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    with DeviceUser(host) as user:
        machine = desk.start("a", user)
        await eventually(lambda: machine.pod_uid in desk.published or desk.keeper._turn is None)
        assert desk.state() == ("free", "")
        user.open(path)
        await eventually(lambda: desk.published.get(machine.pod_uid) == (GPU,))
        user.close_file(path)
        await eventually(lambda: desk.published.get(machine.pod_uid) == ())


async def test_hold_keeps_a_powered_off_vms_device_for_it(desk: Desk, host: DevHost) -> None:
    """The reason for all of this: the guest powers off, another VM wants the device, the first could not come back."""
    desk.on_exit = OnExit.HOLD
    path = desk.gpu()
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        desk.row()
        user.kill()
        desk.end(machine, forget=True)
    assert desk.state() == ("held", "ns/a")
    with pytest.raises(DeviceBusy, match="held for ns/a"):
        await desk.keeper.claim(GPU, "ns/b")
    with DeviceUser(host, path) as user:
        again = desk.start("a", user)
        assert desk.state() == ("in-use", "ns/a")
        assert desk.row().pod_uid == again.pod_uid
        assert desk.conflicts == []


async def test_a_vm_may_hold_where_the_others_release(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        await desk.keeper.claim(GPU, "ns/a", on_exit="hold")
        user.kill()
        desk.end(machine)
    assert desk.state() == ("held", "ns/a")


async def test_a_qemu_that_opens_another_s_device_is_a_conflict(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    await desk.keeper.claim(GPU, "ns/a")
    with DeviceUser(host) as user:
        machine = desk.start("b", user)
        desk.row()
        user.open(path)
        await eventually(lambda: desk.conflicts)
        (conflict,) = desk.conflicts
        assert (conflict.device, conflict.vm) == (GPU, "ns/a")
        assert f"process {user.pid} of ns/b (pod {machine.pod_uid})" in conflict.reason
        assert desk.state() == ("reserved", "ns/a")
        with pytest.raises(DeviceBusy, match=f"process {user.pid} of ns/b"):
            await desk.keeper.release(GPU, "ns/a")
        desk.changed()
        desk.row()
        assert len(desk.conflicts) == 1, "told once"
        user.close_file(path)
        await desk.keeper.release(GPU, "ns/a")
        user.open(path)
        await eventually(lambda: desk.row().vm == "ns/b")


async def test_claims_survive_a_restart_and_in_use_is_found_again(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    stick = desk.tree.usb("1-2", number=ZERO)
    await desk.keeper.claim(stick, "ns/z")
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        before = desk.keeper.devices()
        desk.restart()
        assert desk.keeper.devices() == before
        saves = desk.saves
        desk.restart().devices()
        assert desk.saves == saves, "nothing has changed, so nothing is written"
        # It dies while hostd is away.
        user.kill()
        ended(machine)
        desk.restart()
        assert desk.state() == ("free", "")
        assert desk.state(stick) == ("reserved", "ns/z")


async def test_a_vm_that_is_not_looked_at_yet_keeps_its_claims(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        desk.row()
        desk.close()
        qemus, machine.qemus, machine.state = machine.qemus, [], State.PENDING
        assert desk.state() == ("in-use", "ns/a")
        machine.qemus, machine.state = qemus, State.RUNNING
        desk.keeper.on_vm(machine)
        assert desk.state() == ("in-use", "ns/a")


async def test_one_save_a_change(desk: Desk, host: DevHost) -> None:
    """Several devices at once, and a group of two functions, are one change."""
    path = desk.gpu()
    desk.tree.pci("0000:3b:00.1", group="12")
    stick = desk.tree.usb("1-2", number=ZERO)
    with DeviceUser(host, path, host.node("bus/usb/001/004", ZERO)) as user:
        machine = desk.start("a", user)
        desk.row()
        assert desk.saves == 1
        assert {claim["device"] for claim in desk.saved} == {GPU, "pci/0000:3b:00.1", stick}
        for _ in range(5):
            desk.keeper.on_vm(machine)
            desk.changed()
            desk.row()
        assert desk.saves == 1
        await desk.keeper.claim(GPU, "ns/a")
        await desk.keeper.claim(GPU, "ns/a")
        assert desk.saves == 2
        user.kill()
        desk.end(machine)
        desk.row()
        assert desk.saves == 3


async def test_a_full_disk(desk: Desk, host: DevHost) -> None:
    """A caller gets an error and nothing is changed; what is seen goes on in memory, and is saved later."""
    path = desk.gpu()
    stick = desk.tree.usb("1-2", number=ZERO)
    await desk.keeper.claim(stick, "ns/a")
    before = (desk.state_dir / "claims.json").read_bytes()
    desk.full = True
    with pytest.raises(HostdError, match="No space left on device; nothing was changed"):
        await desk.keeper.claim(GPU, "ns/a")
    with pytest.raises(HostdError, match="nothing was changed"):
        await desk.keeper.release(stick, "ns/a")
    assert (desk.state(), desk.state(stick)) == (("free", ""), ("reserved", "ns/a"))
    with DeviceUser(host, path) as user:
        desk.start("b", user)
        assert desk.state() == ("in-use", "ns/b")
        assert "No space left" in desk.keeper.health["claims"]
        assert (desk.state_dir / "claims.json").read_bytes() == before
        assert os.listdir(desk.state_dir) == ["claims.json"]
        desk.full = False
        await desk.keeper.claim(stick, "ns/a")
        assert desk.keeper.health == {}
        assert {claim["device"] for claim in desk.saved} == {GPU, stick}


async def test_a_bad_claims_file_is_named_and_use_is_found_again(desk: Desk, host: DevHost) -> None:
    path = desk.gpu()
    desk.state_dir.mkdir()
    (desk.state_dir / "claims.json").write_bytes(b"\0" * 100)
    with DeviceUser(host, path) as user:
        desk.vms.append(vm("a", user))
        assert desk.state() == ("in-use", "ns/a")
    (kept,) = desk.keeper.problems
    assert Path(kept).read_bytes() == b"\0" * 100


async def test_bad_names_are_refused(desk: Desk) -> None:
    for device, owner in (("pci/../x", "ns/a"), (GPU, "a"), ("", "")):
        with pytest.raises(InvalidArgs):
            await desk.keeper.claim(device, owner)
        with pytest.raises(InvalidArgs):
            await desk.keeper.release(device, owner)
    with pytest.raises(InvalidArgs, match="OnExit"):
        await desk.keeper.claim(GPU, "ns/a", on_exit="burn")


async def test_a_thousand_claims(desk: Desk) -> None:
    names = [desk.tree.usb(f"{bus}-{port}") for bus in range(1, 11) for port in range(1, 101)]
    desk.state_dir.mkdir()
    rows = [
        {
            "device": name, "vm": f"ns/{n}", "pod_uid": "", "vmi_uid": "", "identity": "046d:c52b", "serial": "",
            "description": "it", "stage": "reserved", "asked": True, "renewed": False, "used_by": "", "on_exit": None,
        }
        for n, name in enumerate(names)
    ]  # fmt: skip
    (desk.state_dir / "claims.json").write_text(json.dumps({"version": 1, "claims": rows}))
    assert [row.device for row in desk.keeper.devices()] == names
    assert {row.state for row in desk.keeper.devices()} == {"reserved"}
    assert desk.saves == 0
    await desk.keeper.release(names[500], "ns/500")
    assert (desk.saves, len(desk.saved)) == (1, 999)


# --- field reports ---


async def test_harvester_7398_and_10010_a_claim_never_stays_for_ever(desk: Desk, host: DevHost) -> None:
    """The VM's next run is without the device; a VM is deleted with it; release twice, and of an unknown device."""
    desk.on_exit = OnExit.HOLD
    desk.settled = 0.05
    path = desk.gpu()
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        desk.row()
        user.kill()
        desk.end(machine)
    assert desk.state() == ("held", "ns/a")
    with DeviceUser(host) as without:
        again = desk.start("a", without)
        await eventually(lambda: desk.state() == ("free", ""))
        without.open(path)
        await eventually(lambda: desk.state() == ("in-use", "ns/a"))
        without.kill()
        desk.end(again, forget=True)
    desk.vms.clear()
    desk.restart()
    assert desk.state() == ("held", "ns/a"), "nothing is left of the VM, and its claim can still be released by name"
    await desk.keeper.release(GPU, "ns/a")
    assert desk.state() == ("free", "")
    saves = desk.saves
    await desk.keeper.release(GPU, "ns/a")
    assert desk.saves == saves
    with pytest.raises(NoSuchDevice, match="no device usb/9-9"):
        await desk.keeper.release("usb/9-9", "ns/a")


async def test_harvester_3771_5293_8294_no_release_under_a_running_vm(desk: Desk, host: DevHost) -> None:
    """Refused while open, and the process is named: the claimant's QEMU, and one that is nobody's."""
    path = desk.gpu()
    with DeviceUser(host, path) as user:
        machine = desk.start("a", user)
        with pytest.raises(DeviceBusy, match=f"process {user.pid} of ns/a"):
            await desk.keeper.release(GPU, "ns/a")
        with pytest.raises(DeviceBusy, match=f"in use by ns/a .*process {user.pid}"):
            await desk.keeper.claim(GPU, "ns/b")
        await desk.keeper.claim(GPU, "ns/a", on_exit="hold")
        user.kill()
        desk.end(machine)
    with DeviceUser(host, path) as stranger:
        with pytest.raises(DeviceBusy, match=rf"sh\[{stranger.pid}\] has it open"):
            await desk.keeper.release(GPU, "ns/a")
        assert desk.state() == ("held", "ns/a")
    await desk.keeper.release(GPU, "ns/a")


async def test_harvester_6518_6720_6892_addresses_shift(desk: Desk) -> None:
    """Another device at the claimed address, then none: flagged, never rebound, always removable."""
    desk.gpu("10de:1eb8")
    await desk.keeper.claim(GPU, "ns/a")
    desk.close()
    desk.gpu("10de:2204")
    assert desk.state() == ("mismatch", "ns/a")
    await eventually(lambda: desk.conflicts)
    assert "10de:2204 is there now, 10de:1eb8 was claimed" in desk.conflicts[0].reason
    with pytest.raises(DeviceBusy, match="give the old claim up"):
        await desk.keeper.claim(GPU, "ns/a")
    assert desk.saved[0]["identity"] == "10de:1eb8"
    desk.close()
    desk.tree.remove(GPU)
    desk.tree.pci("0000:3c:00.0", "10de:1eb8", group="13")
    assert desk.state() == ("absent", "ns/a")
    assert "one like it is at pci/0000:3c:00.0" in desk.row().description
    await desk.keeper.release(GPU, "ns/a")
    assert [row.device for row in desk.keeper.devices()] == ["pci/0000:3c:00.0"]


async def test_a_mismatch_is_seen_while_hostd_runs(desk: Desk) -> None:
    stick = desk.tree.usb("1-2", "046d:c52b")
    await desk.keeper.claim(stick, "ns/a")
    desk.tree.remove(stick)
    desk.changed()
    assert desk.state(stick) == ("absent", "ns/a")
    desk.tree.usb("1-2", "1234:5678")
    desk.changed()
    assert desk.state(stick) == ("mismatch", "ns/a")
    desk.tree.remove(stick)
    desk.tree.usb("1-2", "046d:c52b")
    desk.changed()
    assert desk.state(stick) == ("reserved", "ns/a")


async def test_harvester_9987_7348_2819_twins(desk: Desk) -> None:
    """Eight devices of one model, two callers at once: one winner each time, saved before the answer, order stable."""
    for n in range(8):
        desk.tree.pci(f"0000:3b:0{n}.0", group=str(n))
    names = [row.device for row in desk.keeper.devices()]
    assert len(names) == len(set(names)) == 8
    for n in range(64):
        device = names[n % 8]
        owners = ("ns/a", "ns/b") if n % 2 else ("ns/b", "ns/a")
        answers = await asyncio.gather(*[desk.keeper.claim(device, owner) for owner in owners], return_exceptions=True)
        (winner,) = [owner for owner, answer in zip(owners, answers, strict=True) if answer is None]
        assert [claim["vm"] for claim in desk.saved] == [winner]
        assert isinstance(next(answer for answer in answers if answer is not None), DeviceBusy)
        if n % 10 == 0:
            desk.restart()
        assert [row.device for row in desk.keeper.devices()] == names
        gone = await asyncio.gather(*[desk.keeper.release(device, winner) for _ in range(2)], return_exceptions=True)
        assert gone == [None, None]


async def test_kubevirt_9037_mediated_devices_are_never_removed(desk: Desk, host: DevHost) -> None:
    """Unknown ones, a live one, one created just now, one of a dead VM: all stay, only the dead VM's claim goes."""
    unknown = [desk.tree.mdev(group=str(20 + n)) for n in range(3)]
    live = desk.tree.mdev(group="30", number=FULL)
    dead = desk.tree.mdev(group="31", number=RANDOM)
    with (
        DeviceUser(host, host.node("vfio/30", FULL)) as living,
        DeviceUser(host, host.node("vfio/31", RANDOM)) as dying,
    ):
        desk.start("live", living)
        machine = desk.start("dead", dying)
        desk.keeper.devices()
        new = desk.tree.mdev(group="32")
        desk.changed()
        dying.kill()
        desk.end(machine)
        states = {row.device: (row.state, row.vm) for row in desk.keeper.devices()}
    assert states[live] == ("in-use", "ns/live")
    assert {states[name] for name in (*unknown, dead, new)} == {("free", "")}
    assert len(list((desk.tree.path / "bus/mdev/devices").iterdir())) == 6


async def test_pyudev_194_usbmonitor_2_events_of_strangers_and_floods(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removes of what nobody claimed, a burst, an overflow: afterwards everything is seen as it is."""
    monkeypatch.setattr("hostd.devices.udev.BUFFER", 4096)
    desk.gpu()
    await desk.keeper.claim(GPU, "ns/a")
    desk.tree.remove(GPU)
    for action in ("remove", *["change"] * 2000, "add"):
        with open("/sys/devices/virtual/mem/null/uevent", "w") as file:
            file.write(action)
    await eventually(lambda: desk.keeper._events.overflows)
    await eventually(lambda: desk.state() == ("absent", "ns/a"))
    desk.gpu()
    with open("/sys/devices/virtual/mem/null/uevent", "w") as file:
        file.write("change")
    await eventually(lambda: desk.state() == ("reserved", "ns/a"))
    assert desk.keeper.health == {}


async def test_kubevirt_7032_two_runs_of_one_name(desk: Desk, host: DevHost) -> None:
    """The old run goes down slowly while the new one is there: the old one's end leaves the new one's claim."""
    path = desk.gpu()
    with DeviceUser(host, path) as old, DeviceUser(host) as new:
        first = desk.start("a", old, vmi_uid=str(uuid.uuid4()))
        desk.row()
        second = desk.start("a", new, vmi_uid=str(uuid.uuid4()))
        await desk.keeper.claim(GPU, "ns/a", vmi_uid=second.vmi_uid)
        old.kill()
        desk.end(first, forget=True)
        assert desk.state() == ("reserved", "ns/a")
        assert desk.row().pod_uid == second.pod_uid
        new.open(path)
        await eventually(lambda: desk.state() == ("in-use", "ns/a"))


async def test_usb_and_vfio_files_of_one_vm(desk: Desk, host: DevHost) -> None:
    card = desk.tree.pci("0000:5e:00.0", "8086:10ed", cdev=URANDOM)
    stick = desk.tree.usb("1-2", number=ZERO)
    files = [host.node("vfio/devices/vfio9", URANDOM), host.node("bus/usb/001/004", ZERO)]
    with DeviceUser(host, *files) as user:
        machine = desk.start("a", user)
        assert {desk.state(card), desk.state(stick)} == {("in-use", "ns/a")}
        assert desk.published[machine.pod_uid] == (card, stick)
        desk.tree.remove(stick)
        desk.changed()
        assert desk.row(stick).state == "absent"
        with pytest.raises(DeviceBusy, match=f"process {user.pid}"):
            await desk.keeper.release(stick, "ns/a")
