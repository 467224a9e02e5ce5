"""The daemon: wires the parts, in the order in which they may fail.

    lock → configuration → workers → state → stored descriptors → look → decide → clean what is due → bus → READY=1

The core does not need the bus: it comes when it comes, and clean-up goes on without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from hostd import __version__, config, notify
from hostd.bus.log_control import LogControl
from hostd.bus.server import BusServer, NameTaken
from hostd.bus.server import State as BusState
from hostd.core import start
from hostd.core.discovery import Discovery
from hostd.core.inhibitors import Inhibitors
from hostd.core.keeper import Keeper
from hostd.core.model import State
from hostd.core.mount_source import open_source
from hostd.core.mounts import NodeMounts
from hostd.core.pod_mounts import KubeletRoot
from hostd.core.qemus import Qemus
from hostd.core.registry import Registry
from hostd.core.requests import Requests
from hostd.core.service import VMRemoved
from hostd.core.store import Store
from hostd.core.survey import Survey
from hostd.core.watchers import FdStore
from hostd.devices.claims_store import ClaimsStore
from hostd.devices.service import DeviceKeeper
from hostd.devices.sysfs import Sysfs
from hostd.devices.udev import Database
from hostd.errors import ConfigError, HostdError
from hostd.kubevirt.pod_cgroup import PodCgroups
from hostd.linux.pool import PoolExhausted, WorkerError, WorkerPool
from hostd.log import Message, event, setup
from hostd.metrics import Metrics, Textfile
from hostd.prhelper.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from hostd.config import Config

log = logging.getLogger(__name__)

#: Exit codes: configuration that cannot be used, as sysexits.h has it; another instance runs.
EXIT_FAILED, EXIT_RUNNING, EXIT_CONFIG = 1, 75, 78
#: How long what is queued for the bus may take at the end (seconds).
_GOODBYE_SECONDS = 2.0
#: How long the status line may lag behind (seconds).
_STATUS_SECONDS = 0.25
#: How often the kubelet's root is looked for while it does not exist (seconds).
_ROOT_SECONDS = 5.0


class AlreadyRunning(HostdError):
    """Another hostd has the runtime directory or the bus name."""


class Daemon:
    """One hostd, from its configuration to its end."""

    def __init__(self, settings: Config, config_file: str | None) -> None:
        self._config = settings
        self._config_file = config_file
        self._notifier = notify.Notifier()
        self._stop = asyncio.Event()
        self._end = contextlib.AsyncExitStack()
        self._devices: DeviceKeeper | None = None
        self._helper: Supervisor | None = None
        self._server: BusServer | None = None
        self._status_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises HostdError or OSError where it cannot begin."""
        async with self._end:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
            requests = await self._start_core()
            loop.add_signal_handler(signal.SIGHUP, lambda: self.keeper.start_task(self._on_hangup(requests), "reload"))
            await self._start_helper(requests)
            bus = await self._start_bus(requests)
            self._start_textfile(requests, bus)
            # What is there now stays: a full collection need not look at all of it each time, with all else waiting.
            gc.freeze()
            self._notifier.ready()
            log.info(
                "hostd %s is ready: %d VMs, mode %s", __version__, len(self.keeper.registry), requests.mode,
                extra=event(Message.STARTED, version=__version__, mode=requests.mode),
            )  # fmt: skip
            await self._work(requests, bus)
            self._notifier.stopping()
            log.info("hostd stops; mounts and VMs stay as they are", extra=event(Message.STOPPED))

    async def _start_core(self) -> Requests:
        host = self._config.host
        runtime_dir = os.fsdecode(host.runtime_dir)
        self._end.callback(os.close, lock(runtime_dir))
        stored = notify.stored_fds()
        pool = WorkerPool(host.mount_namespace, host.kubelet_root, notes=os.path.join(runtime_dir, "workers"))
        self._end.push_async_callback(pool.close)
        await pool.start()
        root = KubeletRoot(pool.root or os.path.normpath(host.kubelet_root), found=pool.root is not None)
        store = Store(runtime_dir)
        self._end.callback(store.close)
        fds = FdStore(self._notifier)
        # The keeper is made of these, and they wake it: hence the lambdas.
        source = open_source(pool.mountinfo_path, pool.namespace_path)
        mounts = NodeMounts(source, root, lambda pods: self.keeper.on_mounts(pods))  # noqa: PLW0108
        cgroups = PodCgroups(host.cgroup_root)
        self.keeper = Keeper(
            self._config,
            Registry(store),
            Qemus(cgroups, lambda uid, dead: self.keeper.on_death(uid, dead), lambda uid: self.keeper.wake(uid)),  # noqa: PLW0108
            mounts,
            pool,
            Survey(pool, root, host.kubevirt_private),
            Inhibitors(runtime_dir, lambda ended: self.keeper.on_inhibitor_end(ended)),  # noqa: PLW0108
            fds,
        )
        self._end.push_async_callback(self.keeper.close)
        discovery = Discovery(cgroups, host.cgroup_root, self.keeper.on_pod)
        self._end.callback(discovery.close)
        # Watched before it is looked at, so that nothing comes unseen in between.
        discovery.start()
        mounts.start()
        requests = Requests(self.keeper, root, lambda: config.load(self._config_file))
        requests.complaints["discovery"] = lambda: discovery.error
        self.metrics = Metrics(
            requests,
            workers_hung=lambda: len(pool.hung),
            helper=lambda: None if self._helper is None else self._helper.status,
        )
        # Before the first look, which may find deaths.
        self._end.callback(self.metrics.listen())
        requests.problems |= await start.start(self.keeper, root, fds, stored)
        self._start_devices(requests)
        if not root.found:
            self.keeper.start_task(self._await_root(root), "wait for the kubelet's root")
        return requests

    def _start_devices(self, requests: Requests) -> None:
        """After the core has looked: what a VM that is not known has is as good as let go. The core goes on without."""
        registry = self.keeper.registry
        try:
            store = ClaimsStore(os.fsdecode(self._config.host.state_dir))
            on_exit = lambda: self.keeper.config.devices.on_exit  # noqa: E731 - a reload changes it
            devices = DeviceKeeper(store, Sysfs(namer=Database()), on_exit, self._publish_devices)
            devices.start(registry)
        except OSError as error:
            requests.problems["devices"] = f"claims on devices are not kept: {error}"
            log.error("claims on devices are not kept: %s", error)  # noqa: TRY400 - the sentence says it all
            return
        self._end.callback(devices.close)
        self._end.callback(
            registry.subscribe(
                lambda what: devices.on_vm_removed(what.vm) if isinstance(what, VMRemoved) else devices.on_vm(what.vm)
            )
        )
        requests.problems |= devices.problems
        self._devices = devices

    async def _start_helper(self, requests: Requests) -> None:
        """qemu-pr-helper's supervisor; the core goes on without. Helper and clients do not notice its end."""
        host, metrics = self._config.host, self.metrics
        helper = Supervisor(
            self._config.pr_helper, host.state_dir, host.runtime_dir,
            on_probe=lambda answered: metrics.probed(answered=answered),
        )  # fmt: skip
        try:
            await helper.start()
        except OSError as error:
            requests.problems["pr-helper"] = f"qemu-pr-helper is not supervised: {error}"
            log.error("qemu-pr-helper is not supervised: %s", error)  # noqa: TRY400 - the sentence says it all
            return
        self._end.push_async_callback(helper.close)
        requests.reloaded = lambda new: helper.reload(new.pr_helper)
        self._helper = helper

    def _publish_devices(self, pod_uid: str, names: tuple[str, ...]) -> None:
        vm = self.keeper.registry.get(pod_uid)
        if vm is not None and vm.devices != names:
            self.keeper.conclude(vm)
            vm.devices = names
            self.keeper.registry.commit(vm)

    async def _await_root(self, root: KubeletRoot) -> None:
        """The kubelet may be installed after hostd: its directory is looked for until it is there."""
        log.warning("%s does not exist yet; waiting for the kubelet", os.fsdecode(root.path))
        while (found := await self._find_root()) is None:  # noqa: ASYNC110 - nothing tells of its coming
            await asyncio.sleep(_ROOT_SECONDS)
        root.path, root.found = found, True
        self.keeper.mounts.sort_again()
        while not await self._looked_around():  # noqa: ASYNC110 - nothing tells when it can be
            await asyncio.sleep(_ROOT_SECONDS)
        self.keeper.wake_all()

    async def _looked_around(self) -> bool:
        try:
            await start.look_around(self.keeper)
        except OSError as error:  # no descriptor is left, say; nobody else would look at what was there before the root
            log.warning("the node cannot be looked at, which is tried again: %s", error)
            return False
        return True

    async def _find_root(self) -> bytes | None:
        try:
            return await self.keeper.pool.refresh()
        except (WorkerError, PoolExhausted, OSError) as error:  # it may hang today and answer tomorrow
            log.debug("the kubelet's root cannot be looked for: %s", error)
            return None

    async def _start_bus(self, requests: Requests) -> BusServer:
        bus = BusServer(
            requests, devices=self._devices, helper=self._helper, log_control=LogControl(), metrics=self.metrics.render
        )
        self._server = bus
        self._bus = asyncio.create_task(bus.run(), name="bus")
        self._end.push_async_callback(_end_bus, bus, self._bus)
        self._bus.add_done_callback(lambda _: self._stop.set())
        await self._first_of(bus.settled(), self._stop.wait(), asyncio.shield(self._bus))
        self._raise_if_name_taken()
        if bus.connected:
            self.metrics.bus_connected()
        bus.on_state = lambda state: self._on_bus_state(state, bus)
        return bus

    def _start_textfile(self, requests: Requests, bus: BusServer) -> None:
        if (path := self._config.metrics.textfile) is None:
            return
        textfile = Textfile(path, self.metrics, on_trouble=lambda _: bus.refresh())
        requests.complaints["metrics"] = lambda: textfile.trouble
        textfile.start()
        self._end.callback(textfile.close)
        if self._helper is not None:
            self._end.callback(self._helper.subscribe(lambda: self.metrics.changed()))  # noqa: PLW0108 - it changes

    def _on_bus_state(self, state: BusState, bus: BusServer) -> None:
        self._say_status_soon(bus)
        if state is BusState.READY:
            self.metrics.bus_connected()

    @staticmethod
    async def _first_of(*awaitables: Awaitable[object]) -> None:
        """Waits until one of them is done, whatever comes of it."""
        futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    def _raise_if_name_taken(self) -> None:
        if self._bus.done():
            try:
                self._bus.result()
            except NameTaken as error:
                raise AlreadyRunning(str(error)) from None

    async def _work(self, requests: Requests, bus: BusServer) -> None:
        """Tells systemd how things are until it is time to stop. The loop that feeds the watchdog is the one that
        does the work: when it is stuck, so is this."""
        period = notify.watchdog_usec()
        unsubscribe = requests.subscribe(lambda _: self._say_status_soon(bus))
        self._say_status(bus)
        while not self._stop.is_set():
            if period:
                self._notifier.alive()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period / 2e6 if period else None):
                    await self._stop.wait()
        unsubscribe()
        self._raise_if_name_taken()

    def _say_status_soon(self, bus: BusServer) -> None:
        """One line for all events of a moment: counting costs something for each VM."""
        if self._status_timer is None:
            self._status_timer = asyncio.get_running_loop().call_later(_STATUS_SECONDS, self._say_status, bus)

    def _say_status(self, bus: BusServer) -> None:
        self._status_timer = None
        vms = list(self.keeper.registry)
        count = {state: sum(vm.state is state for vm in vms) for state in State}
        parts = [f"{number} {state}" for state, number in count.items() if number]
        trouble = "" if bus.connected else "; no bus"
        self._notifier.status((", ".join(parts) if parts else "no VMs") + trouble)

    async def _on_hangup(self, requests: Requests) -> None:
        self._notifier.reloading()
        try:
            await requests.reload()
            if self._server is not None:
                self._server.refresh()
            log.info("configuration read again: mode %s", requests.mode)
        except HostdError as error:
            log.error("configuration not changed: %s", error)  # noqa: TRY400 - the sentence says it all
        self._notifier.ready()


async def _end_bus(bus: BusServer, task: asyncio.Task[None]) -> None:
    bus.stop()
    await asyncio.wait({task}, timeout=_GOODBYE_SECONDS)
    task.cancel()


def lock(runtime_dir: str) -> int:
    """The lock of this runtime directory: one hostd at a time, with a bus or without. Raises AlreadyRunning."""
    os.makedirs(runtime_dir, mode=0o755, exist_ok=True)
    path = os.path.join(runtime_dir, "lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyRunning(f"hostd runs already (process {owner} holds {path}); stop that one first") from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hostd", description="Unmounts what was mounted for a KubeVirt VM when its QEMU dies.", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="read this file alone, instead of /usr/lib, /etc and drop-ins")
    parser.add_argument("--check-config", action="store_true", help="check the configuration, say so, and exit")
    parser.add_argument("--debug", action="store_true", help="log what is looked at, too")
    parser.add_argument("--version", action="version", version=f"hostd {__version__}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program `hostd`."""
    chosen = parse(sys.argv[1:] if arguments is None else arguments)
    setup(logging.DEBUG if chosen.debug else logging.INFO)
    try:
        settings = config.load(chosen.config)
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    if chosen.check_config:
        sys.stdout.write("the configuration is fine: " + (", ".join(settings.sources) or "defaults") + "\n")
        return 0
    try:
        asyncio.run(Daemon(settings, chosen.config).run())
    except AlreadyRunning as error:
        log.critical("%s", error)
        return EXIT_RUNNING
    except (HostdError, OSError) as error:
        log.critical("hostd cannot run: %s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
