"""Finding pods: those that are there when hostd starts, and those that come.

The kubelet makes a cgroup for each pod, and the runtime makes one in it for each container once all volumes are there.
inotify on the few directories whose children are pods tells of the first, a watch on a new pod's own directory of the
second; then it is looked whether the pod is a VM's. So a pod costs two events and one look, and nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from hostd.kubevirt.pod_cgroup import PodCgroups, pod_uid
from hostd.linux import libc
from hostd.linux.cgroup import hierarchies
from hostd.linux.inotify import Event, Inotify

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

#: How soon pods are looked for again where that failed.
_LATER_SECONDS = 5.0
_MASK = libc.IN_CREATE | libc.IN_MOVED_TO | libc.IN_DELETE | libc.IN_ONLYDIR


class Discovery:
    """Watches for pods. `found` is called with the UID of each pod whose first container comes."""

    def __init__(self, cgroups: PodCgroups, cgroup_root: bytes, found: Callable[[str], None]) -> None:
        self._cgroups = cgroups
        self._cgroup_root = cgroup_root
        self._found = found
        self._inotify: Inotify | None = None
        self._watched: dict[int, bytes] = {}
        self._later: asyncio.TimerHandle | None = None
        #: Why new pods are not told of, in words; empty while they are.
        self.error = ""

    def start(self) -> None:
        """Watches from now on; pods that are there already are the caller's to find. Where no watch is to be had, pods
        are found by their mounts."""
        try:
            self._inotify = Inotify()
        except OSError as error:  # all of root's programs share what there is of them
            self._complain("there is no inotify", error, "fs.inotify.max_user_instances")
            return
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._on_events)
        try:
            self.look()
        except OSError as error:
            self._look_later(error)

    def close(self) -> None:
        """Stops watching."""
        if self._later:
            self._later.cancel()
        if self._inotify:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()

    def look(self) -> None:
        """Watches what is to be watched now: the parents of pods, and the top where such parents may come."""
        tops = [hierarchy.path for hierarchy in hierarchies(self._cgroup_root)]
        for path in (*tops, *self._cgroups.parents()):
            self._watch(path)

    def _watch(self, path: bytes) -> None:
        if self._inotify is None:
            return
        try:
            self._watched[self._inotify.add(path, _MASK)] = path
        except FileNotFoundError:
            return
        except OSError as error:
            self._complain(f"{os.fsdecode(path)} cannot be watched", error, "fs.inotify.max_user_watches")

    def _unwatch(self, path: bytes) -> None:
        """Also of a cgroup that is gone: its parent's watch tells so, and its own stays for ever (tried on 6.18)."""
        for watch in [watch for watch, watched in self._watched.items() if watched == path]:
            del self._watched[watch]
            if self._inotify:
                self._inotify.remove(watch)

    def _complain(self, what: str, error: OSError, limit: str) -> None:
        if not self.error:
            log.warning("new pods are found late, for %s: %s", what, error)
        self.error = f"new pods are found by their mounts only: {error.strerror}; raise {limit}"

    def _on_events(self) -> None:
        for event in self._inotify.read() if self._inotify else ():
            try:
                self._on_event(event)
            except OSError as error:  # no descriptor is left to look with, say: it was told, and must not be lost
                self._look_later(error)

    def _on_event(self, event: Event) -> None:
        if event.mask & libc.IN_Q_OVERFLOW:
            self._look_at_all()
        elif event.mask & libc.IN_IGNORED:
            self._watched.pop(event.wd, None)
        elif event.mask & libc.IN_ISDIR and event.wd in self._watched:
            self._on_directory(event)

    def _look_later(self, error: OSError) -> None:
        if self._later is None:
            log.warning("pods cannot be looked for, which is tried again: %s", error)
            self._later = asyncio.get_running_loop().call_later(_LATER_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._later = None
        try:
            self._look_at_all()
        except OSError as error:
            self._look_later(error)

    def _look_at_all(self) -> None:
        self.look()
        for uid in self._cgroups.pods():
            self._found(uid)

    def _on_directory(self, event: Event) -> None:
        parent = self._watched[event.wd]
        path = os.path.join(parent, event.name)
        inside = pod_uid(parent)
        if event.mask & libc.IN_DELETE:
            self._unwatch(path)
        elif inside is not None:
            # The first container: all volumes are there, and the pod's own watch has done its work.
            self._unwatch(parent)
            self._found(inside)
        elif (new := pod_uid(path)) is not None:
            self._on_pod(new, path)
        else:
            self._look_for_parents()

    def _on_pod(self, uid: str, path: bytes) -> None:
        # Watched before it is looked into, so that no container comes unseen in between.
        self._watch(path)
        if any(os.path.isdir(os.path.join(path, name)) for name in _names(path)):
            self._unwatch(path)
            self._found(uid)

    def _look_for_parents(self) -> None:
        """Somewhere a directory came: perhaps one whose children are pods, and perhaps they are in it already."""
        before = set(self._watched.values())
        self._cgroups.look()
        self.look()
        if not before.issuperset(self._watched.values()):
            for uid, paths in self._cgroups.pods().items():
                for path in paths:
                    self._on_pod(uid, path)


def _names(path: bytes) -> list[bytes]:
    try:
        return os.listdir(path)
    except OSError:  # the pod is gone already
        return []
