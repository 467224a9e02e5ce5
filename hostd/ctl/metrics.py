"""`hostctl metrics`: Prometheus' text, as hostd writes it into the textfile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostd.ctl.session import FINE
from hostd.errors import NotSupported

if TYPE_CHECKING:
    from argparse import Namespace

    from hostd.ctl.parser import Commands
    from hostd.ctl.session import Session


def add(commands: Commands) -> None:
    """Declares it."""
    commands.add("metrics", run, "Print metrics in Prometheus' text format.")


async def run(session: Session, _: Namespace) -> int:
    """Always fine."""
    text, screen = await session.node.metrics(), session.screen
    if screen.as_json:
        screen.give(as_json(text))
    else:
        screen.text(text)
    return FINE


def as_json(text: str) -> list[dict[str, Any]]:
    """The stable form: a sample each, with its labels. Raises NotSupported where the library is missing."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise NotSupported("--json needs the prometheus_client library: install python3-prometheus-client") from None
    return [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
