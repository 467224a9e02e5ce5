"""The command line. The man page and the shells' completions are held against it by tests."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hostd import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostd.ctl.session import LocalRun, Run, Session

EPILOG = """\
A VM is named by its launcher pod's UID or the beginning of it, by
namespace/name, by name, or by its VMI's UID. Exit codes: 0 fine, 1 failed,
2 wrong usage, 3 something is blocked or unhealthy. hostctl(1) says more.
"""


class Commands:
    """Sub-commands of one parser; every one takes the common options, before its name or after it."""

    def __init__(self, below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        self._below = below

    def add(self, name: str, run: Run, help: str) -> argparse.ArgumentParser:  # noqa: A002 - argparse's own word
        """A command that `run` carries out."""
        short = help[0].lower() + help[1:].rstrip(".")
        parser = self._below.add_parser(name, help=short, description=help, allow_abbrev=False)
        parser.set_defaults(run=run)
        _common(parser)
        return parser

    def add_local(self, name: str, run: LocalRun, help: str) -> argparse.ArgumentParser:  # noqa: A002 - argparse's word
        """A command that is carried out here, whether hostd can be reached or not."""
        parser = self.add(name, _never, help)
        parser.set_defaults(run=None, run_local=run)
        return parser

    @staticmethod
    def below(parser: argparse.ArgumentParser) -> Commands:
        """Commands below a command, which can do without them."""
        return Commands(parser.add_subparsers(metavar="[COMMAND]", title="commands"))

    @staticmethod
    def vm(parser: argparse.ArgumentParser, *, optional: bool = False, many: bool = False) -> None:
        """The argument that names a VM, or several."""
        nargs = "*" if many else "?" if optional else None
        parser.add_argument(
            "vm", metavar="VM", nargs=nargs, help="pod UID or the beginning of it, namespace/name, name"
        )


def build() -> argparse.ArgumentParser:
    """The whole command line."""
    from hostd.ctl import devices, doctor, helper, hold, holders, layers, metrics, monitor, release, status, vms

    parser = argparse.ArgumentParser(
        prog="hostctl",
        description="Ask hostd about the VMs of this node and their layers, and tell it what to do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _common(parser)
    parser.add_argument("--version", action="version", version=f"hostctl {__version__}")
    commands = Commands(parser.add_subparsers(metavar="COMMAND", title="commands", required=True))
    for module in (status, vms, layers, holders, release, hold, devices, helper, monitor, metrics, doctor):
        module.add(commands)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; what stands behind `--` is `command`. Wrong usage ends the program with 2."""
    # argparse cannot tell a command's own options, nor an optional VM before it, from its own.
    own, command = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parser = build()
    options = parser.parse_args(own)
    if command and not getattr(options, "runs_command", False):
        parser.error("only `hostctl hold` runs a command")
    options.command = command
    return options


async def _never(_: Session, __: argparse.Namespace) -> int:
    raise AssertionError("a local command has no other way to run")


def _common(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: what was said before the command must not be undone by the command's own default.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.add_argument(
        "--bus",
        metavar="ADDRESS",
        default=argparse.SUPPRESS,
        help="the bus (default: DBUS_SYSTEM_BUS_ADDRESS, or the system's)",
    )
