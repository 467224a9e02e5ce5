"""Mount events of a real namespace: each is there as soon as the call is back that it tells of."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.linux import libc, mount_events
from hostd.linux.mount_events import MountEvents, parse
from hostd.linux.statmount import MountRows
from tests.support.mount_sources import needs_mount_events
from tests.support.mountns import MNT_DETACH, MS_MOVE, MountNamespace, mount, umount


def real(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs mounts of its own, and a kernel that tells of them."""
    marked: Callable[..., None] = needs_mount_events(pytest.mark.usefixtures("root")(test))
    return marked


class Watched:
    """A namespace, its rows and its events."""

    def __init__(self, namespace: MountNamespace) -> None:
        self.namespace = namespace
        self.base = namespace.base
        self.rows = MountRows(namespace.path)
        self.events = MountEvents(self.rows.fileno())

    def told(self) -> dict[int, bool]:
        found = self.events.read()
        assert found is not None
        return found

    def numbers(self, *targets: bytes) -> list[int]:
        rows = {number: self.rows.row(number) for number in self.rows.numbers()}
        return [number for number, row in rows.items() if row and row.target in targets]

    def close(self) -> None:
        self.events.close()
        self.rows.close()


@pytest.fixture(params=["private", "shared"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with MountNamespace(request.param) as namespace:
        made = Watched(namespace)
        yield made
        made.close()


@pytest.mark.parametrize("flags", [0, MNT_DETACH])
@real
def test_mount_and_umount(watched: Watched, flags: int) -> None:
    assert watched.told() == {}
    watched.namespace.tmpfs(watched.base + b"/t")
    (number,) = watched.numbers(watched.base + b"/t")
    assert watched.told() == {number: True}
    assert watched.told() == {}
    watched.namespace.umount(watched.base + b"/t", flags)
    assert watched.told() == {number: False}


@real
def test_a_mount_that_came_and_went_meanwhile_is_gone(watched: Watched) -> None:
    watched.namespace.tmpfs(watched.base + b"/t")
    watched.namespace.umount(watched.base + b"/t")
    assert list(watched.told().values()) == [False]


@real
def test_a_tree_is_told_mount_by_mount(watched: Watched) -> None:
    tree = [watched.namespace.tmpfs(watched.base + path) for path in (b"/t", b"/t/u", b"/t/u/v", b"/t/w")]
    numbers = watched.numbers(*tree)
    assert watched.told() == dict.fromkeys(numbers, True)
    watched.namespace.umount(tree[0], MNT_DETACH)
    assert watched.told() == dict.fromkeys(numbers, False)


@real
def test_a_move_is_a_reason_to_look_at_everything(watched: Watched) -> None:
    """For what is below a moved mount has another path as well, and only the mount itself is told of."""
    watched.namespace.mark(watched.base, "private")
    watched.namespace.tmpfs(watched.base + b"/from")
    watched.namespace.tmpfs(watched.base + b"/from/below")
    watched.told()
    watched.namespace.mount(watched.base + b"/from", watched.namespace.mkdir(watched.base + b"/to"), b"", MS_MOVE)
    assert watched.events.read() is None
    assert watched.numbers(watched.base + b"/to/below")
    assert watched.told() == {}


@pytest.mark.parametrize("remove", [os.unlink, os.rmdir])
@real
def test_a_mountpoint_that_is_removed_elsewhere(watched: Watched, remove: Callable[[bytes], None]) -> None:
    target = watched.base + b"/target"
    if remove is os.rmdir:
        watched.namespace.tmpfs(target)
    else:
        watched.namespace.bind(watched.namespace.write(watched.base + b"/file"), watched.namespace.touch(target))
    (number,) = watched.numbers(target)
    with watched.namespace.copy("private") as other:
        other.umount(target)
        watched.told()
        other.call(remove, target)
        assert watched.told() == {number: False}


@real
def test_what_propagates_is_told_and_what_does_not_is_not() -> None:
    with MountNamespace("shared") as host, host.copy("slave") as pod, host.copy("private") as other:
        watched = Watched(pod)
        target = host.tmpfs(host.base + b"/t")
        (number,) = watched.numbers(target)
        assert watched.told() == {number: True}
        other.tmpfs(host.base + b"/t")
        assert watched.told() == {}
        host.umount(target)
        assert watched.told() == {number: False}
        watched.close()


@real
def test_of_these_nothing_is_told(watched: Watched) -> None:
    """So whoever relies on events must look by itself now and then."""
    target = watched.namespace.tmpfs(watched.base + b"/above/t")
    watched.told()
    watched.namespace.call(os.rename, watched.base + b"/above", watched.base + b"/renamed")
    watched.namespace.mark(watched.base + b"/renamed/t", "slave")
    assert watched.told() == {}
    assert not watched.numbers(target)


def _storm(path: bytes, rounds: int) -> None:
    for _ in range(rounds):
        mount(b"none", path, b"tmpfs")
        umount(path)


@real
def test_more_events_than_the_kernel_keeps(watched: Watched) -> None:
    bound = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    path = watched.namespace.mkdir(watched.base + b"/t")
    watched.namespace.call(_storm, path, bound // 2 + 1)
    assert watched.events.read() is None
    assert watched.told() == {}
    watched.namespace.tmpfs(path)
    assert list(watched.told().values()) == [True]


@real
def test_descriptor(watched: Watched) -> None:
    assert not os.get_inheritable(watched.events.fileno())
    assert not os.get_blocking(watched.events.fileno())
    assert not select.select([watched.events], [], [], 0)[0]
    watched.namespace.tmpfs(watched.base + b"/t")
    assert select.select([watched.events], [], [], 0)[0]
    watched.events.close()
    watched.events.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        watched.events.read()


@real
def test_what_is_no_mount_namespace() -> None:
    with open("/proc/self/ns/uts") as other:
        descriptors = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            MountEvents(other.fileno())
        assert os.listdir("/proc/self/fd") == descriptors


# -- the bytes


def event(number: int, mask: int, *, kind: int = libc.FAN_EVENT_INFO_TYPE_MNT, version: int = 3) -> bytes:
    record = mount_events._RECORD.pack(kind, 16, number)
    return mount_events._EVENT.pack(24 + len(record), version, 24, mask) + record


MASKS = st.sampled_from([libc.FAN_MNT_ATTACH, libc.FAN_MNT_DETACH])


@given(st.lists(st.tuples(st.integers(1, 4), MASKS)))
def test_the_last_event_of_a_mount_counts(told: list[tuple[int, int]]) -> None:
    data = b"".join(event(number, mask) for number, mask in told)
    assert parse(data) == {number: mask != libc.FAN_MNT_DETACH for number, mask in told}


@pytest.mark.parametrize(
    "strange",
    [
        event(1, libc.FAN_Q_OVERFLOW),
        mount_events._EVENT.pack(24, 3, 24, libc.FAN_Q_OVERFLOW),
        mount_events._EVENT.pack(24, 3, 24, libc.FAN_MNT_ATTACH),
        event(1, libc.FAN_MNT_ATTACH | libc.FAN_MNT_DETACH),
        event(1, 0),
        event(1, libc.FAN_MNT_ATTACH, kind=1),
        event(1, libc.FAN_MNT_ATTACH, version=4),
    ],
)
def test_what_is_not_understood_counts_as_lost(strange: bytes) -> None:
    assert parse(event(2, libc.FAN_MNT_DETACH) + strange) is None


@given(st.lists(st.tuples(st.integers(1, 4), MASKS), max_size=3), st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_mounts_or_count_as_lost(told: list[tuple[int, int]], more: bytes, end: int) -> None:
    """Nothing is believed of an event that is not whole."""
    data = b"".join(event(number, mask) for number, mask in told)
    found = parse((data + more)[:end])
    assert found is None or isinstance(found, dict)
    if not more:
        assert (found is None) == (end < len(data) and end % len(event(1, 0)) != 0)
