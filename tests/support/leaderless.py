"""A QEMU whose thread group's leader has left: /proc shows a zombie, and the process lives on in another thread."""

from __future__ import annotations

import os
import signal
import tempfile

from tests.support.pod import Pod
from tests.support.qemu import PROGRAM, Program
from tests.support.wait import until

# Opens its files, hands over to a thread, and ends the first one (60 is exit(2): of the calling thread alone).
_CODE = """
import ctypes, os, sys, threading
fds = [os.open(path, os.O_RDONLY) for path in sys.argv[3:]]
def live():
    os.write(1, b"ready")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=live).start()
ctypes.CDLL(None).syscall(60, 0)
"""


class LeaderlessQemu(Program):
    """Looks like a QEMU until its leader leaves; then it has no command line and no file of its own any more."""

    def __init__(self, pod: Pod, *disks: bytes) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hostd-test-program-")
        path = os.path.join(self._directory.name, PROGRAM)
        os.symlink(os.path.realpath("/usr/bin/python3"), path)
        os.chmod(self._directory.name, 0o755)
        name = f"guest={pod.guest.namespace}_{pod.guest.name}"
        super().__init__([path, "-I", "-S", "-c", _CODE, "-name", name, *disks], pod.place)

    def _until_ready(self) -> None:
        self._read_until(b"ready")
        until(lambda: self.state == "Z", why="the leader has left")

    def close(self) -> None:
        """Also removes the link that it was started by."""
        super().close()
        self._directory.cleanup()

    def leave(self) -> None:
        """The last thread ends too."""
        self.send(signal.SIGKILL)
        self.wait_dead()
        self.reap()
