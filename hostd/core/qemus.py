"""The QEMUs that hostd follows, and what can be seen of a pod without disturbing anything.

A QEMU is followed by its pidfd: the kernel says when it is dead, nobody else. Before each pass the pod's cgroup is
looked at again, so that a QEMU that started meanwhile is found; a process that looks like one but was not identified
yet is a doubt, and doubt means waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from typing import TYPE_CHECKING

from hostd.core.decision import Facts
from hostd.kubevirt.pod_cgroup import PodCgroups, pod_uids
from hostd.kubevirt.pods import pods_of_roots
from hostd.kubevirt.qemu import looks_like_launcher, looks_like_qemu
from hostd.linux import process as proc
from hostd.linux.cgroup import Population, PopulationWatch, oom_kills
from hostd.linux.mount_table import parse
from hostd.linux.pidfd import Identity, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hostd.core.model import VM

log = logging.getLogger(__name__)

#: A look at all processes answers all questions of this long (µs).
_FRESH_SECONDS = 1.0


class Qemus:
    """Who lives. `died` is called with the pod and the process, which it takes over; `quiet` when a watched pod's
    cgroup has become empty."""

    def __init__(self, cgroups: PodCgroups, died: Callable[[str, Process], None], quiet: Callable[[str], None]) -> None:
        self.cgroups = cgroups
        self._died = died
        self._quiet = quiet
        self._followed: dict[str, list[Process]] = {}
        #: Looked like a QEMU and are none (libvirt's probes), by pod, so that they are not asked again.
        self._others: dict[str, set[Identity]] = {}
        self._watches: dict[str, list[PopulationWatch]] = {}
        self._named: tuple[float, dict[str, list[int]]] = (float("-inf"), {})

    # --- following ---

    def follow(self, pod_uid: str, process: Process) -> bool:
        """Takes over the process (and closes it when it is dead or forgotten). False = it was followed already."""
        if any(process.identity.same_as(known.identity) for known in self._followed.get(pod_uid, ())):
            process.close()
            return False
        with contextlib.suppress(OSError):  # what cannot be read now, a walk does not find either
            if process.identity.pid not in self.cgroups.processes(pod_uid):
                # The first pod of a layout that was not seen yet: its death must not find an empty cgroup beside it.
                self.cgroups.look()
            self.cgroups.remember(pod_uid)
        self._followed.setdefault(pod_uid, []).append(process)
        asyncio.get_running_loop().add_reader(process.fd, self._on_death, pod_uid, process)
        return True

    def followed(self, pod_uid: str) -> list[Process]:
        """The QEMUs of a pod that were not seen dead yet."""
        return self._followed.get(pod_uid, [])

    def followed_once_more(self, pod_uid: str) -> list[Process]:
        """The living ones of them, opened anew, to be asked what they are. The caller owns them."""
        found: list[Process] = []
        for process in self.followed(pod_uid):
            with contextlib.suppress(OSError):  # it is dead, or no descriptor is left to ask with
                again = Process.open(process.identity.pid)
                if again.identity.same_as(process.identity):
                    found.append(again)
                else:
                    again.close()
        return found

    def _on_death(self, pod_uid: str, process: Process) -> None:
        asyncio.get_running_loop().remove_reader(process.fd)
        self._followed[pod_uid].remove(process)
        self._died(pod_uid, process)

    def is_other(self, pod_uid: str, identity: Identity) -> None:
        """The process only looked like a QEMU."""
        self._others.setdefault(pod_uid, set()).add(identity)

    def forget(self, pod_uid: str) -> None:
        """Stops following all of a pod."""
        self.unwatch(pod_uid)
        self.cgroups.forget(pod_uid)
        self._others.pop(pod_uid, None)
        for process in self._followed.pop(pod_uid, []):
            asyncio.get_running_loop().remove_reader(process.fd)
            process.close()

    def close(self) -> None:
        """Stops following everything."""
        for pod_uid in {*self._followed, *self._watches}:
            self.forget(pod_uid)
        self.cgroups.close()

    # --- looking ---

    def look(self, vm: VM) -> tuple[Facts, list[Process]]:
        """What is seen of the pod now, and living processes that look like its QEMU but are not identified yet; the
        caller owns them. Reads only the pod's own cgroup, however many other pods there are."""
        if any(process.alive() for process in self.followed(vm.pod_uid)):
            return Facts(qemu=True), []
        try:
            return self._look_into(vm)
        except OSError as error:
            failed = error
        with contextlib.suppress(OSError):
            if self.relieve(failed):
                return self._look_into(vm)
        return Facts(doubt=f"its cgroup cannot be looked at: {failed}"), []

    def relieve(self, failed: OSError) -> bool:
        """Where something failed because no descriptor is left, gives back those that only make things quicker: whether
        it is worth trying again."""
        if failed.errno not in {errno.EMFILE, errno.ENFILE}:
            return False
        relief = self.cgroups.close() or bool(self._watches)
        for pod_uid in list(self._watches):
            self.unwatch(pod_uid)
        return relief

    def _look_into(self, vm: VM) -> tuple[Facts, list[Process]]:
        population, living = self.cgroups.census(vm.pod_uid)
        candidates = self.unidentified(vm.pod_uid, living)
        if not candidates and not living and not (vm.had_qemu and vm.cgroup_seen):
            candidates = self.unidentified(vm.pod_uid, self._naming(vm.pod_uid))
        if not candidates:
            return self._facts_without_qemu(vm, population, living), []
        pids = ", ".join(str(process.identity.pid) for process in candidates)
        return Facts(doubt=f"process {pids} looks like a QEMU and is not identified yet"), candidates

    def unidentified(self, pod_uid: str, pids: Iterable[int]) -> list[Process]:
        """Those of the processes that live, look like a QEMU and were not judged yet. The caller owns them."""
        others = self._others.get(pod_uid, set())
        # Of a dead one whose death was not told yet, the pid may be another's already.
        known = {process.identity.pid for process in self.followed(pod_uid) if process.alive()}
        found: list[Process] = []
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    if pid in known or not looks_like_qemu(proc.read_comm(pid)):
                        continue
                    found.append(process := Process.open(pid))
                    # Since it was told whose the pid is, it may have become another pod's.
                    if process.identity in others or pod_uid not in _pods_named_by(pid) or not process.alive():
                        found.pop().close()
        except BaseException:  # no descriptor is left, say: then those that were had are given back
            for process in found:
                process.close()
            raise
        return found

    def _facts_without_qemu(self, vm: VM, population: Population | None, living: Collection[int]) -> Facts:
        if population is None:
            # Perhaps it lies where nobody has looked yet.
            population = self.cgroups.population(vm.pod_uid)
        if population is Population.POPULATED and not living and vm.had_qemu:
            # The kernel counts a dead process for a moment after it has told its death.
            population = Population.EMPTY
        if population is None and vm.cgroup_seen:
            population = Population.GONE
        if population is None and vm.had_qemu and any(map(_lives, self._naming(vm.pod_uid))):
            # Its cgroup is where nobody looks for it.
            population = Population.POPULATED
        if population is not None or vm.had_qemu:
            return Facts(cgroup=population, understood=True)
        # Only for a pod that was never seen running: what this costs grows with the node.
        understood = self.cgroups.understood
        return Facts(understood=understood, named=understood and any(map(_lives, self._naming(vm.pod_uid))))

    def _naming(self, pod_uid: str) -> list[int]:
        """The processes whose cgroup names the pod, and the QEMUs that were moved out of all pods' and have its volumes
        mounted; one look at all processes serves all who ask within a second. A zombie names its pod too, for as long
        as nobody reaps it."""
        now = asyncio.get_running_loop().time()
        if now - self._named[0] > _FRESH_SECONDS:
            named: dict[str, list[int]] = {}
            for pid in proc.pids():
                for uid in _pods_named_by(pid):
                    named.setdefault(uid, []).append(pid)
            self._named = (now, named)
        return self._named[1].get(pod_uid, [])

    def launchers(self, pod_uid: str) -> list[int]:
        """The pod's processes that call themselves virt-launcher: their command lines name the VMI. None where the
        pod's cgroup cannot be read, for no more than names hangs on it."""
        with contextlib.suppress(OSError):
            return [pid for pid in self.cgroups.processes(pod_uid) if _is_launcher(pid)]
        return []

    def oom_kills(self, pod_uid: str) -> int:
        """What the pod's cgroup has counted so far, -1 where it does not tell."""
        counts = [kills for path in self.cgroups.paths(pod_uid) if (kills := oom_kills(path)) is not None]
        return max(counts, default=-1)

    # --- the end of a pod ---

    def watch(self, pod_uid: str) -> None:
        """Calls `quiet` when the pod's cgroup changes between empty and populated, where the kernel tells (v2)."""
        if pod_uid in self._watches:
            return
        watches = self._watches[pod_uid] = []
        for path in self.cgroups.paths(pod_uid):
            with contextlib.suppress(OSError):  # v1 has no events, and a directory may be gone: the timer looks then
                watch = PopulationWatch(path)
                watches.append(watch)
                asyncio.get_running_loop().add_reader(watch.fileno(), self._on_population, pod_uid, watch)

    def _on_population(self, pod_uid: str, watch: PopulationWatch) -> None:
        watch.drain()
        self._quiet(pod_uid)

    def unwatch(self, pod_uid: str) -> None:
        """Ends `watch`."""
        for watch in self._watches.pop(pod_uid, []):
            asyncio.get_running_loop().remove_reader(watch.fileno())
            watch.close()


def _is_launcher(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return looks_like_launcher(proc.read_comm(pid))
    return False


def _lives(pid: int) -> bool:
    try:
        Process.open(pid).close()
    except ProcessLookupError:
        return False
    except OSError:
        return True  # no descriptor is left to tell by: not knowing is not death
    return True


def pods_of(pid: int) -> set[str]:
    """The pods that a process's cgroups name; empty for one that is gone."""
    try:
        return set(pod_uids(path for _, path in proc.cgroup_paths(pid)))
    except ProcessLookupError:
        return set()


def _pods_named_by(pid: int) -> set[str]:
    return pods_of(pid) or _pods_seen_by_stray_qemu(pid)


def _pods_seen_by_stray_qemu(pid: int) -> set[str]:
    """The pods whose volumes a QEMU outside of all pods' cgroups has mounted; empty for all other processes."""
    try:
        if not looks_like_qemu(proc.read_comm(pid)):
            return set()
        with open(f"/proc/{pid}/mountinfo", "rb") as table:
            return pods_of_roots(mount.root for mount in parse(table.read()))
    except OSError:  # it is gone, or a zombie
        return set()


def qemu_pids_by_pod() -> dict[str, list[int]]:
    """A look at every process of the host: those that look like a QEMU, by the pod that their cgroup names."""
    found: dict[str, list[int]] = {}
    for pid in proc.pids():
        with contextlib.suppress(ProcessLookupError):
            if looks_like_qemu(proc.read_comm(pid)):
                for uid in pods_of(pid):
                    found.setdefault(uid, []).append(pid)
    return found
