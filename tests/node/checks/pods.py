"""Launcher pods on the node, with the cgroups that systemd makes for kubelet and the mounts that virt-handler makes.

    pod = Pod("vm1")
    pod.containerdisk(0, image.file)
    pod.hotplug_file("data", pvc.file)
    qemu = pod.fake_qemu()

Everything is real: slices and scopes of systemd, overlays, loop devices, and for `real_qemu` QEMU itself.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import uuid
from enum import StrEnum
from pathlib import Path

from tests.node.checks.node import alive, mounts, run, until

KUBELET = Path("/var/lib/kubelet")
SCRATCH = Path("/var/lib/node/scratch")
#: The kernel names a process by the path that it was started from: dash under QEMU's name looks like one.
FAKE = Path("/var/lib/node/bin/qemu-system-x86_64")
REAL = "/usr/bin/qemu-system-x86_64"
# Opens the disks that its arguments name.
_OPEN = 'n=3; for a; do case $a in file=*) a=${a#file=}; eval "exec $n<\\"${a%%,*}\\""; n=$((n+1));; esac; done; '
_FOR_EVER = "echo ready; while :; do sleep 0.1; done"


class Life(StrEnum):
    """How a stand-in for QEMU lives, in dash's words."""

    #: Ends at the latest with the check that started it.
    CHECK = "echo ready; read -r x"
    #: Outlives the checks; ends at SIGTERM.
    BOOT = _FOR_EVER
    #: Outlives the checks; takes two seconds to end at SIGTERM, as a guest does that shuts down.
    SLOW = f"trap 'sleep 2; exit 0' TERM; {_FOR_EVER}"


class LoopFileSystem:
    """An ext4 on a loop device that goes away by itself when its last mount does, as a node's volume would."""

    def __init__(self, name: str, where: Path) -> None:
        self.mountpoint = where
        self.backing = SCRATCH / f"{name}.ext4"
        SCRATCH.mkdir(parents=True, exist_ok=True)
        where.mkdir(parents=True)
        with self.backing.open("wb") as file:
            file.truncate(16 << 20)
        run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(self.backing))
        run("mount", "-o", "loop", str(self.backing), str(where))
        self.device = run("findmnt", "--noheadings", "--output", "SOURCE", str(where)).stdout.strip()
        assert not self.free, f"{self.device} has {self._loop.read_text()!r}, not {self.backing}"

    @property
    def _loop(self) -> Path:
        return Path("/sys/block", os.path.basename(self.device), "loop/backing_file")

    @property
    def free(self) -> bool:
        """Whether the kernel let go of the device: then no superblock on it lives anywhere, mounted or not."""
        return not self._loop.exists() or self._loop.read_text().strip() != str(self.backing)


class ImageLayer:
    """A containerDisk's root file system: an overlay, with its layers on a file system of their own."""

    def __init__(self, name: str) -> None:
        self.store = LoopFileSystem(f"{name}-store", SCRATCH / f"{name}-store")
        top = self.store.mountpoint
        for part in ("lower/disk", "upper", "work", "merged"):
            (top / part).mkdir(parents=True)
        (top / "lower/disk/downloaded").write_bytes(secrets.token_bytes(4096))
        options = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
        run("mount", "-t", "overlay", "overlay", "-o", options, str(top / "merged"))
        self.file = top / "merged/disk/downloaded"

    def discard(self) -> None:
        """What the runtime does with a container that is gone; fails while a layer of a VM holds it."""
        run("umount", str(self.store.mountpoint / "merged"))
        run("umount", str(self.store.mountpoint))


class Volume(LoopFileSystem):
    """A PVC, staged where a CSI driver does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, KUBELET / "plugins/kubernetes.io/csi/pv" / name / "globalmount")
        self.file = self.mountpoint / "disk.img"
        self.file.write_bytes(bytes(65536))

    def discard(self) -> None:
        """What kubelet does with a volume that no pod uses any more."""
        run("umount", str(self.mountpoint))


class Pod:
    """One launcher pod."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uid = str(uuid.uuid4())
        self.slice = f"kubepods-burstable-pod{self.uid.replace('-', '_')}.slice"
        self.empty_dir = KUBELET / "pods" / self.uid / "volumes/kubernetes.io~empty-dir"
        for part in ("container-disks", "hotplug-disks", "sockets"):
            (self.empty_dir / part).mkdir(parents=True)
            os.chown(self.empty_dir / part, 107, 107)
        self.targets: list[Path] = []
        #: Device files that its stand-ins for QEMU open.
        self.devices: list[Path] = []

    def containerdisk(self, index: int, source: Path) -> Path:
        """What virt-handler binds for a containerDisk."""
        return self._bind(source, self.empty_dir / f"container-disks/disk_{index}.img", "ro")

    def hotplug_file(self, volume: str, source: Path) -> Path:
        """What virt-handler binds for a hotplugged filesystem PVC."""
        return self._bind(source, self.empty_dir / f"hotplug-disks/{volume}.img", "rw")

    def _bind(self, source: Path, target: Path, mode: str) -> Path:
        target.touch()
        run("mount", "--bind", "-o", mode, str(source), str(target))
        self.targets.append(target)
        return target

    @property
    def mounted(self) -> list[str]:
        """Its targets in PID 1's mount table."""
        top = os.fsencode(self.empty_dir)
        return [os.path.basename(os.fsdecode(each)) for each in mounts() if each.startswith(top + b"/")]

    def fake_qemu(self, life: Life = Life.CHECK) -> Qemu:
        """A stand-in that starts at once and holds the pod's disks open."""
        if not FAKE.exists():
            FAKE.parent.mkdir(parents=True)
            FAKE.symlink_to("/bin/dash")
        return Qemu(self, [str(FAKE), "-c", _OPEN + life, *self._guest(), *self._files(),
                           *(f"file={each}" for each in self.devices)])  # fmt: skip

    def real_qemu(self) -> Qemu:
        """QEMU itself, paused before its first instruction."""
        drives = [word for each in self._files() for word in ("-drive", f"if=none,readonly=on,{each}")]
        return Qemu(self, [REAL, *self._guest(), "-machine", "q35,accel=tcg", "-m", "64", "-nodefaults", "-display",
                           "none", "-S", "-monitor", "stdio", *drives], says="QEMU")  # fmt: skip

    def launcher(self) -> subprocess.Popen[bytes]:
        """Something else in the pod that lives on when QEMU has died, as virt-launcher does."""
        return subprocess.Popen([*self._enter(), "sleep", "infinity"], stdin=subprocess.DEVNULL)

    def _guest(self) -> list[str]:
        return ["-name", f"guest=default_{self.name},debug-threads=on", "-uuid", str(uuid.uuid4())]

    def _files(self) -> list[str]:
        return [f"file={target},format=raw" for target in self.targets]

    def _enter(self) -> list[str]:
        """A container of the pod: a scope in its slice, in a slave copy of the node's mounts."""
        return ["systemd-run", "--quiet", "--scope", f"--unit=cri-containerd-{secrets.token_hex(32)}",
                f"--slice={self.slice}", "--property=Delegate=yes", "unshare", "--mount", "--propagation",
                "slave"]  # fmt: skip


class Qemu:
    """A QEMU in a pod, ready when the constructor returns."""

    def __init__(self, pod: Pod, command: list[str], says: str = "ready") -> None:
        self._process = subprocess.Popen([*pod._enter(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         bufsize=0)  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert says in line, f"{command}: {line!r}"
        self.pid = self._process.pid
        assert Path(f"/proc/{self.pid}/comm").read_text().strip() == "qemu-system-x86"
        assert re.search(re.escape(pod.slice), Path(f"/proc/{self.pid}/cgroup").read_text())

    def kill(self) -> None:
        """SIGKILL, and nobody left behind."""
        if alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        until(lambda: not alive(self.pid), f"process {self.pid} is gone")
