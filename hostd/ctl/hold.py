"""`hostctl hold`: clean-up of a VM waits, while a command runs or for good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

from hostd.core.model import Policy
from hostd.ctl.names import find_vm
from hostd.ctl.session import FINE, WrongUsage
from hostd.errors import HostdError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from hostd.client.model import VM
    from hostd.ctl.parser import Commands
    from hostd.ctl.session import Session

#: As a shell says it of a command that a signal ended.
_SIGNALLED = 128


def add(commands: Commands) -> None:
    """Declares it."""
    parser = commands.add("hold", run, "Keep layers mounted while COMMAND runs, or until interrupted.")
    commands.vm(parser, optional=True)
    parser.add_argument("--all", action="store_true", help="all VMs")
    parser.add_argument("--why", default="", metavar="TEXT", help="the reason that others see")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="set the VM's policy to keep and return: it lasts until --end")
    how.add_argument("--end", action="store_true", help="set the VM's policy to clean again and return")
    parser.usage = (
        "hostctl hold [-h] [--json] [--bus ADDRESS] (VM | --all) [--why TEXT]\n"
        "                    [--keep | --end | -- COMMAND ...]"
    )
    parser.set_defaults(runs_command=True)


async def run(session: Session, options: Namespace) -> int:
    """The command's exit code, where there is one."""
    if bool(options.vm) == bool(options.all):
        raise WrongUsage("name one VM, or say --all")
    vm = find_vm(await session.node.list(), options.vm) if options.vm else None
    if options.keep or options.end:
        return await _set_policy(session, vm, Policy.KEEP if options.keep else Policy.CLEAN, options)
    why = options.why or (f"runs {options.command[0]}" if options.command else "asked for with hostctl hold")
    async with session.node.inhibit(vm.pod_uid if vm else "", who=_who(), why=why):
        if options.command:
            return await _run(options.command)
        interrupted = _interrupted()
        if session.screen.as_json:
            session.screen.record({"pod_uid": vm.pod_uid if vm else "", "why": why})
        else:
            session.screen.line(f"Clean-up of {vm or 'all VMs'} is held until this is interrupted.")
        session.screen.flush()
        await interrupted.wait()
    return FINE


async def _set_policy(session: Session, vm: VM | None, policy: Policy, options: Namespace) -> int:
    if vm is None or options.command:
        raise WrongUsage("--keep and --end set the policy of one VM, and run nothing")
    await session.node.set_policy(vm.pod_uid, policy)
    if session.screen.as_json:
        session.screen.give(await session.node.get(vm.pod_uid))
    elif policy is Policy.KEEP:
        session.screen.line(f"{vm}: its layers are kept until `hostctl hold --end {vm.pod_uid}`.")
    else:
        session.screen.line(f"{vm}: its layers are cleaned up when it has ended.")
    return FINE


def _who() -> str:
    user = os.environ.get("SUDO_USER") or os.environ.get("USER") or str(os.getuid())
    return f"hostctl ({user}, process {os.getpid()})"


async def _run(command: list[str]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*command)
    except FileNotFoundError:
        raise HostdError(f"{command[0]} is not found") from None
    except OSError as error:
        raise HostdError(f"{command[0]} cannot be run: {error.strerror}") from None
    # The terminal sends its interrupts to the command, too; it decides when it ends.
    with _deaf():
        code = await process.wait()
    return code if code >= 0 else _SIGNALLED - code


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _interrupted() -> asyncio.Event:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end.set)
    return end
