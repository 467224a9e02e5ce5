from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.kubevirt.qemu import Guest, Launcher, guest, is_probe, launcher, looks_like_launcher, looks_like_qemu

VM = (
    b"/usr/libexec/qemu-kvm\0-name\0guest=default_fedora,debug-threads=on\0-S\0-object\0"
    b'{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/run/kubevirt-private/master-key.aes"}\0'
    b"-machine\0pc-q35-rhel9.4.0,usb=off,dump-guest-core=off,memory-backend=pc.ram\0-accel\0kvm\0-cpu\0host\0"
    b"-m\0size=1048576k\0-uuid\05d307ca9-b3ef-428c-8861-06e72d69f223\0-no-user-config\0-nodefaults"
).split(b"\0")
PROBE = (
    b"/usr/bin/qemu-system-x86_64\0-S\0-no-user-config\0-nodefaults\0-nographic\0-machine\0none,accel=kvm:tcg\0-qmp\0"
    b"unix:/var/lib/libvirt/qemu/qmp-7Hd2aZ/qmp.monitor,server=on,wait=off\0-pidfile\0/tmp/qmp.pid\0-daemonize"
).split(b"\0")


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        (b"qemu-system-x86", True),
        (b"qemu-system-aar", True),
        (b"qemu-system-s39", True),
        (b"qemu-kvm", True),
        (b"qemu-kvm-one", True),
        (b"qemu-pr-helper", False),
        (b"qemu-img", False),
        (b"qemu-nbd", False),
        (b"qemu-storage-da", False),
        (b"qemu", False),
        (b"CPU 0/KVM", False),
        (b"virt-launcher", False),
        (b"(qemu-kvm)", False),
        (b"", False),
    ],
)
def test_qemu_by_the_name_of_its_process(comm: bytes, expected: bool) -> None:
    assert looks_like_qemu(comm) is expected


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        (b"virt-launcher", True),
        (b"virt-launcher-m", True),
        (b"virt-handler", False),
        (b"qemu-kvm", False),
        (b"", False),
    ],
)
def test_virt_launcher_by_the_name_of_its_process(comm: bytes, expected: bool) -> None:
    assert looks_like_launcher(comm) is expected


def test_a_real_command_line() -> None:
    assert guest(VM) == Guest("default", "fedora")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"guest=ns_vm_with_underscore,debug-threads=on", Guest("ns", "vm_with_underscore")),
        (b"debug-threads=on,guest=ns_vm", Guest("ns", "vm")),
        (b"guest=ns_a,,b,debug-threads=on", Guest("ns", "a,b")),
        (b"guest=ns_a,,,process=x", Guest("ns", "a,")),
        (b"guest=ns_a=b", Guest("ns", "a=b")),
        (b"ns_vm", Guest("ns", "vm")),
        (b"ns_vm,process=qemu:vm", Guest("ns", "vm")),
        (b"ns_a.b-c,debug-threads=on", Guest("ns", "a.b-c")),
        (b"plain", Guest("", "plain")),
        (b"guest=_vm", Guest("", "vm")),
        (b"guest=ns_", Guest("", "ns_")),
        (b"guest=_", Guest("", "_")),
        (b"guest=ns_\xff", Guest("ns", "\\xff")),
        (b"guest=", None),
        (b"", None),
        (b"debug-threads=on", None),
        (b"process=x,ns_vm", None),
        (b"guest=" + b"x" * 254, None),
    ],
)
def test_names_in_qemus_option_syntax(value: bytes, expected: Guest | None) -> None:
    assert guest([b"qemu-system-x86_64", b"-name", value]) == expected
    assert guest([b"qemu-system-x86_64", b"-S", b"--name", value, b"-nodefaults"]) == expected


def test_the_last_name_counts() -> None:
    argv = [b"qemu-kvm", b"-name", b"guest=a_b", b"-name", b"guest=c_d", b"-name", b"debug-threads=on"]
    assert guest(argv) == Guest("c", "d")


@pytest.mark.parametrize("machine", [b"none", b"none,accel=kvm:tcg", b"type=none", b"accel=tcg,type=none"])
@pytest.mark.parametrize("option", [b"-machine", b"-M", b"--machine"])
def test_probes_are_no_guests(option: bytes, machine: bytes) -> None:
    argv = [b"qemu-kvm", option, machine, b"-name", b"guest=ns_vm"]
    assert is_probe(argv)
    assert guest(argv) is None


def test_a_real_probe() -> None:
    assert is_probe(PROBE)
    assert guest(PROBE) is None
    assert not is_probe(VM)
    assert not is_probe([b"qemu-kvm", b"-machine", b"none-such", b"-machine"])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [b""],
        [b"qemu-kvm"],
        [b"qemu-kvm", b"-name"],
        [b"/usr/bin/qemu-img", b"convert", b"-name", b"ns_vm"],
        [b"qemu-nbd", b"--name", b"ns_vm"],
        [b"/usr/bin/qemu-pr-helper", b"-k", b"/var/run/kubevirt/daemons/pr/pr-helper.sock", b"--name", b"a_b"],
    ],
)
def test_no_guest(argv: list[bytes]) -> None:
    assert guest(argv) is None


LAUNCHER = [
    *(b"/usr/bin/virt-launcher", b"--qemu-timeout", b"266s", b"--name", b"fedora"),
    *(b"--uid", b"2b1c7a0e-9a53-4c1f-8b53-0d4e6a6d2f10", b"--namespace", b"default"),
    *(b"--kubevirt-share-dir", b"/var/run/kubevirt", b"--hook-sidecars", b"0", b"--run-as-nonroot"),
]


@pytest.mark.parametrize("program", [b"/usr/bin/virt-launcher", b"virt-launcher", b"/usr/bin/virt-launcher-monitor"])
def test_virt_launcher(program: bytes) -> None:
    expected = Launcher("fedora", "2b1c7a0e-9a53-4c1f-8b53-0d4e6a6d2f10", "default")
    assert launcher([program, *LAUNCHER[1:]]) == expected
    assert launcher([program, b"--name=fedora", b"--uid=" + expected.uid.encode(), b"--namespace=default"]) == expected


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [b"virt-launcher"],
        [b"/bin/sh", *LAUNCHER],
        [b"/usr/bin/virt-handler", *LAUNCHER[1:]],
        LAUNCHER[:6],
        [b"virt-launcher", b"--name", b"", b"--uid", b"u", b"--namespace", b"n"],
        [b"virt-launcher", b"--uid", b"u", b"--namespace", b"n", b"--name"],
        [b"virt-launcher", b"--name", b"x" * 254, b"--uid", b"u", b"--namespace", b"n"],
    ],
)
def test_no_launcher(argv: list[bytes]) -> None:
    assert launcher(argv) is None


words = st.binary(max_size=20) | st.sampled_from(
    [
        b"qemu-kvm",
        b"virt-launcher",
        b"-name",
        b"--name",
        b"--uid",
        b"--namespace",
        b"-machine",
        b"none",
        b"guest=a_b,,c",
    ]
)


@given(st.lists(words, max_size=10))
def test_any_command_line_is_read_without_an_error(argv: list[bytes]) -> None:
    found = guest(argv)
    assert found is None or found.name
    started = launcher(argv)
    assert started is None or (started.name and started.uid and started.namespace)


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name), st.booleans())
def test_a_name_survives_qemus_escapes(name: bytes, more: bool) -> None:
    value = b"guest=ns_" + name.replace(b",", b",,") + (b",debug-threads=on" if more else b"")
    assert guest([b"qemu-kvm", b"-name", value]) == Guest("ns", name.decode("utf-8", "backslashreplace"))
