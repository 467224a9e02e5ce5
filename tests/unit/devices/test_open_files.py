"""Which device files a process has open."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from hostd.devices.open_files import device_numbers, holders
from tests.support.devices import FULL, KMSG, NULL, RANDOM, ZERO, DevHost, DeviceUser
from tests.support.fuse import DeadFileSystem
from tests.support.mountns import Child
from tests.support.wait import DEADLINE

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def host() -> Iterator[DevHost]:
    with DevHost() as made:
        yield made


def test_groups_devices_and_usb_are_found_by_number(host: DevHost) -> None:
    paths = [
        host.node("vfio/12", NULL),
        host.node("vfio/devices/vfio3", ZERO),
        host.node("bus/usb/001/004", FULL),
    ]
    with DeviceUser(host, *paths) as user:
        assert device_numbers(user.pid) == {NULL, ZERO, FULL}
        user.close_file(paths[0])
        assert device_numbers(user.pid) == {ZERO, FULL}


def test_a_file_that_was_unlinked_counts_still(host: DevHost) -> None:
    path = host.node("vfio/12", NULL)
    with DeviceUser(host, path) as user:
        host.call(os.unlink, path)
        assert device_numbers(user.pid) == {NULL}


def test_other_files_do_not_count(host: DevHost) -> None:
    plain = host.write(host.base + b"/vfio/12", b"no device")
    with DeviceUser(host, host.node("kmsg", KMSG), plain) as user:
        assert device_numbers(user.pid) == frozenset()


def test_a_dead_process_has_nothing_and_a_missing_one_is_an_error(host: DevHost) -> None:
    with DeviceUser(host, host.node("vfio/12", NULL)) as user:
        user.kill(reap=False)
        assert device_numbers(user.pid) == frozenset()
        user.reap()
        with pytest.raises(ProcessLookupError):
            device_numbers(user.pid)


def test_a_file_system_that_hangs_is_not_asked(host: DevHost) -> None:
    """A file named like a VFIO group on a server that never answers: a stat of it would hang."""
    host.node("fuse", (10, 229))
    trap = host.mkdir(host.base + b"/vfio/12")
    good = host.node("vfio/13", ZERO)

    def hold() -> list[int]:
        return [os.open(trap, os.O_PATH), os.open(good, os.O_RDONLY)]

    with DeadFileSystem(host, trap) as dead:
        user = host.hold(hold)
        with Child(lambda tell: tell(device_numbers(user.pid))) as child:
            readable = select.select([child._reader], [], [], DEADLINE)[0]
            dead.end()
            assert readable, "it hangs"
            assert child.hear() == {ZERO}


async def test_every_holder_on_the_host_is_named(host: DevHost) -> None:
    path, other = host.node("vfio/12", NULL), host.node("vfio/13", RANDOM)
    with DeviceUser(host, path) as first, DeviceUser(host, path) as second, DeviceUser(host, other):
        found = await holders({NULL})
        assert {holder.pid for holder in found} == {first.pid, second.pid}
        assert str(found[0]) in {f"sh[{first.pid}]", f"sh[{second.pid}]"}
    assert await holders({NULL, RANDOM}) == []
