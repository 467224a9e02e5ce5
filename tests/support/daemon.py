"""hostd as tests run it: a process of its own, with nothing but a configuration file and a bus address.

daemon = Daemon(config="/…/hostd.toml", bus_address="unix:path=…")
daemon.start()                  # returns once it said READY=1
daemon.status                   # its STATUS line, as systemd would show it
daemon.log()                    # what it wrote to stderr
daemon.kill(); daemon.start()   # SIGKILL, and a new one on the same state
assert daemon.stop() == 0       # SIGTERM
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.support import older_kernel
from tests.support.qemu import readable
from tests.support.wait import DEADLINE, TimedOut, until

#: Without a script, so that the interpreter of the tests runs the code of the tree that they lie in.
COMMAND = (sys.executable, "-P", "-c", "import sys; from hostd.app import main; sys.exit(main())")
TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: What the daemon inherits of the tests' environment: nothing else may change what it does.
_INHERITED = ("PATH", "LANG", "HOSTD_DBUS_LIBRARY", "PYTHONWARNINGS", "COVERAGE_PROCESS_START")


class Daemon:
    """One hostd; `start` and the ways to end it may be called again and again."""

    #: Whether it finds a kernel without mount events; HOSTD_TEST_OLDER_KERNEL=1 says so for a whole run.
    older_kernel = bool(os.environ.get("HOSTD_TEST_OLDER_KERNEL"))

    def __init__(
        self,
        config: str,
        bus_address: str = "",
        *,
        mount_namespace: str = "",
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        """`mount_namespace`: where it is started. `wrapper`: a command that runs it, prlimit or strace say."""
        enter = ["nsenter", f"--mount={mount_namespace}", "--"] if mount_namespace else []
        kernel = older_kernel.COMMAND if self.older_kernel else ()
        self._command = [*wrapper, *enter, *kernel, *COMMAND, "--config", config]
        self._environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._environment |= {"PYTHONPATH": TREE, "DBUS_SYSTEM_BUS_ADDRESS": bus_address} | dict(environment or {})
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process: subprocess.Popen[bytes] | None = None
        self._pass_fds: tuple[int, ...] = ()
        self._notify = _NotifySocket()

    # -- its life

    def start(self, *, ready: bool = True) -> Self:
        """Starts it, and returns when it is READY; raises AssertionError with its log when it ends before that."""
        assert self._process is None, "it runs already"
        self._notify.forget()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment | {"NOTIFY_SOCKET": self._notify.address},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=self._pass_fds,
        )
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Waits for READY=1."""
        until(lambda: self.ready or self._ended(), why=lambda: f"hostd is READY; its log:\n{self.log()}")
        if not self.ready:
            raise AssertionError(f"hostd ended with {self.wait()} before it was READY; its log:\n{self.log()}")

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL."""
        self.send(signal.SIGKILL)
        self.wait()

    def run_to_its_end(self) -> int:
        """Starts one that is expected to end by itself; its exit status."""
        self.start(ready=False)
        return self.wait()

    def wait(self) -> int:
        """Its exit status once it has ended (negative: signal)."""
        process = self._running()
        try:
            status = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"hostd does not end; its log:\n{self.log()}") from None
        self._process = None
        return status

    def send(self, what: signal.Signals) -> None:
        """Sends a signal."""
        self._running().send_signal(what)

    def close(self) -> None:
        """Ends it, whatever its state, and closes everything."""
        if self._process is not None:
            self.kill()
        self._notify.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what is seen of it

    @property
    def pid(self) -> int:
        """Its process."""
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and not self._ended()

    @property
    def ready(self) -> bool:
        """Whether it said READY=1 since it was started."""
        return "READY=1" in self._notify.lines()

    @property
    def status(self) -> str:
        """Its last STATUS line."""
        found = [line for line in self._notify.lines() if line.startswith("STATUS=")]
        return found[-1].removeprefix("STATUS=") if found else ""

    @property
    def notifications(self) -> list[str]:
        """All that it told the service manager, line by line."""
        return list(self._notify.lines())

    def log(self) -> str:
        """All that it (and those started before it) wrote."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def said(self, *words: str) -> list[str]:
        """Lines of the log that contain all of these."""
        return [line for line in self.log().splitlines() if all(word in line for word in words)]

    def memory(self) -> int:
        """Its resident memory in bytes."""
        with open(f"/proc/{self.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))

    def descriptors(self) -> int:
        """How many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def processor_time(self) -> float:
        """Seconds of processor time that it has used."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "hostd does not run"
        return self._process

    def _ended(self) -> bool:
        # Not poll(): it would reap, and a test may want to see the zombie.
        fd = os.pidfd_open(self._running().pid)
        try:
            return readable(fd, 0)
        finally:
            os.close(fd)


class _NotifySocket:
    """The service manager's end: an abstract socket, which every mount namespace reaches."""

    def __init__(self) -> None:
        self.address = f"@hostd-test-{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.address[1:])
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """All lines since `forget`."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(65536, 4096)
            except BlockingIOError:
                return self._lines
            _close_all(ancillary)
            self._lines += data.decode(errors="replace").splitlines()

    def forget(self) -> None:
        """Starts anew."""
        self.lines()
        self._lines = []

    def close(self) -> None:
        """Closes it."""
        self._socket.close()


def _close_all(ancillary: Sequence[tuple[int, int, bytes]]) -> None:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for start in range(0, len(data) - 3, 4):
                os.close(int.from_bytes(data[start : start + 4], sys.byteorder))
