"""Reading the mount table: a full one in which few rows matter."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

from hostd.linux.mount_table import MountTable, parse, rows_naming
from tests.bench.figures import Figure
from tests.bench.scale import crowd, mount_foreign
from tests.support.node import Node

_NEEDLES = (b"~empty-dir/container-disks/", b"~empty-dir/hotplug-disks/")


def rows(vms: int = 250, layers: int = 4, foreign: int = 9000) -> Iterator[Figure]:
    """A table of ten thousand rows, of which a tenth matters."""
    with Node() as node:
        node.namespace.call(mount_foreign, node.kubelet, foreign)
        crowd(node, vms, layers)
        table = MountTable(node.namespace.mountinfo)
        kernel = _times(table.read)
        data = table.read()
        ours = _times(lambda: rows_naming(table.read(), *_NEEDLES))
        whole = _times(lambda: parse(table.read()))
        command = [
            "nsenter",
            f"--mount={node.namespace.path}",
            "findmnt",
            "--noheadings",
            "--list",
            "--output",
            "TARGET",
        ]
        peer = _times(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True), 5)
        count, total = len(rows_naming(data, *_NEEDLES)), data.count(b"\n")
        table.close()
    yield Figure(f"the table: {count} of {total} rows found", "ms", ours, "the kernel's part", kernel)
    yield Figure(f"the table: all of {total} rows parsed, for comparison", "ms", whole, "findmnt", peer)


def _times(work: Callable[[], object], rounds: int = 20) -> list[float]:
    samples = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begun) * 1000)
    return samples
