"""Which mounts stand for a layer, by tables written out."""

from __future__ import annotations

import pytest

from hostd.linux import copies
from hostd.linux.copies import Wanted

TARGET = b"/k/pods/u/volumes/e/hotplug-disks/data.img"
HERE = "mnt:[1]"
TOP = b"20 1 0:20 / / rw - ext4 root rw\n21 20 0:40 / /k rw shared:7 - tmpfs k rw\n"


def row(number: int, target: bytes, device: bytes = b"0:50", root: bytes = b"/disk.img") -> bytes:
    return b"%d 21 %s %s %s rw shared:8 - tmpfs pvc rw\n" % (number, device, root, target)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (row(30, b"/k/pods/u/volumes/e/hotplug-disks/sub/hidden"), [b"/k/pods/u/volumes/e/hotplug-disks/sub/hidden"]),
        (row(30, b"/k/pods/u/volumes/e/aside/data.img"), [b"/k/pods/u/volumes/e/aside/data.img"]),
        # An id that was given anew: far away, or of something else.
        (row(30, b"/k/pods/v/volumes/e/hotplug-disks/data.img"), []),
        (row(30, b"/k/pods/u/volumes/e/hotplug-disks/sub/hidden", device=b"0:51"), []),
        (row(30, b"/k/pods/u/volumes/e/hotplug-disks/sub/hidden", root=b"/other.img"), []),
        (row(31, b"/k/pods/u/volumes/e/hotplug-disks/sub/hidden"), []),
        (row(30, TARGET), []),
        (b"", []),
    ],
)
def test_a_mount_that_moved_with_its_mountpoint_is_the_layers_still(table: bytes, found: list[bytes]) -> None:
    wanted = Wanted(TARGET, "0:50", b"/disk.img", (30,))
    assert copies.find([wanted], HERE, {HERE: TOP + table}).below == [(TARGET, moved) for moved in found]
