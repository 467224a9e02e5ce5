"""Targets: the paths that KubeVirt's agent mounts for a VM, and how they are told from all other mounts.

Where they live is KubeVirt's convention (containerDisks, kernel boot and hotplug, releases up to 1.9):

    <kubelet root>/pods/<pod uid>/volumes/kubernetes.io~empty-dir/
        container-disks/disk_<i>.img            a containerDisk: a file bound from the image's overlay
        container-disks/kernel-boot/<file>      kernel or initrd: files are bound, never the directory
        hotplug-disks/<volume>.img              a PVC's disk.img, bound as a file
        hotplug-disks/<volume>                  a whole PVC bound as a directory (utility volume, memory dump)
        hotplug-disks/<volume>                  a block PVC: a device node made with mknod, no mount

Everything else is somebody else's: kubelet's, a CSI driver's, or an attachment pod's own
`hotplug-disks/<volume>/<pvc uid>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hostd.errors import NotATarget

PODS = b"pods"
VOLUMES = b"volumes"
EMPTY_DIRS = b"kubernetes.io~empty-dir"
CONTAINER_DISKS = b"container-disks"
HOTPLUG_DISKS = b"hotplug-disks"
KERNEL_BOOT = b"kernel-boot"
IMAGE_SUFFIX = b".img"

#: The host's root as processes in other containers name it; old hotplug records start with it.
_HOST_ROOT = b"/proc/1/root"
#: A UUID as the API server makes it, or the 32 digits that kubelet gives to static pods; always lower case.
_POD_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", re.ASCII)
#: NAME_MAX of Linux: no directory entry is longer.
_NAME_MAX = 255
#: How much of a refused path an error shows.
_SHOWN = 200


class Kind(StrEnum):
    """What a layer is; the words are those of the bus."""

    CONTAINERDISK = "containerdisk"
    KERNEL_BOOT = "kernel-boot"
    HOTPLUG_FILE = "hotplug-file"
    HOTPLUG_DIRECTORY = "hotplug-directory"
    HOTPLUG_BLOCK = "hotplug-block"


@dataclass(frozen=True, slots=True)
class Target:
    """One path that a VM's layer is mounted on.

    `path` is absolute and as PID 1 sees it (bytes: names need not be UTF-8); `relative` is the same path below
    the kubelet's root, which is how it is walked. `volume` is the name without `.img`, decoded with surrogateescape.
    """

    pod_uid: str
    kind: Kind
    volume: str
    path: bytes
    relative: bytes


@dataclass(frozen=True, slots=True)
class Foreign:
    """A mount inside a pod's two directories that is no target: to be reported, never touched."""

    pod_uid: str
    path: bytes


def is_pod_uid(text: str) -> bool:
    """Whether this is a pod's UID in its canonical form: a lower-case UUID, or 32 hex digits (static pods)."""
    return _POD_UID.fullmatch(text) is not None


def pods_prefix(kubelet_root: bytes) -> bytes:
    """The directory that holds all pods' directories; no slash at its end."""
    return kubelet_root.rstrip(b"/") + b"/" + PODS


def classify(kubelet_root: bytes, mountpoint: bytes) -> Target | Foreign | None:
    """What a row of the mount table is; None for all that is not inside a pod's two directories.

    A mount on one of the two directories itself (a memory-backed emptyDir, say) is kubelet's own business: None.
    """
    prefix = pods_prefix(kubelet_root) + b"/"
    if not mountpoint.startswith(prefix):
        return None
    parts = mountpoint[len(prefix) :].split(b"/")
    uid = _pod_of(parts)
    if uid is None or not all(map(_is_name, parts)):
        return None
    return _target(kubelet_root, uid, parts, block=False) or Foreign(uid, mountpoint)


def target(kubelet_root: bytes, path: bytes, *, block: bool = False) -> Target:
    """The target that a path given by others (an agent, a record) means.

    `//`, `/./` and a slash at the end are dropped, and so are `/proc/1/root` and whatever stands before
    `/pods/<pod uid>/volumes/`: agents see the kubelet's directory under other names than the host does. `block` says
    that the path is a block PVC's device node. Raises NotATarget for all else.
    """
    if b"\0" in path:
        raise _refused(path, "it contains a NUL byte")
    if not path.startswith(b"/"):
        raise _refused(path, "it is not absolute")
    if b".." in path.split(b"/"):
        raise _refused(path, "it contains '..'")
    parts = _below_pods(kubelet_root, _normal(path))
    uid = _pod_of(parts)
    found = None if uid is None else _target(kubelet_root, uid, parts, block=block)
    if found is None:
        raise _refused(path, "a block volume lies directly below hotplug-disks" if block else _SHAPE)
    return found


_SHAPE = (
    "a target is <kubelet root>/pods/<pod uid>/volumes/kubernetes.io~empty-dir/"
    "{container-disks/<file>, container-disks/kernel-boot/<file>, hotplug-disks/<volume>}"
)


def _refused(path: bytes, why: str) -> NotATarget:
    shown = path[:_SHOWN].decode("utf-8", "backslashreplace").replace("\0", r"\x00")
    return NotATarget(f"{shown} is not a path that a VM's layer is mounted on: {why}")


def _is_name(part: bytes) -> bool:
    return part not in (b"", b".", b"..") and len(part) <= _NAME_MAX and b"\0" not in part


def _normal(path: bytes) -> list[bytes]:
    """The path's components without those that mean nothing."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    host_root = _HOST_ROOT.split(b"/")[1:]
    return parts[len(host_root) :] if parts[: len(host_root)] == host_root else parts


def _below_pods(kubelet_root: bytes, parts: list[bytes]) -> list[bytes]:
    """The components that follow `pods/`; none if the path leads into no pod.

    The FIRST place that looks like a pod's directory counts. All below it is writable by the pod, so that a later
    one may be a trap that names another pod.
    """
    root = [part for part in kubelet_root.split(b"/") if part] + [PODS]
    if parts[: len(root)] == root:
        return parts[len(root) :]
    for at, part in enumerate(parts):
        if part == PODS and parts[at + 2 : at + 3] == [VOLUMES] and _uid(parts[at + 1]) is not None:
            return parts[at + 1 :]
    return []


def _uid(part: bytes) -> str | None:
    text = part.decode("latin-1")
    return text if is_pod_uid(text) else None


def _pod_of(parts: list[bytes]) -> str | None:
    """The pod whose two directories the components (those after `pods/`) lead into, below the directory itself."""
    if len(parts) < 5 or parts[1:3] != [VOLUMES, EMPTY_DIRS] or parts[3] not in (CONTAINER_DISKS, HOTPLUG_DISKS):
        return None
    return _uid(parts[0])


def _target(kubelet_root: bytes, uid: str, parts: list[bytes], *, block: bool) -> Target | None:
    inner = parts[4:]
    kind = _kind(parts[3], inner, block=block)
    if kind is None or not all(map(_is_name, inner)):
        return None
    relative = b"/".join([PODS, *parts])
    volume = inner[-1].decode("utf-8", "surrogateescape")
    if kind in (Kind.CONTAINERDISK, Kind.HOTPLUG_FILE):
        volume = volume.removesuffix(IMAGE_SUFFIX.decode())
    return Target(uid, kind, volume, kubelet_root.rstrip(b"/") + b"/" + relative, relative)


def _kind(directory: bytes, inner: list[bytes], *, block: bool) -> Kind | None:
    """The kind of what lies at `inner` below one of the two directories; None if nothing of KubeVirt's lies there."""
    if directory == HOTPLUG_DISKS:
        return _hotplug_kind(inner[0], block=block) if len(inner) == 1 else None
    if block:
        return None
    if len(inner) == 1:
        return None if inner[0] == KERNEL_BOOT else Kind.CONTAINERDISK
    return Kind.KERNEL_BOOT if len(inner) == 2 and inner[0] == KERNEL_BOOT else None


def _hotplug_kind(name: bytes, *, block: bool) -> Kind:
    if block:
        return Kind.HOTPLUG_BLOCK
    return Kind.HOTPLUG_FILE if name.endswith(IMAGE_SUFFIX) else Kind.HOTPLUG_DIRECTORY
