"""Devices, the whole way: a real hostd on a private bus, a stand-in QEMU with a device file open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.devices import NULL, ZERO, SysfsTree
from tests.support.mountns import MS_BIND, MS_REC
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("root")


def devices(node: Node) -> dict[str, tuple[str, str]]:
    """Device → state and VM, as the bus has it."""
    return {row[0]: (row[4], row[2]) for row in node.call("ListDevices", "a{sv}", "0")}


def test_a_vm_has_its_device_until_it_dies(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys")
    gpu = tree.pci("0000:3b:00.0", group="12", number=NULL)
    stick = tree.usb("1-2", number=ZERO)
    (tree.path / "fs").mkdir()
    with Node() as node:
        # The tree is the node's /sys, with the cgroups of the machine where they belong.
        node.namespace.mount(b"/sys/fs", tree.root + b"/fs", flags=MS_BIND | MS_REC)
        node.namespace.mount(tree.root, b"/sys", flags=MS_BIND | MS_REC)
        pod = node.pod(name="vm", namespace="ns")
        pod.containerdisk(0)
        inside = pod.launcher_namespace
        inside.tmpfs(node.namespace.base + b"/vfio")
        file = node.namespace.base + b"/vfio/12"
        inside.call(os.mknod, file, stat.S_IFCHR | 0o666, os.makedev(*NULL))
        qemu = pod.qemu(FakeQemu, disks=[file])
        node.hostd.start()

        assert devices(node) == {gpu: ("in-use", "ns/vm"), stick: ("free", "")}
        until(lambda: node.get("Devices", node.vm(pod)) == [gpu])
        node.call("ClaimDevice", "ssa{sv}", stick, "ns/b", "1", "OnExit", "s", "hold")
        arguments = ("io.kubevirt.hostd1", "/io/kubevirt/hostd1", "io.kubevirt.hostd1.Manager", "ReleaseDevice", "ss")
        refused = node.busctl("call", *arguments, gpu, "ns/vm", check=False)
        assert f"process {qemu.pid} of ns/vm" in refused.stderr

        node.hostd.kill()
        node.hostd.start()
        assert devices(node) == {gpu: ("in-use", "ns/vm"), stick: ("reserved", "ns/b")}
        qemu.kill()
        until(lambda: devices(node) == {gpu: ("free", ""), stick: ("reserved", "ns/b")})
        until(lambda: node.get("Devices", node.vm(pod)) == [])
        node.call("ReleaseDevice", "ss", stick, "ns/b")
        assert devices(node)[stick] == ("free", "")
        assert node.hostd.stop() == 0
