"""The whole story without virt-handler: a VM runs, its QEMU is killed, and what it held is really free."""

from __future__ import annotations

from tests.node.checks.hostd import reaches, released
from tests.node.checks.node import call, prop, run, until
from tests.node.checks.pods import SCRATCH, ImageLayer, LoopFileSystem, Pod, Volume


def test_a_killed_vm_leaves_nothing_behind() -> None:
    image, volume, pod = ImageLayer("story"), Volume("story"), Pod("story")
    pod.containerdisk(0, image.file)
    pod.hotplug_file("data", volume.file)
    qemu = pod.fake_qemu()
    reaches(pod, "running")
    call("Sweep", "t", "0")
    assert sorted(pod.mounted) == ["data.img", "disk_0.img"], "a living QEMU's layers stay"
    until(lambda: prop("StatusText") == "1 running", "systemctl status shows one running VM")

    qemu.kill()
    released(pod)
    image.discard()
    volume.discard()
    until(lambda: image.store.free, f"{image.store.device} (image store) is free")
    until(lambda: volume.free, f"{volume.device} (volume) is free")
    explained = run("journalctl", "--no-pager", "--catalog", f"HOSTD_POD_UID={pod.uid}").stdout
    for subject in ("The last QEMU of pod {} is dead", "Everything of pod {} is unmounted"):
        assert f"░░ Subject: {subject.format(pod.uid)}" in explained, explained


def test_a_real_qemu_is_found_and_cleaned_up_after() -> None:
    """virt-launcher lives on, so hostd gives virt-handler its grace before it acts."""
    image, pod = ImageLayer("real"), Pod("real")
    pod.containerdisk(0, image.file)
    launcher = pod.launcher()
    qemu = pod.real_qemu()
    reaches(pod, "running")
    assert call("GetVMByPID", "u", str(qemu.pid)) == call("GetVM", "s", pod.uid)
    qemu.kill()
    released(pod)
    launcher.kill()
    launcher.wait()
    image.discard()
    until(lambda: image.store.free, f"{image.store.device} is free")


def test_hostd_itself_pins_no_image() -> None:
    """Mounts below a private one, as CRI-O keeps its images, do not propagate, and so hostd's own namespace has copies
    of those that were there before it. They go with the mountpoint, which runtimes remove for that very reason."""
    parent = SCRATCH / "private"
    parent.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "tmpfs", str(parent))
    run("mount", "--make-private", str(parent))
    file_system = LoopFileSystem("private", parent / "image")
    run("systemctl", "restart", "hostd.service")
    run("umount", str(file_system.mountpoint))
    file_system.mountpoint.rmdir()
    until(lambda: file_system.free, f"{file_system.device} is free")
    run("umount", str(parent))


def test_what_is_not_a_vms_stays() -> None:
    """Another volume of the pod, and a pod that is no VM's."""
    volume, pod, other = Volume("foreign"), Pod("foreign"), Pod("no-vm")
    foreign = pod.empty_dir.parent / "kubernetes.io~csi-volume"
    foreign.mkdir()
    run("mount", "--bind", str(volume.mountpoint), str(foreign))
    target = other.empty_dir.parent / "kubernetes.io~projected"
    target.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", str(target))
    pod.containerdisk(0, volume.file)
    qemu = pod.fake_qemu()
    reaches(pod, "running")
    qemu.kill()
    released(pod)
    for path in (foreign, target):
        run("mountpoint", "-q", str(path))
        run("umount", str(path))
    volume.discard()
