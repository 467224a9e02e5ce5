"""The node itself: one boot of the image under QEMU's software emulation.

The checks go in as a tar archive on the second disk, and what they leave comes out as one on the third: the cloud
kernel has no 9p, and the guest no network. The root disk is an overlay that is thrown away.

For VFIO there is an IOMMU and two spare PCI devices, each behind a root port and so in a group of its own. The checks
plug and unplug them by QEMU's monitor, which is the other end of the guest's second serial line.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.node.image import Image

#: Room for what comes out: the journal, the checks' own output.
_OUT_BYTES = 256 << 20
_CONSOLE = Path(__file__).with_name("console.py")
#: Emulated, five levels of page tables and wide vectors cost more than they save: half of all time, with "max".
_CPU = "qemu64"
_KERNEL = (
    "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=no loglevel=4 mitigations=off panic=-1 "
    "intel_iommu=on iommu=pt"
)
#: This model has no driver in the cloud kernel, so nobody but vfio-pci takes it.
_SPARE = "e1000e,romfile="
_DEVICES = (
    "intel-iommu,intremap=on", "virtio-rng-pci", *(f"pcie-root-port,id=port{each},chassis={each}" for each in (1, 2)),
    *(f"{_SPARE},id=spare{each},bus=port{each}" for each in (1, 2)),
)  # fmt: skip


def pack(archive: Path, files: dict[str, Path]) -> None:
    """Writes `files` (name in the guest → file or directory here) as a tar archive, padded to whole sectors."""
    with tarfile.open(archive, "w") as tar:
        for name, source in files.items():
            tar.add(source, name, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in member.name:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def boot(image: Image, inputs: Path, results: Path, *, seconds: float, scratch: Path) -> int:
    """Boots the node, runs what is in `inputs`, unpacks what comes out into `results`.

    Returns the checks' exit code; 124 when `seconds` are over, 125 when the node left none.
    """
    overlay, out = scratch / "root.qcow2", scratch / "out.tar"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", image.disk.resolve(), overlay], check=True
    )
    with out.open("wb") as file:
        file.truncate(_OUT_BYTES)
    results.mkdir(parents=True, exist_ok=True)
    with _qemu(image, overlay, inputs, out, results / "console.log", scratch / "monitor") as qemu:
        try:
            qemu.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
    return _unpack(out, results)


@contextmanager
def _qemu(
    image: Image, overlay: Path, inputs: Path, out: Path, console: Path, monitor: Path
) -> Iterator[subprocess.Popen[bytes]]:
    drives = [f"file={overlay},format=qcow2,cache=unsafe", f"file={inputs},format=raw,readonly=on",
              f"file={out},format=raw,cache=unsafe"]  # fmt: skip
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", _CPU, "-machine", "q35", "-smp", "2", "-m", "2G",
        "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio",
        *(part for device in _DEVICES for part in ("-device", device)),
        # QEMU is a client of its own monitor, on the guest's behalf.
        "-chardev", f"socket,id=server,path={monitor},server=on,wait=off", "-mon", "chardev=server,mode=control",
        "-chardev", f"socket,id=client,path={monitor}", "-serial", "chardev:client",
        "-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append",
        _KERNEL,
        *(part for drive in drives for part in ("-drive", f"if=virtio,{drive}")),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    tee = subprocess.Popen([sys.executable, "-B", _CONSOLE, console], stdin=process.stdout)
    process.stdout.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        tee.wait()


def _unpack(out: Path, results: Path) -> int:
    done = subprocess.run(["tar", "-xf", out, "-C", results], stderr=subprocess.DEVNULL, check=False)
    code = results / "exit-code"
    if done.returncode or not code.exists():
        print(f"the node left no results; its console is in {results / 'console.log'}")
        return 125
    return int(code.read_text())
