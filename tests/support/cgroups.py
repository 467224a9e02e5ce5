"""Pod cgroups for tests: below a cgroup made by the test, laid out as kubelet's drivers and runtimes do.

    with PodCgroups(V2_SYSTEMD) as cgroups:
        directories = cgroups.add(pod_uid)        # one a hierarchy: what a container's process joins
        hostd's host.cgroup-root = cgroups.root

On a unified host `root` is the test's own cgroup itself. For the layouts of version 1 it is a directory with one bind
mount for each hierarchy, made in the mount namespace that is handed in, as /sys/fs/cgroup has them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.support.mountns import MountNamespace
from tests.support.wait import DEADLINE, until


@dataclass(frozen=True, slots=True)
class Layout:
    """How a node arranges its pods' cgroups; `hierarchies` are directory names of version 1, or empty for version 2."""

    label: str
    systemd: bool
    runtime: str = "cri-containerd"
    qos: str = "burstable"
    prefix: str = ""
    hierarchies: tuple[str, ...] = ()

    def parents(self) -> list[str]:
        """Path components down to the directory whose children are pods."""
        above = [self.prefix] if self.prefix else []
        qos = [self.qos] if self.qos else []
        if not self.systemd:
            return [*above, "kubepods", *qos]
        return [*above, "kubepods.slice", *(f"kubepods-{name}.slice" for name in qos)]

    def pod(self, uid: str) -> str:
        """A pod's directory name."""
        if not self.systemd:
            return f"pod{uid}"
        stem = "kubepods-" + (f"{self.qos}-" if self.qos else "")
        return f"{stem}pod{uid.replace('-', '_')}.slice"

    def container(self) -> str:
        """A new container's directory name."""
        number = secrets.token_hex(32)
        return f"{self.runtime}-{number}.scope" if self.systemd else number


V2_SYSTEMD = Layout("v2-systemd", systemd=True)
V2_CGROUPFS = Layout("v2-cgroupfs", systemd=False)
V2_GUARANTEED = Layout("v2-guaranteed-crio", systemd=True, runtime="crio", qos="")
V2_NESTED = Layout("v2-nested", systemd=True, runtime="docker", qos="besteffort", prefix="kubelet.slice")
V1_SYSTEMD = Layout("v1-systemd", systemd=True, hierarchies=("pids", "systemd"))
V1_CGROUPFS = Layout("v1-cgroupfs", systemd=False, hierarchies=("pids", "systemd"))
LAYOUTS = [V2_SYSTEMD, V2_CGROUPFS, V2_GUARANTEED, V2_NESTED, V1_SYSTEMD, V1_CGROUPFS]


class Unavailable(Exception):
    """This machine does not have the hierarchies of a layout."""


def unified_mount() -> str:
    """Where this machine has its cgroup2 file system."""
    with open("/proc/self/mountinfo") as table:
        for line in table:
            if " - cgroup2 " in line and os.access(target := line.split()[4], os.W_OK):
                return target
    raise Unavailable("no writable cgroup2 file system is mounted here")


def _legacy_mount(controller: str) -> str:
    with open("/proc/self/mountinfo") as table:
        for line in table:
            head, _, tail = line.partition(" - ")
            options = tail.split()[2].split(",") if tail.startswith("cgroup ") else []
            if controller in options or f"name={controller}" in options:
                return head.split()[4]
    raise Unavailable(f"no cgroup hierarchy of version 1 with {controller} is mounted here")


class PodCgroups:
    """The cgroups of one test. Removed at the end, with the processes that are in them still."""

    def __init__(self, layout: Layout = V2_SYSTEMD, namespace: MountNamespace | None = None) -> None:
        self.layout = layout
        name = f"hostd-test-{os.getpid()}-{secrets.token_hex(3)}"
        mounts = [_legacy_mount(each) for each in layout.hierarchies] or [unified_mount()]
        self._tops = [os.path.join(mount, name) for mount in mounts]
        self._pods: dict[str, list[str]] = {}
        for top in self._tops:
            os.makedirs(os.path.join(top, *layout.parents()))
        self.root = self._tops[0] if not layout.hierarchies else self._bind(namespace)

    def _bind(self, namespace: MountNamespace | None) -> str:
        assert namespace is not None, "layouts of version 1 need a mount namespace for their root"
        root = namespace.base + b"/cgroup"
        for name, top in zip(self.layout.hierarchies, self._tops, strict=True):
            namespace.bind(os.fsencode(top), namespace.mkdir(root + b"/" + name.encode()))
        return os.fsdecode(root)

    def add(self, pod_uid: str) -> list[str]:
        """Makes a pod's cgroup (again: one more container in it); gives the container's, one a hierarchy."""
        pods = [os.path.join(top, *self.layout.parents(), self.layout.pod(pod_uid)) for top in self._tops]
        self._pods[pod_uid] = pods
        container = self.layout.container()
        made = [os.path.join(pod, container) for pod in pods]
        for directory in made:
            os.makedirs(directory)
        return made

    def processes(self, pod_uid: str) -> list[int]:
        """All processes of a pod."""
        return [pid for pod in self._pods.get(pod_uid, []) for pid in _processes(pod)]

    def remove(self, pod_uid: str) -> None:
        """Removes a pod's cgroup as kubelet does once its last process is gone."""
        for pod in self._pods.pop(pod_uid, []):
            _remove(pod)

    def close(self) -> None:
        """Ends what runs in the cgroups still and removes them."""
        for top in self._tops:
            for pid in _processes(top):
                _end(pid)
            _remove(top)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Uninterruptible:
    """Keeps a process in D state, where even SIGKILL waits, until the end: the freezer of version 1 does that.

    Raises Unavailable on machines that have cgroups of version 2 alone.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._top = os.path.join(_legacy_mount("freezer"), f"hostd-test-{os.getpid()}-{secrets.token_hex(3)}")
        os.mkdir(self._top)
        with open(f"/proc/{pid}/cgroup") as file:
            groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
        self._home = os.path.dirname(self._top) + groups["freezer"]
        self._write("cgroup.procs", str(pid))
        self._write("freezer.state", "FROZEN")
        until(self._frozen, why=f"process {pid} is frozen")

    def _frozen(self) -> bool:
        with open(os.path.join(self._top, "freezer.state")) as file:
            return file.read() == "FROZEN\n"

    def _write(self, name: str, text: str) -> None:
        with open(os.path.join(self._top, name), "w") as file:
            file.write(text)

    def end(self) -> None:
        """Lets it go on, or die of what it was sent meanwhile."""
        self._write("freezer.state", "THAWED")
        with contextlib.suppress(ProcessLookupError), open(os.path.join(self._home, "cgroup.procs"), "w") as file:
            file.write(str(self._pid))
        _remove(self._top)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Frozen:
    """Keeps a process from running while it looks as if it slept: a hang. SIGKILL ends it, and the end of this does.

    The freezer of version 2 does that. Raises Unavailable.
    """

    def __init__(self, pid: int) -> None:
        self._top = os.path.join(unified_mount(), f"hostd-test-{os.getpid()}-{secrets.token_hex(3)}")
        os.mkdir(self._top)
        self._write("cgroup.procs", str(pid))
        self._write("cgroup.freeze", "1")
        until(self._frozen, why=f"process {pid} is frozen")

    def _write(self, name: str, text: str) -> None:
        with open(os.path.join(self._top, name), "w") as file:
            file.write(text)

    def _frozen(self) -> bool:
        with open(os.path.join(self._top, "cgroup.events")) as file:
            return "frozen 1" in file.read()

    def thaw(self) -> None:
        """Lets it go on."""
        self._write("cgroup.freeze", "0")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in _processes(self._top):
            _end(pid)
        _remove(self._top)


def _processes(top: str) -> list[int]:
    found: list[int] = []
    for directory, _, _ in os.walk(top):
        with contextlib.suppress(OSError), open(os.path.join(directory, "cgroup.procs")) as file:
            found += [int(line) for line in file]
    return found


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], DEADLINE)
        finally:
            os.close(fd)


def _remove(top: str) -> None:
    """Removes a cgroup with its children; a process that has just died may keep one for a moment."""
    for directory, _, _ in os.walk(top, topdown=False):
        until(lambda directory=directory: _rmdir(directory), why=f"cgroup {directory} can be removed")  # type: ignore[misc]


def _rmdir(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
