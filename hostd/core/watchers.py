"""Watching processes that are not a VM's QEMU, and keeping pidfds over a restart."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from hostd.linux.pidfd import Identity, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hostd.core.model import Layer

log = logging.getLogger(__name__)

#: Holders of one layer that are waited for: any one's death is reason enough to try again.
_MOST = 16


class HolderWatch:
    """Calls `freed` when a process that held a layer, or a worker that hung in it, is dead."""

    def __init__(self, freed: Callable[[str, bytes], None]) -> None:
        self._freed = freed
        self._watched: dict[str, dict[bytes, list[Process]]] = {}

    def watch(self, pod_uid: str, layers: Iterable[Layer]) -> None:
        """Waits for the holders of these layers of a VM, and for no others of it."""
        self._drop(pod_uid)
        for layer in layers:
            if layer.worker is not None and not self._watch_one(pod_uid, layer, layer.worker.pid, layer.worker):
                asyncio.get_running_loop().call_soon(self._freed, pod_uid, layer.target.path)
            pids = {holder.pid for holder in layer.holders if holder.pid > 0}
            living = [self._watch_one(pod_uid, layer, pid) for pid in sorted(pids)[:_MOST]]
            if living and not any(living):  # they all ended since they were seen
                asyncio.get_running_loop().call_soon(self._freed, pod_uid, layer.target.path)

    def _watch_one(self, pod_uid: str, layer: Layer, pid: int, meant: Identity | None = None) -> bool:
        """Whether the process lives and is waited for."""
        try:
            process = Process.open(pid)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # no descriptor is left: the timer tries again
        if meant is not None and not process.identity.same_as(meant):
            process.close()
            return False
        path = layer.target.path
        self._watched.setdefault(pod_uid, {}).setdefault(path, []).append(process)
        asyncio.get_running_loop().add_reader(process.fd, self._on_death, pod_uid, path, process)
        return True

    def _on_death(self, pod_uid: str, path: bytes, process: Process) -> None:
        asyncio.get_running_loop().remove_reader(process.fd)
        process.close()
        self._watched[pod_uid][path].remove(process)
        self._freed(pod_uid, path)

    def _drop(self, pod_uid: str) -> None:
        for processes in self._watched.pop(pod_uid, {}).values():
            for process in processes:
                asyncio.get_running_loop().remove_reader(process.fd)
                process.close()

    def close(self) -> None:
        """Waits for nobody any more."""
        for pod_uid in list(self._watched):
            self._drop(pod_uid)


class Keeping(Protocol):
    """What a service manager does for descriptors (see `hostd.notify`)."""

    def store(self, name: str, fd: int) -> None:
        """Keeps a descriptor under a name."""
        ...

    def drop(self, name: str) -> None:
        """Closes what is kept under a name."""
        ...


class FdStore:
    """The pidfds of followed QEMUs in the service manager's store: over a restart no pid can be mistaken, and how a
    QEMU ended meanwhile is still known."""

    def __init__(self, manager: Keeping) -> None:
        self._manager = manager
        self._names: dict[Identity, str] = {}

    def keep(self, pod_uid: str, process: Process) -> None:
        """Stores a QEMU's pidfd, unless it came from there."""
        identity = process.identity
        if identity in self._names:
            return
        name = f"{_PREFIX}{pod_uid}.{identity.pid}-{identity.start_time}"
        try:
            self._manager.store(name, process.fd)
            self._names[identity] = name
        except OSError as error:
            log.warning("process %d of pod %s is followed, but not over a restart: %s", identity.pid, pod_uid, error)

    def drop(self, identity: Identity) -> None:
        """A QEMU is dead or forgotten, and its pidfd not needed any more."""
        name = self._names.pop(identity, None)
        if name is not None:
            self._manager.drop(name)

    def adopt(self, stored: Iterable[tuple[str, int]]) -> dict[str, list[Process]]:
        """What an earlier hostd stored, by pod. What is no pidfd of ours is closed, here and there."""
        found: dict[str, list[Process]] = {}
        for name, fd in stored:
            pod_uid = name.removeprefix(_PREFIX).rpartition(".")[0] if name.startswith(_PREFIX) else ""
            try:
                process = Process.adopt(fd)
            except OSError:
                self._manager.drop(name)
                continue
            if pod_uid:
                self._names[process.identity] = name
                found.setdefault(pod_uid, []).append(process)
            else:
                process.close()
                self._manager.drop(name)
        return found


#: Names in the store; the pid and its start time make them unique, and are never trusted.
_PREFIX = "qemu."
