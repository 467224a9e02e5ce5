"""Pods as their cgroups name them: the one statement about a process that it cannot forge.

Known layouts, each perhaps below a prefix (kind, k3s, minikube, a kubelet with `--cgroup-root`):

    systemd    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with _>.slice/<runtime>-<id>.scope
    cgroupfs   kubepods/burstable/pod<uid with ->/<id>
    loose      system.slice/containerd.service/kubepods-burstable-pod<uid with _>.slice:cri-containerd:<id>
               (kubelet thinks in slices and its runtime does not; the pod's own slice exists and stays empty)
    inside     …/container (crun), …/housekeeping (KubeVirt's threaded child)

Guaranteed pods lie directly below the first directory. Seen from within a cgroup namespace, a path may start with
`/../..`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from typing import TYPE_CHECKING

from hostd.kubevirt.targets import is_pod_uid
from hostd.linux.cgroup import Group, Population, census, hierarchies, population, processes
from hostd.linux.clock import boottime_usec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_KUBEPODS = b"kubepods"
#: Names of a pod's directory. A UUID's dashes are underscores in slices, where a dash divides levels.
_POD = re.compile(
    rb"(?:.*-)?pod([0-9a-f]{32}|[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice(:.*)?)?", re.DOTALL
)
_QOS = (b"burstable", b"besteffort")
#: Nodes that are containers themselves (kind, minikube) have their kubelet's cgroups this deep, and no deeper.
_DEPTH = 8
#: Directories looked at in one hierarchy: a bound against a tree that somebody blew up.
_BOUND = 20_000
#: Never anything of a kubelet's below it, and the only place where unprivileged users make directories.
_PRUNED = frozenset({b"user.slice"})
#: How old a look may be before "no process left" is believed (µs): less than any settle that makes sense.
_STALE = 5_000_000
#: Where no kubepods is found, looking for it may take one part in so many of the time.
_SHARE = 20
#: Groups come and go while they are read.
_VANISHED = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)


def pod_uid(cgroup_path: bytes) -> str | None:
    """The pod whose cgroup this path (a line of /proc/PID/cgroup, say) is or lies in; None for all others.

    The outermost pod counts: whatever a container makes below its own cgroup, it stays that pod's.
    """
    below = False
    for part in cgroup_path.split(b"/"):
        below = below or _KUBEPODS in part
        uid = _pod_of(part) if below else None
        if uid is not None:
            return uid
    return None


def pod_uids(cgroup_paths: Iterable[bytes]) -> set[str]:
    """The pods that these paths name: one for a process of a pod, whatever the number of its hierarchies."""
    return {uid for path in cgroup_paths if (uid := pod_uid(path)) is not None}


def _pod_of(name: bytes) -> str | None:
    match = _POD.fullmatch(name)
    if match is None:
        return None
    uid = match[1].decode("ascii").replace("_", "-")
    return uid if is_pod_uid(uid) else None


class PodCgroups:
    """The pods' directories in the cgroup file system. Reads only, and keeps a file open for the pods it `remember`s.

    The directories that hold pods are looked for once, by a walk, and again when none is left; else a question costs
    a few stat calls. What cannot be read for another reason than that it is gone raises OSError: a pod that one could
    not see must not pass for one that ended.
    """

    def __init__(self, cgroup_root: bytes) -> None:
        self._cgroup_root = cgroup_root
        self._kubepods: list[bytes] = []
        self._loose: list[bytes] = []
        #: The kubelet's own directories, where pods are: kubepods and the QoS classes, whether or not they exist.
        self._parents: list[bytes] = []
        self._patterns: list[tuple[bytes, bytes, bytes]] = []
        #: Pods whose directories are all there, and known.
        self._complete: dict[str, list[Group]] = {}
        self._open: set[Group] = set()
        self._looked_at = self._not_before = 0
        #: Why the last look may have missed a pod, in words; empty if it saw everything.
        self.trouble = ""
        self.look()

    def look(self) -> None:
        """Looks through all hierarchies for what holds pods: a walk, for starts and sweeps. Never raises."""
        walk, begun = _Walk(), boottime_usec()
        try:
            for hierarchy in hierarchies(self._cgroup_root):
                walk.through(hierarchy.path)
        except OSError as error:
            walk.trouble = f"{os.fsdecode(self._cgroup_root)!a} cannot be read: {error.strerror}"
        self.trouble = walk.trouble
        # What a look with trouble did not see may be there still; what is gone for good is passed over when asked for.
        self._kubepods = list(dict.fromkeys([*walk.kubepods, *(self._kubepods if walk.trouble else [])]))
        self._loose = list(dict.fromkeys([*walk.loose, *(self._loose if walk.trouble else [])]))
        self._parents = [path for kubepods in self._kubepods for path in (kubepods, *_classes(kubepods))]
        self._patterns = [_pattern(parent) for parent in self._parents]
        self._looked_at = boottime_usec()
        self._not_before = self._looked_at + (self._looked_at - begun) * _SHARE

    def parents(self) -> list[bytes]:
        """The directories whose children are pods (and QoS classes): what to watch for pods that come and go."""
        return [*self._ordered(), *self._loose]

    @property
    def understood(self) -> bool:
        """Whether pods could be found here if there were any: only then is a pod's absence evidence.

        False where there is no kubepods, where all that lies in it has names that are not known, and where the look
        was not complete.
        """
        parents = self._ordered()
        names = [(parent, name) for parent in parents for name in _directories(parent)]
        known = any(_pod_of(name) is not None for _, name in names)
        strange = any(_pod_of(name) is None and os.path.join(parent, name) not in parents for parent, name in names)
        return bool(parents) and not self.trouble and (known or not strange)

    def pods(self) -> dict[str, list[bytes]]:
        """Every pod that has a cgroup, with its directories: one in each hierarchy, or more."""
        found: dict[str, list[bytes]] = {}
        for uid, path in _pods_in(self.parents()):
            found.setdefault(uid, []).append(path)
        return found

    def paths(self, pod_uid: str) -> list[bytes]:
        """The directories of this pod that exist: none when it has ended, or has not begun."""
        # A pod that is found shows that what holds pods is there still: that is not asked then.
        found = self._directories_of(pod_uid)
        if not found and self._look_again():
            found = self._directories_of(pod_uid)
        return found + self._loose_of(pod_uid)

    def _loose_of(self, pod_uid: str) -> list[bytes]:
        """Each container may have one, whenever it comes."""
        return [path for uid, path in _pods_in(self._loose) if uid == pod_uid]

    def _directories_of(self, pod_uid: str) -> list[bytes]:
        dashes = pod_uid.encode()
        uids = {b"-": dashes, b"_": dashes.replace(b"-", b"_")}
        candidates = (before + uids[divider] + after for before, divider, after in self._patterns)
        return [path for path in candidates if _is_directory(path)]

    def population(self, pod_uid: str) -> Population | None:
        """Whether processes are left in the pod; None when it has no directory (now).

        POPULATED where one directory says so. Else UNREADABLE where one cannot tell, or where none was found and the
        look was not complete: not knowing is not emptiness. Costs a walk only for a pod that is not found.
        """
        answer = self._population(pod_uid)
        if answer is not None or boottime_usec() - self._looked_at < _STALE:
            return answer
        # The first pod of its layout may have come after the last look.
        self.look()
        return self._population(pod_uid)

    def processes(self, pod_uid: str) -> list[int]:
        """The pod's processes (host pids), ascending, from all hierarchies."""
        return sorted({pid for path in self.paths(pod_uid) for pid in processes(path)})

    def remember(self, pod_uid: str) -> None:
        """The pod's containers run, so its own directories are all there: a census need not look for them again."""
        if found := self._directories_of(pod_uid):
            self.forget(pod_uid)
            self._complete[pod_uid] = [Group(path) for path in found]
            self._open.update(self._complete[pod_uid])

    def forget(self, pod_uid: str) -> None:
        """Ends `remember`."""
        for group in self._complete.pop(pod_uid, []):
            self._open.discard(group)
            group.close()

    def close(self) -> bool:
        """Closes the files of all pods, if any are open. A census takes longer then, and tells the same."""
        closed = bool(self._open)
        while self._open:
            self._open.pop().close()
        return closed

    def census(self, pod_uid: str) -> tuple[Population | None, list[int]]:
        """`population` and `processes` by one look; what a population costs a walk for is for `population` to say."""
        known = self._complete.get(pod_uid)
        found = [group.census() for group in known or ()]
        found += [census(path) for path in (self.paths(pod_uid) if known is None else self._loose_of(pod_uid))]
        return self._ranked({state for state, _ in found}), sorted({pid for _, living in found for pid in living})

    def _population(self, pod_uid: str) -> Population | None:
        return self._ranked({population(path) for path in self.paths(pod_uid)})

    def _ranked(self, seen: Collection[Population]) -> Population | None:
        ranked = (Population.POPULATED, Population.UNREADABLE, Population.EMPTY, Population.GONE)
        unseen = Population.UNREADABLE if self.trouble else None
        return next((answer for answer in ranked if answer in seen), unseen)

    def _ordered(self) -> list[bytes]:
        """The kubelet's own directories that exist: kubepods and the QoS classes, in each hierarchy."""
        self._look_again()
        return [path for path in self._parents if _is_directory(path)]

    def _look_again(self) -> bool:
        """Looks where none of the known directories is left, but not too often; whether it did."""
        if boottime_usec() < self._not_before or any(map(_is_directory, self._kubepods)):
            return False
        self.look()
        return True


class _Walk:
    """A bounded search for the outermost directories that are named after kubepods, nearest first."""

    def __init__(self) -> None:
        self.kubepods: list[bytes] = []
        #: Directories of a runtime, with loose pods among their children.
        self.loose: list[bytes] = []
        self.trouble = ""

    def through(self, hierarchy: bytes) -> None:
        queue = deque([(hierarchy, 0)])
        for _ in range(_BOUND):
            if not queue:
                return
            path, depth = queue.popleft()
            further = self._sort(path)
            if depth < _DEPTH:
                queue.extend((os.path.join(path, name), depth + 1) for name in further)
        self.trouble = f"more than {_BOUND} directories in {os.fsdecode(hierarchy)!a}: not all were looked at"

    def _sort(self, path: bytes) -> list[bytes]:
        """Notes what holds pods among a directory's children; the names of the others, to be walked into."""
        try:
            names = _directories(path)
        except OSError as error:
            self.trouble = f"{os.fsdecode(path)!a} cannot be read: {error.strerror}"
            return []
        ours = [name for name in names if _KUBEPODS in name]
        self.kubepods += [os.path.join(path, name) for name in ours if _pod_of(name) is None]
        if any(_pod_of(name) is not None for name in ours):
            self.loose.append(path)
        return [name for name in names if _KUBEPODS not in name and name not in _PRUNED]


def _pods_in(parents: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    for parent in parents:
        for name in _directories(parent):
            uid = _pod_of(name)
            if uid is not None:
                yield uid, os.path.join(parent, name)


def _pattern(parent: bytes) -> tuple[bytes, bytes, bytes]:
    """What a pod's directory is called in one of the kubelet's: what stands before its UID, what divides that, and what
    stands after it."""
    name = os.path.basename(parent)
    if name.endswith(b".slice"):
        return os.path.join(parent, name.removesuffix(b".slice") + b"-pod"), b"_", b".slice"
    return os.path.join(parent, b"pod"), b"-", b""


def _classes(kubepods: bytes) -> list[bytes]:
    """Where the QoS classes of a kubelet lie, whether or not they exist."""
    name = os.path.basename(kubepods)
    if name.endswith(b".slice"):
        return [os.path.join(kubepods, b"%s-%s.slice" % (name.removesuffix(b".slice"), qos)) for qos in _QOS]
    return [os.path.join(kubepods, qos) for qos in _QOS]


def _directories(path: bytes) -> list[bytes]:
    """The names of the directories in one; none if it is gone."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if error.errno in _VANISHED:
            return []
        raise


def _is_directory(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        if error.errno in _VANISHED:
            return False
        raise
