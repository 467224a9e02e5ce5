"""QEMUs to kill: the real one, and a stand-in that starts in a few milliseconds.

Both have the same interface, so tests take either:

    with RealQemu(guest, disks=[…], place=place) as qemu: ...
    with FakeQemu(guest, disks=[…], place=place, children=1) as qemu: ...

On return from the constructor the process has its final name and has opened its disks. It is a child of the test and
is reaped only by `reap` (and `close`): until then it is a zombie after its death.

The stand-in is dash, run through a symbolic link named like QEMU: the kernel takes a process's name from the path it
was started by, and dash ignores the arguments after its script. Its life hangs on a pipe, so none outlives its test.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, ClassVar, Self

from tests.support.wait import DEADLINE, TimedOut

#: The user that KubeVirt runs QEMU as.
QEMU_UID = 107
PROGRAM = "qemu-system-x86_64"

# Joins the cgroups, then becomes the program: from its first moment on, a QEMU is where it belongs.
_ENTER = 'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit 97; shift; done; shift; exec "$@"'

# Opens each file=… of its command line, starts children, and then lives until it is told how to end.
_SCRIPT = r"""
n=3
for argument; do
    case $argument in file=*)
        file=${argument#file=}; file=${file%,format=raw}
        eval "exec $n<\"\$file\"" || exit 98
        n=$((n+1));;
    esac
done
i=0
while [ $i -lt CHILDREN ]; do
    (exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&-; exec sleep 300 >/dev/null 2>&1) &
    i=$((i+1))
done
echo ready
read -r status || status=0
exit $status
"""


def readable(fd: int, seconds: float = DEADLINE) -> bool:
    """Waits until there is something to read (a pidfd: until its process is dead). Any number of fds may be open."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@dataclass(frozen=True, slots=True)
class Guest:
    """What a QEMU's command line says of its VM."""

    namespace: str = "default"
    name: str = "vm"
    firmware_uuid: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def arguments(self) -> list[str]:
        """As libvirt writes them for KubeVirt."""
        return ["-name", f"guest={self.namespace}_{self.name},debug-threads=on", "-uuid", self.firmware_uuid]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: cgroup directories it joins, a mount namespace (path of its file), a user."""

    cgroups: tuple[str, ...] = ()
    mount_namespace: str = ""
    user: int | None = None

    def wrap(self, command: Sequence[str | bytes]) -> list[str | bytes]:
        """The command line that runs `command` there, as one process all along."""
        wrapped: list[str | bytes] = ["/bin/sh", "-c", _ENTER, "enter", *self.cgroups, "--"]
        if self.mount_namespace:
            wrapped += ["nsenter", f"--mount={self.mount_namespace}", "--"]
        if self.user is not None:
            wrapped += ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--"]
        return [*wrapped, *command]


class Program:
    """A process of a pod, with a pidfd of the test's own."""

    def __init__(self, command: Sequence[str | bytes], place: Place) -> None:
        self.place = place
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            place.wrap(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        try:
            self._until_ready()
        except BaseException:
            self.close()
            raise

    def _until_ready(self) -> None:
        """Returns once the program does what it is there for."""

    @property
    def alive(self) -> bool:
        """Whether the process runs: neither a zombie nor reaped."""
        return not readable(self.pidfd, 0)

    @property
    def name(self) -> str:
        """Its name as the kernel has it (at most 15 characters)."""
        with open(f"/proc/{self.pid}/comm") as file:
            return file.read().rstrip("\n")

    @property
    def state(self) -> str:
        """The letter in /proc/PID/stat: R, S, D, T, Z, …"""
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    @property
    def errors(self) -> str:
        """What it wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def send(self, what: signal.Signals) -> None:
        """Sends a signal to this very process."""
        signal.pidfd_send_signal(self.pidfd, what)

    def kill(self, *, reap: bool = True) -> None:
        """SIGKILL; returns when it is dead: reaped as its real parent does at once, or left a zombie."""
        self.send(signal.SIGKILL)
        self.wait_dead()
        if reap:
            self.reap()

    def wait_dead(self) -> None:
        """Waits for its death without reaping it."""
        if not readable(self.pidfd):
            raise TimedOut(f"process {self.pid} does not die (state {self.state})")

    def reap(self) -> int:
        """Takes its exit status as Popen gives it: negative = signal."""
        return self._process.wait(DEADLINE)

    def close(self) -> None:
        """Ends it if it lives still, reaps it, closes everything; may be called twice."""
        if self.pidfd < 0:
            return
        if self._process.returncode is None:
            if self.alive:
                self.send(signal.SIGKILL)
            self.reap()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()
        os.close(self.pidfd)
        self.pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    def _read_until(self, wanted: bytes) -> None:
        assert self._process.stdout is not None
        seen = b""
        while wanted not in seen:
            if not readable(self._process.stdout.fileno()):
                raise TimedOut(f"{type(self).__name__} {self.pid} is not ready; it said {seen!r} and {self.errors!r}")
            if not (piece := os.read(self._process.stdout.fileno(), 65536)):
                raise RuntimeError(
                    f"{type(self).__name__} ended with {self.reap()}; it said {seen!r} and {self.errors!r}"
                )
            seen += piece


class Qemu(Program):
    """What the real QEMU and the stand-in have in common."""

    #: For the ids of parametrised tests.
    label: ClassVar[str]

    def poweroff(self, status: int = 0, *, reap: bool = True) -> None:
        """Ends by itself, with this exit status (the real one knows 0 only)."""
        self._tell(self._last_words(status))
        self.wait_dead()
        if reap:
            self.reap()

    def _last_words(self, status: int) -> bytes:
        raise NotImplementedError


class RealQemu(Qemu):
    """qemu-system-x86_64: software emulation, paused, no display, its monitor on the test's pipe."""

    label = "qemu"

    def __init__(
        self,
        guest: Guest | None = None,
        *,
        disks: Sequence[bytes] = (),
        kernel: bytes = b"",
        initrd: bytes = b"",
        place: Place | None = None,
    ) -> None:
        command: list[str | bytes] = [
            PROGRAM,
            "-accel",
            "tcg",
            "-S",
            "-display",
            "none",
            "-nodefaults",
            "-no-user-config",
        ]
        command += ["-machine", "q35", "-m", "32", *(guest or Guest()).arguments, "-qmp", "stdio"]
        for number, disk in enumerate(disks):
            options = f"driver=raw,node-name=d{number},read-only=on,file.driver=file,file.locking=off,file.filename="
            command += ["-blockdev", options.encode() + disk.replace(b",", b",,")]
            command += ["-device", f"virtio-blk-pci,drive=d{number}"]
        command += ["-kernel", kernel] if kernel else []
        command += ["-initrd", initrd] if initrd else []
        super().__init__(command, place or Place())

    def _until_ready(self) -> None:
        self._read_until(b'"QMP"')
        self._tell(b'{"execute": "qmp_capabilities"}')
        self._read_until(b'"return"')

    def _last_words(self, status: int) -> bytes:
        assert status == 0, "the real QEMU quits with 0 only"
        return b'{"execute": "quit"}'


class Impostor(Program):
    """A shell under another program's name and command line."""

    def __init__(
        self, program: str, arguments: Sequence[str | bytes], place: Place | None = None, *, children: int = 0
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hostd-test-program-")
        path = os.path.join(self._directory.name, program)
        #: pid → pidfd of its children, which outlive it until `close`.
        self.children: dict[int, int] = {}
        os.symlink("/bin/sh", path)
        os.chmod(self._directory.name, 0o755)
        super().__init__([path, "-c", _SCRIPT.replace("CHILDREN", str(children)), *arguments], place or Place())

    def _until_ready(self) -> None:
        self._read_until(b"ready\n")
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            self.children = {int(pid): os.pidfd_open(int(pid)) for pid in file.read().split()}

    def close(self) -> None:
        """Also ends its children and removes the link that it was started by."""
        super().close()
        while self.children:
            _, fd = self.children.popitem()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self._directory.cleanup()


class FakeQemu(Impostor, Qemu):
    """A process that looks like a QEMU: its name, its command line, its open disks (at most six), its children."""

    label = "fake"

    def __init__(
        self,
        guest: Guest | None = None,
        *,
        disks: Sequence[bytes] = (),
        kernel: bytes = b"",
        initrd: bytes = b"",
        place: Place | None = None,
        children: int = 0,
        program: str = PROGRAM,
    ) -> None:
        assert len(disks) <= 6, "a shell has single-digit descriptors only"
        arguments: list[str | bytes] = [*(guest or Guest()).arguments]
        for disk in disks:
            arguments += ["-drive", b"file=" + disk + b",format=raw"]
        arguments += ["-kernel", kernel] if kernel else []
        arguments += ["-initrd", initrd] if initrd else []
        super().__init__(program, arguments, place, children=children)

    def _last_words(self, status: int) -> bytes:
        return str(status).encode()


class Launcher(Impostor):
    """Looks like virt-launcher, which outlives its QEMU for a while and keeps the pod's cgroup populated."""

    def __init__(self, name: str, vmi_uid: str, namespace: str, place: Place | None = None) -> None:
        super().__init__("virt-launcher", ["--name", name, "--uid", vmi_uid, "--namespace", namespace], place)
