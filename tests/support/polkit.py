"""A real polkitd on a bus of the test's own, with users, policy and rules that only exist in a mount namespace.

    with Guarded() as guarded:                       # a node, its users, a bus with hostd's own policy file, hostd
        with guarded.polkit("polkit.addRule(…);"):   # polkitd with this rule, or none
            guarded.gdbus("member", path, "io.kubevirt.hostd1.VM.SetPolicy", "keep")

Nothing of it is seen outside: /etc/passwd, /etc/group, polkit's actions and its rules are bound over by others.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.bus import PrivateBus
from tests.support.daemon import TREE, Daemon
from tests.support.node import Node
from tests.support.wait import until

POLKITD = "/usr/lib/polkit-1/polkitd"
NAME = "org.freedesktop.PolicyKit1"
_POLKIT_BUS_POLICY = "/usr/share/dbus-1/system.d/org.freedesktop.PolicyKit1.conf"
_ACTIONS, _RULES, _VENDOR_RULES = (
    b"/usr/share/polkit-1/actions",
    b"/etc/polkit-1/rules.d",
    b"/usr/share/polkit-1/rules.d",
)
_DBUS = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")

#: Users by name; each is in a group of its own number and in those named here.
USERS = {"member": 61_001, "operator": 61_002, "stranger": 61_003}
GROUPS = {"hostd": (61_010, "member,operator"), "kubevirt-operators": (61_011, "operator,stranger")}
#: As in dbus's own system.conf.
SYSTEM_POLICY = """
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/> <deny send_type="method_call"/>
    <allow send_type="signal"/> <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/> <allow receive_type="method_return"/>
    <allow receive_type="error"/> <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
  </policy>"""


def why_not() -> str:
    """Why polkitd cannot run here; empty: it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [path for path in (POLKITD, _POLKIT_BUS_POLICY) if not os.path.exists(path)]
    return f"polkit is not installed ({', '.join(missing)}): it is in Debian's polkitd" if missing else ""


class Guarded:
    """hostd and a bus as on a system: the files in dbus/ as they are, and users of three kinds."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self.node = stack.enter_context(Node())
            self._directory = Path(tempfile.mkdtemp(prefix="hostd-polkit-"))
            stack.callback(shutil.rmtree, self._directory)
            self._bind_users()
            self._bind_policy()
            files = (f"{TREE}/dbus/io.kubevirt.hostd1.conf", _POLKIT_BUS_POLICY)
            more = "".join(f"<include>{file}</include>" for file in files)
            self.bus = PrivateBus(self._directory, SYSTEM_POLICY, more, mount_namespace=self.node.namespace.path)
            self.bus.start_now()
            stack.callback(self.bus.stop)
            self.hostd = stack.enter_context(
                Daemon(self.node.configuration, self.bus.address, mount_namespace=self.node.namespace.path)
            ).start()
            stack.callback(self.hostd.stop)
            self._end = stack.pop_all()

    def _bind_users(self) -> None:
        users = "".join(f"{name}:x:{uid}:{uid}::/nonexistent:/bin/false\n" for name, uid in USERS.items())
        groups = "".join(f"{name}:x:{uid}:\n" for name, uid in USERS.items())
        groups += "".join(f"{name}:x:{gid}:{members}\n" for name, (gid, members) in GROUPS.items())
        for path, more in ((b"/etc/passwd", users), (b"/etc/group", groups)):
            # A node of its own may have a group hostd already: here it has these members and no others.
            lines = [
                line for line in Path(os.fsdecode(path)).read_text().splitlines() if line.split(":")[0] not in GROUPS
            ]
            made = self.node.namespace.write(self.node.namespace.base + path, ("\n".join(lines) + "\n" + more).encode())
            os.chmod(self.node.outside(made), 0o644)
            self.node.namespace.bind(made, path)

    def _bind_policy(self) -> None:
        namespace = self.node.namespace
        for path in (_ACTIONS, _RULES, _VENDOR_RULES):
            namespace.bind(namespace.mkdir(namespace.base + b"/polkit" + path), path)
        policy = Path(TREE, "dbus/io.kubevirt.hostd1.policy").read_bytes()
        namespace.write(_ACTIONS + b"/io.kubevirt.hostd1.policy", policy)

    @contextmanager
    def polkit(self, rules: str = "") -> Iterator[Polkitd]:
        """polkitd, with these rules alone."""
        self.node.namespace.write(_RULES + b"/10-test.rules", rules.encode())
        with Polkitd(self) as started:
            yield started

    def enter(self, user: str = "") -> list[str]:
        """What a command begins with that runs on the node as this user (root: nobody is named)."""
        enter = ["nsenter", f"--mount={self.node.namespace.path}", "--"]
        uid = str(USERS[user]) if user else ""
        return enter + (["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"] if user else [])

    def start_gdbus(self, user: str, path: str, method: str, *arguments: str) -> subprocess.Popen[str]:
        """`gdbus call` of hostd under way; it shows an error's own sentence."""
        command = ["gdbus", "call", f"--address={self.bus.address}", "--dest", "io.kubevirt.hostd1"]
        return subprocess.Popen(
            [*self.enter(user), *command, "--object-path", path, "--method", method, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def gdbus(self, user: str, path: str, method: str, *arguments: str) -> str:
        """What it says: the answer, or the error."""
        with self.start_gdbus(user, path, method, *arguments) as asking:
            return asking.communicate(timeout=60)[0]

    def owner(self, name: str) -> str:
        """Who has a name on the bus; empty: nobody."""
        command = ["busctl", f"--address={self.bus.address}", "call", *_DBUS, "GetNameOwner", "s", name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def close(self) -> None:
        """Takes everything away."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextmanager
def adopting() -> Iterator[None]:
    """Processes whose parent dies are this process's meanwhile (PR_SET_CHILD_SUBREAPER)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1)
    try:
        yield
    finally:
        libc.prctl(36, 0)


class Polkitd:
    """A polkitd that answers; it gives up root by itself."""

    def __init__(self, guarded: Guarded) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed at its end
        self._process = subprocess.Popen(
            [*guarded.enter(), POLKITD], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env=os.environ | {"DBUS_SYSTEM_BUS_ADDRESS": guarded.bus.address},
        )  # fmt: skip
        self.pid = self._process.pid
        try:
            until(lambda: guarded.owner(NAME) or self._process.poll() is not None, why=lambda: f"polkitd: {self.log}")
            assert self._process.poll() is None, f"polkitd ends at its start: {self.log}"
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        """What it said."""
        return os.pread(self._log.fileno(), 1 << 16, 0).decode(errors="replace")

    def children(self) -> list[int]:
        """Programs that its rules have started."""
        found: list[int] = []
        if self._process.poll() is not None:
            return found
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{task}/children") as file:
                found += [int(pid) for pid in file.read().split()]
        return found

    def kill(self) -> None:
        """Dead at once, with all that its rules have started, which becomes this process's to reap."""
        with adopting():
            children = self.children()
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.kill()
        self._log.close()
