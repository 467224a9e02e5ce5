"""qemu-pr-helper under its units and under hostd, with real reservations on LIO disks."""

from __future__ import annotations

import os
import re
import signal
import stat
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.guest import Guest
from tests.node.checks.node import MANAGER, NAME, PACKAGES, alive, get, main_pid, prop, run, text, until, versions
from tests.node.checks.scsi import (
    CONFLICT,
    GOOD,
    PREEMPT,
    READ_RESERVATION,
    REGISTER,
    RELEASE,
    RESERVE,
    Helper,
    Lun,
    reservation,
)

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


def _pid() -> int:
    """The helper that the service's shell runs now; 0 in between."""
    shell = main_pid(SERVICE)
    found = text(f"/proc/{shell}/task/{shell}/children").split() if shell else []
    return int(found[0]) if found else 0


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

    inode, pid = _inode(), _pid()
    os.kill(pid, signal.SIGKILL)
    helper = Helper(SOCKET)  # accepted at once: the listener outlives the helper
    assert helper.keys(second) == [0xA, 0xB]
    assert _inode() == inode
    assert _pid() not in (0, pid)

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
    pid = _pid()
    run("systemctl", "stop", LISTENER)
    assert helper.read("/dev/null", 0)[0] != GOOD
    assert _pid() == pid
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
    until(lambda: get("MainPID", HELPER, HELPER_INTERFACE) == _pid(), "hostd knows the helper")
    assert get("NRestarts", HELPER, HELPER_INTERFACE) == 1


def test_killed_fifty_times_it_is_back_each_time() -> None:
    inode, times = _inode(), []
    for _ in range(50):
        pid = until(_pid, "a helper runs")
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not alive(pid), "it is dead")  # type: ignore[misc]
        Helper(SOCKET).close()
        times.append((time.monotonic() - begin) * 1e3)
    assert _inode() == inode
    print(f"served after a kill, on an emulated processor: median {statistics.median(times):.0f} ms, "
          f"worst {max(times):.0f} ms")  # fmt: skip
    until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "the helper is ready")


def test_a_stopped_one_is_replaced() -> None:
    pid = _pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not alive(pid), "hostd has found it out")
    until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "the helper is ready")
    assert "was stopped" in get("LastFailure", HELPER, HELPER_INTERFACE)


def test_kubevirts_own_comes_and_goes() -> None:
    """Those who are connected to hostd's helper keep it all along, and lose its socket's place to nobody."""
    client, pid = Helper(SOCKET), _pid()
    rival = subprocess.Popen(["qemu-pr-helper", "-k", SOCKET], stderr=subprocess.DEVNULL)
    try:
        until(lambda: get("OwnerPID", HELPER, HELPER_INTERFACE) == rival.pid, "hostd stands by, and names it")
        assert get("State", HELPER, HELPER_INTERFACE) == "standby"
        until(lambda: prop("ActiveState", LISTENER) == prop("ActiveState", SERVICE) == "inactive", "hostd has yielded")
        assert prop("ActiveState", f"hostd-pr-helper-retired-{pid}.scope") == "active"
        assert prop("DevicePolicy", f"hostd-pr-helper-retired-{pid}.scope") == "closed"
        assert client.read("/dev/null", 0)[0] != GOOD
        Helper(SOCKET).close()
    finally:
        rival.kill()
        rival.wait()
    until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "hostd has taken over")
    new = Helper(SOCKET)
    assert client.read("/dev/null", 0)[0] != GOOD, "the takeover cuts nobody off"
    assert _pid() not in (0, pid)
    for each in (client, new):
        each.close()
    until(lambda: not alive(pid), "the old helper goes with its last client")
    until(lambda: prop("ActiveState", f"hostd-pr-helper-retired-{pid}.scope") == "inactive", "and so does its scope")


def test_an_unprivileged_qemus_reservations_outlive_its_helpers(lun: Lun) -> None:
    for disk in lun.disks:
        os.chown(disk, 107, 107)
    options = [
        "-object", f"pr-manager-helper,id=pr0,path={SOCKET}", "-drive",
        f"if=none,id=d0,driver=raw,file.driver=host_device,file.filename={lun.disks[0]},file.pr-manager=pr0",
    ]  # fmt: skip
    times = []
    with Guest(options) as guest:
        assert guest.monitor("query-pr-managers") == [{"id": "pr0", "connected": True}]
        assert guest.command(*reservation(REGISTER, 0, 0xC)) == (GOOD, b"")
        for what in (RESERVE, RELEASE) * 5:
            pid = until(_pid, "a helper runs")
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not alive(pid), "it is dead")  # type: ignore[misc]
            guest.send(*reservation(what, 0xC))
            while not guest.done:
                begin = time.monotonic()
                guest.monitor("query-pr-managers")
                times.append((time.monotonic() - begin) * 1e3)
            assert guest.result()[0] == GOOD
            assert ("naa.5001405000000011" in lun.holder) == (what == RESERVE)
        assert guest.command(*reservation(REGISTER, 0xC, 0)) == (GOOD, b"")
    assert "naa" not in lun.registrations
    print(f"QEMU's monitor meanwhile: median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms")
    assert statistics.median(times) < 1000


def test_a_restart_and_an_upgrade_of_hostd_leave_the_helper_alone() -> None:
    pid, inode = _pid(), _inode()
    helper = Helper(SOCKET)
    package = str(PACKAGES / f"hostd_{versions()[1]}_all.deb")
    for command in (("systemctl", "restart", "hostd.service"), ("dpkg", "--install", package)):
        before = main_pid()
        run(*command)
        until(lambda: main_pid() not in (0, before), "another hostd runs")  # noqa: B023
        until(lambda: get("State", HELPER, HELPER_INTERFACE) == "ready", "the helper is ready")
        assert (_pid(), _inode()) == (pid, inode)
        assert helper.read("/dev/null", 0)[0] != GOOD
    helper.close()


def test_disabled_it_is_gone() -> None:
    _call("Disable")
    for unit in (SERVICE, LISTENER):
        until(lambda unit=unit: prop("ActiveState", unit) == "inactive", f"{unit} is inactive")  # type: ignore[misc]
    assert get("State", HELPER, HELPER_INTERFACE) == "disabled"
