"""What is read of a sysfs tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostd.devices.device import Kind
from hostd.devices.sysfs import Names, Sysfs
from tests.support.devices import FULL, NULL, RANDOM, ZERO, SysfsTree


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


def test_a_function_bound_to_vfio_is_listed_and_described(tree: SysfsTree) -> None:
    name = tree.pci("0000:3b:00.0", "10de:1eb8", group="12", number=NULL)
    device = Sysfs(tree.root).scan()[name]
    assert (device.kind, device.identity, device.group) == (Kind.PCI, "10de:1eb8", "12")
    assert device.description == "10de:1eb8, IOMMU group 12, vfio-pci"


@pytest.mark.parametrize("driver", ["mlx5_vfio_pci", "nvgrace_gpu_vfio_pci", "vfio-pci"])
def test_the_relatives_of_vfio_pci_count(tree: SysfsTree, driver: str) -> None:
    assert tree.pci("0000:3b:00.0", driver=driver) in Sysfs(tree.root).scan()


def test_functions_of_the_host_are_not_listed_unless_they_are_wanted(tree: SysfsTree) -> None:
    name = tree.pci("0000:00:1f.0", driver="nvme")
    assert Sysfs(tree.root).scan() == {}
    assert list(Sysfs(tree.root).scan({name})) == [name]


def test_a_mediated_device_has_a_type_and_a_parent(tree: SysfsTree) -> None:
    name = tree.mdev("nvidia-35", parent="0000:06:00.0", group="31", number=NULL)
    device = Sysfs(tree.root).scan()[name]
    assert device.identity == "nvidia-35@0000:06:00.0"
    assert device.description == "nvidia-35 GRID T4-4A, of 0000:06:00.0, IOMMU group 31"


def test_usb_devices_are_listed_but_neither_hubs_nor_interfaces(tree: SysfsTree) -> None:
    name = tree.usb("1-2.4", bus=1, device=9)
    tree.usb("1-1", device_class="09")
    tree.usb("1-2.4:1.0")
    (device,) = Sysfs(tree.root).scan().values()
    assert (device.name, device.identity) == (name, "046d:c52b")
    assert device.description == "046d:c52b, bus 1 device 9"


def test_names_and_serial_come_from_the_namer_once(tree: SysfsTree) -> None:
    asked: list[bytes] = []

    def namer(directory: bytes) -> Names:
        asked.append(directory)
        return Names("Logitech", "Receiver\n\x1b[31m", "S1")

    name = tree.usb("1-2")
    sysfs = Sysfs(tree.root, namer)
    for _ in range(3):
        device = sysfs.scan()[name]
    assert device.serial == "S1"
    assert device.description.startswith("046d:c52b Logitech Receiver\\n\\x1b[31m, serial S1")
    assert len(asked) == 1
    sysfs.forget_names()
    sysfs.scan()
    assert len(asked) == 2


def test_a_missing_device_is_none(tree: SysfsTree) -> None:
    sysfs = Sysfs(tree.root)
    for name in ("pci/0000:3b:00.0", "usb/1-2", "mdev/a297db4a-f4c2-11e6-90f6-d3b88d6c9525"):
        assert sysfs.device(name) is None


def test_a_torn_device_is_no_error(tree: SysfsTree) -> None:
    """Its directory is still there, its attributes are not: as between two steps of a removal."""
    name = tree.pci("0000:3b:00.0")
    for attribute in ("vendor", "device"):
        (tree.path / "devices/pci0000:00/0000:3b:00.0" / attribute).unlink()
    assert Sysfs(tree.root).scan() == {}
    assert Sysfs(tree.root).device(name) is None


def test_no_sysfs_at_all(tmp_path: Path) -> None:
    sysfs = Sysfs(bytes(tmp_path / "nothing"))
    assert sysfs.scan({"pci/0000:3b:00.0"}) == {}
    assert sysfs.behind(NULL) == ()


# --- device files ---


def test_a_group_file_leads_to_the_functions_with_a_vfio_driver(tree: SysfsTree) -> None:
    gpu = tree.pci("0000:3b:00.0", group="12", number=NULL)
    audio = tree.pci("0000:3b:00.1", "10de:10f8", group="12")
    tree.pci("0000:3a:00.0", driver="pcieport", group="12")
    tree.pci("0000:3b:00.2", driver="", group="12")
    assert set(Sysfs(tree.root).behind(NULL)) == {gpu, audio}


def test_a_group_without_an_iommu(tree: SysfsTree) -> None:
    name = tree.pci("0000:3b:00.0", group="7")
    tree._char(tree.path / "devices/virtual/vfio/noiommu-7", "vfio", ZERO)
    assert Sysfs(tree.root).behind(ZERO) == (name,)


def test_a_device_file_of_its_own_leads_to_one_function(tree: SysfsTree) -> None:
    name = tree.pci("0000:3b:00.0", group="12", number=NULL, cdev=FULL)
    tree.pci("0000:3b:00.1", group="12")
    assert Sysfs(tree.root).behind(FULL) == (name,)


def test_usb_and_mediated_devices_are_found_by_number(tree: SysfsTree) -> None:
    stick = tree.usb("1-2", number=RANDOM)
    vgpu = tree.mdev(group="31", number=ZERO)
    sysfs = Sysfs(tree.root)
    assert sysfs.behind(RANDOM) == (stick,)
    assert sysfs.behind(ZERO) == (vgpu,)


def test_other_files_lead_nowhere(tree: SysfsTree) -> None:
    tree._char(tree.path / "devices/virtual/misc/vfio", "misc", (10, 196))
    assert Sysfs(tree.root).behind((10, 196)) == ()
    assert Sysfs(tree.root).behind((1, 3)) == ()


def test_all_files_of_a_device_are_known(tree: SysfsTree) -> None:
    name = tree.pci("0000:3b:00.0", group="12", number=NULL, cdev=FULL)
    stick = tree.usb("1-2", number=RANDOM)
    sysfs = Sysfs(tree.root)
    found = sysfs.scan()
    assert sysfs.numbers(found[name]) == {NULL, FULL}
    assert sysfs.numbers(found[stick]) == {RANDOM}


def test_nothing_in_the_tree_is_written(tree: SysfsTree) -> None:
    """hostd makes, binds and removes no device (kubevirt #9037): it reads."""
    names = [tree.mdev(group=str(n)) for n in range(3)]
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in tree.path.rglob("*"))
    assert set(Sysfs(tree.root).scan()) == set(names)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in tree.path.rglob("*")) == before
