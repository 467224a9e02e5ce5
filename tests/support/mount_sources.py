"""The two sources of mounts, for tests that hold on both."""

from __future__ import annotations

import pytest

from hostd.core.mount_source import ChangedRows, MountSource, WholeTable, open_source
from hostd.linux.mount_events import MountEvents
from hostd.linux.mount_table import MountTable
from hostd.linux.statmount import MountRows
from tests.support.mountns import MountNamespace


def kernel_tells() -> bool:
    """Whether this kernel tells which mounts change (Linux 6.15), and this process may know."""
    try:
        with MountRows("/proc/self/ns/mnt") as rows, MountEvents(rows.fileno()):
            return True
    except OSError:
        return False


needs_mount_events = pytest.mark.skipif(not kernel_tells(), reason="this kernel has no mount events (Linux 6.15)")


def changed_rows(namespace: MountNamespace) -> MountSource:
    """Rows that the kernel tells of; the test is skipped where it does not."""
    if not kernel_tells():
        pytest.skip("this kernel has no mount events (Linux 6.15)")
    source = open_source(namespace.mountinfo, namespace.path)
    assert isinstance(source, ChangedRows)
    return source


def whole_table(namespace: MountNamespace) -> MountSource:
    """The whole table each time."""
    return WholeTable(MountTable(namespace.mountinfo))


SOURCES = {"changed rows": changed_rows, "whole table": whole_table}
