"""Storage that hangs: an umount that never returns costs the node one process, and neither stop nor start waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.hostd import reaches, released, states
from tests.node.checks.node import UNIT, main_pid, prop, run, until
from tests.node.checks.pods import KUBELET, SCRATCH, Pod, Qemu, Volume


class SuspendedVolume:
    """A PVC on a device-mapper device whose I/O can be made to wait for ever, as a SAN's would."""

    def __init__(self) -> None:
        SCRATCH.mkdir(parents=True, exist_ok=True)
        backing = SCRATCH / "san"
        with backing.open("wb") as file:
            file.truncate(16 << 20)
        self.loop = run("losetup", "--find", "--show", str(backing)).stdout.strip()
        run("dmsetup", "create", "san", "--table", f"0 {(16 << 20) // 512} linear {self.loop} 0")
        run("mkfs.ext4", "-q", "/dev/mapper/san")
        self.mountpoint = KUBELET / "plugins/kubernetes.io/csi/pv/san/globalmount"
        self.mountpoint.mkdir(parents=True)
        run("mount", "/dev/mapper/san", str(self.mountpoint))
        self.file = self.mountpoint / "disk.img"
        self.file.write_bytes(bytes(1 << 20))

    def suspend(self) -> None:
        """From here on the last umount of the file system, which writes, does not return."""
        run("umount", str(self.mountpoint))
        run("dmsetup", "suspend", "--nolockfs", "--noflush", "san")

    def resume(self) -> None:
        """The storage is back."""
        run("dmsetup", "resume", "san")


@pytest.fixture
def volume() -> Iterator[SuspendedVolume]:
    made = SuspendedVolume()
    yield made
    made.resume()
    until(lambda: run("dmsetup", "remove", "san", check=False).returncode == 0, "the device is free")
    run("losetup", "--detach", made.loop)


def _in_state_d() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if "hostd-worker" in head and tail.split()[0] == "D":
                found.append(int(entry.name))
    return found


def _dead_vm(volume: SuspendedVolume) -> Pod:
    pod = Pod("hung")
    pod.hotplug_file("data", volume.file)
    qemu = pod.fake_qemu()
    reaches(pod, "running")
    volume.suspend()
    qemu.kill()
    return pod


def test_a_hung_umount_keeps_neither_stop_nor_start(volume: SuspendedVolume) -> None:
    pod = _dead_vm(volume)
    hung = until(_in_state_d, "a worker hangs in its umount")
    began = time.monotonic()
    run("systemctl", "stop", UNIT)
    stopped = time.monotonic() - began
    assert prop("ActiveState") == "inactive"
    assert prop("Result") == "success", "it was neither killed nor timed out"
    assert _in_state_d() == hung, "the hung one is still there, and was not waited for"

    began = time.monotonic()
    run("systemctl", "start", UNIT)
    started = time.monotonic() - began
    print(f"with a hung umount: stop {stopped:.2f} s, start {started:.2f} s")
    assert stopped < 10
    assert started < 60
    assert pod.uid in states()

    other, pvc = Pod("good"), Volume("good")
    other.hotplug_file("data", pvc.file)
    qemu: Qemu = other.fake_qemu()
    reaches(other, "running")
    qemu.kill()
    released(other)
    pvc.discard()

    volume.resume()
    released(pod)
    until(lambda: not _in_state_d(), "the hung one has ended")
    until(lambda: len(_workers()) <= 3, "no worker is left over")


def _workers() -> list[str]:
    cgroup = Path("/sys/fs/cgroup" + prop("ControlGroup"), "cgroup.procs")
    return [pid for pid in cgroup.read_text().split() if int(pid) != main_pid() and os.path.exists(f"/proc/{pid}")]
