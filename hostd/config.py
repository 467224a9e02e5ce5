"""The configuration: TOML from three places, each key's last word counts.

    /usr/lib/hostd/hostd.toml < /etc/hostd/hostd.toml < /etc/hostd/hostd.toml.d/*.toml (by name)

`--config FILE` replaces all of them. No file need exist. Every file is checked by itself, so that an error can name the
file, the key and what is allowed. Times are microseconds here and text such as "1min 30s" in the files.
"""

from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from hostd import values as read
from hostd.errors import ConfigError
from hostd.kubevirt.targets import Kind
from hostd.values import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Where the configuration lies: the package's, the administrator's, and the administrator's drop-ins.
PLACES = ("/usr/lib/hostd/hostd.toml", "/etc/hostd/hostd.toml", "/etc/hostd/hostd.toml.d")

#: No configuration is larger (bytes); what is larger is another file.
_LARGEST = 1 << 20


class Mode(StrEnum):
    """Whether hostd acts, or only says what it would do."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class OnExit(StrEnum):
    """What becomes of the devices of a VM that powered off."""

    RELEASE = "release"
    HOLD = "hold"


class Backend(StrEnum):
    """Who runs qemu-pr-helper."""

    AUTO = "auto"
    SYSTEMD = "systemd"
    CHILD = "child"


@dataclass(frozen=True, slots=True)
class Host:
    """Where things lie on this host; all paths are absolute."""

    kubelet_root: bytes = b"/var/lib/kubelet"
    kubevirt_private: bytes = b"/var/run/kubevirt-private"
    mount_namespace: str = "/proc/1/ns/mnt"
    cgroup_root: bytes = b"/sys/fs/cgroup"
    runtime_dir: bytes = b"/run/hostd"
    state_dir: bytes = b"/var/lib/hostd"


@dataclass(frozen=True, slots=True)
class LazyAfter:
    """How long a busy layer is tried plainly before it is detached (µs); None = for ever."""

    #: For containerDisks and kernel-boot files, which are read-only images.
    containerdisk_usec: int | None = 30 * SECOND
    #: For all hotplugged volumes, whose writers a detach would hide.
    hotplug_usec: int | None = None


@dataclass(frozen=True, slots=True)
class Cleanup:
    """When and how layers are unmounted; times in µs."""

    mode: Mode = Mode.ENFORCE
    grace_usec: int = 2 * SECOND
    settle_usec: int = 10 * SECOND
    retain_usec: int = 600 * SECOND
    lazy_after: LazyAfter = LazyAfter()

    def lazy_after_usec(self, kind: Kind) -> int | None:
        """When after the death a busy layer of this kind may be detached; None = never."""
        image = kind in (Kind.CONTAINERDISK, Kind.KERNEL_BOOT)
        return self.lazy_after.containerdisk_usec if image else self.lazy_after.hotplug_usec


@dataclass(frozen=True, slots=True)
class Devices:
    """Claims on devices."""

    on_exit: OnExit = OnExit.RELEASE


@dataclass(frozen=True, slots=True)
class PRHelper:
    """qemu-pr-helper: `owner` is (uid, gid), `mode` a file mode; an empty label leaves the label alone."""

    enabled: bool = False
    socket: bytes = b"/var/run/kubevirt/daemons/pr/pr-helper.sock"
    owner: tuple[int, int] = (107, 107)
    mode: int = 0o660
    selinux_label: str = "system_u:object_r:container_file_t:s0"
    backend: Backend = Backend.AUTO


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where metrics are written, beside the bus; None = nowhere."""

    textfile: bytes | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """All of the configuration, and the files that it was read from, in order."""

    host: Host = Host()
    cleanup: Cleanup = Cleanup()
    devices: Devices = Devices()
    pr_helper: PRHelper = PRHelper()
    metrics: Metrics = Metrics()
    sources: tuple[str, ...] = field(default=(), compare=False)


#: Every key, by the name that an error gives it: the field that holds it, and what reads its value.
KEYS: dict[str, tuple[str, Callable[[object], object]]] = {
    "host.kubelet-root": ("kubelet_root", read.path),
    "host.kubevirt-private": ("kubevirt_private", read.path),
    "host.mount-namespace": ("mount_namespace", read.path_text),
    "host.cgroup-root": ("cgroup_root", read.path),
    "host.runtime-dir": ("runtime_dir", read.path),
    "host.state-dir": ("state_dir", read.path),
    "cleanup.mode": ("mode", read.choice(Mode)),
    "cleanup.grace": ("grace_usec", read.duration),
    "cleanup.settle": ("settle_usec", read.duration),
    "cleanup.retain": ("retain_usec", read.duration),
    "cleanup.lazy-after.containerdisk": ("containerdisk_usec", read.duration_or_never),
    "cleanup.lazy-after.hotplug": ("hotplug_usec", read.duration_or_never),
    "devices.on-exit": ("on_exit", read.choice(OnExit)),
    "pr-helper.enabled": ("enabled", read.flag),
    "pr-helper.socket": ("socket", read.socket_path),
    "pr-helper.owner": ("owner", read.owner),
    "pr-helper.mode": ("mode", read.file_mode),
    "pr-helper.selinux-label": ("selinux_label", read.selinux_label),
    "pr-helper.backend": ("backend", read.choice(Backend)),
    "metrics.textfile": ("textfile", read.path_or_nothing),
}


def load(file: str | None = None, places: tuple[str, str, str] = PLACES) -> Config:
    """The configuration as it is on disk now; with `file`, that one alone. Raises ConfigError."""
    values: dict[str, object] = {}
    sources: list[str] = []
    for path in _files(places) if file is None else [file]:
        values |= parse(_read(path), path)
        sources.append(path)
    return _config(values, tuple(sources))


def parse(text: str, file: str) -> dict[str, object]:
    """The values that a file's text sets, by the names in `KEYS`. Raises ConfigError that names the file."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{file}: its values are nested too deeply; hostd.toml(5) has all keys") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    return {key: _value(file, key, value) for key, value in _flat(file, "", table)}


def _value(file: str, key: str, value: object) -> object:
    try:
        return KEYS[key][1](value)
    except ValueError as error:
        raise ConfigError(f"{file}: {key} must be {error}; it is {_shown(value)}") from None


def _flat(file: str, prefix: str, table: Mapping[str, object]) -> list[tuple[str, object]]:
    """The keys of a table with its name before them, tables in tables likewise; all of them known."""
    found: list[tuple[str, object]] = []
    for name, value in table.items():
        key = prefix + name
        inner = [known for known in KEYS if known.startswith(key + ".")]
        # A quoted key with a dot in it looks like one of ours and is not.
        if "." in name or not (inner or key in KEYS):
            raise ConfigError(f"{file}: {key} is unknown; allowed here: {_allowed(prefix)}")
        if not inner:
            found.append((key, value))
        elif isinstance(value, dict):
            found += _flat(file, key + ".", value)
        else:
            raise ConfigError(f"{file}: {key} must be a table with {_allowed(key + '.')}; it is {_shown(value)}")
    return found


def _allowed(prefix: str) -> str:
    names = [key.removeprefix(prefix).split(".")[0] for key in KEYS if key.startswith(prefix)]
    return ", ".join(dict.fromkeys(names))


def _shown(value: object) -> str:
    """A refused value for an error: short, and as TOML would have it where that is easy."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else "a table" if isinstance(value, dict) else f"{value}"
    return text if len(text) <= 80 else text[:77] + "..."


def _config(values: Mapping[str, object], sources: tuple[str, ...]) -> Config:
    def section(name: str) -> dict[str, object]:
        return {KEYS[key][0]: value for key, value in values.items() if key.rpartition(".")[0] == name}

    # The readers in KEYS have made the types right, which no checker can see through a mapping.
    lazy_after = LazyAfter(**section("cleanup.lazy-after"))  # type: ignore[arg-type]
    return Config(
        host=Host(**section("host")),  # type: ignore[arg-type]
        cleanup=Cleanup(**section("cleanup"), lazy_after=lazy_after),  # type: ignore[arg-type]
        devices=Devices(**section("devices")),  # type: ignore[arg-type]
        pr_helper=PRHelper(**section("pr-helper")),  # type: ignore[arg-type]
        metrics=Metrics(**section("metrics")),  # type: ignore[arg-type]
        sources=sources,
    )


def _files(places: tuple[str, str, str]) -> list[str]:
    """The files that exist, least important first. A link to nothing exists: it is an error, not an absence."""
    vendor, administrator, directory = places
    return [path for path in (vendor, administrator) if os.path.lexists(path)] + _drop_ins(directory)


def _drop_ins(directory: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from None
    wanted = sorted(name for name in names if name.endswith(".toml") and not name.startswith("."))
    return [os.path.join(directory, name) for name in wanted]


def _read(path: str) -> str:
    try:
        data = _content(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _LARGEST:
        raise ConfigError(f"{path} is larger than {_LARGEST >> 20} MiB: it is no configuration of hostd")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def _content(path: str) -> bytes:
    """The bytes of a regular file, or none for /dev/null; anything else could block or never end."""
    # O_NONBLOCK: the open of a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3):
            return b""
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} cannot be read: it is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(_LARGEST + 1)
    finally:
        os.close(fd)
