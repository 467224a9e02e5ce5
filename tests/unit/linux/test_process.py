from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.linux import libc, process
from tests.support.wait import until

COMMS = st.binary(max_size=15).map(lambda comm: comm.replace(b"\0", b""))
NUMBERS = st.integers(0, 2**63)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        until(lambda: process.read_comm(child.pid) == b"sleep")
        yield child
        child.kill()


def test_stat_of_a_real_process(sleeper: subprocess.Popen[bytes]) -> None:
    stat = process.read_stat(sleeper.pid)
    assert (stat.pid, stat.comm, stat.ppid, stat.exit_code) == (sleeper.pid, b"sleep", os.getpid(), 0)
    assert stat.state in "SRD"
    ticks = os.sysconf("SC_CLK_TCK")
    assert process.read_stat(os.getpid()).start_time <= stat.start_time
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 <= uptime * ticks - stat.start_time < 3600 * ticks


def test_stat_of_a_zombie_tells_its_exit_code() -> None:
    with subprocess.Popen(["sh", "-c", "exit 3"]) as child:
        until(lambda: process.read_stat(child.pid).state == "Z")
        assert process.read_stat(child.pid).exit_code == 3 << 8
        assert process.command_line(child.pid) == []


@pytest.mark.parametrize("name", [b"a) R 1 (b", b"((((", b"))))", b" x ", b"a\nb\\c", b"\xff\xfe(\t", b""])
def test_a_name_cannot_forge_fields(name: bytes) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        libc.set_process_name(name)
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    try:
        stat = process.read_stat(child)
        assert (stat.comm, stat.ppid) == (name, os.getpid())
        assert process.read_comm(child) == name
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_the_dead_have_no_proc() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    for read in (process.read_stat, process.read_comm, process.command_line, process.cgroup_paths):
        with pytest.raises(ProcessLookupError, match=str(child.pid)):
            read(child.pid)


def test_an_open_file_of_the_dead_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    real = os.open

    def die_after_open(*arguments: object) -> int:
        fd = real(*arguments)  # type: ignore[arg-type]
        child.kill()
        child.wait()
        return fd

    monkeypatch.setattr(os, "open", die_after_open)
    with pytest.raises(ProcessLookupError):
        process.read_stat(child.pid)


def test_command_line_keeps_empty_and_odd_arguments() -> None:
    arguments: list[bytes] = [b"", b"a b", b"\xff", b"guest=x,y", b""]
    code = b"import sys; sys.stdin.read()"
    with subprocess.Popen([os.fsencode(sys.executable), b"-c", code, *arguments], stdin=subprocess.PIPE) as child:
        until(lambda: len(process.command_line(child.pid)) > 3)
        assert process.command_line(child.pid)[1:] == [b"-c", code, *arguments]


def test_a_long_command_line_is_read_whole() -> None:
    arguments = [b"%06d" % number * 10 for number in range(3000)]
    with subprocess.Popen([b"sh", b"-c", b"read x", *arguments], stdin=subprocess.PIPE) as child:
        until(lambda: process.command_line(child.pid)[:1] == [b"sh"])
        assert process.command_line(child.pid) == [b"sh", b"-c", b"read x", *arguments]


def test_kernel_threads_have_no_command_line() -> None:
    threads = [pid for pid in process.pids() if _parent(pid) == 2]
    assert threads
    assert process.command_line(threads[0]) == []


def _parent(pid: int) -> int:
    try:
        return process.read_stat(pid).ppid
    except ProcessLookupError:
        return 0


def test_pids_has_the_living_and_no_threads(sleeper: subprocess.Popen[bytes]) -> None:
    found = process.pids()
    assert {1, os.getpid(), sleeper.pid} <= set(found)
    assert len(set(found)) == len(found)


def test_cgroups_of_ourselves() -> None:
    found = dict(process.cgroup_paths(os.getpid()))
    assert found
    assert all(path.startswith(b"/") for path in found.values())
    assert [f"{name}:{path.decode()}" for name, path in process.cgroup_paths(os.getpid())] == [
        line.split(":", 1)[1] for line in Path("/proc/self/cgroup").read_text().splitlines()
    ]


def test_cgroup_lines() -> None:
    data = (
        b"12:cpu,cpuacct:/kubepods/pod1 (deleted)\n1:name=systemd:/a:b:c\n"
        b"0::/../../kubepods.slice/x (deleted)\nnonsense\n\n"
    )
    assert process.parse_cgroup(data) == [
        ("cpu,cpuacct", b"/kubepods/pod1 (deleted)"),
        ("name=systemd", b"/a:b:c"),
        ("", b"/../../kubepods.slice/x"),
    ]


@given(COMMS, st.sampled_from("RSDTtZXI"), st.integers(0, 2**22), NUMBERS, st.integers(0, 2**16), st.integers(0, 400))
def test_any_name_parses_and_nothing_that_was_cut(
    comm: bytes, state: str, ppid: int, start_time: int, exit_code: int, cut_at: int
) -> None:
    between = b" ".join(b"%d" % number for number in range(17))
    after = b" ".join(b"%d" % number for number in range(29))
    data = b"7 (%s) %s %d %s %d %s %d\n" % (comm, state.encode(), ppid, between, start_time, after, exit_code)
    assert process.parse_stat(7, data) == process.Stat(7, comm, state, ppid, start_time, exit_code)
    cut = data[: cut_at % data.rindex(b" ")]
    with pytest.raises(ValueError, match=r"/proc/7/stat|int\(\)"):
        process.parse_stat(7, cut)


@given(st.binary())
def test_what_is_no_stat_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"/proc/7/stat|int\(\)"):
        process.parse_stat(7, data)


@given(st.binary(), st.sampled_from([b"", b"0::", b"4:pids:/"]))
def test_any_bytes_as_cgroups_are_survived(data: bytes, before: bytes) -> None:
    for controllers, path in process.parse_cgroup(before + data):
        assert isinstance(controllers, str)
        assert b"\n" not in path


GROUP_PATHS = st.lists(st.sampled_from([b":", b"::", b"/", b" (deleted)"]) | st.binary(max_size=6), max_size=5).map(
    lambda parts: b"/" + b"".join(parts).replace(b"\n", b"")
)


@given(st.lists(st.tuples(st.sampled_from(["pids", "cpu,cpuacct", "name=x"]), GROUP_PATHS)))
def test_cgroups_round_trip(rows: list[tuple[str, bytes]]) -> None:
    data = b"".join(b"%d:%s:%s\n" % (place, name.encode(), path) for place, (name, path) in enumerate(rows))
    assert process.parse_cgroup(data) == rows


ARGUMENTS = st.lists(st.binary(max_size=30).map(lambda argument: argument.replace(b"\0", b"")), max_size=6)


@given(ARGUMENTS)
def test_any_arguments_are_told_as_they_were_given(arguments: list[bytes]) -> None:
    waiting = [b"/bin/sh", b"-c", b"read line", *arguments]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as child:
        # In the middle of its exec it has none yet.
        until(lambda: process.command_line(child.pid))
        assert process.command_line(child.pid) == waiting


@given(st.binary())
def test_what_a_process_wrote_over_its_arguments_is_survived(data: bytes) -> None:
    """It may have been written without its last NUL, or any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_read", lambda *_: data)
        line = process.command_line(1)
    assert b"\0".join(line) == data.removesuffix(b"\0")
