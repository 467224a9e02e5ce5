"""The helper's life under hostd, with the real binary: deaths, hangs, starts that fail, hostd's own restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from hostd.errors import HelperFailed, NotEnabled
from hostd.prhelper.checkup import TIMEOUT
from hostd.prhelper.supervisor import Supervisor
from tests.support.cgroups import Frozen
from tests.support.prhelper import (
    PROGRAM,
    Client,
    Home,
    assert_prompt,
    attributes,
    new_helper,
    reaches,
    served_after_kill,
    serves,
)
from tests.support.wait import DEADLINE, eventually, until

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"needs {PROGRAM}"),
]


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


@pytest.fixture
async def supervisor(home: Home) -> AsyncIterator[Supervisor]:
    async with home.running() as running:
        yield running


def inode(path: bytes | str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


async def test_enabled_it_serves_and_disabled_nothing_is_left(home: Home) -> None:
    async with home.running(enable=False) as supervisor:
        assert supervisor.status.state == "disabled"
        assert not os.path.exists(home.directory)
        await supervisor.enable()
        assert supervisor.status.state == "ready"
        assert serves(home.path)
        assert attributes(home.path) == (107, 107, 0o660)
        assert attributes(home.directory) == (107, 107, 0o755)
        pid = supervisor.status.main_pid
        await supervisor.disable()
        assert not os.path.exists(f"/proc/{pid}")
        assert os.listdir(home.directory) == []
        assert supervisor.status.state == "disabled"


@pytest.fixture
def views(home: Home) -> Iterator[list[bytes]]:
    """The socket as pods may see it: a bind mount of its file, and one of its directory. Made by calling `mount`."""
    by_file, by_directory = f"{home.top}/file", f"{home.top}/directory"
    Path(by_file).touch()
    os.mkdir(by_directory)
    yield [os.fsencode(by_file), os.fsencode(f"{by_directory}/pr-helper.sock")]
    for place in (by_file, by_directory):
        subprocess.run(["umount", place], check=True)


async def test_killed_fifty_times_it_is_back_each_time(home: Home, views: list[bytes], supervisor: Supervisor) -> None:
    """Wherever one looks from, and whether hostd has seen that the last one was up or not."""
    for source, place in ((home.path, views[0]), (os.fsencode(home.directory), os.path.dirname(views[1]))):
        subprocess.run(["mount", "--bind", source, place], check=True)
    paths = [home.path, *views]
    before, times = [inode(path) for path in paths], []
    for number in range(50):
        old = supervisor.status.main_pid
        times.append(await served_after_kill(old, paths[number % len(paths)]))
        assert [inode(path) for path in paths] == before
    await new_helper(supervisor, old)
    assert supervisor.status.restarts == 50
    assert "was killed by SIGKILL" in supervisor.status.last_failure
    assert_prompt(times)


async def test_a_client_of_a_killed_helper_sees_the_end(home: Home, supervisor: Supervisor) -> None:
    with Client(home.path).greet() as client:
        old = supervisor.status.main_pid
        await eventually(lambda: supervisor.status.clients == 1, why="the client is counted")
        os.kill(old, signal.SIGKILL)
        assert client.cut_off()
        await new_helper(supervisor, old)
    await eventually(lambda: supervisor.status.clients == 0, why="nobody is connected")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP. It ends by SIGKILL only."""
    os.kill(pid, signal.SIGSTOP)
    yield


@pytest.mark.parametrize(("hang", "word"), [(stopped, "was stopped"), (Frozen, "did not")], ids=["stopped", "hung"])
async def test_a_stopped_or_hung_helper_is_replaced(
    home: Home, hang: Callable[[int], contextlib.AbstractContextManager[object]], word: str
) -> None:
    """Within the probe's interval and its time-out together, replacement and all."""
    async with home.running(interval=1.0) as supervisor:
        old = supervisor.status.main_pid
        with hang(old):
            begin = time.monotonic()
            await new_helper(supervisor, old)
            took = time.monotonic() - begin
            assert not os.path.exists(f"/proc/{old}")
        assert word in supervisor.status.last_failure
        assert supervisor.status.restarts == 1
        print(f"cured after {took:.2f} s")
        assert took < 1.0 + TIMEOUT


async def test_a_helper_that_is_merely_slow_is_left(home: Home) -> None:
    async with home.running(interval=0.1) as supervisor:
        old, checkup = supervisor.status.main_pid, supervisor._checkup
        with Frozen(old) as slow:
            await eventually(lambda: checkup._task, why="a probe is under way")
            due = checkup.due_at
            await asyncio.sleep(TIMEOUT / 2)  # as slow as that
            slow.thaw()
            await eventually(lambda: checkup.due_at > due, why="the probe is answered")
            assert (supervisor.status.state, supervisor.status.main_pid) == ("ready", old)
            assert supervisor.status.last_failure == ""


async def test_a_standstill_of_hostds_own_is_not_taken_for_the_helpers(home: Home) -> None:
    """The answer lies there unread until the time-out is over."""
    async with home.running(interval=0.1) as supervisor:
        old, checkup = supervisor.status.main_pid, supervisor._checkup
        with Frozen(old) as slow:
            await eventually(lambda: checkup._task, why="a probe is under way")
            due = checkup.due_at
            slow.thaw()
            time.sleep(TIMEOUT + 1)  # of the whole loop
            await eventually(lambda: checkup.due_at > due, why="it was asked again")
            assert (supervisor.status.state, supervisor.status.main_pid) == ("ready", old)
            assert supervisor.status.last_failure == ""


async def test_a_helper_that_hangs_at_its_start_is_replaced(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.prhelper.checkup.START_TIMEOUT", 0.3)
    home.script("exec sleep 300")
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        await reaches(supervisor, "backing-off")
        assert "did not greet" in supervisor.status.last_failure
        home.script(f"exec {PROGRAM}")
        await supervisor.restart()
        assert supervisor.status.state == "ready"


async def test_restart_gives_another_helper_on_the_same_listener(home: Home, supervisor: Supervisor) -> None:
    old, before = supervisor.status.main_pid, inode(home.path)
    await supervisor.restart()
    assert supervisor.status.main_pid not in (0, old)
    assert inode(home.path) == before
    assert (supervisor.status.restarts, supervisor.status.last_failure) == (0, "")


async def test_a_probe_tells_what_it_found(home: Home, supervisor: Supervisor) -> None:
    found = await supervisor.probe()
    assert (found["Answered"], found["Sense"], found["OwnerPID"]) == (True, "0b/00/06", 0)
    os.kill(supervisor.status.main_pid, signal.SIGSTOP)
    try:
        found = await supervisor.probe()
    finally:
        os.kill(supervisor.status.main_pid, signal.SIGCONT)
    assert found["Answered"] is False
    assert "did not greet" in str(found["Error"])


async def test_disabled_it_cannot_be_asked(home: Home) -> None:
    async with home.running(enable=False) as supervisor:
        with pytest.raises(NotEnabled, match="hostctl pr-helper enable"):
            await supervisor.restart()
        with pytest.raises(NotEnabled):
            await supervisor.probe()


async def test_a_crash_loop_backs_off_with_the_listener_closed_and_ends_by_itself(home: Home) -> None:
    home.script("echo no luck >&2; exit 7")
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        await reaches(supervisor, "backing-off")
        assert not os.path.lexists(home.path), "a held listener without a helper freezes QEMU"
        assert supervisor.status.last_failure.endswith("ended with status 7: no luck")
        with pytest.raises(HelperFailed, match="no luck"):
            await supervisor.restart()
        home.script(f"exec {PROGRAM}")
        await reaches(supervisor, "ready")
        assert serves(home.path)


@pytest.mark.parametrize(
    ("spoil", "mend", "word"),
    [
        (os.unlink, lambda path: os.symlink(PROGRAM, path), "No such file"),
        (lambda path: os.chmod(path, 0o644), lambda path: os.chmod(path, 0o755), "not an executable"),
    ],
    ids=["missing", "not executable"],
)
async def test_a_missing_program_is_said_and_used_when_it_comes(
    home: Home, spoil: object, mend: object, word: str
) -> None:
    assert callable(spoil)
    assert callable(mend)
    home.script(f"exec {PROGRAM}")
    spoil(home.program)
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        await reaches(supervisor, "failed")
        assert word in supervisor.status.why
        assert home.program in supervisor.status.why
        assert not os.path.lexists(home.path)
        mend(home.program)
        await reaches(supervisor, "ready")


async def test_a_program_that_goes_while_it_runs_changes_nothing(home: Home) -> None:
    home.script(f"exec {PROGRAM}")
    async with home.running(interval=0.05) as supervisor:
        old = supervisor.status.main_pid
        os.unlink(home.program)
        asked: list[object] = []
        undo = supervisor.subscribe(lambda: asked.append(1))
        await eventually(lambda: len(asked) > 5, why="it was looked at some more")
        undo()
        assert (supervisor.status.state, supervisor.status.main_pid) == ("ready", old)


async def test_owner_and_mode_are_put_right_whoever_changed_them(home: Home, supervisor: Supervisor) -> None:
    os.chown(home.path, 0, 0)
    os.chmod(home.path, 0o600)
    await eventually(lambda: attributes(home.path) == (107, 107, 0o660), why="the socket is QEMU's again")
    os.chmod(home.directory, 0o700)
    os.chown(home.directory, 0, 0)
    await eventually(lambda: attributes(home.directory) == (107, 107, 0o755), why="the directory is QEMU's again")


async def test_the_label_is_set_where_selinux_runs(home: Home) -> None:
    home.selinux = home.top
    async with home.running() as supervisor:
        for path in (home.path, home.directory):
            assert os.getxattr(path, "security.selinux") == home.config.selinux_label.encode() + b"\0"
        old = supervisor.status.main_pid
        os.setxattr(home.path, "security.selinux", b"other:other:other:s0\0")
        await eventually(
            lambda: os.getxattr(home.path, "security.selinux").startswith(b"system_u:"), why="the label is right again"
        )
        assert supervisor.status.main_pid == old


async def test_the_directory_is_never_made_anew(home: Home) -> None:
    os.makedirs(home.directory)
    Path(home.directory, "multipathd.socket").touch()
    before = inode(home.directory)
    for _ in range(3):
        async with home.running():
            assert inode(home.directory) == before
    assert os.listdir(home.directory) == ["multipathd.socket"]


async def test_a_directory_that_goes_is_made_again(home: Home, supervisor: Supervisor) -> None:
    os.rename(home.directory, f"{home.top}/elsewhere")
    await eventually(lambda: os.path.lexists(home.path) and serves(home.path), why="it serves at its path again")
    await reaches(supervisor, "ready", lambda: attributes(home.path) == (107, 107, 0o660))


async def test_what_is_no_socket_is_left_and_named(home: Home) -> None:
    os.makedirs(home.directory)
    Path(os.fsdecode(home.path)).write_text("precious")
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        assert supervisor.status.state == "failed"
        assert "is no socket; remove it" in supervisor.status.why
        assert Path(os.fsdecode(home.path)).read_text() == "precious"
        os.unlink(home.path)
        await reaches(supervisor, "ready")


async def test_a_link_at_the_path_leads_nowhere(home: Home) -> None:
    """The directory is QEMU's, so whatever stands there may be a trap."""
    os.makedirs(home.directory)
    victim = f"{home.top}/victim"
    Path(victim).touch(0o600)
    os.symlink(victim, home.path)
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        assert supervisor.status.state == "failed"
    assert attributes(victim) == (0, 0, 0o600)
    assert os.path.islink(home.path)


async def test_the_choice_is_kept_and_the_configuration_may_change_it(home: Home) -> None:
    async with home.running():
        pass
    assert not home.supervisor().status.enabled
    supervisor = home.supervisor()
    await supervisor.start()
    await supervisor.enable()
    await supervisor.close()
    try:
        assert home.supervisor().status.enabled
    finally:
        async with home.running():
            pass


# -- hostd's own end

_HOSTD = """
import asyncio, pickle, sys

async def main():
    supervisor = pickle.loads(bytes.fromhex(sys.argv[1])).supervisor()
    await supervisor.start()
    await supervisor.enable()
    print(supervisor.status.state, supervisor.status.main_pid, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await supervisor.close()

asyncio.run(main())
"""


class Hostd:
    """A process with nothing but the supervisor in it."""

    def __init__(self, home: Home) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOSTD, pickle.dumps(home).hex()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self.process.stdout is not None
        state, pid = self.process.stdout.readline().split()
        self.state, self.helper = state, int(pid)

    def end(self, how: signal.Signals | None) -> None:
        """Killed, or (None) ending by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.returncode is not None:
            return
        if how is not None:
            self.process.send_signal(how)
        self.process.stdin.close()
        self.process.wait(DEADLINE)
        self.process.stdout.close()


@pytest.fixture
def hostd(home: Home) -> Iterator[Callable[[], Hostd]]:
    """Starts one after the other."""
    started: list[Hostd] = []

    def start() -> Hostd:
        started.append(Hostd(home))
        return started[-1]

    yield start
    for one in started:
        one.end(signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["crash", "stop"])
async def test_helper_and_clients_outlive_hostd(
    home: Home, hostd: Callable[[], Hostd], how: signal.Signals | None
) -> None:
    first = hostd()
    before = inode(home.path)
    with Client(home.path).greet() as client:
        first.end(how)
        assert client.works()
        assert serves(home.path), "without hostd too"
        second = hostd()
        try:
            assert (second.state, second.helper) == ("ready", first.helper)
            assert client.works()
            # The listener was taken over too: it outlives the helper that had it.
            await served_after_kill(second.helper, home.path)
            assert inode(home.path) == before
        finally:
            second.end(None)
    async with home.running():
        pass
    assert not os.path.lexists(home.path)


async def test_a_helper_that_dies_while_hostd_is_away_is_replaced(home: Home, hostd: Callable[[], Hostd]) -> None:
    first = hostd()
    first.end(signal.SIGKILL)
    os.kill(first.helper, signal.SIGKILL)
    until(lambda: not serves(home.path), why="the socket is stale")
    async with home.running() as supervisor:
        assert supervisor.status.main_pid != first.helper
        assert serves(home.path)
