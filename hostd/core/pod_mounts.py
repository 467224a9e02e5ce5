"""Which pod has what mounted: the rows of a mount table, sorted by the pods whose directories they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostd.kubevirt.targets import CONTAINER_DISKS, EMPTY_DIRS, HOTPLUG_DISKS, Foreign, Target, classify

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hostd.linux.mount_table import Mount

#: One of these is in every target that matters.
NEEDLES = tuple(b"/".join((b"", EMPTY_DIRS, directory, b"")) for directory in (CONTAINER_DISKS, HOTPLUG_DISKS))


@dataclass(slots=True)
class PodMounts:
    """What is mounted in one pod's two directories."""

    #: Each target with the mounts stacked on it, bottom first.
    targets: dict[bytes, tuple[Target, list[Mount]]] = field(default_factory=dict)
    #: Mounts that are nobody's layer.
    foreign: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class KubeletRoot:
    """The kubelet's directory, symlinks resolved: found once, for all who need it. `found` is False while it does not
    exist; the path is then the configured one."""

    path: bytes
    found: bool = False


class SortedMounts:
    """Rows by number (whatever number their source gives them, rising as in the table), and each pod's of them."""

    def __init__(self, root: KubeletRoot) -> None:
        self._root = root
        #: All that contain a needle, also those that are in no pod's directories.
        self.rows: dict[int, Mount] = {}
        self.pods: dict[str, PodMounts] = {}
        self._meaning: dict[int, Target | Foreign] = {}
        self._numbers: dict[str, set[int]] = {}

    def replace(self, rows: Mapping[int, Mount]) -> set[str]:
        """These are all; gives the pods whose mounts differ from before."""
        numbers = self.rows.keys() | rows.keys()
        return self.update({each: rows.get(each) for each in numbers if self.rows.get(each) != rows.get(each)})

    def update(self, changes: Mapping[int, Mount | None]) -> set[str]:
        """These are new, or other than before, or gone (None); gives the pods whose mounts differ from before."""
        touched: set[str] = set()
        for number, row in changes.items():
            touched |= self._take_out(number)
            if row is not None:
                touched |= self._put_in(number, row)
        return {pod_uid for pod_uid in touched if self._sort(pod_uid)}

    def sort_again(self) -> None:
        """The kubelet's root is another now, and the same rows mean something else."""
        rows = self.rows
        self.rows, self.pods, self._meaning, self._numbers = {}, {}, {}, {}
        self.update(rows)

    def numbers_of(self, pod_uid: str) -> Collection[int]:
        """The rows of one pod."""
        return self._numbers.get(pod_uid, ())

    def _take_out(self, number: int) -> set[str]:
        self.rows.pop(number, None)
        meaning = self._meaning.pop(number, None)
        if meaning is None:
            return set()
        self._numbers[meaning.pod_uid].discard(number)
        return {meaning.pod_uid}

    def _put_in(self, number: int, row: Mount) -> set[str]:
        self.rows[number] = row
        meaning = classify(self._root.path, row.target)
        if meaning is None:
            return set()
        self._meaning[number] = meaning
        self._numbers.setdefault(meaning.pod_uid, set()).add(number)
        return {meaning.pod_uid}

    def _sort(self, pod_uid: str) -> bool:
        """Puts together what one pod has mounted; whether that is something else than before."""
        made = PodMounts()
        for number in sorted(self._numbers[pod_uid]):
            match self._meaning[number]:
                case Target() as target:
                    made.targets.setdefault(target.path, (target, []))[1].append(self.rows[number])
                case Foreign(path=path):
                    made.foreign.append(path)
        before = self.pods.pop(pod_uid, None)
        if self._numbers[pod_uid]:
            self.pods[pod_uid] = made
        else:
            del self._numbers[pod_uid]
        return made != (before or PodMounts())
