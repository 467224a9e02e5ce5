"""A QEMU that SIGKILL does not end: it waits in the kernel, uninterruptibly, for a file system that never answers."""

from __future__ import annotations

import os
import tempfile

from tests.support.fuse import DeadFileSystem
from tests.support.pod import Pod
from tests.support.qemu import PROGRAM, Place, Program
from tests.support.wait import until

# umount2(2) of a fuseblk mount whose server is dead to the world.
_CODE = """
import ctypes, os, sys
fds = [os.open(path, os.O_RDONLY) for path in sys.argv[4:]]
os.write(1, b"ready")
ctypes.CDLL(None).umount2(os.fsencode(sys.argv[3]), 0)
os.read(0, 1)
"""


class StuckQemu(Program):
    """From its start until `let_go`; in state D once it was sent a signal. Root's, for it has to unmount."""

    def __init__(self, pod: Pod, *disks: bytes) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hostd-test-program-")
        path = os.path.join(self._directory.name, PROGRAM)
        os.symlink(os.path.realpath("/usr/bin/python3"), path)
        namespace = pod.launcher_namespace
        dead = namespace.base + b"/dead-%d" % id(self)
        namespace.mkdir(dead)
        self._dead = DeadFileSystem(namespace, dead, block=True)
        name = f"guest={pod.guest.namespace}_{pod.guest.name}"
        place = Place(pod.cgroups, namespace.path)
        super().__init__([path, "-I", "-S", "-c", _CODE, "-name", name, dead, *disks], place)

    def _until_ready(self) -> None:
        self._read_until(b"ready")
        until(lambda: "request_wait" in self._waits_in(), why="it is stuck")

    def _waits_in(self) -> str:
        with open(f"/proc/{self.pid}/wchan") as file:
            return file.read()

    def let_go(self) -> None:
        """The file system's server ends, and with it what waits for it."""
        self._dead.end()

    def close(self) -> None:
        """Also lets it go."""
        self.let_go()
        super().close()
        self._directory.cleanup()
