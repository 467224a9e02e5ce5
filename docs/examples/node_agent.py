"""A node agent that acts when a VM powers itself off: python3 node_agent.py [OPTION…] [-- HOOK [ARGUMENT…]]

It watches hostd. When a VM's QEMU ends by itself with status 0 (ExitReason `poweroff`), it waits for a set time, and
then prints a line, or runs HOOK with namespace, name, VMI UID, pod UID and reason behind its arguments, and in its
environment. It does neither where the VM is to be skipped, runs again, or was acknowledged meanwhile.

It is written to be copied and changed: what it decides is in `Agent._why_not`, what it does in `Agent._act`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field

import hostd.client as hostd
from hostd.errors import HostdError

#: Between two attempts to reach a bus that is not there yet (s).
BUS_PAUSE = 2.0
#: For a hook to be gone after SIGKILL (s); one that hangs in the kernel is left behind.
KILL_PAUSE = 5.0
#: What was done is remembered for at least so long after it (s); hostd has forgotten the VM long before.
REMEMBER = 86_400
ALIVE = (hostd.State.PENDING, hostd.State.RUNNING)


@dataclass
class Options:
    """What the command line says."""

    after: float = 30.0
    timeout: float = 60.0
    hooks: int = 4
    skip: list[str] = field(default_factory=list)
    skip_file: str = ""
    state: str = ""
    hook: list[str] = field(default_factory=list)


class SkipList:
    """Patterns of namespace/name, pod UIDs and VMI UIDs, given on the command line and in a file that may change."""

    def __init__(self, patterns: list[str], path: str) -> None:
        self._given = patterns
        self._path = path
        self._read: list[str] = []

    def match(self, vm: hostd.VM) -> str:
        """The pattern that a VM matches, or nothing."""
        names = [name for name in (vm.full_name, vm.pod_uid, vm.vmi_uid) if name]
        patterns = [*self._given, *self._of_file()]
        return next((each for each in patterns for name in names if fnmatch.fnmatchcase(name, each)), "")

    def _of_file(self) -> list[str]:
        """The file's lines as they are now; those of before where it cannot be read. No file: nobody is skipped."""
        if not self._path:
            return []
        try:
            with open(self._path, encoding="utf-8") as file:
                lines = [line.partition("#")[0].strip() for line in file]
            self._read = [line for line in lines if line]
        except FileNotFoundError:
            self._read = []
        except (OSError, ValueError) as error:
            report(f"{self._path} cannot be read, so what it said before counts: {error}")
        return self._read


class Memory:
    """Which deaths were acted on, so that none is twice; in a file, where one is named, also after a restart."""

    def __init__(self, path: str) -> None:
        """Raises OSError and ValueError for a file that cannot be used."""
        self._path = path
        self._done: dict[str, dict[str, object]] = {}
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self._done = dict(json.load(file)["done"])
        for key in [key for key, how in self._done.items() if how["what"] == "begun"]:
            report(f"{key.split()[0]}: the agent ended while its hook ran; it is not run again")
            self.note(key, "interrupted")

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def note(self, key: str, what: str) -> None:
        """Remembers what was done; on disk before this returns."""
        self._done[key] = {"what": what, "at": time.time()}
        self._save()

    def forget_but(self, known: set[str]) -> None:
        """Forgets what is old and of VMs that hostd does not know any more."""
        old = time.time() - REMEMBER
        gone = [key for key, how in self._done.items() if key not in known and float(str(how["at"])) < old]
        for key in gone:
            del self._done[key]
        if gone:
            self._save()

    def _save(self) -> None:
        if not self._path:
            return
        try:
            new = self._path + ".new"
            with open(new, "w", encoding="utf-8") as file:
                json.dump({"done": self._done}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as error:
            report(f"{self._path} cannot be written; after a restart, a VM may be acted on twice: {error}")


class Agent:
    """Use `watch`, and `close` in the end."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._skip = SkipList(options.skip, options.skip_file)
        self._memory = Memory(options.state)
        #: What hostd knows, by pod UID; true while `_current` is set.
        self._vms: dict[str, hostd.VM] = {}
        self._current = asyncio.Event()
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(options.hooks)

    async def watch(self) -> None:
        """For ever; raises AccessDenied."""
        async with contextlib.AsyncExitStack() as stack:
            node = await connect(stack)
            async for event in node.watch():
                self._take(event)

    def _take(self, event: hostd.Event) -> None:
        match event:
            case hostd.Resync(vms=vms):
                before, self._vms = self._vms, {vm.pod_uid: vm for vm in vms}
                for pod_uid in before.keys() - self._vms.keys():
                    self._forgotten(before[pod_uid])
                self._memory.forget_but({life(vm) for vm in vms})
                self._current.set()
                for vm in vms:
                    self._consider(vm)
            case hostd.Lost(what=what):
                self._current.clear()
                report(f"{what} is gone; waiting for it")
            case hostd.VMRemoved(vm=vm):
                self._vms.pop(vm.pod_uid, None)
                self._forgotten(vm)
            case hostd.VMNew(vm=vm) | hostd.VMChanged(vm=vm) | hostd.VMExited(vm=vm):
                self._vms[vm.pod_uid] = vm
                self._consider(vm)

    def _consider(self, vm: hostd.VM) -> None:
        """Every way to learn of a death leads here, and each death has one task."""
        key = life(vm)
        known = key in self._waiting or key in self._running or key in self._memory
        if vm.state in ALIVE or vm.exit_reason != hostd.ExitReason.POWEROFF or known:
            return
        task = asyncio.create_task(self._see_to(key, vm), name=f"the end of {vm}")
        self._waiting[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _forgotten(self, vm: hostd.VM) -> None:
        """Decided at once: hostd may find the pod anew, as one that never had a QEMU."""
        for key, task in self._waiting.items():
            if key.startswith(vm.pod_uid):
                task.cancel()
                self._leave(key, vm, "it was acknowledged, or hostd has forgotten it (cleanup.retain)")

    def _leave(self, key: str, vm: hostd.VM, why: str) -> None:
        report(f"{vm}: powered off, and left alone: {why}")
        self._memory.note(key, "skipped")

    async def _see_to(self, key: str, vm: hostd.VM) -> None:
        # The clock on the wall may have been set since: the wait is never longer than it was meant.
        passed = time.time() - vm.exited_usec / 1e6
        await asyncio.sleep(min(max(self._options.after - passed, 0.0), self._options.after))
        async with self._slots:
            # While hostd is away nobody knows whether the VM runs again.
            await self._current.wait()
            if why := self._why_not(key, vm):
                self._leave(key, vm, why)
                return
            # From here on it is not tried again: better no hook for this death than two.
            self._running[key] = self._waiting.pop(key)
            self._memory.note(key, "begun")
            self._memory.note(key, await self._act(vm))

    def _why_not(self, key: str, vm: hostd.VM) -> str:
        """Why nothing is done about this death, or nothing."""
        now = self._vms.get(vm.pod_uid, vm)
        if now.state in ALIVE or life(now) != key:
            return "it runs again in the same pod"
        for other in self._vms.values():
            again = other.state in ALIVE or other.started_usec > vm.exited_usec
            if vm.name and other.full_name == vm.full_name and other.pod_uid != vm.pod_uid and again:
                return f"it runs again, or ran, in pod {other.pod_uid}"
        pattern = self._skip.match(vm)
        return f"to be skipped ({pattern})" if pattern else ""

    async def _act(self, vm: hostd.VM) -> str:
        """Prints or runs the hook; says what came of it."""
        facts = {
            "NAMESPACE": vm.namespace,
            "NAME": vm.name,
            "VMI_UID": vm.vmi_uid,
            "POD_UID": vm.pod_uid,
            "REASON": vm.exit_reason,
        }
        if not self._options.hook:
            print(f"{vm.full_name or '-'} {vm.exit_reason} vmi={vm.vmi_uid or '-'} pod={vm.pod_uid}", flush=True)
            return "printed"
        environment = {**os.environ, **{f"HOSTD_{name}": value for name, value in facts.items()}}
        result = await run([*self._options.hook, *facts.values()], environment, self._options.timeout)
        if result:
            report(f"{vm}: the hook {result}")
        return result or "done"

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        self._waiting.pop(key, None)
        self._running.pop(key, None)
        if not task.cancelled() and (error := task.exception()):
            report(f"{task.get_name()}: this should not happen: {error!r}")

    async def close(self) -> None:
        """Lets hooks that run come to their end; the rest is found again by the next agent."""
        for task in self._waiting.values():
            task.cancel()
        await asyncio.gather(*self._waiting.values(), *self._running.values(), return_exceptions=True)


async def run(command: list[str], environment: dict[str, str], limit: float) -> str:
    """Runs a hook in a process group of its own; what went wrong with it, or nothing."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        return f"cannot be run: {error}"
    try:
        async with asyncio.timeout(limit):
            status = await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_PAUSE):
                await process.wait()
        return f"was killed: it did not end within {limit:g} s"
    if status < 0:
        return f"died of signal {-status}"
    return f"failed with status {status}" if status else ""


async def connect(stack: contextlib.AsyncExitStack) -> hostd.Node:
    """The node, once there is a bus; later the client waits for it by itself."""
    told = False
    while True:
        try:
            return await stack.enter_async_context(hostd.connect())
        except hostd.Unreachable as error:
            if not told:
                report(f"waiting: {error}")
            told = True
        await asyncio.sleep(BUS_PAUSE)


def life(vm: hostd.VM) -> str:
    """What one run of a VM's QEMU is called; a QEMU that is started anew in the same pod is another."""
    return f"{vm.pod_uid} {vm.started_usec} {vm.leader}"


def report(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> Options:
    """The options; what stands behind `--` is the hook. Wrong usage ends the program with 2."""
    own, hook = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, hook = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="node_agent.py",
        usage="node_agent.py [OPTION…] [-- HOOK [ARGUMENT…]]",
        description="Print a line, or run HOOK, when a VM of this node has powered itself off.",
    )
    parser.add_argument("--after", type=seconds, default=30.0, metavar="SECONDS", help="how long after it (30)")
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="SECONDS", help="how long a hook may run (60)")
    parser.add_argument("--hooks", type=positive, default=4, metavar="N", help="how many may run at once (4)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="VMs to leave alone (ns/name, * ?)"
    )
    parser.add_argument("--skip-file", default="", metavar="FILE", help="such patterns, a line each, read each time")
    parser.add_argument("--state", default="", metavar="FILE", help="remember here what was done, over restarts")
    options = Options(**vars(parser.parse_args(own)), hook=hook)
    if "--" in arguments and not hook:
        parser.error("no hook behind --")
    return options


def seconds(text: str) -> float:
    """A time that is none of nan, inf, and below 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def positive(text: str) -> int:
    """A number from 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


async def work(options: Options) -> int:
    """Until SIGTERM or SIGINT; the exit code."""
    try:
        agent = Agent(options)
    except (OSError, ValueError, LookupError, TypeError) as error:
        report(f"{options.state} cannot be used, so what was done is not known ({error!r}); remove it to begin anew")
        return 1
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await agent.watch()
    except HostdError as error:
        report(str(error))
        return 1
    finally:
        await agent.close()
    return 0


async def main(options: Options) -> int:
    """The whole program."""
    working = asyncio.ensure_future(work(options))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    try:
        return await working
    except asyncio.CancelledError:
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
