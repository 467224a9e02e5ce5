"""A launcher pod on a test's node, laid out as kubelet and virt-handler would.

    pod = node.pod(name="vm")
    disk = pod.containerdisk(0)                  # …/container-disks/disk_0.img, bound out of an overlay
    pod.kernel_boot(); pod.hotplug_file("data"); pod.hotplug_directory("dump"); pod.hotplug_block("raw")
    pod.write_records()                          # virt-handler's own, as JSON
    qemu = pod.qemu(FakeQemu)                    # in the pod's cgroup, in a slave copy of the node's mounts

Every method that mounts gives the target's path as the node's PID 1 sees it. Who owns what is as in KubeVirt: the
launcher's user (107) the emptyDirs and all that is hotplugged, root the records.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import struct
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from tests.support.mountns import MNT_DETACH, MS_BIND, MS_RDONLY, MountNamespace, mount, umount
from tests.support.qemu import QEMU_UID, FakeQemu, Guest, Launcher, Place, Program, RealQemu

if TYPE_CHECKING:
    from tests.support.node import Node

Q = TypeVar("Q", bound=FakeQemu | RealQemu)

EMPTY_DIR = b"volumes/kubernetes.io~empty-dir"
_LAUNCHER_DIRECTORIES = (b"container-disks", b"hotplug-disks", b"sockets", b"private", b"public", b"ephemeral-disks")
_IMAGE_SIZE = 1 << 20


class Pod:
    """One launcher pod: its directories, its mounts, its cgroup, its processes."""

    def __init__(
        self, node: Node, *, name: str = "vm", namespace: str = "default", vmi_uid: str = "", uid: str = ""
    ) -> None:
        self.node = node
        self.uid = uid or str(uuid.uuid4())
        self.vmi_uid = vmi_uid or str(uuid.uuid4())
        self.guest = Guest(namespace, name)
        self.targets: list[bytes] = []
        self.blocks: list[bytes] = []
        self._programs: list[Program] = []
        self._records: dict[str, list[bytes]] = {"container-disk": [], "hotplug-volume": []}
        self.directory = node.kubelet + b"/pods/" + self.uid.encode()
        self.empty_dir = self.directory + b"/" + EMPTY_DIR
        for each in _LAUNCHER_DIRECTORIES:
            self._mkdir(self.empty_dir + b"/" + each, QEMU_UID)
        self.container_disks = self.empty_dir + b"/container-disks"
        self.hotplug_disks = self.empty_dir + b"/hotplug-disks"
        self.cgroups = tuple(node.cgroups.add(self.uid))
        self._launcher_namespace: MountNamespace | None = None

    # -- what virt-handler mounts

    def containerdisk(self, index: int = 0, *, image: str = "overlay", name: bytes = b"") -> bytes:
        """Binds a containerDisk's image, read-only as virt-handler does. `image`: the file system it comes from."""
        target = self.container_disks + b"/" + (name or b"disk_%d.img" % index)
        source = self.node.image(image)
        self._bind_file(source, target, 0, MS_RDONLY)
        self._touch(os.path.splitext(target)[0] + b".sock", 0)
        self._records["container-disk"].append(target)
        return target

    def kernel_boot(self, *names: bytes) -> list[bytes]:
        """Binds kernel and initrd below kernel-boot/ (by default both)."""
        directory = self.container_disks + b"/kernel-boot"
        self._mkdir(directory, 0)
        names = names or (b"vmlinuz", b"initrd.img")
        for name in names:
            content = kernel() if name.startswith(b"vmlinuz") else bytes(4096)
            self._bind_file(
                self.node.image("overlay", b"/boot/" + name, content), directory + b"/" + name, 0, MS_RDONLY
            )
        self._records["container-disk"].append(directory)
        return [directory + b"/" + name for name in names]

    def hotplug_file(self, volume: str | bytes, *, pvc: str = "tmpfs") -> bytes:
        """Binds a filesystem PVC's disk.img."""
        target = self.hotplug_disks + b"/" + _name(volume) + b".img"
        self._bind_file(self.node.pvc(pvc) + b"/disk.img", target, QEMU_UID)
        self._records["hotplug-volume"].append(target)
        return target

    def hotplug_directory(self, volume: str | bytes, *, pvc: str = "tmpfs") -> bytes:
        """Binds a whole PVC (utility volume, memory dump)."""
        target = self.hotplug_disks + b"/" + _name(volume)
        self._mkdir(target, QEMU_UID)
        self._bind(self.node.pvc(pvc), target)
        self._records["hotplug-volume"].append(target)
        return target

    def hotplug_block(self, volume: str | bytes, *, device: tuple[int, int] = (1, 3)) -> bytes:
        """Makes the device node of a block PVC (by default the null device). No mount."""
        target = self.hotplug_disks + b"/" + _name(volume)
        outside = self.node.outside(target)
        os.mknod(outside, stat.S_IFBLK | 0o660, os.makedev(*device))
        os.chown(outside, QEMU_UID, QEMU_UID)
        self.blocks.append(target)
        self._records["hotplug-volume"].append(target)
        return target

    def bind(self, source: bytes, target: bytes, flags: int = 0) -> None:
        """Binds anything on an existing mountpoint; again = one more on the stack."""
        self._bind(source, target, flags)

    def unmount(self, target: bytes) -> None:
        """Takes one mount off a target, lazily, as virt-handler does."""
        self.node.namespace.call(umount, target, MNT_DETACH)

    def attachment(self, volume: str | bytes) -> Attachment:
        """The attachment pod (hp-volume-*) that holds a hotplugged PVC: its mounts look alike and are not hostd's."""
        return Attachment(self.node, _name(volume))

    # -- what it writes down

    def record(self, which: str = "container-disk") -> bytes:
        """Path of a record of virt-handler's: container-disk or hotplug-volume."""
        return self.node.private + f"/{which}-mount-state/{self.vmi_uid}".encode()

    @property
    def ghost(self) -> bytes:
        """Path of virt-handler's ghost record."""
        return self.node.private + b"/ghost-records/" + self.vmi_uid.encode()

    def write_records(self, *, safe_paths: bool | None = True, prefix: bytes = b"") -> None:
        """Writes the mount records and the ghost record. `safe_paths` None = as releases that knew no such key."""
        for which, targets in self._records.items():
            entries = [self._entry(which, prefix + target) for target in targets]
            record: dict[str, object] = {"mountTargetEntries": entries}
            record |= {} if safe_paths is None else {"usesSafePaths": safe_paths}
            self.write(self.record(which), json.dumps(record, separators=(",", ":")).encode())
        socket = f"/pods/{self.uid}/{EMPTY_DIR.decode()}/sockets/launcher-sock"
        ghost = {"name": self.guest.name, "namespace": self.guest.namespace, "socketFile": socket, "uid": self.vmi_uid}
        self.write(self.ghost, json.dumps(ghost, separators=(",", ":")).encode())

    def _entry(self, which: str, target: bytes) -> dict[str, str]:
        entry = {"targetFile": target.decode(errors="replace")}
        if which == "container-disk":
            stem = os.path.splitext(os.path.basename(target))[0].decode(errors="replace")
            entry["socketFile"] = f"/pods/{self.uid}/{EMPTY_DIR.decode()}/container-disks/{stem}.sock"
        return entry

    def write(self, path: bytes, content: bytes) -> None:
        """Writes a record, whatever its content; with the mode that virt-handler gives it."""
        outside = self.node.outside(path)
        os.makedirs(os.path.dirname(outside), 0o700, exist_ok=True)
        with open(outside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)

    # -- processes

    @property
    def launcher_namespace(self) -> MountNamespace:
        """The compute container's view: a slave of the node's (HostToContainer), so umounts on the node reach it."""
        if self._launcher_namespace is None:
            self._launcher_namespace = self.node.namespace.copy("slave")
        return self._launcher_namespace

    @property
    def place(self) -> Place:
        """Where the pod's processes run."""
        return Place(self.cgroups, self.launcher_namespace.path, QEMU_UID)

    def qemu(self, kind: type[Q], *, disks: Sequence[bytes] | None = None, name: str = "") -> Q:
        """Starts a QEMU in the pod that has all file targets open (or just `disks`), and boots from kernel-boot/."""
        boot = {os.path.basename(path): path for path in self.targets if b"/kernel-boot/" in path}
        files = [path for path in self.targets if path.endswith(b".img") and b"/kernel-boot/" not in path]
        guest = Guest(self.guest.namespace, name or self.guest.name, self.guest.firmware_uuid)
        started = kind(
            guest,
            disks=files if disks is None else disks,
            kernel=boot.get(b"vmlinuz", b""),
            initrd=boot.get(b"initrd.img", b""),
            place=self.place,
        )
        self._programs.append(started)
        return started

    def launcher(self) -> Launcher:
        """Starts what looks like virt-launcher: with it the pod's cgroup stays populated after QEMU's death."""
        started = Launcher(self.guest.name, self.vmi_uid, self.guest.namespace, self.place)
        self._programs.append(started)
        return started

    # -- the end

    def mounted(self) -> list[bytes]:
        """The pod's mounts by an independent look at the node's mount table."""
        return self.node.mounts(self.directory + b"/")

    def remove_cgroup(self) -> None:
        """Removes the (empty) cgroup, as kubelet does."""
        self.node.cgroups.remove(self.uid)

    def vanish(self) -> None:
        """Removes the pod's directory, as kubelet's clean-up does in the end; nothing may be mounted below it."""
        shutil.rmtree(self.node.outside(self.directory))

    def close(self) -> None:
        """Ends the pod's processes."""
        for program in self._programs:
            program.close()

    # -- how

    def _bind_file(self, source: bytes, target: bytes, owner: int, flags: int = 0) -> None:
        self._touch(target, owner)
        self._bind(source, target, flags)

    def _bind(self, source: bytes, target: bytes, flags: int = 0) -> None:
        self.node.namespace.call(mount, source, target, b"", MS_BIND | flags)
        if target not in self.targets:
            self.targets.append(target)

    def _touch(self, path: bytes, owner: int) -> None:
        outside = self.node.outside(path)
        os.close(os.open(outside, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        os.chown(outside, owner, owner)

    def _mkdir(self, path: bytes, owner: int) -> None:
        outside = self.node.outside(path)
        os.makedirs(outside, 0o755, exist_ok=True)
        os.chown(outside, owner, owner)


class Attachment:
    """An attachment pod: it owns a directory of the same name as the launcher's hotplug-disks."""

    def __init__(self, node: Node, volume: bytes) -> None:
        self.uid = str(uuid.uuid4())
        self.pvc_uid = str(uuid.uuid4())
        directory = node.kubelet + b"/pods/" + self.uid.encode() + b"/" + EMPTY_DIR + b"/hotplug-disks"
        self.target = directory + b"/" + volume + b"/" + self.pvc_uid.encode()
        os.makedirs(node.outside(self.target))
        os.close(os.open(node.outside(directory + b"/hp.sock"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        node.namespace.call(mount, node.pvc("tmpfs"), self.target, b"", MS_BIND)


def kernel() -> bytes:
    """The smallest file that QEMU loads as a Linux kernel (boot protocol 2.12); it is never run."""
    image = bytearray(0x2000)
    image[0x1F1] = 1
    image[0x1FE:0x200] = b"\x55\xaa"
    image[0x202:0x206] = b"HdrS"
    image[0x206:0x208] = struct.pack("<H", 0x20C)
    image[0x211] = 1
    image[0x22C:0x230] = struct.pack("<I", 0x37FFFFFF)
    return bytes(image)


def image_content() -> bytes:
    """A disk's content, recognisable."""
    return secrets.token_bytes(512) + bytes(_IMAGE_SIZE - 512)


def _name(volume: str | bytes) -> bytes:
    return volume.encode() if isinstance(volume, str) else volume
