from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.errors import NotATarget
from hostd.kubevirt.targets import Foreign, Kind, Target, classify, is_pod_uid, pods_prefix, target

ROOT = b"/var/lib/kubelet"
UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OTHER = "ffffffff-1111-2222-3333-444444444444"
STATIC = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
BELOW = f"pods/{UID}/volumes/kubernetes.io~empty-dir/".encode()
EMPTY_DIR = ROOT + b"/" + BELOW


@pytest.mark.parametrize(
    ("tail", "kind", "volume"),
    [
        (b"container-disks/disk_0.img", Kind.CONTAINERDISK, "disk_0"),
        (b"container-disks/disk_17.img", Kind.CONTAINERDISK, "disk_17"),
        (b"container-disks/anything", Kind.CONTAINERDISK, "anything"),
        (b"container-disks/kernel-boot.img", Kind.CONTAINERDISK, "kernel-boot"),
        (b"container-disks/kernel-boot/vmlinuz", Kind.KERNEL_BOOT, "vmlinuz"),
        (b"container-disks/kernel-boot/initrd.img", Kind.KERNEL_BOOT, "initrd.img"),
        (b"container-disks/kernel-boot/kernel-boot", Kind.KERNEL_BOOT, "kernel-boot"),
        (b"hotplug-disks/data.img", Kind.HOTPLUG_FILE, "data"),
        (b"hotplug-disks/data.img.img", Kind.HOTPLUG_FILE, "data.img"),
        (b"hotplug-disks/memory-dump", Kind.HOTPLUG_DIRECTORY, "memory-dump"),
        (b"hotplug-disks/kernel-boot", Kind.HOTPLUG_DIRECTORY, "kernel-boot"),
        (b"hotplug-disks/a b\t\n\\040#", Kind.HOTPLUG_DIRECTORY, "a b\t\n\\040#"),
        (b"hotplug-disks/\xff\xfe.img", Kind.HOTPLUG_FILE, "\udcff\udcfe"),
        ("hotplug-disks/größe.img".encode(), Kind.HOTPLUG_FILE, "größe"),
        (b"hotplug-disks/x//deleted"[:15], Kind.HOTPLUG_DIRECTORY, "x"),
        (b"hotplug-disks/a(deleted)", Kind.HOTPLUG_DIRECTORY, "a(deleted)"),
    ],
)
def test_each_kind_is_told_from_its_place(tail: bytes, kind: Kind, volume: str) -> None:
    expected = Target(UID, kind, volume, EMPTY_DIR + tail, BELOW + tail)
    assert classify(ROOT, EMPTY_DIR + tail) == expected
    assert target(ROOT, EMPTY_DIR + tail) == expected


@pytest.mark.parametrize(
    "tail",
    [
        b"container-disks/kernel-boot",
        b"container-disks/kernel-boot/a/b",
        b"container-disks/disk_0.img/x",
        b"container-disks/x/vmlinuz",
        b"hotplug-disks/volume/7d1c4d9e-1111-4222-8333-944444444444",
        b"hotplug-disks/kernel-boot/vmlinuz",
    ],
)
def test_what_else_is_mounted_inside_the_two_directories_is_foreign(tail: bytes) -> None:
    assert classify(ROOT, EMPTY_DIR + tail) == Foreign(UID, EMPTY_DIR + tail)
    with pytest.raises(NotATarget):
        target(ROOT, EMPTY_DIR + tail)


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"",
        ROOT,
        ROOT + b"/pods",
        EMPTY_DIR[:-1],
        EMPTY_DIR + b"container-disks",
        EMPTY_DIR + b"hotplug-disks",
        EMPTY_DIR + b"container-disksx/disk_0.img",
        EMPTY_DIR + b"sockets/launcher-sock",
        EMPTY_DIR + b"ephemeral-disks/disk.img",
        f"/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~csi/pvc-1/mount".encode(),
        f"/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dirx/container-disks/disk_0.img".encode(),
        f"/var/lib/kubelet/pods/{UID}/volume-subpaths/container-disks/compute/0".encode(),
        f"/var/lib/kubelet/pods/{UID.upper()}/volumes/kubernetes.io~empty-dir/container-disks/disk_0.img".encode(),
        b"/var/lib/kubelet/pods/not-a-uid/volumes/kubernetes.io~empty-dir/container-disks/disk_0.img",
        b"/var/lib/kubelet/plugins/kubernetes.io/csi/pv/pvc-1/globalmount",
        EMPTY_DIR + b"hotplug-disks/..",
        EMPTY_DIR + b"hotplug-disks/" + b"x" * 256,
    ],
)
def test_what_is_not_inside_a_pods_two_directories_is_none(path: bytes) -> None:
    assert classify(ROOT, path) is None
    with pytest.raises(NotATarget):
        target(ROOT, path)


def test_only_this_kubelets_mounts_are_classified() -> None:
    assert classify(b"/srv/kubelet", EMPTY_DIR + b"container-disks/disk_0.img") is None
    assert classify(b"/var/lib", EMPTY_DIR + b"container-disks/disk_0.img") is None
    found = classify(b"/srv/kubelet/", b"/srv/kubelet/" + BELOW + b"container-disks/disk_0.img")
    assert isinstance(found, Target)
    assert found.path == b"/srv/kubelet/" + BELOW + b"container-disks/disk_0.img"


def test_a_static_pods_uid_has_no_dashes() -> None:
    path = f"/var/lib/kubelet/pods/{STATIC}/volumes/kubernetes.io~empty-dir/hotplug-disks/v.img".encode()
    found = classify(ROOT, path)
    assert isinstance(found, Target)
    assert found.pod_uid == STATIC


@pytest.mark.parametrize(
    "path",
    [
        EMPTY_DIR + b"hotplug-disks/v.img",
        b"/var//lib/./kubelet///" + BELOW + b"./hotplug-disks//v.img/",
        b"/proc/1/root" + EMPTY_DIR + b"hotplug-disks/v.img",
        b"//proc/1/./root" + EMPTY_DIR + b"hotplug-disks/v.img//",
        b"/" + BELOW + b"hotplug-disks/v.img",
        b"/proc/1/root/" + BELOW + b"hotplug-disks/v.img",
        b"/state" + EMPTY_DIR + b"hotplug-disks/v.img",
        b"/data/kubelet/" + BELOW + b"hotplug-disks/v.img",
        b"/pods/pods/" + BELOW + b"hotplug-disks/v.img",
    ],
)
def test_other_names_of_a_target_mean_the_same(path: bytes) -> None:
    assert target(ROOT, path) == classify(ROOT, EMPTY_DIR + b"hotplug-disks/v.img")


@pytest.mark.parametrize(
    "path",
    [
        b"hotplug-disks/v.img",
        BELOW + b"hotplug-disks/v.img",
        EMPTY_DIR + b"hotplug-disks/../hotplug-disks/v.img",
        b"/var/lib/../lib/kubelet/" + BELOW + b"hotplug-disks/v.img",
        b"/.." + EMPTY_DIR + b"hotplug-disks/v.img",
        EMPTY_DIR + b"hotplug-disks/v.img/..",
        EMPTY_DIR + b"hotplug-disks/v\0.img",
        b"/proc/1/cwd/../etc/passwd",
        b"/proc/1/root",
        b"/etc/passwd",
        b"/" * 5000,
    ],
)
def test_hostile_paths_are_refused(path: bytes) -> None:
    with pytest.raises(NotATarget):
        target(ROOT, path)


@pytest.mark.parametrize("prefix", [ROOT, b"", b"/state/var/lib/kubelet", b"/proc/1/root"])
def test_a_pod_cannot_name_another_pod_below_its_own_directory(prefix: bytes) -> None:
    trap = BELOW + b"hotplug-disks/" + BELOW.replace(UID.encode(), OTHER.encode()) + b"hotplug-disks/v.img"
    with pytest.raises(NotATarget):
        target(ROOT, prefix + b"/" + trap)


def test_a_kubelet_root_that_has_pods_in_its_name() -> None:
    root = f"/srv/pods/{OTHER}/volumes".encode()
    path = root + b"/" + BELOW + b"hotplug-disks/v.img"
    assert target(root, path) == classify(root, path)
    assert target(root, path).pod_uid == UID


def test_block_volumes_lie_directly_below_hotplug_disks() -> None:
    found = target(ROOT, EMPTY_DIR + b"hotplug-disks/raw", block=True)
    assert (found.kind, found.volume) == (Kind.HOTPLUG_BLOCK, "raw")
    for tail in (b"container-disks/raw", b"container-disks/kernel-boot/raw", b"hotplug-disks/raw/x"):
        with pytest.raises(NotATarget, match="block volume"):
            target(ROOT, EMPTY_DIR + tail, block=True)


def test_the_error_names_the_path_and_what_a_target_is() -> None:
    with pytest.raises(NotATarget, match=r"^/etc/\\xff is not .*<kubelet root>/pods/<pod uid>/"):
        target(ROOT, b"/etc/\xff")
    with pytest.raises(NotATarget, match=r"NUL byte$"):
        target(ROOT, b"/a\0b")
    with pytest.raises(NotATarget) as caught:
        target(ROOT, b"/" + b"x" * 100_000)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UID, True),
        (STATIC, True),
        (UID.upper(), False),
        (STATIC.upper(), False),
        (UID + "\n", False),
        (UID.replace("-", "_"), False),
        (UID[:-1], False),
        ("", False),
        ("../" + UID, False),
        (UID.replace("0", "\u0660"), False),
    ],
)
def test_canonical_pod_uids(text: str, expected: bool) -> None:
    assert is_pod_uid(text) is expected


def test_pods_prefix() -> None:
    assert pods_prefix(b"/var/lib/kubelet") == pods_prefix(b"/var/lib/kubelet/") == b"/var/lib/kubelet/pods"


known = [UID.encode(), OTHER.encode(), STATIC.encode(), b"pods", b"volumes", b"kubernetes.io~empty-dir"]
inner = [b"container-disks", b"hotplug-disks", b"kernel-boot", b"disk_0.img", b"v.img"]
names = st.binary(min_size=1, max_size=12) | st.sampled_from([*known, *inner, b"proc", b"1", b"root", b"..", b"."])
tails = st.lists(names, max_size=8).map(b"/".join)
paths = st.builds(
    bytes.__add__,
    st.sampled_from(
        [b"", b"/", EMPTY_DIR, EMPTY_DIR + b"hotplug-disks/", EMPTY_DIR + b"container-disks/", ROOT + b"/"]
    ),
    tails,
)


@given(paths)
def test_classify_and_target_agree(path: bytes) -> None:
    found = classify(ROOT, path)
    if isinstance(found, Target):
        assert target(ROOT, path) == found


@given(paths, st.booleans())
def test_nothing_outside_the_pattern_is_ever_accepted(path: bytes, block: bool) -> None:
    try:
        found = target(ROOT, path, block=block)
    except NotATarget:
        return
    assert found.path == ROOT + b"/" + found.relative
    parts = found.relative.split(b"/")
    assert parts[:4] == [b"pods", found.pod_uid.encode(), b"volumes", b"kubernetes.io~empty-dir"]
    assert parts[4:-1] in ([b"container-disks"], [b"container-disks", b"kernel-boot"], [b"hotplug-disks"])
    assert parts[-1] not in (b"", b".", b"..")
    assert parts[4:] != [b"container-disks", b"kernel-boot"]
    assert b"\0" not in found.path
    assert b".." not in path.split(b"/")
    # What was accepted is a name that stands for itself from here on.
    assert target(ROOT, found.path, block=block) == found
    assert block or classify(ROOT, found.path) == found
