"""Looking at the node from inside: units, packages, the bus, the journal."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

NAME = "io.kubevirt.hostd1"
MANAGER = "/io/kubevirt/hostd1"
UNIT = "hostd.service"
PACKAGES = Path("/var/lib/node/packages")
#: The emulated node is slow; only a failing check waits this long.
DEADLINE = 30.0


def run(*command: str, check: bool = True, user: str = "", timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Runs a program, by default as root and expecting success; its output is in the failure's message."""
    words = ["runuser", "-u", user, "--", *command] if user else list(command)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert not check or done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def until(condition: Callable[[], T], why: str, deadline: float = DEADLINE) -> T:
    """The first true value of `condition()`."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {why} (last seen: {value!r})"
        time.sleep(0.05)
    return value


def show(unit: str = UNIT, *names: str) -> dict[str, str]:
    """Properties of a unit."""
    wanted = [f"--property={name}" for name in names]
    return dict(line.split("=", 1) for line in run("systemctl", "show", *wanted, unit).stdout.splitlines())


def prop(name: str, unit: str = UNIT) -> str:
    """One property of a unit."""
    return show(unit, name)[name]


def main_pid(unit: str = UNIT) -> int:
    """A service's main process, 0 for none."""
    return int(prop("MainPID", unit))


def call(member: str, signature: str = "", *arguments: str, user: str = "", check: bool = True) -> Any:
    """Calls the manager through busctl; plain values, one by itself; the completed process when not `check`."""
    words = [signature, *arguments] if signature else []
    done = run("busctl", "--json=short", "--timeout=30", "call", "--", NAME, MANAGER, f"{NAME}.Manager", member, *words,
               user=user, check=check)  # fmt: skip
    if not check:
        return done
    data = json.loads(done.stdout or '{"data": []}')["data"]
    return data[0] if isinstance(data, list) and len(data) == 1 else data


def get(name: str, path: str = MANAGER, interface: str = f"{NAME}.Manager", user: str = "") -> Any:
    """A property's plain value, through busctl."""
    done = run("busctl", "--json=short", "--timeout=30", "get-property", NAME, path, interface, name, user=user)
    return json.loads(done.stdout)["data"]


def install(version: str) -> None:
    """Installs that version of the package with apt, which has nothing but what the node has already."""
    run("apt-get", "install", "--yes", "--allow-downgrades", "-o", "Dpkg::Use-Pty=0",
        str(PACKAGES / f"hostd_{version}_all.deb"), timeout=300)  # fmt: skip


def versions() -> tuple[str, str]:
    """The two packages that were handed in: the older, and the one that this tree makes."""
    older, newer = sorted(path.name.split("_")[1] for path in PACKAGES.glob("hostd_*_all.deb"))
    return older, newer


def mounts() -> list[bytes]:
    """Mountpoints in PID 1's mount table."""
    table = Path("/proc/1/mountinfo").read_bytes()
    return [line.split(b" ")[4] for line in table.splitlines()]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def text(path: str | os.PathLike[str]) -> str:
    """A small file's content, stripped."""
    return Path(path).read_text().strip()
