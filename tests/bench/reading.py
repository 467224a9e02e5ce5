"""The mount table: reading a full one in which few rows matter, and what one change in it costs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from unittest import mock

from hostd.core.mount_source import MountSource, WholeTable, open_source
from hostd.core.pod_mounts import KubeletRoot, SortedMounts
from hostd.linux.mount_table import MountTable, parse, rows_naming
from tests.bench.figures import Figure
from tests.bench.scale import crowd, mount_foreign
from tests.support.daemon import Daemon
from tests.support.mountns import mount
from tests.support.node import Node

_NEEDLES = (b"~empty-dir/container-disks/", b"~empty-dir/hotplug-disks/")
#: Longer than hostd waits between two reads of the largest table here (seconds).
_APART = 0.5


def rows(vms: int = 250, layers: int = 4, foreign: int = 9000) -> Iterator[Figure]:
    """A table of ten thousand rows, of which a tenth matters."""
    with Node() as node:
        node.namespace.call(mount_foreign, node.kubelet, foreign)
        crowd(node, vms, layers)
        yield from _whole(node)
        yield from _one_row(node)
    yield from _one_event()


def _whole(node: Node) -> Iterator[Figure]:
    with MountTable(node.namespace.mountinfo) as table:
        kernel = _times(table.read)
        data = table.read()
        ours = _times(lambda: rows_naming(table.read(), *_NEEDLES))
        whole = _times(lambda: parse(table.read()))
    libmount = _libmount()
    library = _times(lambda: _by_libmount(libmount, node.namespace.mountinfo))
    enter = ["nsenter", f"--mount={node.namespace.path}"]
    command = [*enter, "findmnt", "--noheadings", "--list", "--output", "TARGET"]
    findmnt = _times(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True), 5)
    count, total = len(rows_naming(data, *_NEEDLES)), data.count(b"\n")
    yield Figure(f"the table: {count} of {total} rows found", "ms", ours, "the kernel's part", kernel)
    name = f"the table: all of {total} rows parsed, for comparison"
    yield Figure(name, "ms", whole, "findmnt's library", library)
    yield Figure(name, "ms", whole, "findmnt, the command", findmnt)


def _libmount() -> ctypes.CDLL:
    library = ctypes.CDLL("libmount.so.1")
    library.mnt_new_table.restype = ctypes.c_void_p
    library.mnt_table_parse_file.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.mnt_table_get_nents.argtypes = library.mnt_unref_table.argtypes = (ctypes.c_void_p,)
    return library


def _by_libmount(libmount: ctypes.CDLL, path: str) -> None:
    """As findmnt(8) reads it."""
    table = libmount.mnt_new_table()
    failed = libmount.mnt_table_parse_file(table, os.fsencode(path))
    rows = libmount.mnt_table_get_nents(table)
    libmount.mnt_unref_table(table)
    assert (failed, rows > 0) == (0, True)


def _one_row(node: Node) -> Iterator[Figure]:
    """One layer comes or goes: which pod has what now, by either source."""
    target = node.namespace.mkdir(node.pod().hotplug_disks + b"/one-more")
    told_one, told_all = _by(open_source(node.namespace.mountinfo, node.namespace.path), node, target)
    table_one, table_all = _by(WholeTable(MountTable(node.namespace.mountinfo)), node, target)
    total = node.namespace.table().count(b"\n")
    yield Figure(f"the table: one row of {total} changed, as told", "ms", told_one, "the table read whole", table_one)
    yield Figure(f"the table: all of {total} rows one by one", "ms", told_all, "the table read whole", table_all)


def _by(source: MountSource, node: Node, target: bytes, rounds: int = 30) -> tuple[list[float], list[float]]:
    """Milliseconds for one change, and for all rows."""
    mounts = SortedMounts(KubeletRoot(node.kubelet, found=True))
    everything = _times(lambda: mounts.replace(source.whole()), 10)

    def take_in() -> None:
        changes = source.changes(mounts.rows.keys(), ())
        told = mounts.replace(source.whole()) if changes is None else mounts.update(changes)
        assert told, "the change is seen"

    one = []
    for _ in range(rounds // 2):
        node.namespace.call(mount, b"none", target, b"tmpfs")
        one += _times(take_in, 1)
        node.namespace.umount(target)
        one += _times(take_in, 1)
    source.close()
    return one, everything


def _one_event() -> Iterator[Figure]:
    """Somebody else's mount comes or goes: what that costs the daemon, among few and among many others."""
    for foreign in (0, 5000):
        told, table = (_event_costs(foreign, older_kernel=older) for older in (False, True))
        name = f"one foreign mount or umount among {foreign} others: CPU time of hostd"
        yield Figure(name, "ms", told, "the table read whole", table)


def _event_costs(foreign: int, *, older_kernel: bool, rounds: int = 10) -> list[float]:
    with mock.patch.object(Daemon, "older_kernel", older_kernel), Node() as node:
        node.namespace.call(mount_foreign, node.kubelet, foreign)
        path = node.namespace.mkdir(node.namespace.base + b"/one-more")
        node.hostd.start()
        time.sleep(2)  # what follows the start is done by then
        costs = []
        for _ in range(rounds):
            costs.append(_cost(node, lambda: node.namespace.call(mount, b"none", path, b"tmpfs")))
            costs.append(_cost(node, lambda: node.namespace.umount(path)))
    return costs


def _cost(node: Node, change: Callable[[], None]) -> float:
    """Milliseconds of CPU time that the daemon takes for a change and what follows it."""
    # As clock_getcpuclockid(3) makes it of a pid.
    clock = (~node.hostd.pid << 3) | 2
    begun = time.clock_gettime_ns(clock)
    change()
    time.sleep(_APART)
    return (time.clock_gettime_ns(clock) - begun) / 1e6


def _times(work: Callable[[], object], rounds: int = 20) -> list[float]:
    samples = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begun) * 1000)
    return samples
