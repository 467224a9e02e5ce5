"""Names that the mount table escapes, that are no text, or that mean something to somebody: all unmounted, all told."""

from __future__ import annotations

import os

import pytest

from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.witness import gone, in_state, listed

pytestmark = pytest.mark.usefixtures("root", "mount_source")

#: Escaped mount paths never matched where they were compared as they stand in the table.
NAMES = {
    "space": b"a b",
    "tab": b"a\tb",
    "newline": b"a\nb",
    "backslash": b"a\\b",
    "literal-escape": b"a\\040b",
    "double-escape": b"a\\134040b",
    "hash": b"#a#",
    "utf-8": "größe-ψ".encode(),
    "not-utf-8": b"\xff\xfe",
    "control": b"a\x01\x1b[31mb",
    "long": b"n" * 245,
    "dots": b"...",
    "dash": b"-rf",
    "quote": b"\"'`$(id)`",
    "percent": b"%s%n{}",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_layers_of_any_name_go_and_are_told(node: Node, name: bytes) -> None:
    pod = node.pod()
    pod.containerdisk(name=name + b".img")
    pod.kernel_boot(name)
    pod.hotplug_file(name)
    pod.hotplug_directory(name)
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    before = node.layers(pod)
    assert len(before) == 4
    assert set(before.values()) == {"mounted"}
    qemu.kill()
    gone(node, pod)
    in_state(node, pod, "released")
    assert set(node.layers(pod).values()) == {"gone"}
    assert listed(node, pod.hotplug_disks) == []
    assert listed(node, pod.container_disks + b"/kernel-boot") == []
    assert all(line.startswith(("INFO", "WARNING", "ERROR")) for line in node.hostd.log().splitlines())
    assert "Traceback" not in node.hostd.log()


def test_what_the_bus_shows_is_lossless(node: Node) -> None:
    pod = node.pod()
    targets = {pod.hotplug_file(name) for name in (b"\xff", b"\xfe", b"\\xff", b"\xc3\xbf", b"a\nb")}
    pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    told = {row[1] for row in node.call("ListLayers", "a{sv}", "0")}
    assert len(told) == len(targets)
    prefix = pod.hotplug_disks.decode() + "/"
    assert all(path.startswith(prefix) for path in told)


def test_a_restart_remembers_every_name(node: Node) -> None:
    pod = node.pod()
    targets = [pod.hotplug_file(name) for name in NAMES.values()]
    holder = node.namespace.hold(lambda: [os.open(target, os.O_RDONLY) for target in targets])
    qemu = pod.qemu(FakeQemu, disks=[])
    node.hostd.start()
    qemu.kill()
    in_state(node, pod, "blocked")
    before = node.layers(pod)
    node.hostd.kill()
    node.hostd.start()
    assert set(node.layers(pod)) == set(before)
    assert len(pod.mounted()) == len(NAMES)
    holder.end()
    gone(node, pod)
    in_state(node, pod, "released")
