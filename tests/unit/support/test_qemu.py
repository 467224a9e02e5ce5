"""The QEMUs that tests kill: both kinds behave alike, and as hostd is to see them."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.support.cgroups import Unavailable, Uninterruptible
from tests.support.qemu import FakeQemu, Guest, Launcher, Place, Qemu, RealQemu
from tests.support.wait import DEADLINE, holds_for


@pytest.fixture(params=[FakeQemu, RealQemu], ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> type[FakeQemu | RealQemu]:
    """Either kind."""
    found: type[FakeQemu | RealQemu] = request.param
    return found


@pytest.fixture
def disk(tmp_path: Path) -> bytes:
    """A disk image."""
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(1 << 20))
    return os.fsencode(path)


def open_files(qemu: Qemu) -> list[bytes]:
    """What the process has open."""
    directory = f"/proc/{qemu.pid}/fd"
    return [os.fsencode(os.readlink(f"{directory}/{fd}")) for fd in os.listdir(directory)]


def test_it_has_the_name_the_command_line_and_the_disk(kind: type[FakeQemu | RealQemu], disk: bytes) -> None:
    guest = Guest("ns", "vm-1")
    with kind(guest, disks=[disk]) as qemu:
        assert qemu.name == "qemu-system-x86"
        argv = Path(f"/proc/{qemu.pid}/cmdline").read_bytes().split(b"\0")
        assert argv[argv.index(b"-name") + 1] == b"guest=ns_vm-1,debug-threads=on"
        assert argv[argv.index(b"-uuid") + 1] == guest.firmware_uuid.encode()
        assert disk in open_files(qemu)
        assert qemu.alive


def test_a_kill_leaves_a_zombie_until_it_is_reaped(kind: type[FakeQemu | RealQemu]) -> None:
    with kind() as qemu:
        qemu.kill(reap=False)
        assert not qemu.alive
        assert qemu.state == "Z"
        assert qemu.reap() == -signal.SIGKILL


def test_it_powers_off(kind: type[FakeQemu | RealQemu]) -> None:
    with kind() as qemu:
        qemu.poweroff(reap=False)
        assert qemu.reap() == 0


def test_the_fake_ends_with_any_status_and_its_children_outlive_it_until_it_is_closed() -> None:
    with FakeQemu(children=2) as qemu:
        children = [os.dup(pidfd) for pidfd in qemu.children.values()]
        qemu.poweroff(3, reap=False)
        assert qemu.reap() == 3
        assert len(children) == 2
        assert not select.select(children, [], [], 0)[0]
    for child in children:
        assert select.select([child], [], [], DEADLINE)[0]
        os.close(child)


def test_a_disk_that_is_not_there_is_told(kind: type[FakeQemu | RealQemu]) -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        kind(disks=[b"/nowhere.img"])


def test_a_launcher_looks_like_one() -> None:
    with Launcher("vm-1", "11111111-2222-3333-4444-555555555555", "ns", Place()) as launcher:
        assert launcher.name == "virt-launcher"
        argv = Path(f"/proc/{launcher.pid}/cmdline").read_bytes()
        assert b"--name\0vm-1\0--uid\x0011111111-2222-3333-4444-555555555555\0--namespace\0ns\0" in argv


@pytest.mark.usefixtures("root")
def test_a_frozen_one_dies_only_when_it_may(kind: type[FakeQemu | RealQemu]) -> None:
    with kind() as qemu:
        try:
            frozen = Uninterruptible(qemu.pid)
        except Unavailable as error:
            pytest.skip(str(error))
        with frozen:
            assert qemu.state == "D"
            qemu.send(signal.SIGKILL)
            holds_for(lambda: qemu.alive, 0.05, "it cannot die")
        qemu.wait_dead()
