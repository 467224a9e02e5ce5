"""Removal stops hostd and touches nothing else; purge takes what is hostd's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checks.documents import follow
from tests.node.checks.hostd import reaches
from tests.node.checks.node import alive, install, mounts, prop, run, until, versions
from tests.node.checks.pods import Pod, Qemu


@pytest.fixture(scope="module")
def vm() -> Iterator[tuple[Pod, Qemu]]:
    pod = Pod("stays")
    source = Path("/var/lib/node/stays.img")
    source.write_bytes(bytes(4096))
    pod.containerdisk(0, source)
    qemu = pod.fake_qemu()
    yield pod, qemu
    qemu.kill()
    for target in pod.targets:
        run("umount", str(target))


def test_removal_stops_it_and_leaves_vms_and_mounts(vm: tuple[Pod, Qemu]) -> None:
    pod, qemu = vm
    reaches(pod, "running")
    Path("/etc/hostd/hostd.toml").write_text('[cleanup]\ngrace = "3s"\n')
    before = mounts()
    follow("docs/operating.md", "Back out")
    assert prop("ActiveState") == "inactive"
    assert alive(qemu.pid)
    assert mounts() == before
    assert pod.mounted == ["disk_0.img"]
    assert Path("/etc/hostd/hostd.toml").exists()
    assert Path("/var/lib/hostd").exists()
    assert prop("LoadState") == "not-found"


def test_installed_again_it_goes_on(vm: tuple[Pod, Qemu]) -> None:
    install(versions()[1])
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    reaches(vm[0], "running")


def test_purge_removes_state_and_configuration(vm: tuple[Pod, Qemu]) -> None:
    pod, qemu = vm
    run("apt-get", "purge", "--yes", "hostd", timeout=300)
    for path in ("/etc/hostd", "/var/lib/hostd", "/run/hostd", "/usr/lib/hostd"):
        assert not os.path.exists(path), path
    left = run("find", "/usr", "/etc", "/var", "/run", "-xdev", "-path", "/var/lib/node", "-prune", "-o", "-path",
               "/var/lib/dpkg", "-prune", "-o", "-iname", "*hostd*", "-print").stdout.split()  # fmt: skip
    assert [each for each in left if not each.startswith(("/var/log/", "/run/systemd/"))] == []
    assert alive(qemu.pid)
    assert pod.mounted == ["disk_0.img"]
    assert run("systemctl", "--failed", "--no-legend").stdout.strip() == ""


def test_the_bus_forgot_it() -> None:
    assert "io.kubevirt.hostd1" not in run("busctl", "list", "--activatable").stdout
