"""One target unmounted as a worker does it, in the process that calls."""

from __future__ import annotations

from hostd.linux.umount import Neighbours, Outcome


def unmount(root_fd: int, relative: bytes, *, lazy: bool, block_node: bool) -> Outcome:
    """Leaves the process in "/"."""
    alone = Neighbours(root_fd)
    try:
        return alone.unmount(relative, lazy=lazy, block_node=block_node)
    finally:
        alone.leave()
