"""`hostctl metrics`: how it is now, in Prometheus' text format."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from hostd.client.model import plain
from hostd.core.model import State
from hostd.ctl.session import FINE
from hostd.metrics import Snapshot, render_now

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hostd.client.model import VM, Helper, Layer, Status
    from hostd.ctl.parser import Commands
    from hostd.ctl.session import Session


def add(commands: Commands) -> None:
    """Declares it."""
    commands.add("metrics", run, "Print metrics in Prometheus' text format: what is now, without what was counted.")


async def run(session: Session, _: Namespace) -> int:
    """Always fine."""
    node = session.node
    now = snapshot(await node.status(), await node.list(), await node.layers(), await node.pr_helper.status())
    if session.screen.as_json:
        session.screen.give(as_json(now))
        return FINE
    session.screen.flush()
    sys.stdout.buffer.write(render_now(now))
    return FINE


def snapshot(status: Status, vms: Sequence[VM], layers: Sequence[Layer], helper: Helper) -> Snapshot:
    """Out of what the bus tells."""
    blocked = [vm.exited_usec / 1e6 for vm in vms if vm.state == State.BLOCKED and vm.exited_usec]
    return Snapshot(
        version=status.version,
        mode=status.mode,
        vms=Counter(vm.state for vm in vms),
        layers=Counter((layer.kind, layer.state) for layer in layers),
        attempts=sum(layer.attempts for layer in layers if not layer.gone),
        blocked_since=min(blocked, default=None),
        unhealthy=tuple(part for part, _ in status.health),
        helper=helper,
    )


def as_json(now: Snapshot) -> dict[str, object]:
    """The stable form."""
    return {
        "version": now.version,
        "mode": now.mode,
        "vms": dict(now.vms),
        "layers": [{"kind": kind, "state": state, "count": count} for (kind, state), count in now.layers.items()],
        "attempts": now.attempts,
        "blocked_since": now.blocked_since,
        "unhealthy": list(now.unhealthy),
        "pr_helper": plain(now.helper),
    }
