"""Keeping up with a real mount table: many changes cost one look, and after a storm the picture is true.

On both sources: rows that the kernel tells of, and the whole table each time.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hostd.core import mounts
from hostd.core.mount_source import MountSource
from hostd.core.mounts import NodeMounts
from hostd.core.pod_mounts import KubeletRoot
from hostd.linux.mount_table import Mount, MountTable, rows_naming
from hostd.linux.statmount import MountRows
from tests.support.core import OTHER, POD
from tests.support.mount_sources import SOURCES, changed_rows
from tests.support.mountns import MNT_DETACH, MS_MOVE, MountNamespace, mount, umount
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")

IN_POD = b"/volumes/kubernetes.io~empty-dir/hotplug-disks/dump"


class Table:
    """A node's mounts, and what hostd's part says of them."""

    def __init__(self, namespace: MountNamespace, source: MountSource) -> None:
        self.namespace = namespace
        self.root = namespace.base + b"/kubelet"
        self.told: list[set[str]] = []
        self.mounts = NodeMounts(source, KubeletRoot(self.root), self.told.append)

    def target(self, name: bytes = b"hotplug-disks/dump", pod: str = POD) -> bytes:
        return self.root + b"/pods/" + pod.encode() + b"/volumes/kubernetes.io~empty-dir/" + name

    def seen(self, pod: str = POD) -> list[bytes]:
        return list(self.mounts.of(pod).targets)


@pytest.fixture
def namespace() -> Iterator[MountNamespace]:
    with MountNamespace("private") as made:
        yield made


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, namespace: MountNamespace) -> MountSource:
    return SOURCES[request.param](namespace)


@pytest.fixture
async def table(namespace: MountNamespace, source: MountSource) -> AsyncIterator[Table]:
    made = Table(namespace, source)
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
    await asyncio.gather(*(table.mounts.fresh(POD) for _ in range(100)))
    assert table.target() in table.mounts.of(POD).targets
    assert table.mounts.reads - before <= 2


async def test_a_look_may_be_put_off_and_sees_all_that_came_meanwhile(table: Table) -> None:
    put_off: list[Callable[[], None]] = []
    table.mounts.when_quiet = put_off.append
    table.mounts.start()
    table.mounts.read()
    table.namespace.tmpfs(table.target())
    waiting = asyncio.create_task(table.mounts.fresh(POD))
    await eventually(lambda: put_off)
    table.namespace.tmpfs(table.target(pod=OTHER))
    await asyncio.sleep(0.05)
    assert (len(put_off), table.told, waiting.done()) == (1, [], False)
    put_off.pop()()
    await waiting
    assert table.told == [{POD, OTHER}]
    table.namespace.umount(table.target())
    await eventually(lambda: put_off, why="the next change asks anew")


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


async def test_when_the_kubelets_root_is_found_the_same_rows_mean_something_else(
    namespace: MountNamespace, source: MountSource
) -> None:
    root = KubeletRoot(b"/nowhere")
    mounts = NodeMounts(source, root, print)
    namespace.tmpfs(namespace.base + b"/kubelet/pods/" + POD.encode() + IN_POD)
    mounts.read()
    assert mounts.pods() == set()
    root.path = namespace.base + b"/kubelet"
    mounts.sort_again()
    assert mounts.pods() == {POD}
    mounts.close()


async def test_who_waits_at_the_end_is_let_go(namespace: MountNamespace, source: MountSource) -> None:
    mounts = NodeMounts(source, KubeletRoot(namespace.base), print)
    mounts.start()
    mounts.read()
    waiting = asyncio.create_task(mounts.fresh(POD))
    await asyncio.sleep(0)
    mounts.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_read_that_fails_is_made_up_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes wait for the next look, and the change that it is for is told only once."""
    monkeypatch.setattr(mounts, "_AGAIN", 0.05)
    failures = [1, 2]

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: object) -> object:
            if failures:
                failures.pop()
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return real(*arguments)

        return read

    table.mounts.start()
    table.mounts.read()
    monkeypatch.setattr(MountTable, "read", failing(MountTable.read))
    monkeypatch.setattr(MountRows, "row", failing(MountRows.row))
    table.namespace.tmpfs(table.target())
    await asyncio.wait_for(table.mounts.fresh(POD), 10)
    assert not failures
    assert table.told == [{POD}]
    assert table.seen() == [table.target()]


# -- ways in which a mount comes, goes and changes its place


async def test_a_mount_is_moved_in_and_out(table: Table) -> None:
    table.mounts.read()
    outside = table.namespace.tmpfs(table.namespace.base + b"/outside")
    await table.mounts.fresh(POD)
    assert table.seen() == []
    table.namespace.mkdir(table.target())
    table.namespace.mount(outside, table.target(), b"", MS_MOVE)
    await table.mounts.fresh(POD)
    assert table.seen() == [table.target()]
    table.namespace.mount(table.target(), outside, b"", MS_MOVE)
    await table.mounts.fresh(POD)
    assert table.seen() == []


async def test_a_tree_is_moved(table: Table) -> None:
    """Of all below its top nothing is told."""
    top = table.namespace.tmpfs(table.namespace.base + b"/kubelet")
    table.namespace.tmpfs(table.target())
    table.mounts.read()
    table.namespace.mount(top, table.namespace.mkdir(table.namespace.base + b"/elsewhere"), b"", MS_MOVE)
    await table.mounts.fresh(OTHER)
    assert table.mounts.pods() == set()
    table.namespace.mount(table.namespace.base + b"/elsewhere", top, b"", MS_MOVE)
    await table.mounts.fresh(OTHER)
    assert table.seen() == [table.target()]


async def test_a_tree_is_detached(table: Table) -> None:
    top = table.namespace.tmpfs(table.namespace.base + b"/kubelet")
    table.namespace.tmpfs(table.target())
    table.namespace.tmpfs(table.target(pod=OTHER))
    table.mounts.read()
    assert table.mounts.pods() == {POD, OTHER}
    table.namespace.umount(top, MNT_DETACH)
    await table.mounts.fresh(POD)
    assert table.mounts.pods() == set()


async def test_a_mountpoint_is_removed_in_another_namespace(table: Table) -> None:
    table.namespace.tmpfs(table.target())
    with table.namespace.copy("private") as other:
        other.umount(table.target())
        table.mounts.read()
        other.call(os.rmdir, table.target())
    await table.mounts.fresh(POD)
    assert table.seen() == []


async def test_what_comes_by_propagation() -> None:
    with MountNamespace("shared") as host, host.copy("slave") as watched:
        for make in SOURCES.values():
            table = Table(watched, make(watched))
            table.mounts.read()
            host.tmpfs(table.target())
            await table.mounts.fresh(POD)
            assert table.seen() == [table.target()]
            host.umount(table.target())
            await table.mounts.fresh(POD)
            assert table.seen() == []
            table.mounts.close()


async def test_a_directory_above_is_renamed_of_which_nobody_tells(table: Table) -> None:
    table.namespace.tmpfs(table.target())
    table.namespace.tmpfs(table.target(pod=OTHER))
    table.mounts.read()
    table.namespace.call(os.rename, os.path.dirname(table.target()), table.target(b"container-disks"))
    await table.mounts.fresh(POD)
    assert table.seen() == [table.target(b"container-disks/dump")]
    table.namespace.call(os.rename, table.target(b"container-disks"), table.target(b"elsewhere"))
    await table.mounts.fresh(POD)
    assert table.seen() == []
    assert table.seen(OTHER) == [table.target(pod=OTHER)]


async def test_a_mount_comes_into_place_of_which_nobody_tells(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after any change it is known all the same, and after that nothing is looked at any more."""
    monkeypatch.setattr(mounts, "_WHOLE_AFTER", 0.1)
    table.namespace.tmpfs(table.target(b"elsewhere/dump"))
    table.mounts.start()
    table.mounts.read()
    table.namespace.call(os.rename, table.target(b"elsewhere"), os.path.dirname(table.target()))
    table.namespace.tmpfs(table.namespace.base + b"/foreign")
    await eventually(lambda: table.seen() == [table.target()])
    assert table.told == [{POD}]
    await asyncio.sleep(0.1)
    reads = table.mounts.reads
    await asyncio.sleep(0.5)
    assert table.mounts.reads == reads


async def test_a_mount_is_replaced_by_another(table: Table) -> None:
    table.namespace.tmpfs(table.target())
    table.mounts.start()
    table.mounts.read()
    table.namespace.umount(table.target())
    table.namespace.mount(b"another", table.target(), b"ramfs")
    await table.mounts.fresh(POD)
    (_, (row,)) = table.mounts.of(POD).targets[table.target()]
    assert (row.fstype, row.source) == (b"ramfs", b"another")
    await eventually(lambda: table.told == [{POD}])


async def test_a_row_is_as_in_the_table(table: Table) -> None:
    table.namespace.mkdir(table.target(b"hotplug-disks/a b"))
    table.namespace.mount(b"so\\ur ce", table.target(b"hotplug-disks/a b"), b"tmpfs")
    table.namespace.mark(table.target(b"hotplug-disks/a b"), "shared")
    table.namespace.bind(table.target(b"hotplug-disks/a b"), table.namespace.mkdir(table.target()))
    table.mounts.read()
    found = [row for _, stack in table.mounts.of(POD).targets.values() for row in stack]
    assert found == rows_naming(table.namespace.table(), b"hotplug-disks")
    assert [row.peer_group > 0 for row in found] == [True, True]


# -- what it costs where the kernel tells


@pytest.fixture
async def told(namespace: MountNamespace) -> AsyncIterator[Table]:
    made = Table(namespace, changed_rows(namespace))
    yield made
    made.mounts.close()


async def test_a_change_costs_what_it_changes(told: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        told.namespace.tmpfs(told.namespace.base + b"/foreign/%d" % number)
    for pod in (POD, OTHER):
        told.namespace.tmpfs(told.target(pod=pod))
    told.mounts.read()
    asked: list[int] = []
    row = MountRows.row

    def counted(self: MountRows, number: int, *naming: bytes) -> Mount | None:
        asked.append(number)
        return row(self, number, *naming)

    monkeypatch.setattr(MountRows, "row", counted)
    foreign = told.namespace.tmpfs(told.namespace.base + b"/one-more")
    await told.mounts.fresh("nobody")
    assert len(asked) == 1
    told.namespace.umount(foreign)
    await told.mounts.fresh("nobody")
    assert len(asked) == 1, "of a mount that did not matter nothing is to be known when it goes"
    told.namespace.umount(told.target())
    await told.mounts.fresh("nobody")
    assert len(asked) == 2
    await told.mounts.fresh(OTHER)
    assert len(asked) == 3
    assert told.mounts.whole_reads == 1


async def test_lost_events_are_made_up_for(told: Table) -> None:
    told.mounts.read()
    with open("/proc/sys/fs/fanotify/max_queued_events") as file:
        rounds = int(file.read()) // 2 + 1
    path = told.namespace.mkdir(told.namespace.base + b"/storm")
    told.namespace.call(_storm, [path], rounds, told.namespace.mkdir(told.target()))
    await told.mounts.fresh(POD)
    assert told.seen() == [told.target()]
    assert told.mounts.whole_reads == 2
    told.namespace.umount(told.target())
    await told.mounts.fresh(POD)
    assert told.seen() == []
    assert told.mounts.whole_reads == 2
