from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator
from contextlib import closing
from typing import Self

import pytest

from hostd.linux.mount_table import MountTable, rows_below
from hostd.linux.mount_watch import MountWatch
from tests.support.mountns import MS_BIND, MountNamespace, mount, umount


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace() as namespace:
        namespace.mkdir(namespace.base + b"/t")
        yield namespace


@pytest.fixture
def table(host: MountNamespace) -> Iterator[MountTable]:
    with MountTable(host.mountinfo) as opened:
        yield opened


class Waiter:
    """Waits as asyncio's selector does: from before the change on, by an epoll."""

    def __init__(self, watch: MountWatch) -> None:
        self._epoll = select.epoll()
        self._epoll.register(watch.fileno(), select.EPOLLIN)

    def told(self, seconds: float = 0) -> bool:
        return bool(self._epoll.poll(seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()


def test_quiet_until_something_changes(host: MountNamespace, table: MountTable) -> None:
    with closing(MountWatch(table)) as watch, Waiter(watch) as waiter:
        assert not waiter.told()
        assert table.read()
        assert not waiter.told()
        host.write(host.base + b"/file")
        assert not waiter.told()


def test_mount_and_umount_are_told_each(host: MountNamespace, table: MountTable) -> None:
    with closing(MountWatch(table)) as watch, Waiter(watch) as waiter:
        for change in (lambda: host.tmpfs(host.base + b"/t"), lambda: host.umount(host.base + b"/t")):
            change()
            assert waiter.told(20)
            watch.drain()
            assert not waiter.told()


def test_a_change_between_wake_and_drain_is_seen_by_the_look(host: MountNamespace, table: MountTable) -> None:
    with closing(MountWatch(table)) as watch, Waiter(watch) as waiter:
        host.tmpfs(host.base + b"/t")
        assert waiter.told(20)
        second = host.tmpfs(host.base + b"/t2")
        watch.drain()
        assert second in [mount.target for mount in rows_below(table.read(), host.base)]
        assert not waiter.told()
        host.umount(second)
        assert waiter.told(20)


def test_drain_without_a_notice_is_harmless(host: MountNamespace, table: MountTable) -> None:
    with closing(MountWatch(table)) as watch, Waiter(watch) as waiter:
        watch.drain()
        watch.drain()
        host.tmpfs(host.base + b"/t")
        assert waiter.told(20)


def test_changes_of_other_namespaces_are_not_told(host: MountNamespace, table: MountTable) -> None:
    with host.copy("private") as other, closing(MountWatch(table)) as watch, Waiter(watch) as waiter:
        other.tmpfs(host.base + b"/t")
        assert not waiter.told()


def test_changes_that_propagate_are_told() -> None:
    with (
        MountNamespace("shared") as host,
        host.copy("slave") as pod,
        MountTable(pod.mountinfo) as table,
        closing(MountWatch(table)) as watch,
        Waiter(watch) as waiter,
    ):
        host.tmpfs(host.base + b"/t")
        assert waiter.told(20)


def test_close_ends_the_watch_and_leaves_the_table(host: MountNamespace, table: MountTable) -> None:
    watch = MountWatch(table)
    assert not os.get_inheritable(watch.fileno())
    watch.close()
    watch.close()
    assert table.read()


def test_no_table_no_watch_and_no_descriptor() -> None:
    with MountTable("/proc/self/mountinfo") as table:
        table.close()
        before = os.listdir("/proc/self/fd")
        with pytest.raises((OSError, ValueError)):
            MountWatch(table)
        assert os.listdir("/proc/self/fd") == before


async def test_with_asyncio_no_change_is_lost(host: MountNamespace, table: MountTable) -> None:
    """Mounts made as fast as possible, seen by a reader that only looks when it is told to."""
    total = 200
    loop = asyncio.get_running_loop()
    complete = loop.create_future()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        watch.drain()
        if len(rows_below(table.read(), host.base + b"/t")) == total and not complete.done():
            complete.set_result(None)

    def bind_all() -> None:
        for number in range(total):
            name = host.base + b"/t/%d" % number
            os.close(os.open(name, os.O_CREAT))
            mount(name, name, flags=MS_BIND)

    def unbind_all() -> None:
        for number in range(200):
            umount(host.base + b"/t/%d" % number)

    with closing(MountWatch(table)) as watch:
        loop.add_reader(watch.fileno(), look)
        host.hold(bind_all).end()
        await asyncio.wait_for(complete, 20)
        complete, total = loop.create_future(), 0
        host.hold(unbind_all).end()
        await asyncio.wait_for(complete, 20)
        # Level-triggered by mistake, it would look for ever.
        settled = looks
        for _ in range(50):
            await asyncio.sleep(0)
        assert looks <= settled + 1
        loop.remove_reader(watch.fileno())
