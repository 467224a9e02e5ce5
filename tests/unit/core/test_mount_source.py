"""Which source is taken, and that both tell the same."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator

import pytest

from hostd.core.mount_source import ChangedRows, WholeTable, open_source
from hostd.linux.mount_table import MountTable
from tests.support import older_kernel
from tests.support.core import POD
from tests.support.mount_sources import changed_rows, needs_mount_events, whole_table
from tests.support.mountns import Child, MountNamespace, mount

pytestmark = pytest.mark.usefixtures("root")

DISKS = b"/pods/" + POD.encode() + b"/volumes/kubernetes.io~empty-dir/hotplug-disks"


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace("shared") as made:
        yield made


@needs_mount_events
def test_the_kernel_tells_and_is_taken_at_its_word(host: MountNamespace) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    source = open_source(host.mountinfo, host.path)
    assert isinstance(source, ChangedRows)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2
    source.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@needs_mount_events
def test_both_tell_the_same_rows(host: MountNamespace) -> None:
    for name in (b"/a b\n", b"/c", b"/c", b"/d/e"):
        host.tmpfs(host.base + DISKS + name)
    host.tmpfs(host.base + b"/foreign")
    rows, table = changed_rows(host), whole_table(host)
    assert list(rows.whole().values()) == list(table.whole().values())
    assert len(rows.whole()) == 4
    host.umount(host.base + DISKS + b"/c")
    known = rows.whole()
    host.umount(host.base + DISKS + b"/c")
    host.tmpfs(host.base + DISKS + b"/f")
    changes = rows.changes(known, ())
    assert changes is not None
    left = {number: row for number, row in (known | changes).items() if row is not None}
    assert list(left.values()) == list(table.whole().values())
    assert table.changes(known, ()) is None
    rows.close()
    table.close()


@needs_mount_events
def test_mounts_that_come_and_go_meanwhile(host: MountNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """hostd may start in the middle of a storm, and would read the whole table for all of its life."""
    read, number = MountTable.read, itertools.count()

    def read_in_a_storm(table: MountTable) -> bytes:
        passing = host.tmpfs(host.base + b"/passing")
        rows = read(table)
        host.umount(passing)
        host.tmpfs(host.base + b"/%d" % next(number))
        return rows

    monkeypatch.setattr(MountTable, "read", read_in_a_storm)
    changed_rows(host).close()
    assert next(number)


def test_a_kernel_without(host: MountNamespace) -> None:
    def body(tell: Callable[[object], None]) -> None:
        older_kernel.become_older()
        before = len(os.listdir("/proc/self/fd"))
        source = open_source(host.mountinfo, host.path)
        kind = type(source)
        source.close()
        tell((kind, len(os.listdir("/proc/self/fd")) - before))

    with Child(body) as child:
        assert child.hear() == (WholeTable, 0)


@needs_mount_events
def test_where_processes_have_another_root_than_statmount_takes(
    host: MountNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Something is mounted over the root of the namespace: who enters it has that for its root."""
    host.call(mount, b"over", b"/", b"tmpfs")

    inside = host.hold()
    descriptors = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        source = open_source(f"/proc/{inside.pid}/mountinfo", f"/proc/{inside.pid}/ns/mnt")
    assert isinstance(source, WholeTable)
    assert "do not tell the same" in caplog.text
    source.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    inside.end()
