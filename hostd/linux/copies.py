"""Which mounts stand for a layer: on its target in the host's namespace, and the copies of that in all others.

Pure: works on mount tables that somebody has read. Device and root alone do not tell one layer's copy from another's
(two VMs may share a volume). The *place* does: the directory entry that the mount covers, as a device and a path in its
file system. Whatever path a container has it under, a copy of a mount covers the same entry.

A copy is *bound* to the host's mount when an umount there takes it away (its parent is a peer or a slave of the host
mount's parent); then its users make that umount busy. A copy that is not stays, and pins what was mounted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from hostd.linux import mount_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hostd.linux.mount_table import Mount

#: What mountinfo puts behind the root of a mount whose source was deleted; no path has two slashes.
_DELETED: Final = b"//deleted"

Place = tuple[str, bytes]
Source = tuple[str, bytes]


class Wanted(NamedTuple):
    """A layer: its target as the host's table has it, its device ("major:minor") and root (unescaped).

    `mount_ids`: ids that its mounts had before they were detached. An id is not given anew while anything pins it.
    """

    target: bytes
    device: str
    root: bytes
    mount_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Copies:
    """What was found for all layers together."""

    #: Mount id → target. Users of these mounts hold the layer.
    ids: dict[int, bytes] = field(default_factory=dict)
    #: (target, namespace) of copies that an umount on the host does not take away.
    pins: list[tuple[bytes, str]] = field(default_factory=list)
    #: (target, mountpoint) of mounts below a layer on the host, and of its own that were moved from its target.
    below: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: Device → target, of layers that are not mounted on the host (any more).
    absent: dict[str, bytes] = field(default_factory=dict)
    #: Mount id → target, of the mounts that these are known to have had.
    former: dict[int, bytes] = field(default_factory=dict)
    #: Namespace → where the mounts in `ids` are in there.
    paths: dict[str, list[bytes]] = field(default_factory=dict)


class _Layer:
    def __init__(self, wanted: Wanted, host: Mapping[int, Mount]) -> None:
        self.target = wanted.target
        self.former = frozenset(wanted.mount_ids)
        self.mounts = [mount for mount in host.values() if mount.target == wanted.target]
        self.sources: set[Source] = {(wanted.device, wanted.root.removesuffix(_DELETED))}
        self.sources.update(map(_source, self.mounts))
        parent = _parent(self.mounts[0], host) if self.mounts else _covering(wanted.target, host.values())
        self.place = _place(wanted.target, parent) if parent else None
        self.groups = {parent.peer_group} - {0} if parent and self.mounts else set()


def find(wanted: Sequence[Wanted], host: str, tables: Mapping[str, bytes]) -> Copies:
    """The mounts of the wanted layers in `tables` (mountinfo by namespace, the one named `host` among them)."""
    host_mounts = _by_id(tables[host])
    layers = [_Layer(one, host_mounts) for one in wanted]
    sources = set().union(*(layer.sources for layer in layers)) if layers else set()
    parsed = {name: _by_id(table) for name, table in tables.items() if name != host and _may_have(table, sources)}
    found = Copies(
        absent={one.device: one.target for one, layer in zip(wanted, layers, strict=True) if not layer.mounts}
    )
    found.former = {number: one.target for one in wanted for number in one.mount_ids}
    for layer in layers:
        _on_host(layer, host, host_mounts, found)
        _spread(layer, [host_mounts, *parsed.values()])
    for name, mounts in parsed.items():
        for layer in layers:
            _elsewhere(layer, name, mounts, found)
    return found


def _on_host(layer: _Layer, host: str, mounts: Mapping[int, Mount], found: Copies) -> None:
    ids = {mount.mount_id for mount in layer.mounts}
    found.ids.update(dict.fromkeys(ids, layer.target))
    if ids:
        found.paths.setdefault(host, []).append(layer.target)
    below = (mount for mount in mounts.values() if mount.parent_id in ids and mount.mount_id not in ids)
    found.below.extend((layer.target, mount.target) for mount in (*below, *_moved(layer, mounts)))


def _moved(layer: _Layer, mounts: Mapping[int, Mount]) -> list[Mount]:
    """The layer's own mounts that are elsewhere now: renaming a mountpoint in a namespace where nothing is mounted on
    it takes the mount along here. Only close to the target: far away an id may have been given anew."""
    near = os.path.dirname(os.path.dirname(layer.target)) + b"/"
    return [
        mount
        for number in layer.former
        if (mount := mounts.get(number)) and mount.target != layer.target
        if mount.target.startswith(near) and _source(mount) in layer.sources
    ]


def _spread(layer: _Layer, tables: Iterable[Mapping[int, Mount]]) -> None:
    """Adds the peer groups that are slaves of the layer's, at any remove."""
    links = {(mount.master, mount.peer_group) for table in tables for mount in table.values() if mount.master}
    while more := {group for master, group in links if group and master in layer.groups} - layer.groups:
        layer.groups |= more


def _elsewhere(layer: _Layer, name: str, mounts: Mapping[int, Mount], found: Copies) -> None:
    for mount in mounts.values():
        if _source(mount) not in layer.sources:
            continue
        parent = _parent(mount, mounts)
        if parent is None or layer.place is None or _place(mount.target, parent) != layer.place:
            continue
        bound = parent.peer_group in layer.groups or parent.master in layer.groups
        if not bound and (layer.target, name) not in found.pins:
            found.pins.append((layer.target, name))
        # While the host has it mounted, the users of an unbound copy do not make that umount busy.
        if bound or not layer.mounts:
            found.ids[mount.mount_id] = layer.target
            found.paths.setdefault(name, []).append(mount.target)


def _by_id(table: bytes) -> dict[int, Mount]:
    return {mount.mount_id: mount for mount in mount_table.parse(table)}


def _may_have(table: bytes, sources: Iterable[Source]) -> bool:
    return any(b" %s %s" % (device.encode(), mount_table.escape(root)) in table for device, root in sources)


def _source(mount: Mount) -> Source:
    return mount.device, mount.root.removesuffix(_DELETED)


def _parent(mount: Mount, mounts: Mapping[int, Mount]) -> Mount | None:
    """The mount that the lowest one of the stack at this mountpoint stands on."""
    parent = mounts.get(mount.parent_id)
    while parent is not None and parent.target == mount.target:
        parent = mounts.get(parent.parent_id) if parent.parent_id != parent.mount_id else None
    return parent


def _covering(path: bytes, mounts: Iterable[Mount]) -> Mount | None:
    above = [mount for mount in mounts if path.startswith(mount.target.rstrip(b"/") + b"/")]
    # Of stacked ones the last is on top.
    return max(reversed(above), key=lambda mount: len(mount.target), default=None)


def _place(target: bytes, parent: Mount) -> Place | None:
    above = parent.target.rstrip(b"/")
    if not target.startswith(above + b"/"):
        return None
    return parent.device, parent.root.rstrip(b"/") + target[len(above) :]
