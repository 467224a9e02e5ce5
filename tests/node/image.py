"""The node's disk: a Debian 12 root file system with everything but hostd, kept between runs.

The machine's own apt configuration says where packages come from; nothing of it is written down here, and it is
taken out of the image again, which has no network anyway.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SUITE = "bookworm"
SIZE = "4G"

#: What a node has: an init, a bus, polkit, udev, QEMU; two well-known daemons to compare the sandbox with.
SYSTEM = (
    "apt", "dbus", "dmsetup", "e2fsprogs", "initramfs-tools", "kmod", "libpam-systemd", "linux-image-cloud-amd64",
    "polkitd", "procps", "qemu-system-common", "qemu-system-x86", "systemd", "systemd-container", "systemd-sysv",
    "udev", "udisks2", "util-linux",
)  # fmt: skip
#: What the checks are run by.
CHECKS = ("bash-completion", "python3", "python3-pytest")
#: What the deb depends on, and the other bus library that it can do with. Too few, and apt fails in the node, which
#: has no network.
HOSTD = (
    "python3-dbus-fast", "python3-dbus-next", "python3-prometheus-client", "python3-pystemd", "python3-pyudev",
    "python3-sdnotify",
)  # fmt: skip

#: The disk's driver and file system, which the cloud kernel has as modules: a small initrd unpacks fast.
_MODULES = ("virtio_pci", "virtio_blk", "ext4")
_UNWANTED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty@tty1.service", "serial-getty@ttyS0.service", "systemd-networkd.service",
    "systemd-networkd-wait-online.service", "systemd-timesyncd.service", "man-db.timer",
)  # fmt: skip
_DPKG = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/qemu/*.fd",
         "/usr/share/qemu/edk2-*", "/usr/share/qemu/skiboot.lid", "/usr/share/qemu/opensbi*")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Image:
    """A disk with its kernel, to be booted directly."""

    disk: Path
    kernel: Path
    initrd: Path


def sources() -> list[str]:
    """The machine's own apt sources for Debian's suite, a line each, whatever format they are written in."""
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages",
         "Origin: Debian"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = sorted({line for line in said.splitlines() if line.split()[1].startswith(SUITE)})
    if not found:
        raise RuntimeError(f"apt knows no Debian {SUITE} here: run apt-get update, or configure its sources")
    return [f"deb {line}" for line in found]


def acquire_options() -> str:
    """How this machine's apt fetches (proxies, dates), as a configuration file."""
    return subprocess.run(
        ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n', "Acquire"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def key(guest: Path) -> str:
    """Names the image by what it is made from."""
    digest = hashlib.sha256()
    for part in (*sources(), *SYSTEM, *CHECKS, *HOSTD):
        digest.update(part.encode() + b"\0")
    for file in (Path(__file__), *sorted(guest.iterdir())):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def get(cache: Path, guest: Path) -> Image:
    """The image, from `cache` or built into it; images made from other inputs are removed."""
    where = cache / f"image-{key(guest)}"
    if not where.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob("image-*"):
            shutil.rmtree(old)
        _build(where, guest)
    return Image(where / "disk.raw", where / "vmlinuz", where / "initrd.img")


def _build(where: Path, guest: Path) -> None:
    with tempfile.TemporaryDirectory(dir=where.parent, prefix="building-") as scratch:
        made = Path(scratch, "made")
        root = Path(scratch, "root")
        made.mkdir()
        _bootstrap(root, guest, Path(scratch))
        shutil.copy(root / "vmlinuz", made / "vmlinuz")
        shutil.copy(root / "initrd.img", made / "initrd.img")
        subprocess.run(
            ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-E", "lazy_itable_init=1",
             "-L", "node", "-d", root, made / "disk.raw", SIZE],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        made.rename(where)


def _bootstrap(root: Path, guest: Path, scratch: Path) -> None:
    """Runs mmdebstrap in a mount namespace of its own, so that no mount it makes outlives it."""
    options = scratch / "apt.conf"
    options.write_text(acquire_options())
    early = f'{guest}/small-initrd "$1" {" ".join(_MODULES)}'
    late = f'{guest}/prepare "$1" {guest} {" ".join(_UNWANTED)}'
    subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "nice", "mmdebstrap", "--quiet", "--mode=root",
         "--variant=apt", f"--aptopt={options}", '--aptopt=APT::Install-Recommends "false"',
         *(f"--dpkgopt=path-exclude={path}" for path in _DPKG),
         f"--include={','.join((*SYSTEM, *CHECKS, *HOSTD))}",
         f"--essential-hook={early}", f"--customize-hook={late}", SUITE, root, *sources()],
        check=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8",
                         **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}},
    )  # fmt: skip
