"""Rows one by one, held against the kernel's own table of the same namespace."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from hostd.linux import libc, statmount
from hostd.linux.mount_table import parse
from hostd.linux.statmount import MountRows
from tests.support import older_kernel
from tests.support.mount_sources import needs_mount_events
from tests.support.mountns import Child, MountNamespace, mount

pytestmark = [pytest.mark.usefixtures("root"), needs_mount_events]


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace("shared") as made:
        yield made


@pytest.fixture
def rows(host: MountNamespace) -> Iterator[MountRows]:
    with MountRows(host.path) as opened:
        yield opened


def number_of(rows: MountRows, target: bytes) -> int:
    (number,) = [number for number in rows.numbers() if (row := rows.row(number)) and row.target == target]
    return number


def test_all_rows_are_those_of_the_table_in_its_order(host: MountNamespace, rows: MountRows) -> None:
    strange = host.tmpfs(host.base + b"/a b\t\n\\c\xff\r")
    host.mount(b"a so\\urce #1", host.mkdir(host.base + b"/b"), b"tmpfs")
    host.mount(b"", host.mkdir(host.base + b"/c"), b"tmpfs")
    host.bind(host.write(host.base + b"/file"), host.touch(host.base + b"/bound"))
    os.unlink(host.outside(host.base + b"/file"))
    host.bind(strange, strange)
    host.mark(host.base + b"/b", "private")
    with host.copy("slave") as slave, MountRows(slave.path) as its:
        for found, table in ((rows, host.table()), (its, slave.table())):
            assert [found.row(number) for number in found.numbers()] == parse(table)


def test_a_mount_that_is_not_there(host: MountNamespace, rows: MountRows) -> None:
    target = host.tmpfs(host.base + b"/t")
    number = number_of(rows, target)
    with host.copy("private") as other, MountRows(other.path) as its:
        assert its.row(number) is None
        host.umount(target)
        assert rows.row(number) is None
        assert number not in rows.numbers()
        assert target in [row.target for row in map(its.row, its.numbers()) if row]


def test_only_rows_whose_target_has_a_needle(host: MountNamespace, rows: MountRows) -> None:
    host.bind(host.tmpfs(host.base + b"/source"), host.mkdir(host.base + b"/target"))
    number = number_of(rows, host.base + b"/target")
    assert rows.row(number, b"nowhere", b"/target") == rows.row(number)
    assert rows.row(number, b"/source") is None


def test_more_than_are_listed_by_one_call(
    host: MountNamespace, rows: MountRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = rows.numbers()
    for listed in (1, 2, len(every) - 1, len(every), len(every) + 1):
        monkeypatch.setattr(statmount, "_LISTED", listed)
        with MountRows(host.path) as few:
            assert few.numbers() == every == sorted(every)


def test_a_path_longer_than_path_max(host: MountNamespace, rows: MountRows) -> None:
    """Made step by step, as nobody can name it: no buffer for one path is large enough."""

    def make() -> None:
        os.chdir(host.base)
        for _ in range(100):
            os.mkdir(b"d" * 250)
            os.chdir(b"d" * 250)
        os.mkdir(b"t")
        mount(b"hostd-test", b"t", b"tmpfs")

    host.call(make)
    longest = max((row.target for row in map(rows.row, rows.numbers()) if row), key=len)
    assert len(longest) > 25_000
    assert longest in [row.target for row in parse(host.table())]


def test_where_it_cannot_be_had() -> None:
    descriptors = os.listdir("/proc/self/fd")
    for path, number in (("/proc/self/ns/uts", errno.EINVAL), ("/etc/passwd", errno.ENOTTY), ("/none", errno.ENOENT)):
        with pytest.raises(OSError, match=os.strerror(number)):
            MountRows(path)
    assert os.listdir("/proc/self/fd") == descriptors


def test_where_a_filter_of_system_calls_hides_it() -> None:
    def body(_: object) -> None:
        older_kernel.become_older()
        MountRows("/proc/self/ns/mnt")

    with Child(body) as child, pytest.raises(OSError, match="Function not implemented"):
        child.hear()


def test_descriptor(rows: MountRows) -> None:
    assert not os.get_inheritable(rows.fileno())
    rows.close()
    rows.close()
    assert libc.LSMT_ROOT == 2**64 - 1
