"""What is known of runs, from one look to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostd.core.model import State
from hostd.devices.claim import Life
from hostd.devices.run_table import RunTable
from hostd.devices.sysfs import Sysfs
from tests.support.devices import NULL, ZERO, DevHost, DeviceUser, SysfsTree, ended, vm

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def host() -> Iterator[DevHost]:
    with DevHost() as made:
        yield made


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


@pytest.fixture
def table(tree: SysfsTree) -> RunTable:
    return RunTable(Sysfs(tree.root))


def test_a_run_from_pending_to_dead(host: DevHost, tree: SysfsTree, table: RunTable) -> None:
    name = tree.pci("0000:3b:00.0", group="12", number=NULL)
    path = host.node("vfio/12", NULL)
    with DeviceUser(host, path) as user:
        machine = vm("a", user)
        qemus, machine.qemus, machine.state = machine.qemus, [], State.PENDING
        assert table.see(machine) == (True, False)
        machine.qemus, machine.state = qemus, State.RUNNING
        assert table.see(machine) == (True, True)
        assert table.see(machine) == (False, False)
        assert table.runs[machine.pod_uid].life is Life.UNSEEN
        assert table.look(machine.pod_uid)
        run = table.runs[machine.pod_uid]
        assert (run.life, run.vm, run.open) == (Life.ALIVE, "ns/a", {name: user.pid})
        assert not table.look(machine.pod_uid)
        assert table.see(ended(machine)) == (True, False)
        assert table.runs[machine.pod_uid].life is Life.DEAD


def test_a_device_that_was_torn_out_is_still_open(host: DevHost, tree: SysfsTree, table: RunTable) -> None:
    name = tree.usb("1-2", number=ZERO)
    with DeviceUser(host, host.node("bus/usb/001/004", ZERO)) as user:
        machine = vm("a", user)
        table.see(machine)
        table.look(machine.pod_uid)
        tree.remove(name)
        table.look(machine.pod_uid)
        assert table.runs[machine.pod_uid].open == {name: user.pid}


def test_a_process_that_only_has_the_pid_tells_nothing(host: DevHost, tree: SysfsTree, table: RunTable) -> None:
    tree.pci("0000:3b:00.0", group="12", number=NULL)
    with DeviceUser(host, host.node("vfio/12", NULL)) as user:
        machine = vm("a", user)
        machine.qemus = [replace(machine.qemus[0], start_time=1, inode=0)]
        table.see(machine)
        assert not table.look(machine.pod_uid)
        assert table.runs[machine.pod_uid].life is Life.UNSEEN


def test_a_second_qemu_in_the_pod_is_looked_at_afresh(host: DevHost, tree: SysfsTree, table: RunTable) -> None:
    tree.pci("0000:3b:00.0", group="12", number=NULL)
    path = host.node("vfio/12", NULL)
    with DeviceUser(host, path) as first, DeviceUser(host) as second:
        machine = vm("a", first)
        table.see(machine)
        table.look(machine.pod_uid)
        table.settle(machine.pod_uid)
        assert table.runs[machine.pod_uid].settled
        table.see(ended(machine))
        again = vm("a", second, pod_uid=machine.pod_uid)
        assert table.see(again) == (True, True)
        run = table.runs[machine.pod_uid]
        assert (run.life, run.settled, dict(run.open)) == (Life.UNSEEN, False, {})


def test_what_was_read_of_a_dead_qemu_changes_nothing(host: DevHost, tree: SysfsTree, table: RunTable) -> None:
    """Its death is for the keeper to tell: until then its devices are not free."""
    name = tree.pci("0000:3b:00.0", group="12", number=NULL)
    with DeviceUser(host, host.node("vfio/12", NULL)) as user:
        machine = vm("a", user)
        table.see(machine)
        table.look(machine.pod_uid)
        user.kill(reap=False)
        assert not table.look(machine.pod_uid)
        assert set(table.runs[machine.pod_uid].open) == {name}
