"""Keeping up with a real mount table: many changes cost one read, and after a storm the picture is true."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from hostd.core import mounts
from hostd.core.mounts import KubeletRoot, NodeMounts
from hostd.linux.mount_table import MountTable
from tests.support.core import OTHER, POD
from tests.support.mountns import MountNamespace, mount, umount
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")


class Table:
    """A node's mounts, and what hostd's part says of them."""

    def __init__(self, namespace: MountNamespace) -> None:
        self.namespace = namespace
        self.root = namespace.base + b"/kubelet"
        self.told: list[set[str]] = []
        self.mounts = NodeMounts(MountTable(namespace.mountinfo), KubeletRoot(self.root), self.told.append)

    def target(self, name: bytes = b"hotplug-disks/dump", pod: str = POD) -> bytes:
        return self.root + b"/pods/" + pod.encode() + b"/volumes/kubernetes.io~empty-dir/" + name


@pytest.fixture
def namespace() -> Iterator[MountNamespace]:
    with MountNamespace("private") as made:
        yield made


@pytest.fixture
async def table(namespace: MountNamespace) -> AsyncIterator[Table]:
    made = Table(namespace)
    yield made
    made.mounts.close()


def _storm(paths: list[bytes], rounds: int, last: bytes) -> None:
    for _ in range(rounds):
        for path in paths:
            mount(b"none", path, b"tmpfs")
        for path in paths:
            umount(path)
    mount(b"none", last, b"tmpfs")


async def test_a_read_tells_targets_stacks_and_what_is_foreign(table: Table) -> None:
    for name in (b"hotplug-disks/dump", b"hotplug-disks/dump", b"hotplug-disks/a/b", b"elsewhere/x"):
        table.namespace.tmpfs(table.target(name))
    table.namespace.tmpfs(table.target(pod=OTHER))
    assert table.mounts.read() == {POD, OTHER}
    found = table.mounts.of(POD)
    assert [(path, len(stack)) for path, (_, stack) in found.targets.items()] == [(table.target(), 2)]
    assert found.foreign == [table.target(b"hotplug-disks/a/b")]
    assert table.mounts.pods() == {POD, OTHER}
    assert table.mounts.read() == set()
    assert table.mounts.of("nobody").targets == {}


async def test_a_change_is_told_with_its_pod_and_others_changes_are_not(table: Table) -> None:
    table.mounts.start()
    table.mounts.read()
    table.namespace.tmpfs(table.target())
    await eventually(lambda: table.told == [{POD}])
    table.namespace.umount(table.target())
    await eventually(lambda: table.told == [{POD}, {POD}])
    reads = table.mounts.reads
    table.namespace.tmpfs(table.namespace.base + b"/elsewhere")
    await eventually(lambda: table.mounts.reads > reads)
    assert table.told == [{POD}, {POD}]


async def test_one_read_answers_many_who_wait_and_begins_after_they_asked(table: Table) -> None:
    table.mounts.start()
    table.mounts.read()
    table.namespace.tmpfs(table.target())
    before = table.mounts.reads
    await asyncio.gather(*(table.mounts.fresh() for _ in range(100)))
    assert table.target() in table.mounts.of(POD).targets
    assert table.mounts.reads - before <= 2


async def test_a_storm_costs_few_reads_and_ends_with_a_true_picture(table: Table) -> None:
    table.mounts.start()
    table.mounts.read()
    paths = [table.namespace.mkdir(table.namespace.base + b"/storm/%d" % number) for number in range(50)]
    victim = table.namespace.mkdir(table.target())
    storm = table.namespace.hold(_storm, paths, 10, victim)
    await eventually(lambda: victim in table.mounts.of(POD).targets)
    assert table.mounts.reads < 500, "a thousand mounts and umounts were more changes than reads"
    storm.end()
    table.namespace.umount(victim)
    await eventually(lambda: not table.mounts.of(POD).targets)
    assert table.namespace.table() == MountTable(table.namespace.mountinfo).read()


async def test_when_the_kubelets_root_is_found_the_same_rows_mean_something_else(namespace: MountNamespace) -> None:
    table = Table(namespace)
    root = KubeletRoot(b"/nowhere")
    mounts = NodeMounts(MountTable(namespace.mountinfo), root, table.told.append)
    namespace.tmpfs(table.target())
    mounts.read()
    assert mounts.pods() == set()
    root.path = table.root
    mounts.sort_again()
    assert mounts.pods() == {POD}
    mounts.close()
    table.mounts.close()


async def test_who_waits_at_the_end_is_let_go(table: Table) -> None:
    mounts = NodeMounts(MountTable(table.namespace.mountinfo), KubeletRoot(table.root), table.told.append)
    mounts.start()
    mounts.read()
    waiting = asyncio.create_task(mounts.fresh())
    await asyncio.sleep(0)
    mounts.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_read_that_fails_is_made_up_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes wait for the next read, and the change that it is for is told only once."""
    monkeypatch.setattr(mounts, "_AGAIN", 0.05)
    whole, failures = MountTable.read, [1, 2]

    def read(self: MountTable) -> bytes:
        if failures:
            failures.pop()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return whole(self)

    monkeypatch.setattr(MountTable, "read", read)
    table.mounts.start()
    table.namespace.tmpfs(table.target())
    await asyncio.wait_for(table.mounts.fresh(), 10)
    assert not failures
    assert table.told == [{POD}]
