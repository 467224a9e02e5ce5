"""What systemd hears, on a real socket."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.notify import Notifier, stored_fds, watchdog_usec
from tests.support.wait import eventually

#: sdnotify leaves the socket that it cannot connect to the garbage collector.
UNCLOSED = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def hear(self) -> list[str]:
        """All that came."""
        return [message for message, _ in self.hear_with_fds()]

    def hear_with_fds(self) -> list[tuple[str, list[int]]]:
        found: list[tuple[str, list[int]]] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, 65536, 8)
            except BlockingIOError:
                return found
            found.append((data.decode(), fds))


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    name = f"@hostd-test-{secrets.token_hex(6)}" if request.param == "abstract" else str(tmp_path / "notify")
    made = Manager(name)
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    yield made
    made.socket.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    made = Notifier()
    yield made
    if made._socket is not None:
        made._socket.close()


def test_it_hears_each_message_once(notifier: Notifier, manager: Manager) -> None:
    notifier.ready()
    notifier.status("2 running")
    notifier.status("2 running")
    notifier.status("1 running, 1 exited")
    notifier.alive()
    notifier.reloading()
    notifier.stopping()
    assert manager.hear() == [
        "READY=1",
        "STATUS=2 running",
        "STATUS=1 running, 1 exited",
        "WATCHDOG=1",
        "RELOADING=1",
        "STOPPING=1",
    ]


def test_a_descriptor_goes_along_and_is_not_dropped_on_hup(notifier: Notifier, manager: Manager) -> None:
    reader, writer = os.pipe()
    notifier.store("qemu.u.7", reader)
    [(message, [fd])] = manager.hear_with_fds()
    assert message.splitlines() == ["FDSTORE=1", "FDNAME=qemu.u.7", "FDPOLL=0"]
    os.write(writer, b"x")
    assert os.read(fd, 1) == b"x"
    for each in (reader, writer, fd):
        os.close(each)
    notifier.drop("qemu.u.7")
    assert manager.hear() == ["FDSTOREREMOVE=1\nFDNAME=qemu.u.7"]


def test_a_status_with_bytes_of_a_name_is_sent_all_the_same(notifier: Notifier, manager: Manager) -> None:
    notifier.status("pod \udcff")
    assert manager.hear() == [r"STATUS=pod \udcff"]


async def test_a_manager_that_is_slow_to_listen_is_never_waited_for(notifier: Notifier, manager: Manager) -> None:
    for number in range(2000):
        notifier.status(f"{number}")
    reader, writer = os.pipe()
    notifier.store("late", reader)
    os.close(reader)
    notifier.stopping()
    heard: list[tuple[str, list[int]]] = []

    def all_came() -> bool:
        heard.extend(manager.hear_with_fds())
        return heard[-1:] == [("STOPPING=1", [])]

    await eventually(all_came)
    messages = [message for message, _ in heard]
    assert messages[-3] == "STATUS=1999", "of the status lines that waited the last is told"
    assert len(messages) < 2000
    [late] = heard[-2][1]
    os.close(late)
    os.close(writer)


async def test_what_comes_and_goes_while_nobody_listens_costs_no_descriptors(
    notifier: Notifier, manager: Manager
) -> None:
    """Of one that is dropped before it was heard of nothing is kept, nor told."""
    before = len(os.listdir("/proc/self/fd"))
    fd = os.eventfd(0)
    while not notifier._waiting:
        notifier.status(secrets.token_hex(4))
    notifier.drop("qemu.old")
    told = len(notifier._waiting)
    for number in range(2000):
        notifier.store(f"qemu.{number}", fd)
        notifier.drop(f"qemu.{number}")
    notifier.store("qemu.last", fd)
    os.close(fd)
    assert (len(notifier._waiting), len(notifier._stores)) == (told + 1, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    heard: list[str] = []

    def all_heard() -> bool:
        for message, fds in manager.hear_with_fds():
            heard.append(message)
            for each in fds:
                os.close(each)
        return any("qemu.last" in message for message in heard)

    await eventually(all_heard)
    assert heard[-2:] == ["FDSTOREREMOVE=1\nFDNAME=qemu.old", "FDSTORE=1\nFDNAME=qemu.last\nFDPOLL=0"]
    assert notifier._stores == {}
    assert len(os.listdir("/proc/self/fd")) == before


@UNCLOSED
def test_without_a_socket_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    notifier.ready()
    notifier.store("x", 0)


def test_a_manager_that_is_gone_costs_a_line(
    notifier: Notifier, manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.socket.close()
    notifier.ready()
    assert "systemd was not told 'READY=1'" in caplog.text


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("5000000", None, 5_000_000),
        ("5000000", str(os.getpid()), 5_000_000),
        ("5000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_is_asked_for_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, expected: int | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert watchdog_usec() == expected


def _given(monkeypatch: pytest.MonkeyPatch, pid: int, count: str, names: str | None) -> None:
    monkeypatch.setenv("LISTEN_PID", str(pid))
    monkeypatch.setenv("LISTEN_FDS", count)
    if names is None:
        monkeypatch.delenv("LISTEN_FDNAMES", raising=False)
    else:
        monkeypatch.setenv("LISTEN_FDNAMES", names)
    monkeypatch.setattr(os, "set_inheritable", lambda *_: None)


@pytest.mark.parametrize(
    ("count", "names", "expected"),
    [
        ("2", "a:b", [("a", 3), ("b", 4)]),
        ("2", "a", [("a", 3), ("unknown", 4)]),
        ("1", None, [("", 3)]),
        ("0", "", []),
        ("many", "a", []),
        ("-1", "a", []),
    ],
)
def test_what_was_kept_is_given_once(
    monkeypatch: pytest.MonkeyPatch, count: str, names: str | None, expected: list[tuple[str, int]]
) -> None:
    _given(monkeypatch, os.getpid(), count, names)
    assert stored_fds() == expected
    assert stored_fds() == []
    assert "LISTEN_FDS" not in os.environ


@given(st.integers(0, 50), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_whatever_the_names_each_descriptor_has_one(count: int, names: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _given(patch, os.getpid(), str(count), names)
        stored = stored_fds()
    assert [fd for _, fd in stored] == list(range(3, 3 + count))
    assert [name for name, _ in stored] == [*names.split(":"), *["unknown"] * count][:count]


def test_what_was_kept_for_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, os.getpid() + 1, "2", "a:b")
    assert stored_fds() == []
