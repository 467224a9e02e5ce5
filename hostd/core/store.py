"""The durable state: one small JSON file a VM in the runtime directory, as boot-scoped as the mounts it speaks of.

The format is private and has a version. A file is replaced whole (temporary file, fsync, rename, fsync of the
directory), so a crash or a full disk leaves the old one. A file that cannot be used is moved aside to `bad/`, and what
it was about is found again by looking.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from hostd.core.model import VM, Exit, ExitReason, Holder, Layer, LayerState, Policy, State
from hostd.kubevirt.targets import Kind, Target, is_pod_uid
from hostd.linux import small_file
from hostd.linux.clock import boot_id
from hostd.linux.pidfd import Identity

VERSION = 1
#: A VM with a thousand layers takes about 400 KiB.
LARGEST = 4 << 20
_SUFFIX = ".json"
#: Of any number in a file; the kernel has none that is larger.
_BITS = 64


@dataclass(frozen=True, slots=True)
class BadFile:
    """A state file that could not be used, where it is now, and why."""

    name: str
    kept_as: str
    why: str


class Store:
    """The state files of one hostd. Raises OSError where the directory cannot be used."""

    def __init__(self, runtime_dir: str) -> None:
        self.directory = os.path.join(runtime_dir, "vms")
        self._aside = os.path.join(runtime_dir, "bad")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Lets go of the directory."""
        os.close(self._fd)

    def load(self) -> tuple[list[VM], list[BadFile]]:
        """All VMs of this boot, oldest first, and the files that could not be used (moved aside).

        Files of another boot are removed: the mounts and processes they speak of ended with it.
        """
        vms: list[VM] = []
        bad: list[BadFile] = []
        for name in sorted(os.listdir(self._fd)):
            if not name.endswith(_SUFFIX):
                os.unlink(name, dir_fd=self._fd)  # a temporary file of a write that a crash cut off
                continue
            try:
                vm = self._load_one(name)
            except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                bad.append(BadFile(name, self._set_aside(name), f"{type(error).__name__}: {error}"))
                continue
            if vm is None:
                os.unlink(name, dir_fd=self._fd)
            else:
                vms.append(vm)
        return sorted(vms, key=lambda vm: vm.first_seen_at), bad

    def _load_one(self, name: str) -> VM | None:
        uid = name.removesuffix(_SUFFIX)
        plain = json.loads(small_file.read(name, LARGEST, self._fd))
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise ValueError(f"not a state file of version {VERSION}")
        if plain["boot"] != boot_id():
            return None
        vm = vm_from_plain(plain["vm"])
        if vm.pod_uid != uid or not is_pod_uid(uid):
            raise ValueError(f"speaks of pod {vm.pod_uid!r}")
        return vm

    def _set_aside(self, name: str) -> str:
        os.makedirs(self._aside, mode=0o700, exist_ok=True)
        kept_as = os.path.join(self._aside, name)
        try:
            os.rename(os.path.join(self.directory, name), kept_as)
        except OSError:  # a directory of that name is there already: any free name will do
            kept_as = f"{kept_as}.{os.getpid()}"
            os.rename(os.path.join(self.directory, name), kept_as)
        return kept_as

    def save(self, vm: VM, plain: dict[str, Any] | None = None) -> None:
        """Durable on return. Raises OSError, and then the old file is as it was. `plain`: of a caller that has it."""
        plain = vm_to_plain(vm) if plain is None else plain
        data = json.dumps({"version": VERSION, "boot": boot_id(), "vm": plain}, separators=(",", ":"))
        small_file.replace(self._fd, vm.pod_uid + _SUFFIX, data.encode())

    def remove(self, pod_uid: str) -> None:
        """Forgets a VM; one that has no file is none the worse."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pod_uid + _SUFFIX, dir_fd=self._fd)


# --- plain data, both ways; bytes travel as surrogate-escaped text ---


_NAMES = tuple(field.name for field in fields(VM))
_VALUES = attrgetter(*_NAMES)


def vm_to_plain(vm: VM) -> dict[str, Any]:
    """A VM as JSON can hold it."""
    plain = dict(zip(_NAMES, _VALUES(vm), strict=True))
    plain["leader"] = vm.leader and vm.leader.to_dict()
    plain["qemus"] = [identity.to_dict() for identity in vm.qemus]
    plain["exit"] = [vm.exit.status, vm.exit.signal, vm.exit.reason]
    plain["layers"] = [_layer_to_plain(layer) for layer in vm.layers.values()]
    return plain


def vm_from_plain(plain: dict[str, Any]) -> VM:
    """The VM that was saved. Raises ValueError, TypeError or KeyError where it cannot be one."""
    values = {name: value for name, value in plain.items() if name in _NAMES}
    status, signal, reason = _list(plain["exit"])
    layers = [_layer_from_plain(plain["pod_uid"], layer) for layer in _list(plain["layers"])]
    values |= {
        "state": State(plain["state"]),
        "policy": Policy(plain["policy"]),
        "leader": _identity(plain["leader"]),
        "qemus": [Identity.from_dict(identity) for identity in _list(plain["qemus"])],
        "exit": Exit(_int(status), _int(signal), ExitReason(reason)),
        "layers": {layer.target.path: layer for layer in layers},
        "devices": tuple(_str(device) for device in _list(plain["devices"])),
    }
    vm = VM(**values)
    _check_plain_fields(vm)
    return vm


def _check_plain_fields(vm: VM) -> None:
    for field in fields(VM):
        value = getattr(vm, field.name)
        match field.type:
            case "str":
                _str(value)
            case "int":
                _int(value)
            case "int | None" if value is not None:
                _int(value)
            case "bool" if not isinstance(value, bool):
                raise TypeError(f"{field.name}: true or false, not {value!r}")


def _layer_to_plain(layer: Layer) -> dict[str, Any]:
    return {
        "path": os.fsdecode(layer.target.path),
        "relative": os.fsdecode(layer.target.relative),
        "kind": layer.target.kind,
        "volume": layer.target.volume,
        "state": layer.state,
        "error": layer.error,
        "errno": layer.errno,
        "attempts": layer.attempts,
        "retry_at": layer.retry_at,
        "seen_at": layer.seen_at,
        "source": [layer.source[0], os.fsdecode(layer.source[1])],
        "mount_ids": list(layer.mount_ids),
        "pinned_ids": list(layer.pinned_ids),
        "holders": [[holder.pid, holder.name, holder.how, holder.pod_uid] for holder in layer.holders],
        "worker": layer.worker and layer.worker.to_dict(),
        "remounts": layer.remounts,
        "gone_at": layer.gone_at,
        "tracked": layer.tracked,
    }


#: What a layer of an older hostd lacks is as in a new one.
_DEFAULTS = _layer_to_plain(Layer(Target("", Kind.CONTAINERDISK, "", b"", b"")))
_REQUIRED = ("path", "relative", "kind", "volume", "state")


def _layer_from_plain(pod_uid: str, saved: dict[str, Any]) -> Layer:
    plain = _DEFAULTS | saved | {name: saved[name] for name in _REQUIRED}
    path, relative = os.fsencode(plain["path"]), os.fsencode(plain["relative"])
    device, root = _list(plain["source"])
    return Layer(
        Target(pod_uid, Kind(plain["kind"]), _str(plain["volume"]), path, relative),
        state=LayerState(plain["state"]),
        error=_str(plain["error"]),
        errno=_int(plain["errno"]),
        attempts=_int(plain["attempts"]),
        retry_at=_int(plain["retry_at"]),
        seen_at=_int(plain["seen_at"]),
        source=(_str(device), os.fsencode(root)),
        mount_ids=tuple(_int(number) for number in _list(plain["mount_ids"])),
        pinned_ids=tuple(_int(number) for number in _list(plain["pinned_ids"])),
        holders=tuple(_holder(*_list(row)) for row in _list(plain["holders"])),
        worker=_identity(plain["worker"]),
        remounts=_int(plain["remounts"]),
        gone_at=_int(plain["gone_at"]),
        tracked=plain["tracked"] is True,
    )


def _holder(pid: object, name: object, how: object, pod_uid: object) -> Holder:
    holder = Holder(_int(pid), _str(name), _str(how), _str(pod_uid))
    holder.name.encode()  # what a QEMU looks like is asked in bytes
    return holder


def _identity(plain: Any) -> Identity | None:  # noqa: ANN401 - looked at in there
    return None if plain is None else Identity.from_dict(plain)


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value.bit_length() > _BITS:
        raise TypeError(f"a whole number of at most 64 bits, not {value!r}")
    return value


def _str(value: object) -> str:
    """Text, in which a surrogate stands for a byte of a path and nothing else. Raises UnicodeEncodeError too."""
    if not isinstance(value, str):
        raise TypeError(f"a string, not {value!r}")
    os.fsencode(value)
    return value


def _list(value: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list, not {value!r}")
    return value
