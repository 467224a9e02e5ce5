"""State files: what is saved is what is loaded, whatever became of the files meanwhile."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.core.model import VM, Exit, ExitReason, Holder, Layer, LayerState, Policy, State
from hostd.core.store import LARGEST, VERSION, Store, vm_from_plain, vm_to_plain
from hostd.kubevirt.targets import target
from hostd.linux.clock import boot_id
from hostd.linux.pidfd import Identity
from tests.support.core import KUBELET, OTHER, POD, a_layer, a_vm
from tests.support.damage import damaged
from tests.support.mountns import MountNamespace

numbers = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.text(max_size=20)
names = st.binary(min_size=1, max_size=30).filter(
    lambda name: not set(name) & {0, 0x2F} and name not in {b".", b"..", b"kernel-boot"}
)
identities = st.builds(Identity, numbers, numbers, texts, numbers)
holders = st.builds(Holder, numbers, texts, texts, texts)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    directory = b"/pods/" + POD.encode() + b"/volumes/kubernetes.io~empty-dir/"
    name = draw(st.sampled_from([b"container-disks/", b"container-disks/kernel-boot/", b"hotplug-disks/"])) + draw(
        names
    )
    return Layer(
        target(KUBELET, KUBELET + directory + name, block=name.startswith(b"hotplug") and draw(st.booleans())),
        state=draw(st.sampled_from(LayerState)),
        error=draw(texts),
        errno=draw(numbers),
        attempts=draw(numbers),
        retry_at=draw(numbers),
        seen_at=draw(numbers),
        source=(draw(texts), draw(st.binary(max_size=30))),
        mount_ids=tuple(draw(st.lists(numbers, max_size=3))),
        holders=tuple(draw(st.lists(holders, max_size=3))),
        worker=draw(st.none() | identities),
        remounts=draw(numbers),
        gone_at=draw(numbers),
        tracked=draw(st.booleans()),
    )


vms = st.builds(
    VM,
    st.just(POD),
    vmi_uid=texts,
    namespace=texts,
    name=texts,
    state=st.sampled_from(State),
    leader=st.none() | identities,
    qemus=st.lists(identities, max_size=3),
    layers=st.lists(layers(), max_size=4).map(lambda found: {layer.target.path: layer for layer in found}),
    exit=st.builds(Exit, numbers, numbers, st.sampled_from(ExitReason)),
    policy=st.sampled_from(Policy),
    grace_usec=st.none() | numbers,
    registered=st.booleans(),
    cgroup_seen=st.booleans(),
    had_qemu=st.booleans(),
    oom_kills=numbers,
    started_usec=numbers,
    exited_usec=numbers,
    released_usec=numbers,
    first_seen_at=numbers,
    exited_at=numbers,
    released_at=numbers,
    devices=st.lists(texts, max_size=3).map(tuple),
    error=texts,
)


@pytest.fixture
def directory(tmp_path: Any) -> str:
    return str(tmp_path)


@pytest.fixture
def store(directory: str) -> Iterator[Store]:
    made = Store(directory)
    yield made
    made.close()


def file_of(directory: str, pod_uid: str = POD) -> str:
    return os.path.join(directory, "vms", pod_uid + ".json")


@given(vms)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_is_saved_is_what_is_loaded(store: Store, vm: VM) -> None:
    store.save(vm)
    assert store.load() == ([vm], [])
    assert vm_from_plain(json.loads(json.dumps(vm_to_plain(vm)))) == vm


def test_saving_again_replaces_and_removing_twice_is_no_error(store: Store, directory: str) -> None:
    store.save(a_vm())
    store.save(a_vm(a_layer()))
    assert store.load()[0] == [a_vm(a_layer())]
    assert os.listdir(os.path.join(directory, "vms")) == [POD + ".json"]
    store.remove(POD)
    store.remove(POD)
    assert store.load() == ([], [])


def test_vms_come_oldest_first(store: Store) -> None:
    store.save(VM(POD, first_seen_at=2))
    store.save(VM(OTHER, first_seen_at=1))
    assert [vm.pod_uid for vm in store.load()[0]] == [OTHER, POD]


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _whole(vm: object) -> bytes:
    return json.dumps({"version": VERSION, "boot": boot_id(), "vm": vm}).encode()


def _damaged(whole: bytes, *path: str, value: object) -> bytes:
    plain = json.loads(whole)
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(plain).encode()


SOMEBODY = Identity(7, 8, "boot", 9)
FULL = vm_to_plain(
    a_vm(
        a_layer(mount_ids=(1, 2), holders=(Holder(5, "tar", "open", OTHER),), worker=SOMEBODY),
        leader=SOMEBODY,
        qemus=[SOMEBODY],
        grace_usec=5,
        devices=("usb/1-2",),
    )
)


def use(vm: VM) -> None:
    """As the core, the store and the bus use what was loaded."""
    for identity in (vm.leader, *vm.qemus, *(layer.worker for layer in vm.layers.values())):
        assert identity is None or isinstance(identity, Identity)
    assert vm.grace_usec is None or type(vm.grace_usec) is int
    assert not any(holder.qemu for layer in vm.layers.values() for holder in layer.holders)
    plain = {**vm_to_plain(vm), "leader": None, "qemus": []}
    for value in leaves(plain):
        assert not isinstance(value, int) or abs(value) < 1 << 64
        assert not isinstance(value, str) or os.fsdecode(os.fsencode(value)) == value
    assert vm_from_plain(json.loads(json.dumps(vm_to_plain(vm)))) == vm


def leaves(plain: Any) -> Iterator[Any]:
    if isinstance(plain, dict):
        plain = [value for key, value in plain.items() if key != "worker"]
    if isinstance(plain, list | tuple):
        for each in plain:
            yield from leaves(each)
    else:
        yield plain


@given(damaged(json.loads(json.dumps(FULL))).map(_whole))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_file_is_a_vm_or_set_aside_and_costs_no_other(store: Store, directory: str, content: bytes) -> None:
    store.save(VM(OTHER))
    write(file_of(directory), content)
    loaded, bad = store.load()
    assert [vm.pod_uid for vm in loaded if vm.pod_uid != POD] == [OTHER]
    assert len(loaded) + len(bad) == 2
    for vm in loaded:
        use(vm)
    store.remove(POD)


def _contents(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "nul": bytes(len(whole)),
        "truncated": whole[: len(whole) // 2],
        "null": b"null",
        "list": b"[]",
        "garbage": whole + b"}}",
        "not-utf-8": b"\xff\xfe" + whole,
        "huge": b" " * (LARGEST + 1),
        "deep": b"[" * 200_000,
        "version": _damaged(whole, "version", value=VERSION + 1),
        "no-vm": json.dumps({key: value for key, value in json.loads(whole).items() if key != "vm"}).encode(),
        "vm-null": _damaged(whole, "vm", value=None),
        "other-pod": _damaged(whole, "vm", "pod_uid", value=OTHER),
        "state": _damaged(whole, "vm", "state", value="tired"),
        "state-list": _damaged(whole, "vm", "state", value=["running"]),
        "exit": _damaged(whole, "vm", "exit", value=0),
        "time": _damaged(whole, "vm", "exited_at", value="yesterday"),
        "flag": _damaged(whole, "vm", "had_qemu", value=1),
        "grace": _damaged(whole, "vm", "grace_usec", value=1.5),
        "layers": _damaged(whole, "vm", "layers", value={"a": 1}),
        "layer": _damaged(whole, "vm", "layers", value=[7]),
        "leader": _damaged(whole, "vm", "leader", value="me"),
        "qemus": _damaged(whole, "vm", "qemus", value=[None]),
        "devices": _damaged(whole, "vm", "devices", value=[[]]),
        "devices-text": _damaged(whole, "vm", "devices", value="usb"),
        "no-leader": _damaged(whole, "vm", "leader", value=""),
        "no-grace": _damaged(whole, "vm", "grace_usec", value=""),
        "half-a-pair": _damaged(whole, "vm", "name", value="\ud800"),
        "endless-time": _damaged(whole, "vm", "exited_at", value=1 << 64),
    }


BROKEN = list(_contents(b'{"version": 1, "vm": {}}'))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_file_is_set_aside_and_costs_no_other_vm(store: Store, directory: str, kind: str) -> None:
    store.save(VM(OTHER))
    store.save(a_vm(a_layer()))
    content = _contents(read(file_of(directory)))[kind]
    write(file_of(directory), content)
    loaded, bad = store.load()
    assert loaded == [VM(OTHER)]
    assert [(file.name, bool(file.why)) for file in bad] == [(POD + ".json", True)]
    assert read(bad[0].kept_as) == content
    assert store.load() == ([VM(OTHER)], [])
    store.save(a_vm())
    assert {vm.pod_uid for vm in store.load()[0]} == {POD, OTHER}


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("kind", ["directory", "full-directory", "fifo", "dangling", "link", "name"])
def test_what_is_no_file_is_set_aside(store: Store, directory: str, kind: str, again: bool) -> None:
    for _ in range(1 + again):
        path = file_of(directory, "strange" if kind == "name" else POD)
        match kind:
            case "directory":
                os.mkdir(path)
            case "full-directory":
                os.makedirs(path + "/x")
            case "fifo":
                os.mkfifo(path)
            case "dangling":
                os.symlink("/nowhere", path)
            case "link":
                os.symlink("/etc/passwd", path)
            case _:
                with open(path, "w") as file:
                    file.write("{}")
        loaded, bad = store.load()
        assert loaded == []
        assert len(bad) == 1
        assert os.path.lexists(bad[0].kept_as)
        assert not os.path.lexists(path)


def test_a_file_of_another_boot_is_removed(store: Store, directory: str) -> None:
    store.save(a_vm())
    write(file_of(directory), _damaged(read(file_of(directory)), "boot", value="another"))
    assert store.load() == ([], [])
    assert not os.path.exists(file_of(directory))


def test_what_a_crash_left_half_written_is_removed(store: Store, directory: str) -> None:
    store.save(a_vm())
    leftover = os.path.join(directory, "vms", f".{POD}.json.new")
    with open(leftover, "w") as file:
        file.write("{")
    assert store.load() == ([a_vm()], [])
    assert not os.path.exists(leftover)


def _on_a_full_disk(base: bytes) -> tuple[bool, bytes, bytes, list[str], int]:
    """Saves on a full disk: whether the old file is as it was, errno, the directory, and what a later save gives."""
    directory = os.fsdecode(base)
    store = Store(directory)
    store.save(a_vm())
    with open(file_of(directory), "rb") as file:
        before = file.read()
    filler = os.open(base + b"/filler", os.O_WRONLY | os.O_CREAT)
    number = 0
    try:
        while True:
            os.write(filler, bytes(4096))
    except OSError:
        pass
    many = {layer.target.path: layer for layer in (a_layer(b"hotplug-disks/%d.img" % i) for i in range(100))}
    try:
        store.save(VM(POD, layers=many))
    except OSError as error:
        number = error.errno or 0
    with open(file_of(directory), "rb") as file:
        after = file.read()
    litter = os.listdir(os.path.join(directory, "vms"))
    os.ftruncate(filler, 0)
    store.save(VM(POD, layers=many))
    return before == after, before, after, litter, number if len(store.load()[0][0].layers) == 100 else -1


@pytest.mark.usefixtures("root")
def test_a_full_disk_leaves_the_old_file_as_it_was() -> None:
    with MountNamespace("private") as namespace:
        directory = namespace.mkdir(namespace.base + b"/state")
        namespace.mount(b"none", directory, b"tmpfs", data=b"size=128k")
        same, before, _, litter, number = namespace.call(_on_a_full_disk, directory)
    assert same
    assert before
    assert litter == [POD + ".json"]
    assert number == errno.ENOSPC


def test_a_file_of_an_older_hostd_lacks_fields_and_is_used() -> None:
    vm = a_vm(a_layer(error="held", attempts=3), policy=Policy.KEEP)
    plain = vm_to_plain(vm)
    del plain["oom_kills"], plain["layers"][0]["tracked"], plain["layers"][0]["gone_at"]
    assert vm_from_plain(plain) == vm
    del plain["layers"][0]["state"]
    with pytest.raises(KeyError):
        vm_from_plain(plain)


def test_a_holders_name_is_asked_for_in_bytes() -> None:
    plain = vm_to_plain(a_vm(a_layer(holders=(Holder(5, "\udcff", "open", ""),))))
    with pytest.raises(UnicodeEncodeError):
        vm_from_plain(plain)
