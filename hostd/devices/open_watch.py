"""Hears when a process opens or closes a device file, so that nobody has to look again and again.

inotify tells of opens in a directory. The directories are those that the process itself sees: in a container /dev is a
tmpfs of its own, so they are reached through /proc/PID/root, walked without following a symbolic link. In a user
namespace the device files in there are binds of the host's, whose opens are told in the host's own directories: so
those are watched as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from hostd.linux import libc
from hostd.linux.inotify import Event, Inotify
from hostd.linux.walk import open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

#: linux/inotify.h: a file was opened; one that was opened for reading only was closed.
_IN_OPEN: Final = 0x0020
_IN_CLOSE_NOWRITE: Final = 0x0010
_FILES: Final = _IN_OPEN | _IN_CLOSE_NOWRITE | libc.IN_CLOSE_WRITE | libc.IN_CREATE | libc.IN_ONLYDIR
_PLACES: Final = ((b"dev", libc.IN_CREATE | libc.IN_ONLYDIR), (b"dev/vfio", _FILES), (b"dev/vfio/devices", _FILES))
_USB: Final = b"dev/bus/usb"
_DIRECTORY: Final = os.O_DIRECTORY | os.O_CLOEXEC
_PATH: Final = _DIRECTORY | os.O_PATH


class OpenWatch:
    """Calls `touched` with the pods of those whose device files were opened or closed. Raises OSError at its making."""

    def __init__(self, touched: Callable[[str], None], host_root: bytes = b"/proc/1/root") -> None:
        self._touched = touched
        self._host_root = host_root
        self._inotify = Inotify()
        #: Watch → the pod and process that see its directory (on one host, several may see one).
        self._watches: dict[int, set[tuple[str, int]]] = {}
        #: Pod → its watches, each with the process that sees the directory: forgetting one looks at no other's.
        self._of: dict[str, set[tuple[int, int]]] = {}
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self.drain)

    def watch(self, pod_uid: str, pid: int) -> bool:
        """Watches what this process sees, from now on. False = not all of it can be: look again yourself."""
        # What the host has is a second ear: most containers do not need it, so its absence makes nobody blind.
        self._watch_below(self._host_root, (pod_uid, pid))
        return self._watch_below(b"/proc/%d/root" % pid, (pod_uid, pid))

    def _watch_below(self, path: bytes, who: tuple[str, int]) -> bool:
        try:
            root = os.open(path, _PATH)
        except OSError:
            return False
        try:
            watched = [self._add(root, place, mask, who) for place, mask in _places(root)]
            return all(watched)
        finally:
            os.close(root)

    def _add(self, root: int, place: bytes, mask: int, who: tuple[str, int]) -> bool:
        try:
            fd = open_beneath(root, place, _PATH)
        except FileNotFoundError:
            return True  # its coming is seen in the directory above
        except OSError as error:
            log.debug("process %d: /%s cannot be watched: %s", who[1], os.fsdecode(place), error)
            return False
        try:
            # One directory has one watch, and a second `add` must not narrow it: masks are by place.
            number = self._inotify.add(b"/proc/self/fd/%d" % fd, mask)
        except OSError as error:
            log.warning("process %d: /%s cannot be watched: %s", who[1], os.fsdecode(place), error)
            return False
        finally:
            os.close(fd)
        pod_uid, pid = who
        self._watches.setdefault(number, set()).add(who)
        self._of.setdefault(pod_uid, set()).add((number, pid))
        return True

    def drain(self) -> None:
        """Takes in what has happened so far."""
        while events := self._inotify.read():
            for who in self._concerned(events):
                self._touched(who)

    def _concerned(self, events: Iterable[Event]) -> set[str]:
        pods: set[str] = set()
        for event in events:
            if event.mask & libc.IN_Q_OVERFLOW:
                return {pod for whos in self._watches.values() for pod, _ in whos}
            whos = self._watches.get(event.wd, set())
            if event.mask & libc.IN_IGNORED:
                self._watches.pop(event.wd, None)
            elif event.mask & libc.IN_CREATE and event.mask & libc.IN_ISDIR:
                for pod, pid in list(whos):
                    self.watch(pod, pid)
                    pods.add(pod)
            elif not event.mask & libc.IN_ISDIR and not event.mask & libc.IN_CREATE:
                pods |= {pod for pod, _ in whos}
        return pods

    def forget(self, pod_uid: str) -> None:
        """Ends the watches that only this pod's processes needed."""
        for number, pid in self._of.pop(pod_uid, ()):
            whos = self._watches.get(number)
            if whos is None:
                continue  # its directory is gone
            whos.discard((pod_uid, pid))
            if not whos:
                del self._watches[number]
                self._inotify.remove(number)

    def close(self) -> None:
        """Hears nothing any more."""
        if self._inotify.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()


def _places(root: int) -> list[tuple[bytes, int]]:
    """The directories to watch, with what is to be heard of each."""
    buses = [(os.path.join(_USB, name), _FILES) for name in _list(root, _USB)]
    above = [(place, libc.IN_CREATE | libc.IN_ONLYDIR) for place in (b"dev/bus", _USB)]
    return [*_PLACES, *above, *buses]


def _list(root: int, place: bytes) -> list[bytes]:
    try:
        fd = open_beneath(root, place, _DIRECTORY | os.O_RDONLY)
    except OSError:
        return []
    try:
        return [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)
