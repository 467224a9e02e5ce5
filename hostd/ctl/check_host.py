"""doctor's look at the host: mounts, cgroups, kernel."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

from hostd.ctl.findings import Finding, bad, good, note, warning
from hostd.kubevirt.pod_cgroup import PodCgroups
from hostd.linux import libc
from hostd.linux.cgroup import hierarchies
from hostd.linux.mount_events import MountEvents
from hostd.linux.mount_table import MountTable, parse
from hostd.linux.pidfd import Process, identify
from hostd.linux.statmount import MountRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hostd.config import Host
    from hostd.linux.mount_table import Mount

_OPENAT2_SINCE = "5.6"
_NEWER = "nothing has to be done; a newer kernel has it"


def check(host: Host) -> Iterator[Finding]:
    """Everything here."""
    yield from mount_namespace(host)
    yield from kubelet_root(host)
    yield from cgroups(host)
    yield from kernel()


# Mounts


def mount_namespace(host: Host) -> Iterator[Finding]:
    """Whether hostd's workers can get to where the layers are."""
    area, path = "mounts", host.mount_namespace
    try:
        theirs = os.stat(path)
    except PermissionError:
        yield _not_allowed(path)
        return
    except OSError as error:
        yield bad(area, f"{path} cannot be opened: {error.strerror}", "host.mount-namespace names PID 1's on the host")
        return
    ours = os.stat("/proc/self/ns/mnt")
    same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
    where = "" if same else "; this hostctl runs in another one (a container?), so its other findings may be of that"
    yield good(area, f"mount namespace {path} can be reached{where}")


def _not_allowed(path: str) -> Finding:
    if os.geteuid() != 0:
        return note("mounts", f"{path} is for root alone to look at", "run `hostctl doctor` as root")
    return warning(
        "mounts",
        f"not even root may look at {path} here, so hostd cannot reach the host's mounts",
        "run it on the host itself, not in a container (or with CAP_SYS_PTRACE and the host's pids)",
    )


def kubelet_root(host: Host) -> Iterator[Finding]:
    """Whether it is there, and what it is mounted as."""
    area, path = "mounts", host.kubelet_root
    shown = os.fsdecode(path)
    if not os.path.isdir(path):
        yield warning(
            area, f"{shown} is no directory", "is kubelet installed? if its root is elsewhere: host.kubelet-root"
        )
        return
    resolved = os.path.realpath(path)
    link = f" -> {os.fsdecode(resolved)}" if resolved != path else ""
    try:
        with MountTable("/proc/1/mountinfo") as table:
            mount = mount_of(parse(table.read()), resolved)
    except OSError as error:
        yield note(area, f"the mount table of PID 1 cannot be read: {error.strerror}", "run `hostctl doctor` as root")
        return
    if mount is None:
        yield warning(area, f"{shown}{link} is on no mount that can be seen", "run `hostctl doctor` on the host")
    elif mount.peer_group:
        yield good(area, f"{shown}{link} is on a shared mount ({os.fsdecode(mount.target)})")
    else:
        yield warning(
            area,
            f"{shown}{link} is on a mount that is not shared ({os.fsdecode(mount.target)}): what KubeVirt mounts does "
            "not reach the launcher pods, and umounts do not reach copies in them",
            f"mount --make-rshared {os.fsdecode(mount.target)} (systemd does that for / at boot)",
        )


def mount_of(mounts: Sequence[Mount], path: bytes) -> Mount | None:
    """The mount that a path is on: the last one of those whose target is the longest."""
    found = [mount for mount in mounts if _is_at_or_above(mount.target, path)]
    return max(reversed(found), key=lambda mount: len(mount.target), default=None)


def _is_at_or_above(target: bytes, path: bytes) -> bool:
    return target == b"/" or path == target or path.startswith(target + b"/")


# Cgroups


def cgroups(host: Host) -> Iterator[Finding]:
    """Whether hostd can tell an ended pod from one that has not begun."""
    area, shown = "cgroups", os.fsdecode(host.cgroup_root)
    try:
        found = hierarchies(host.cgroup_root)
        pods = PodCgroups(host.cgroup_root)
    except OSError as error:
        yield bad(area, f"{shown} cannot be read: {error.strerror}", "host.cgroup-root names the cgroup file system")
        return
    unified = [each for each in found if each.unified]
    if not found:
        yield bad(area, f"no cgroup hierarchy is at {shown}", "host.cgroup-root names the cgroup file system")
    elif unified and len(found) == 1:
        yield good(area, f"unified hierarchy (version 2) at {shown}")
    else:
        yield note(
            area,
            f"{len(found)} hierarchies of version 1 at {shown}" + (", and the unified one" if unified else ""),
            "nothing has to be done; with version 2 the kernel tells when a pod is empty, here hostd has to look",
        )
    yield _pods(pods)


def _pods(pods: PodCgroups) -> Finding:
    if pods.trouble:
        return warning("cgroups", f"not all were looked at: {pods.trouble}", "run as root; or see what fills that tree")
    if not pods.parents():
        return note(
            "cgroups",
            "no pod cgroups (kubepods) yet: kubelet has not started a pod since the boot",
            "nothing, unless pods run: then host.cgroup-root is another",
        )
    if not pods.understood:
        return warning(
            "cgroups",
            "pod cgroups are there and none has a name that is known: a pod that never had a QEMU is left alone",
            "report the names below kubepods (`systemd-cgls`), so that they can be learnt",
        )
    return good("cgroups", f"pod cgroups are understood: {len(pods.pods())} pods")


# Kernel


def kernel() -> Iterator[Finding]:
    """Features that not every kernel has, each with what its absence costs. Found by trying, not by the version."""
    area, release = "kernel", os.uname().release
    try:
        identity = identify(os.getpid())
    except OSError as error:
        yield bad(area, f"{release} has no pidfds: {error.strerror}", "hostd needs Linux 5.10 or newer")
        return
    if identity.inode:
        yield good(area, f"{release}: processes have unique numbers (pidfs)")
    else:
        yield note(area, f"{release}: no pidfs (6.9): processes are told apart by their start time, to 10 ms", _NEWER)
    if _tells_the_end_of_a_reaped_process():
        yield good(area, "exit statuses of reaped processes are told (PIDFD_GET_INFO)")
    else:
        yield note(
            area,
            "no exit status of reaped processes (PIDFD_GET_INFO, 6.15): how a VM ended is often `unknown`; "
            "its layers are released all the same",
            _NEWER,
        )
    yield _openat2()
    yield _mount_events()


def _tells_the_end_of_a_reaped_process() -> bool:
    # It ends when its input does, and not before its pidfd is open.
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with child, Process.open(child.pid) as process:
        child.communicate()
        end = process.end()
    return end is not None and end.status == 0


def _openat2() -> Finding:
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(libc.openat2(root, b".", os.O_PATH | os.O_CLOEXEC, libc.RESOLVE_BENEATH))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return note(
                "kernel", f"no openat2 ({_OPENAT2_SINCE}): paths are walked part by part, which is slower", _NEWER
            )
        return note("kernel", f"openat2 fails here: {error.strerror}", "see whether a seccomp filter forbids it")
    finally:
        os.close(root)
    return good("kernel", "paths are walked by the kernel itself (openat2)")


def _mount_events() -> Finding:
    try:
        with MountRows("/proc/self/ns/mnt") as rows, MountEvents(rows.fileno()):
            return good("kernel", "it is told which mounts change (mount events)")
    except PermissionError as error:
        return note("kernel", f"whether mount events can be had cannot be told: {error.strerror}", "run it as root")
    except OSError:
        return note(
            "kernel",
            "no mount events (6.15): the mount table is read whole after changes, which costs more the more mounts "
            "the node has",
            _NEWER,
        )
