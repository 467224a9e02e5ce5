from __future__ import annotations

import pytest

from hostd.kubevirt.pods import empty_dir, is_launcher, pods_of_roots
from hostd.kubevirt.targets import target

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
LAUNCHER = {
    b"private",
    b"public",
    b"sockets",
    b"ephemeral-disks",
    b"container-disks",
    b"hotplug-disks",
    b"libvirt-runtime",
}


@pytest.mark.parametrize(
    ("names", "launcher"),
    [
        (LAUNCHER, True),
        (LAUNCHER - {b"container-disks"}, True),
        (LAUNCHER - {b"sockets"}, True),
        ({b"container-disks"}, True),
        # An attachment pod's.
        ({b"hotplug-disks"}, False),
        ({b"hotplug-disks", b"tmp"}, False),
        ({b"cache", b"tmp"}, False),
        ({b"socket", b"container-disk"}, False),
        (set(), False),
    ],
)
def test_pods_by_their_empty_dirs(names: set[bytes], launcher: bool) -> None:
    assert is_launcher(names) is is_launcher(sorted(names)) is launcher


@pytest.mark.parametrize(
    ("root", "found"),
    [
        (b"/var/lib/kubelet/pods/%s/volumes/kubernetes.io~empty-dir/hotplug-disks", True),
        (b"/pods/%s/volumes/kubernetes.io~empty-dir/container-disks", True),
        (b"/pods/%s/volumes", True),
        (b"/pods/%s/etc-hosts", False),
        (b"/pods/%s", False),
        (b"/pots/%s/volumes/x", False),
        (b"/pods/x%s/volumes/x", False),
        (b"/", False),
        (b"", False),
    ],
)
def test_the_roots_of_a_containers_mounts_name_its_pod(root: bytes, found: bool) -> None:
    named = root.replace(b"%s", UID.encode())
    assert pods_of_roots([b"/", named, b"/disk.img"]) == ({UID} if found else set())


def test_targets_lie_in_the_pods_empty_dirs() -> None:
    path = b"/k/" + empty_dir(UID) + b"/hotplug-disks/v"
    assert target(b"/k", path).path == path
