"""The records that KubeVirt's agent keeps of its mounts and VMs: read as hints, and never written.

They are written before the mount and not atomically, overwritten when a VMI comes back to the node in a new pod, and
deleted after a clean-up that failed. So a record may be missing, early, torn, or name what was never mounted; what it
adds to the mount table are targets that are not mounted now. File names are VMI UIDs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

#: Directories below `host.kubevirt-private`.
CONTAINER_DISK_RECORDS = b"container-disk-mount-state"
HOTPLUG_RECORDS = b"hotplug-volume-mount-state"
GHOST_RECORDS = b"ghost-records"

#: Bytes; a record of the agent's has some hundred for each volume.
LARGEST = 1 << 20
#: Targets in one record; the agent once appended the same one for ever, and those fall together.
MOST_TARGETS = 4096


class BadRecord(ValueError):
    """A record that cannot be used; says what is wrong with it, not where it lies."""


@dataclass(frozen=True, slots=True)
class MountRecord:
    """Where the agent meant to mount a VM's volumes: paths as it wrote them, each once, in its order.

    `safe_paths`: symbolic links in them had been resolved (records of older agents have them unresolved).
    """

    targets: tuple[bytes, ...]
    safe_paths: bool


@dataclass(frozen=True, slots=True)
class Ghost:
    """A VM that the agent knows of: `socket` is its launcher's, as the agent's own mount namespace names it."""

    name: str
    namespace: str
    uid: str
    socket: bytes


def mount_record(data: bytes) -> MountRecord:
    """A record of containerDisks or of hotplugged volumes. Raises BadRecord."""
    record = _object(data)
    entries = record.get("mountTargetEntries")
    if not isinstance(entries, list):
        # Go writes an empty list as null.
        if entries is None and "mountTargetEntries" in record:
            entries = []
        else:
            _bad("mountTargetEntries", record, "a list")
    safe_paths = record.get("usesSafePaths", False)
    if not isinstance(safe_paths, bool):
        _bad("usesSafePaths", record, "true or false")
    targets = tuple(dict.fromkeys(_target(at, entry) for at, entry in enumerate(entries)))
    if len(targets) > MOST_TARGETS:
        raise BadRecord(f"it has {len(targets)} targets, more than {MOST_TARGETS}")
    return MountRecord(targets, safe_paths)


def ghost_record(data: bytes) -> Ghost:
    """A ghost record. Raises BadRecord."""
    record = _object(data)
    for key in ("name", "namespace", "uid"):
        if not isinstance(record.get(key), str) or not record[key]:
            _bad(key, record, "a string that is not empty")
    name, namespace, uid = (_bytes(str(record[key]), key).decode() for key in ("name", "namespace", "uid"))
    socket = record.get("socketFile", "")
    if not isinstance(socket, str):
        _bad("socketFile", record, "a string")
    return Ghost(name, namespace, uid, _bytes(socket, "socketFile"))


def _target(at: int, entry: object) -> bytes:
    if not isinstance(entry, dict):
        raise BadRecord(f"entry {at} of mountTargetEntries is {_word(entry)}, not an object")
    path = entry.get("targetFile")
    if not isinstance(path, str) or not path:
        _bad("targetFile", entry, "a string that is not empty", f" (entry {at} of mountTargetEntries)")
    return _bytes(path, "targetFile")


def _bytes(text: str, key: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{key} contains half of a surrogate pair") from None
    if b"\0" in data:
        raise BadRecord(f"{key} contains a NUL byte")
    return data


def _object(data: bytes) -> dict[str, object]:
    """The JSON object that a record is. A key that stands in it twice is refused: which one was meant?"""
    if not data:
        raise BadRecord("it is empty, as after a crash or on a full disk")
    if len(data) > LARGEST:
        raise BadRecord(f"it is larger than {LARGEST >> 20} MiB")
    if not data.strip(b"\0"):
        raise BadRecord(f"it consists of {len(data)} NUL bytes, as after a crash")
    record = _json(data)
    if not isinstance(record, dict):
        raise BadRecord(f"it is {_word(record)}, not an object")
    return record


def _json(data: bytes) -> object:
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadRecord(f"it is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    except RecursionError:
        raise BadRecord("its values are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRecord(f"it is torn, or no JSON: {error.msg} at character {error.pos} of {len(error.doc)}") from None
    except BadRecord:
        raise
    except ValueError as error:  # a number of more digits than Python converts
        raise BadRecord(f"it has a value that cannot be read: {error}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise BadRecord(f"the key {twice[:80]!a} stands in it more than once")
    return found


def _no_constant(name: str) -> NoReturn:
    raise BadRecord(f"it contains {name}, which is no JSON")


def _bad(key: str, record: dict[str, object], wanted: str, where: str = "") -> NoReturn:
    found = _word(record[key]) if key in record else "missing"
    raise BadRecord(f"{key} must be {wanted}, and is {found}{where}")


def _word(value: object) -> str:
    """What a JSON value is, in a word or two."""
    if value is None:
        return "null"
    if value == "" or isinstance(value, bool):
        return "an empty string" if value == "" else str(value).lower()
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")
