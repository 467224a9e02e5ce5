"""Pods as their directories name them: which one is a VM's launcher, and where its two directories lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.kubevirt.targets import CONTAINER_DISKS, EMPTY_DIRS, PODS, VOLUMES, is_pod_uid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: The emptyDir of virt-launcher's socket: every launcher has it, whatever its disks.
SOCKETS = b"sockets"

#: The socket of an attachment pod, in its own hotplug-disks.
HOTPLUG_SOCKET = b"hp.sock"


def empty_dir(pod_uid: str) -> bytes:
    """The directory of a pod's emptyDirs, relative to the kubelet's root."""
    return b"/".join([PODS, pod_uid.encode(), VOLUMES, EMPTY_DIRS])


def pods_of_roots(roots: Iterable[bytes]) -> set[str]:
    """The pods whose volumes these are: roots of mounts (as in a mount table) that a container has of its pod."""
    return {
        uid
        for parts in (root.split(b"/") for root in roots)
        for at, part in enumerate(parts[:-2])
        if part == PODS and parts[at + 2] == VOLUMES and is_pod_uid(uid := parts[at + 1].decode("latin-1"))
    }


def is_launcher(names: Collection[bytes]) -> bool:
    """Whether the pod with these emptyDirs is a launcher, and so a VM.

    An attachment pod (`hp-volume-*`), in which nothing is ours, has a hotplug-disks as a launcher has, and neither of
    these two.
    """
    return CONTAINER_DISKS in names or SOCKETS in names
