"""A whole node of a test's own: mounts, cgroups, kubelet's tree, a bus, and hostd on it.

    with Node() as node:
        pod = node.pod(name="vm")
        disk = pod.containerdisk()
        qemu = pod.qemu(FakeQemu)
        node.hostd.start()
        qemu.kill()
        until(lambda: not pod.mounted(), why="the layers are gone")

The node's mount namespace plays the part of PID 1's. hostd runs inside it, as on a real node, unless `inside=False`.
What hostd must keep over its life (state, bus, configuration) lies on a tmpfs outside, which both see.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.bus import PrivateBus
from tests.support.cgroups import V2_SYSTEMD, Layout, PodCgroups
from tests.support.daemon import Daemon
from tests.support.mountns import MountNamespace, mount
from tests.support.pod import Pod, image_content

NAME = "io.kubevirt.hostd1"
MANAGER = "/io/kubevirt/hostd1"
MANAGER_INTERFACE = "io.kubevirt.hostd1.Manager"
VM_INTERFACE = "io.kubevirt.hostd1.VM"

#: _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
_BTRFS_SUBVOL_CREATE = 0x5000_940E

Settings = Mapping[str, Mapping[str, object]]


class Node:
    """One node. Everything on it is made here and gone after `close`."""

    def __init__(
        self,
        layout: Layout = V2_SYSTEMD,
        *,
        inside: bool = True,
        kubelet_is_a_link: bool = False,
        settings: Settings | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: sections of the configuration over the tests' own. `environment`: variables for hostd."""
        self._undo: list[Callable[[], None]] = []
        try:
            self._build(layout, inside, kubelet_is_a_link, settings or {}, environment or {})
        except BaseException:
            self.close()
            raise

    def _build(
        self, layout: Layout, inside: bool, link: bool, settings: Settings, environment: Mapping[str, str]
    ) -> None:
        self.directory = _directory()
        self._undo.append(lambda: shutil.rmtree(self.directory))
        self.namespace = MountNamespace("shared")
        self._undo.append(self.namespace.close)
        self.cgroups = PodCgroups(layout, self.namespace)
        self._undo.append(self.cgroups.close)
        self.bus = self._bus()
        self.private = self.namespace.mkdir(self.namespace.base + b"/kubevirt-private")
        #: The kubelet's root as it is in the mount table, and as it is in the configuration.
        self.kubelet = self._kubelet(b"/data/kubelet" if link else b"/kubelet")
        self.kubelet_configured = self._link(self.kubelet) if link else self.kubelet
        self._pvcs: dict[str, int] = {}
        self._images = 0
        self.pods: list[Pod] = []
        self._undo.append(self._close_pods)
        self.settings = _merged(self._defaults(), settings)
        self.configuration = os.path.join(self.directory, "hostd.toml")
        self.configure()
        self.hostd = self.daemon(inside=inside, environment=environment)

    def _bus(self) -> PrivateBus:
        directory = Path(self.directory, "bus")
        directory.mkdir()
        bus = PrivateBus(directory)
        bus.start_now()
        self._undo.append(bus.stop)
        return bus

    def _close_pods(self) -> None:
        for pod in self.pods:
            pod.close()

    def _kubelet(self, below: bytes) -> bytes:
        """A tmpfs as on nodes that have a file system for kubelet; shared, as the node's systemd makes it."""
        root = self.namespace.tmpfs(self.namespace.base + below)
        self.namespace.mkdir(root + b"/pods")
        return root

    def _link(self, target: bytes) -> bytes:
        link = self.namespace.base + b"/kubelet"
        os.symlink(target, self.outside(link))
        return link

    def _defaults(self) -> Settings:
        return {
            "host": {
                "kubelet-root": os.fsdecode(self.kubelet_configured),
                "kubevirt-private": os.fsdecode(self.private),
                "mount-namespace": self.namespace.path,
                "cgroup-root": self.cgroups.root,
                "runtime-dir": os.path.join(self.directory, "run"),
                "state-dir": os.path.join(self.directory, "lib"),
            },
            # Short, so that tests of what waits need not wait; each is an upper bound of something, never a deadline.
            "cleanup": {"grace": "200ms", "settle": "1s"},
        }

    # -- hostd

    def configure(self, settings: Settings | None = None) -> None:
        """Writes hostd's configuration, with more settings over those it has."""
        self.settings = _merged(self.settings, settings or {})
        with open(self.configuration, "w") as file:
            file.write(toml(self.settings))

    def daemon(self, *, inside: bool = True, environment: Mapping[str, str] | None = None, config: str = "") -> Daemon:
        """One more hostd on this node's configuration (the node's own is `hostd`); not started."""
        made = Daemon(
            config or self.configuration,
            self.bus.address,
            mount_namespace=self.namespace.path if inside else "",
            environment=environment,
        )
        self._undo.append(made.close)
        return made

    @property
    def runtime_dir(self) -> str:
        """hostd's runtime directory."""
        return os.path.join(self.directory, "run")

    # -- pods and what they mount

    def pod(self, *, name: str = "vm", namespace: str = "default", vmi_uid: str = "", uid: str = "") -> Pod:
        """A new launcher pod, with nothing mounted for it yet."""
        made = Pod(self, name=name, namespace=namespace, vmi_uid=vmi_uid, uid=uid)
        self.pods.append(made)
        return made

    def image(self, kind: str = "overlay", path: bytes = b"/disk/downloaded", content: bytes = b"") -> bytes:
        """A new container's root file system (overlay, ext4, tmpfs, btrfs) with one file; the file's path."""
        self._images += 1
        top = self.namespace.base + b"/containers/%d" % self._images
        root = self._file_system(kind, top)
        return self.namespace.write(root + path, content or image_content())

    def pvc(self, kind: str = "tmpfs") -> bytes:
        """A new PVC, mounted as a CSI driver would below the kubelet's root but outside the pods; its directory."""
        self._images += 1
        top = self.kubelet + b"/plugins/kubernetes.io/csi/pv/%d/globalmount" % self._images
        root = self._file_system(kind, top)
        self.namespace.write(root + b"/disk.img", image_content())
        os.chown(self.outside(root + b"/disk.img"), 107, 107)
        return root

    def _file_system(self, kind: str, top: bytes) -> bytes:
        if kind == "overlay":
            return self._overlay(top)
        root = self.namespace.mkdir(top)
        if kind == "ext4":
            self._ext4(root)
        elif kind == "btrfs":
            return self._btrfs(root)
        else:
            self.namespace.call(mount, b"pvc", root, kind.encode())
        return root

    def _overlay(self, top: bytes) -> bytes:
        lower, upper, work, merged = (
            self.namespace.mkdir(top + each) for each in (b"/lower", b"/upper", b"/work", b"/rootfs")
        )
        options = b"lowerdir=%s,upperdir=%s,workdir=%s" % (lower, upper, work)
        self.namespace.call(mount, b"overlay", merged, b"overlay", 0, options)
        return merged

    def _btrfs(self, root: bytes) -> bytes:
        """A subvolume of a btrfs on a loop device: its files' st_dev is not the device of the mount table."""
        image = root + b".btrfs"
        self.namespace.write(image)
        os.truncate(self.outside(image), 128 << 20)
        self.namespace.run(["mkfs.btrfs", "-q", image])
        self.namespace.run(["mount", "-o", "loop", image, root])
        self.namespace.call(_make_subvolume, root, b"volume")
        return root + b"/volume"

    def _ext4(self, root: bytes) -> None:
        """An ext4 on a loop device, which detaches itself at the last umount."""
        image = root + b".ext4"
        self.namespace.write(image)
        os.truncate(self.outside(image), 8 << 20)
        self.namespace.run(["mkfs.ext4", "-q", "-F", image])
        self.namespace.run(["mount", "-o", "loop", image, root])

    # -- looking at it, independently of hostd

    def outside(self, path: bytes) -> bytes:
        """Where the test reaches a path of the node."""
        return self.namespace.outside(path)

    def mounts(self, prefix: bytes) -> list[bytes]:
        """Mountpoints that start with a prefix, by the node's own mount table; stacked ones as often as they are."""
        points = (line.split(b" ")[4] for line in self.namespace.table().splitlines())
        return [point for point in map(_unescaped, points) if point.startswith(prefix)]

    def rows(self, prefix: bytes) -> list[str]:
        """The mount table's own lines for these."""
        lines = self.namespace.table().splitlines()
        return [line.decode(errors="replace") for line in lines if _unescaped(line.split(b" ")[4]).startswith(prefix)]

    # -- the bus

    def busctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs busctl on the node's bus."""
        command = ["busctl", f"--address={self.bus.address}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
        return done

    def call(self, member: str, signature: str = "", *arguments: str, path: str = MANAGER, interface: str = "") -> Any:
        """Calls a method through busctl; its results as plain values, one by itself, several as a list."""
        interface = interface or (MANAGER_INTERFACE if path == MANAGER else VM_INTERFACE)
        words = [signature, *arguments] if signature else []
        # `--` keeps arguments that start with a dash what they are.
        output = self.busctl("--json=short", "call", "--", NAME, path, interface, member, *words).stdout
        data = json.loads(output or '{"data": []}')["data"]
        return data[0] if isinstance(data, list) and len(data) == 1 else data

    def get(self, name: str, path: str = MANAGER, interface: str = "") -> Any:
        """A property's plain value, through busctl."""
        interface = interface or (MANAGER_INTERFACE if path == MANAGER else VM_INTERFACE)
        return json.loads(self.busctl("--json=short", "get-property", NAME, path, interface, name).stdout)["data"]

    def states(self) -> dict[str, str]:
        """Pod UID → state, as ListVMs has it."""
        return {row[0]: row[4] for row in self.call("ListVMs")}

    def layers(self, pod: Pod) -> dict[str, str]:
        """Target → state of a pod's layers, as ListLayers has it."""
        return {row[1]: row[4] for row in self.call("ListLayers", "a{sv}", "0") if row[0] == pod.uid}

    def vm(self, pod: Pod) -> str:
        """The object path of a pod's VM."""
        return str(self.call("GetVM", "s", pod.uid))

    # -- the end

    def close(self) -> None:
        """Takes everything away, in the reverse order, whatever fails on the way."""
        failures: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001  the rest must go too; all are raised below
                failures.append(error)
        if failures:
            raise ExceptionGroup("the node could not be taken away", failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_subvolume(top: bytes, name: bytes) -> None:
    fd = os.open(top, os.O_RDONLY)
    fcntl.ioctl(fd, _BTRFS_SUBVOL_CREATE, bytearray(struct.pack("=q4088s", 0, name)))
    os.close(fd)


def toml(settings: Settings) -> str:
    """A configuration as text."""
    lines: list[str] = []
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml_value(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def _merged(below: Settings, above: Settings) -> Settings:
    return {
        name: {**below.get(name, {}), **above.get(name, {})} for name in [*below, *(n for n in above if n not in below)]
    }


def _directory() -> str:
    """A new directory on a tmpfs where there is one, as /run is."""
    with open("/proc/self/mountinfo") as table:
        shm = any(line.split()[4] == "/dev/shm" and " - tmpfs " in line for line in table)
    return tempfile.mkdtemp(prefix="hostd-test-", dir="/dev/shm" if shm else None)


def _unescaped(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
