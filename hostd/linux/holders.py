"""Who holds a layer: the processes, loop devices, mounts and namespaces because of which it cannot go.

A file descriptor is told by the `mnt_id` in its fdinfo, which asks no file system; cwd, root, exe and maps by statx(2)
of their links in /proc without synchronisation. Nothing is stat'ed in the plain way: that hangs on a dead file system.
It runs in a worker all the same, since /proc/PID/maps may hang on a process that is stuck with its mmap lock held.

What cannot be seen: descriptors in flight over sockets or registered with io_uring, namespaces that no process is in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from hostd.linux import copies, process
from hostd.linux.copies import Copies, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Held", "Wanted", "find"]

#: s: a scan of many processes says that it goes on.
_PROGRESS_EVERY: Final = 0.2

_AT_FDCWD, _AT_STATX_DONT_SYNC, _STATX_MNT_ID = -100, 0x4000, 0x1000
#: struct statx: its size, and where its mask, device numbers and mount id are.
_STATX_SIZE, _MASK, _MAJOR, _MINOR, _MNT_ID = 256, 0, 136, 140, 144

_FDINFO_MOUNT = re.compile(rb"^mnt_id:\t(\d+)$", re.MULTILINE)
_MAP = re.compile(rb"^(\w+-\w+) \S+ \w+ (\w+:\w+) \d+ +(/.*)$", re.MULTILINE)
_LOOP = re.compile(rb"/dev/(loop\d+)$")

_libc = ctypes.CDLL(None, use_errno=True)


class Held(NamedTuple):
    """One holder of the layer at `target`.

    `how`: open, cwd, root, exe, map (a process; also through a detached mount), loop (a loop device, pid 0, or a
    process that has it open), mount (a mount below, pid 0, `name` its mountpoint), namespace (a process of another
    mount namespace that has a copy of its own). `cgroups`: the process's cgroup paths, for its pod.
    """

    target: bytes
    pid: int
    name: str
    how: str
    cgroups: tuple[bytes, ...] = ()


class _Process(NamedTuple):
    pid: int
    #: /proc/PID, or /proc/PID/task/TID of a thread where the first one has exited.
    path: bytes
    namespace: str


def find(wanted: Sequence[Wanted], *, on_progress: Callable[[], None] = lambda: None) -> list[Held]:
    """The holders of these layers as the namespace of the caller has them, by pid; the caller itself is left out.

    `on_progress` is called now and then. Processes that end meanwhile are no holders; threads with a descriptor table
    or a namespace of their own are not looked at.
    """
    scan = _Scan(wanted)
    said = time.monotonic()
    held: dict[Held, None] = dict.fromkeys(scan.others())
    for one in scan.processes:
        # It ended meanwhile, or is not ours to look at.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found = sorted(set(scan.of_process(one)))
            held.update(dict.fromkeys(_named(target, one.pid, how) for target, how in found))
        if time.monotonic() - said > _PROGRESS_EVERY:
            on_progress()
            said = time.monotonic()
    return list(held)


def _named(target: bytes, pid: int, how: str) -> Held:
    name = process.read_comm(pid).decode("utf-8", "backslashreplace")
    cgroups = dict.fromkeys(path for _, path in process.cgroup_paths(pid) if path != b"/")
    return Held(target, pid, name, how, tuple(cgroups))


class _Scan:
    """One look at everything: the processes, their namespaces' tables, the mounts that matter."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.processes = sorted(_processes())
        host = os.readlink("/proc/self/ns/mnt")
        tables = _tables(self.processes)
        tables[host] = _read(b"/proc/self/mountinfo")
        self._copies: Copies = copies.find(wanted, host, tables)
        #: Ids of all mounts that some table has; needed only for what is detached.
        self._known: set[int] = set()
        if self._copies.absent:
            self._known = {int(row.split(b" ", 1)[0]) for table in tables.values() for row in table.splitlines()}
        self._devices = {_hex_device(one.device) for one in wanted}
        self._loops = dict(_loops({one.target for one in wanted}))

    def others(self) -> Iterator[Held]:
        """The holders that are no user of the mount: mounts below, loop devices, copies in other namespaces."""
        for target, below in self._copies.below:
            yield Held(target, 0, below.decode("utf-8", "backslashreplace"), "mount")
        for loop, target in self._loops.items():
            yield Held(target, 0, loop.decode(), "loop")
        for target, namespace in self._copies.pins:
            for one in self.processes:
                if one.namespace == namespace:
                    with contextlib.suppress(ProcessLookupError):
                        yield _named(target, one.pid, "namespace")
                        break

    def of_process(self, one: _Process) -> Iterator[tuple[bytes, str]]:
        """(target, how) of all that a process has of the layers; how often does not matter."""
        yield from self._descriptors(one)
        for how in (b"cwd", b"root", b"exe"):
            with contextlib.suppress(OSError):
                if target := self._by_link(one.path + b"/" + how):
                    yield target, how.decode()
        with contextlib.suppress(OSError):
            for link in self._maps(one):
                if target := self._by_link(link):
                    yield target, "map"

    def _descriptors(self, one: _Process) -> Iterator[tuple[bytes, str]]:
        for number in os.listdir(one.path + b"/fd"):
            with contextlib.suppress(FileNotFoundError):
                link = os.readlink(one.path + b"/fd/" + number)
                if not link.startswith((b"/", b"(unreachable)")):
                    continue
                if (loop := _LOOP.match(link)) and loop[1] in self._loops:
                    yield self._loops[loop[1]], "loop"
                if target := self._by_descriptor(one.path, number):
                    yield target, "open"

    def _by_descriptor(self, path: bytes, number: bytes) -> bytes | None:
        found = _FDINFO_MOUNT.search(_read(path + b"/fdinfo/" + number))
        if not found:
            return None
        mount_id = int(found[1])
        if self._is_detached(mount_id) and mount_id not in self._copies.former:
            return self._by_link(path + b"/fd/" + number)
        return self._by_mount(mount_id)

    def _is_detached(self, mount_id: int) -> bool:
        return bool(self._known) and mount_id not in self._known

    def _by_mount(self, mount_id: int) -> bytes | None:
        if target := self._copies.ids.get(mount_id):
            return target
        return self._copies.former.get(mount_id) if self._is_detached(mount_id) else None

    def _by_link(self, link: bytes) -> bytes | None:
        """The layer that a magic link leads into, through a mount that is in a table or was detached."""
        mount_id, device = _statx(link)
        by_device = self._copies.absent.get(device) if self._is_detached(mount_id) else None
        return self._by_mount(mount_id) or by_device

    def _maps(self, one: _Process) -> Iterator[bytes]:
        """The links of the mapped files that may be a layer's: by device or, for overlays hide it, by path."""
        if process.read_stat(one.pid).state == "D":
            return
        paths = tuple(path.replace(b"\n", b"\\012") for path in self._copies.paths.get(one.namespace, ()))
        for area, device, path in _MAP.findall(_read(one.path + b"/maps")):
            if device in self._devices or path.startswith(paths):
                # The names of map_files have no leading zeros.
                start, _, end = area.partition(b"-")
                yield b"/proc/%d/map_files/%x-%x" % (one.pid, int(start, 16), int(end, 16))


def _processes() -> Iterator[_Process]:
    """All processes but this one, kernel threads (no exe) and zombies with no thread left."""
    for pid in process.pids():
        if pid == os.getpid():
            continue
        for path in _threads(pid):
            try:
                os.readlink(path + b"/exe")
                yield _Process(pid, path, os.readlink(path + b"/ns/mnt").decode())
            except OSError:
                continue
            break


def _threads(pid: int) -> Iterator[bytes]:
    yield b"/proc/%d" % pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(b"/proc/%d/task" % pid):
            yield b"/proc/%d/task/%s" % (pid, thread)


def _tables(processes: Sequence[_Process]) -> dict[str, bytes]:
    tables: dict[str, bytes] = {}
    for one in processes:
        if one.namespace not in tables:
            with contextlib.suppress(OSError):
                tables[one.namespace] = _read(one.path + b"/mountinfo")
    return tables


def _loops(targets: set[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(loop device, target) where the file behind the device is a layer, or is in one."""
    for name in _block_devices():
        if not name.startswith(b"loop"):
            continue
        try:
            backing = _read(b"/sys/block/%s/loop/backing_file" % name).removesuffix(b"\n")
        except OSError:
            # Not attached.
            continue
        for target in targets:
            if backing == target or backing.startswith(target + b"/"):
                yield name, target


def _block_devices() -> list[bytes]:
    try:
        return os.listdir(b"/sys/block")
    except FileNotFoundError:
        # A namespace without /sys, as a container may be.
        return []


def _hex_device(device: str) -> bytes:
    """A device as /proc/PID/maps writes it."""
    major, _, minor = device.partition(":")
    return b"%02x:%02x" % (int(major), int(minor))


def _read(path: bytes) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _statx(path: bytes) -> tuple[int, str]:
    """(mount id, device) of what a link leads to, from what the kernel has in memory; 0 before Linux 5.8."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    if _libc.statx(_AT_FDCWD, path, _AT_STATX_DONT_SYNC, _STATX_MNT_ID, buffer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)

    def field(offset: int, size: int = 4) -> int:
        return int.from_bytes(buffer.raw[offset : offset + size], sys.byteorder)

    known = field(_MASK) & _STATX_MNT_ID
    return field(_MNT_ID, 8) if known else 0, f"{field(_MAJOR)}:{field(_MINOR)}"
