"""What a command works with: hostd, the screen, and the exit codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostd.errors import HostdError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable

    from hostd.client.node import Node
    from hostd.ctl.screen import Screen

#: Exit codes. A node problem detector and scripts rely on them.
FINE, FAILED, USAGE, TROUBLE = 0, 1, 2, 3


class WrongUsage(HostdError):
    """Options that do not go together, as argparse cannot say it."""


@dataclass(frozen=True, slots=True)
class Session:
    """One run of hostctl."""

    node: Node
    screen: Screen


if TYPE_CHECKING:
    Run = Callable[[Session, Namespace], Awaitable[int]]
    #: Gets the screen, the bus's address and the options.
    LocalRun = Callable[[Screen, str | None, Namespace], Awaitable[int]]
