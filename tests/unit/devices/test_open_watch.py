"""Hearing of opens and closes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Self

import pytest

from hostd.devices.open_watch import OpenWatch
from tests.support.devices import NULL, ZERO, DevHost, DeviceUser
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def host() -> Iterator[DevHost]:
    with DevHost() as made:
        yield made


class Heard:
    """A watch, and which pods it told of."""

    def __init__(self) -> None:
        self.pods: list[str] = []
        self.watch = OpenWatch(self.pods.append)

    async def hears(self, pod: str) -> None:
        await eventually(lambda: pod in self.pods, why="not told")
        self.pods.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()


async def test_an_open_and_a_close_are_heard(host: DevHost) -> None:
    path = host.node("vfio/12", NULL)
    with DeviceUser(host) as user, Heard() as heard:
        assert heard.watch.watch("pod", user.pid)
        user.open(path)
        await heard.hears("pod")
        user.close_file(path)
        await heard.hears("pod")


async def test_usb_buses_are_heard(host: DevHost) -> None:
    path = host.node("bus/usb/003/004", ZERO)
    with DeviceUser(host) as user, Heard() as heard:
        assert heard.watch.watch("pod", user.pid)
        user.open(path)
        await heard.hears("pod")


async def test_a_directory_that_comes_later_is_heard(host: DevHost) -> None:
    with DeviceUser(host) as user, Heard() as heard:
        assert heard.watch.watch("pod", user.pid)
        path = host.node("vfio/12", NULL)
        await heard.hears("pod")
        user.open(path)
        await heard.hears("pod")


async def test_two_pods_with_one_dev_hear_both_and_one_may_leave(host: DevHost) -> None:
    path = host.node("vfio/12", NULL)
    with DeviceUser(host) as first, DeviceUser(host) as second, Heard() as heard:
        heard.watch.watch("one", first.pid)
        heard.watch.watch("two", second.pid)
        first.open(path)
        await eventually(lambda: {"one", "two"} <= set(heard.pods))
        heard.watch.forget("one")
        heard.pods.clear()
        first.close_file(path)
        await heard.hears("two")
        heard.watch.forget("two")
        assert heard.watch._watches == {}
        first.open(path)
        await asyncio.sleep(0)
        heard.watch.drain()
        assert heard.pods == []


async def test_pods_with_their_own_dev_do_not_hear_each_other(host: DevHost) -> None:
    path = host.node("vfio/12", NULL)
    with DevHost() as other_host:
        other_host.node("vfio/12", NULL)
        with DeviceUser(host) as user, DeviceUser(other_host) as other, Heard() as heard:
            heard.watch.watch("pod", user.pid)
            heard.watch.watch("other", other.pid)
            user.open(path)
            await heard.hears("pod")
            assert "other" not in heard.pods


async def test_a_device_file_that_is_a_bind_of_the_host_s_is_heard(host: DevHost) -> None:
    """As container runtimes do it in a user namespace: the open is told in the host's directory."""
    host.node("vfio/12", NULL)
    with host.copy("private") as pod:
        old = pod.mkdir(host.base + b"/dev")
        pod.bind(b"/dev", old)
        pod.tmpfs(b"/dev")
        pod.bind(old + b"/vfio/12", pod.touch(b"/dev/vfio/12"))
        pods: list[str] = []
        watch = OpenWatch(pods.append, host_root=b"/proc/%d/root" % host.pid)
        with DeviceUser(pod) as user:
            assert watch.watch("pod", user.pid)
            user.open(b"/dev/vfio/12")
            await eventually(lambda: pods)
        watch.close()


async def test_a_dead_process_cannot_be_watched(host: DevHost) -> None:
    with DeviceUser(host) as user, Heard() as heard:
        user.kill()
        assert not heard.watch.watch("pod", user.pid)


async def test_a_link_in_dev_is_not_followed(host: DevHost) -> None:
    host.mkdir(host.base + b"/elsewhere")
    host.call(os.symlink, host.base + b"/elsewhere", b"/dev/vfio")
    with DeviceUser(host) as user, Heard() as heard:
        assert not heard.watch.watch("pod", user.pid)
        host.call(os.mknod, host.base + b"/elsewhere/12", 0o020666, os.makedev(*NULL))
        user.open(host.base + b"/elsewhere/12")
        heard.watch.drain()
        assert heard.pods == []


async def test_a_full_queue_tells_all(host: DevHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from hostd.linux import libc
    from hostd.linux.inotify import Event

    with DeviceUser(host) as user, Heard() as heard:
        heard.watch.watch("pod", user.pid)
        batches = [[Event(-1, libc.IN_Q_OVERFLOW, b"")], []]
        monkeypatch.setattr(heard.watch._inotify, "read", lambda: batches.pop(0))
        heard.watch.drain()
        assert heard.pods == ["pod"]


async def test_the_namespace_s_end_ends_its_watches() -> None:
    with DevHost() as host, Heard() as heard:
        host.node("vfio/12", NULL)
        with DeviceUser(host) as user:
            heard.watch.watch("pod", user.pid)
        host.close()
        await eventually(lambda: not heard.watch._watches, why="watches stay")
