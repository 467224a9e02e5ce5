"""qemu-pr-helper under its units and under hostd, with real reservations on LIO disks."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.node import MANAGER, NAME, get, main_pid, prop, run, until
from tests.node.checks.scsi import CONFLICT, GOOD, PREEMPT, READ_RESERVATION, REGISTER, RELEASE, RESERVE, Helper, Lun

SOCKET = "/run/kubevirt/daemons/pr/pr-helper.sock"
LISTENER, SERVICE = "hostd-pr-helper.socket", "hostd-pr-helper.service"
HELPER, HELPER_INTERFACE = f"{MANAGER}/pr_helper", f"{NAME}.PRHelper"


@pytest.fixture(scope="module")
def lun() -> Iterator[Lun]:
    made = Lun("reservations")
    yield made
    made.remove()


def _call(member: str) -> None:
    run("busctl", "--timeout=30", "call", NAME, HELPER, HELPER_INTERFACE, member)


def _inode() -> int:
    return os.stat(SOCKET).st_ino


def _reservations(lun: Lun) -> None:
    """Two initiators and one disk, with the helper killed in between."""
    first, second = lun.disks
    helper = Helper(SOCKET)
    assert helper.write(first, REGISTER, 0, 0xA) == GOOD
    assert helper.write(second, REGISTER, 0, 0xB) == GOOD
    assert helper.keys(first) == [0xA, 0xB]
    assert helper.write(first, RESERVE, 0xA) == GOOD
    assert "naa.5001405000000011" in lun.holder
    assert helper.write(second, RESERVE, 0xB) == CONFLICT

    inode, pid = _inode(), main_pid(SERVICE)
    os.kill(pid, signal.SIGKILL)
    helper = Helper(SOCKET)  # accepted at once: the listener outlives the helper
    assert helper.keys(second) == [0xA, 0xB]
    assert _inode() == inode
    assert main_pid(SERVICE) not in (0, pid)

    assert helper.write(second, PREEMPT, 0xB, 0xA) == GOOD
    assert helper.keys(second) == [0xB]
    assert "naa.5001405000000012" in lun.holder
    assert helper.attention(first), "the disk tells an initiator that it was preempted"
    status, data = helper.read(first, READ_RESERVATION)
    assert status == GOOD
    assert data[8:16] == (0xB).to_bytes(8, "big")
    assert helper.write(first, RESERVE, 0xA) == CONFLICT
    assert helper.write(second, RELEASE, 0xB) == GOOD
    assert "No SPC-3 Reservation holder" in lun.holder
    assert helper.write(second, REGISTER, 0xB, 0) == GOOD
    assert helper.keys(second) == []
    helper.close()


def test_the_units_serve_real_reservations(lun: Lun) -> None:
    run("systemctl", "start", LISTENER)
    found = os.stat(SOCKET)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o600), "hostd opens it to QEMU"
    _reservations(lun)
    run("systemctl", "stop", LISTENER, SERVICE)


def test_the_helper_is_confined() -> None:
    table = run("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    found = re.search(r"exposure level for \S+: ([\d.]+)", table)
    assert found, table
    print(f"exposure of the helper: {found[1]}")
    assert float(found[1]) <= 3.0


def test_stopping_the_listener_leaves_the_connected_their_helper() -> None:
    run("systemctl", "start", LISTENER)
    helper = Helper(SOCKET)
    pid = main_pid(SERVICE)
    run("systemctl", "stop", LISTENER)
    assert helper.read("/dev/null", 0)[0] != GOOD
    assert main_pid(SERVICE) == pid
    assert Path(SOCKET).is_socket(), "the path may be KubeVirt's by now: it is not removed"
    run("systemctl", "stop", SERVICE)


def test_without_a_listener_the_helper_does_not_spin() -> None:
    """It serves no other path either."""
    run("systemctl", "start", SERVICE, check=False)
    until(lambda: prop("ActiveState", SERVICE) == "failed", "the helper gives up")
    assert prop("NRestarts", SERVICE) == "0"
    assert not Path("/run/qemu-pr-helper.sock").exists()
    run("systemctl", "reset-failed", SERVICE)


def test_hostd_serves_real_reservations(lun: Lun) -> None:
    _call("Enable")
    until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "the helper is ready")
    found, directory = os.stat(SOCKET), os.stat(os.path.dirname(SOCKET))
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (107, 107, 0o660)
    assert (directory.st_uid, directory.st_gid) == (107, 107)
    _reservations(lun)
    assert get("MainPID", HELPER, HELPER_INTERFACE) == main_pid(SERVICE)


def test_an_unprivileged_qemu_uses_it(lun: Lun) -> None:
    for disk in lun.disks:
        os.chown(disk, 107, 107)
    command = [
        "setpriv", "--reuid=107", "--regid=107", "--clear-groups", "qemu-system-x86_64", "-nodefaults", "-display",
        "none", "-machine", "q35,accel=tcg", "-m", "64", "-S", "-monitor", "stdio", "-object",
        f"pr-manager-helper,id=pr0,path={SOCKET}", "-drive",
        f"if=none,id=d0,driver=raw,file.driver=host_device,file.filename={lun.disks[0]},file.pr-manager=pr0",
        "-device", "virtio-scsi-pci,id=s0", "-device", "scsi-block,drive=d0,bus=s0.0",
    ]  # fmt: skip
    done = subprocess.run(command, input="info version\nquit\n", capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_restart_of_hostd_leaves_the_helper_alone() -> None:
    pid, inode = main_pid(SERVICE), _inode()
    helper = Helper(SOCKET)
    run("systemctl", "restart", "hostd.service")
    until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "the helper is ready")
    assert (main_pid(SERVICE), _inode()) == (pid, inode)
    assert helper.read("/dev/null", 0)[0] != GOOD
    helper.close()


def test_disabled_it_is_gone() -> None:
    _call("Disable")
    for unit in (SERVICE, LISTENER):
        until(lambda unit=unit: prop("ActiveState", unit) == "inactive", f"{unit} is inactive")  # type: ignore[misc]
    assert get("State", HELPER, HELPER_INTERFACE) == "disabled"
