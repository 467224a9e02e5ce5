"""`hostctl doctor`: what of this node could be better for hostd, and what to do. It works without hostd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.ctl import check_bus, check_host, check_parts
from hostd.ctl.findings import Finding, Level
from hostd.ctl.screen import Cell, Style
from hostd.ctl.session import FINE, TROUBLE
from hostd.ctl.words import count

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hostd.ctl.parser import Commands
    from hostd.ctl.screen import Screen

_MARKS = {
    Level.GOOD: Cell("ok     ", Style.GOOD),
    Level.NOTE: Cell("note   ", Style.STRONG),
    Level.WARNING: Cell("warning", Style.WAIT),
    Level.BAD: Cell("BAD    ", Style.BAD),
}


def add(commands: Commands) -> None:
    """Declares it."""
    parser = commands.add_local("doctor", run, "Check this node, and say what could be better and how.")
    parser.add_argument(
        "--config", metavar="FILE", help="look at this configuration (default: that of the hostd that runs)"
    )


async def run(screen: Screen, address: str | None, options: Namespace) -> int:
    """Exit code 3 where something does not work."""
    running = None if options.config else await check_bus.config_files(address)
    settings, first = check_parts.configured(options.config, running)
    findings = [first, *check_host.check(settings.host), *check_parts.check(settings)]
    findings += [finding async for finding in check_bus.check(address)]
    if screen.as_json:
        screen.give(findings)
    else:
        show(screen, findings)
    return TROUBLE if any(finding.level is Level.BAD for finding in findings) else FINE


def show(screen: Screen, findings: Sequence[Finding]) -> None:
    """A line for what is, one for what to do."""
    for finding in findings:
        screen.line(_MARKS[finding.level], f"  {finding.area:<13}  {finding.what}")
        if finding.to_do:
            screen.line(" " * 24, f"To do: {finding.to_do}")
    bad = sum(finding.level is Level.BAD for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    screen.line()
    screen.line(f"{count(len(findings), 'finding')}: {bad} bad, {count(warnings, 'warning')}.")
