"""What only a worker may look at: directories and files below the kubelet's root, and command lines.

Each of these can hang (a dead file system, a process that holds its own memory map), so a worker does it, and a look
that does not come back costs that look, not the daemon. Nothing here raises for what a pod did: what cannot be seen is
not there yet, and is logged.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hostd.errors import NotATarget
from hostd.kubevirt import records
from hostd.kubevirt.pods import HOTPLUG_SOCKET, empty_dir
from hostd.kubevirt.qemu import Guest, Launcher, guest, is_probe, launcher
from hostd.kubevirt.targets import HOTPLUG_DISKS, Target, target
from hostd.linux.pool import PoolExhausted, WorkerError, WorkerPool
from hostd.log import Message, event, plain

if TYPE_CHECKING:
    from hostd.core.pod_mounts import KubeletRoot

log = logging.getLogger(__name__)

#: How often, and how far apart (seconds), a living process is asked for the command line that it does not have yet.
_EXEC_LOOKS, _EXEC_SECONDS = 20, 0.05
_FAILED = (OSError, WorkerError, PoolExhausted)


@dataclass(slots=True)
class Command:
    """What a process's command line says. `known` is False where it could not be read: then nobody knows."""

    known: bool = False
    probe: bool = False
    guest: Guest | None = None
    launcher: Launcher | None = None


@dataclass(slots=True)
class Records:
    """What virt-handler's records say: the VMI UID of each pod, the name of each VMI UID.

    The targets in them need no taking up: those that are mounted are in the mount table, device nodes in their
    directory, and the rest is not there.
    """

    vmi_uids: dict[str, str] = field(default_factory=dict)
    ghosts: dict[str, records.Ghost] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)


class Survey:
    """Looks by workers."""

    def __init__(self, pool: WorkerPool, root: KubeletRoot, private: bytes) -> None:
        self._pool = pool
        self._root = root
        self._private = private
        #: What was said of directories that cannot be looked at: once is enough.
        self._told: dict[bytes, str] = {}

    async def empty_dirs(self, pod_uid: str) -> set[bytes] | None:
        """The names of a pod's emptyDirs; empty while there are none, None where that cannot be told now."""
        entries = await self._list(empty_dir(pod_uid))
        return None if entries is None else {name for name, _ in entries}

    async def is_rest_of_launcher(self, pod_uid: str) -> bool:
        """Whether a pod that has hotplugged volumes mounted, and not the emptyDirs of a launcher, once was one: kubelet
        removes them one by one, and cannot remove what is mounted. An attachment pod has its socket in there."""
        names = await self._list(empty_dir(pod_uid) + b"/" + HOTPLUG_DISKS)
        return names is not None and HOTPLUG_SOCKET not in {name for name, _ in names}

    async def block_nodes(self, pod_uid: str) -> tuple[list[Target], int] | None:
        """The block PVCs hotplugged into a pod: device nodes, by the directory's own word (nothing is opened). And the
        watch that ends when something comes there, or goes where there are any, -1 where none is to be had.

        None where that cannot be told now.
        """
        directory = empty_dir(pod_uid) + b"/" + HOTPLUG_DISKS
        found = await self._look("list_block_nodes", directory)
        if found is None:
            return None
        names, watch = found or ([], -1)
        where = b"/".join((self._root.path, directory))
        return [target(self._root.path, b"/".join((where, name)), block=True) for name in names], watch

    async def commands(self, pids: list[int]) -> dict[int, Command]:
        """What the processes' command lines say. One that hangs is asked alone the next time, and stays unknown; while
        a worker hangs in it, it is not asked at all."""
        hanging = {hung.what for hung in self._pool.hung}
        mute = {pid: Command() for pid in pids if b"/proc/%d/cmdline" % pid in hanging}
        rest = [pid for pid in pids if pid not in mute]
        return mute | (await self._commands(rest) if rest else {})

    async def _commands(self, pids: list[int]) -> dict[int, Command]:
        try:
            lines = await self._pool.run("command_lines", pids)
            for _ in range(_EXEC_LOOKS):
                # One in the middle of execve(2) has its new name already and no arguments yet; a probe that is taken
                # for a QEMU would look like the VM's death when it ends.
                if not (begun := [pid for pid in pids if lines.get(pid) == []]):
                    break
                await asyncio.sleep(_EXEC_SECONDS)
                lines |= await self._pool.run("command_lines", begun)
        except _FAILED as error:
            if len(pids) > 1:
                return {pid: command for pid in pids for command in (await self._commands([pid])).values()}
            log.warning("the command line of process %d cannot be read, so it counts as a QEMU: %s", pids[0], error)
            return {pids[0]: Command()}
        return {pid: _command(lines.get(pid)) for pid in pids}

    async def records(self) -> Records:
        """All records of this node's virt-handler. A bad one is named and logged, and the rest is read."""
        found = Records()
        for directory in (records.CONTAINER_DISK_RECORDS, records.HOTPLUG_RECORDS):
            for vmi_uid, data in await self._files(directory, found):
                self._take_mount_record(found, directory, vmi_uid, data)
        for vmi_uid, data in await self._files(records.GHOST_RECORDS, found):
            try:
                found.ghosts[vmi_uid] = records.ghost_record(data)
            except records.BadRecord as error:
                self._complain(found, records.GHOST_RECORDS, vmi_uid, str(error))
        return found

    def _take_mount_record(self, found: Records, directory: bytes, vmi_uid: str, data: bytes) -> None:
        try:
            paths = records.mount_record(data).targets
        except records.BadRecord as error:
            return self._complain(found, directory, vmi_uid, str(error))
        for path in paths:
            try:
                meant = target(self._root.path, path)
            except NotATarget as error:
                log.debug("a record of VMI %s names what is no target: %s", vmi_uid, error)
                continue
            found.vmi_uids[meant.pod_uid] = vmi_uid
        return None

    def _complain(self, found: Records, directory: bytes, name: str, why: str) -> None:
        path = plain(os.path.join(self._private, directory, name.encode()))
        found.bad[path] = why
        log.warning(
            "virt-handler's record %s is passed over: %s", path, why, extra=event(Message.BAD_RECORD, record=path)
        )

    async def _files(self, directory: bytes, found: Records) -> list[tuple[str, bytes]]:
        files = []
        where = os.path.join(self._private, directory)
        for name, _ in await self._list(where) or ():
            try:
                data = await self._pool.run("read_file", os.path.join(where, name), records.LARGEST + 1)
            except FileNotFoundError:
                continue  # the agent was done with it meanwhile
            except _FAILED as error:
                self._complain(found, directory, plain(name), str(error))
                continue
            files.append((plain(name), data))
        return files

    async def _list(self, directory: bytes) -> list[tuple[bytes, int]] | None:
        found: list[tuple[bytes, int]] | None = await self._look("list_directory", directory)
        return found

    async def _look(self, op: str, directory: bytes) -> Any:  # noqa: ANN401  as the operation has it
        """What a worker finds in a directory: [] for one that is not there, None where that cannot be told. One that a
        worker hangs in already costs no other worker."""
        if any(hung.what == directory for hung in self._pool.hung):
            return None
        try:
            found = await self._pool.run(op, directory)
        except (FileNotFoundError, NotADirectoryError):
            found = []
        except _FAILED as error:
            if self._told.get(directory) != (words := str(error)):
                self._told[directory] = words
                log.warning("%s cannot be looked at: %s", plain(directory), words)
            # What lies behind a symbolic link is not the pod's: for hostd there is nothing.
            return [] if isinstance(error, OSError) and error.errno == errno.ELOOP else None
        self._told.pop(directory, None)
        return found


def _command(argv: list[bytes] | None) -> Command:
    if not argv:
        return Command()
    return Command(True, is_probe(argv), guest(argv), launcher(argv))
