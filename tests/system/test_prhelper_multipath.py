"""Multipath devices beside the real helper, which Debian builds without libmpathpersist, and beside one with it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator

import pytest

from hostd.prhelper import elf
from tests.support.prhelper import PROGRAM, Home, reaches, serves
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"needs {PROGRAM}"),
]


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


@pytest.fixture
def unlinked() -> None:
    if any(name.startswith("libmpathpersist") for name in elf.needed(os.fsencode(PROGRAM))):
        pytest.skip(f"{PROGRAM} is built with multipath support here")


@pytest.mark.usefixtures("unlinked")
async def test_a_build_without_the_library_is_refused(home: Home) -> None:
    home.multipath_device()
    async with home.running(enable=False) as supervisor:
        await supervisor.enable()
        status = supervisor.status
        assert (status.state, status.multipath) == ("refused", "unsupported")
        assert "built without libmpathpersist" in status.why
        assert "dm-0" in status.why
        assert not os.path.lexists(home.path)
        shutil.rmtree(f"{home.sys_block}/dm-0")
        await reaches(supervisor, "ready", lambda: supervisor.status.multipath == "none")


@pytest.mark.usefixtures("unlinked")
async def test_a_device_that_comes_later_is_noticed(home: Home) -> None:
    async with home.running(interval=0.05) as supervisor:
        home.multipath_device("dm-1", uuid="LVM-abc")
        home.multipath_device("dm-3")
        await reaches(supervisor, "refused")
        assert "dm-3" in supervisor.status.why
        assert "dm-1" not in supervisor.status.why
        assert not serves(home.path)


async def test_multipathd_comes_and_goes_and_the_helper_stays(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.prhelper.elf.needed", lambda _: frozenset({"libmpathpersist.so.0"}))
    home.multipath_device()
    async with home.running(interval=0.05) as supervisor:
        pid = supervisor.status.main_pid
        assert supervisor.status.multipath == "unreachable"
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as multipathd:
                multipathd.bind(home.multipathd)
                multipathd.listen(1)
                await eventually(lambda: supervisor.status.multipath == "ok", why="multipathd is seen")
            os.unlink(home.multipathd)
            await eventually(lambda: supervisor.status.multipath == "unreachable", why="multipathd is missed")
        status = supervisor.status
        assert (status.state, status.main_pid, status.restarts) == ("ready", pid, 0)
