"""A systemd of a test's own: PID 1 of fresh namespaces, with the units it is given and nothing else.

It sees this machine's files, but its own /run and cgroups, and ends with the test.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.wait import DEADLINE, until

_SYSTEMD = "/lib/systemd/systemd"
_BOOT = """
mount --make-rprivate / &&
mount -t proc proc /proc &&
mount -t tmpfs tmpfs /sys/fs/cgroup &&
mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
mount -t tmpfs -o mode=755 tmpfs /run &&
mkdir -p /run/units && cp "$UNITS"/* /run/units &&
export SYSTEMD_UNIT_PATH=/run/units:/run/systemd/system container=test &&
exec SYSTEMD --unit=test.target --log-target=console --show-status=no
"""
_TARGETS = ("test", "basic", "sysinit", "sockets", "shutdown")


class CannotBoot(RuntimeError):
    """This machine does not allow it: the reason to skip a test."""


class Systemd:
    """Boots in the constructor. `run` acts inside."""

    def __init__(self, units: Sequence[Path]) -> None:
        self._cgroup = _make_cgroup()
        self._units = tempfile.mkdtemp(prefix="hostd-test-units-")
        for unit in units:
            shutil.copy(unit, self._units)
        for target in _TARGETS:
            Path(self._units, f"{target}.target").write_text(f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        enter = f'echo 0 >{self._cgroup}/cgroup.procs && exec unshare -pmCi -f --kill-child -- sh -c "$1"'
        self._process = subprocess.Popen(
            ["sh", "-c", enter, "sh", _BOOT.replace("SYSTEMD ", f"{_SYSTEMD} ")],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=os.environ | {"UNITS": self._units},
        )  # fmt: skip
        self.pid = 0
        try:
            until(self._is_up, why="systemd is up")
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            raise CannotBoot(f"no systemd in namespaces here: {self.log}")
        with open(f"/proc/{self._process.pid}/task/{self._process.pid}/children") as file:
            children = file.read().split()
        if not children:
            return False
        self.pid = int(children[0])
        return "running" in self.run("systemctl", "is-system-running", check=False).stdout

    @property
    def log(self) -> str:
        """What it said."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command inside; its output is captured. Raises CalledProcessError, TimeoutExpired."""
        enter = ["nsenter", f"--target={self.pid}", "--pid", "--mount", "--cgroup", "--ipc"]
        return subprocess.run(
            [*enter, *([f"--wd={cwd}"] if cwd else []), "--", *command],
            check=check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=6 * DEADLINE,
        )  # fmt: skip

    def close(self) -> None:
        """Ends it and all that it started; may be called twice."""
        if self._process.poll() is None:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)  # with their PID 1 go all processes of the namespace
            else:
                self._process.kill()
            self._process.wait(DEADLINE)
        self._log.close()
        shutil.rmtree(self._units, ignore_errors=True)
        until(lambda: _remove_cgroup(self._cgroup), why="its cgroups are empty")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _make_cgroup() -> str:
    with open("/proc/self/mounts") as file:
        tops = [line.split()[1] for line in file if line.split()[2] == "cgroup2"]
    if not tops:
        raise CannotBoot("no cgroup2 hierarchy is mounted here")
    path = f"{tops[0]}/hostd-test-{os.getpid()}"
    try:
        os.mkdir(path)
    except OSError as error:
        raise CannotBoot(f"no cgroup can be made: {error}") from error
    return path


def _remove_cgroup(path: str) -> bool:
    for directory, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            return False
    return True
