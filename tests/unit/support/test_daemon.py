"""How tests run hostd, tried on a program that behaves as told."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support import daemon
from tests.support.daemon import Daemon
from tests.support.wait import until

PROGRAM = """
import os, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if os.environ.get("FAIL"):
    sys.exit("cannot: " + sys.argv[2])
name = os.environ["NOTIFY_SOCKET"]
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.connect("\\0" + name[1:])
print("on", os.environ["DBUS_SYSTEM_BUS_ADDRESS"], file=sys.stderr, flush=True)
socket.send_fds(notify, [b"FDSTORE=1\\nFDNAME=x"], [0])
notify.send(b"STATUS=one\\nREADY=1")
notify.send("STATUS=zwölf".encode())
signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program in hostd's place."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(daemon, "COMMAND", (sys.executable, "-S", "-P", str(path)))
    return path


@pytest.mark.usefixtures("program")
def test_it_starts_stops_dies_and_starts_again() -> None:
    with Daemon("/my.toml", "unix:path=/bus") as hostd:
        hostd.start()
        until(lambda: hostd.status == "zwölf", why="the last status counts")
        assert hostd.running
        assert hostd.memory() > 1 << 20
        assert hostd.descriptors() >= 4
        assert hostd.said("on", "unix:path=/bus")
        hostd.kill()
        hostd.start()
        assert len(hostd.said("on unix:path=/bus")) == 2
        assert hostd.notifications.count("READY=1") == 1
        assert hostd.stop() == 0


@pytest.mark.usefixtures("program")
def test_one_that_ends_before_it_is_ready_is_an_error_with_its_log() -> None:
    with Daemon("/my.toml", environment={"FAIL": "1"}) as hostd:
        with pytest.raises(AssertionError, match=r"ended with 1 before it was READY; its log:\ncannot: /my.toml"):
            hostd.start()
        assert not hostd.running
        assert hostd.run_to_its_end() == 1


@pytest.mark.usefixtures("program")
def test_close_ends_one_that_is_stopped() -> None:
    hostd = Daemon("/my.toml").start()
    pid = hostd.pid
    hostd.send(signal.SIGSTOP)
    hostd.close()
    assert not Path(f"/proc/{pid}").exists()
