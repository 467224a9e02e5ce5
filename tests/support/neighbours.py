"""Others on the node, who do something again and again while hostd works."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

from tests.support.mountns import MS_BIND, Child, enter, mount
from tests.support.node import Node


def doing(node: Node, step: Callable[[], None], every: float = 0) -> Child:
    """A process on the node that does something again and again."""

    def body(tell: Callable[[object], None]) -> None:
        enter(node.namespace.path)
        tell(None)
        while True:
            step()
            select.select([], [], [], every)

    child = Child(body)
    child.hear()
    return child


def remounting(node: Node, source: bytes, target: bytes) -> Child:
    """Somebody who mounts again every 200 ms what was unmounted, and makes the mountpoint again as well."""
    directory = os.path.isdir(node.outside(source))

    def step() -> None:
        with contextlib.suppress(OSError):
            if directory:
                os.makedirs(target, exist_ok=True)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            if not os.path.samestat(os.stat(source), os.stat(target)):
                mount(source, target, b"", MS_BIND)

    return doing(node, step, 0.2)
