from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hostd.prhelper import multipath, preflight
from hostd.prhelper.multipath import Multipath
from hostd.prhelper.preflight import Findings, Places, Preflight, judge, own_capabilities

ALL = (1 << 41) - 1
GOOD = Findings(b"/usr/bin/helper", "", frozenset({"libc.so.6"}), ALL, (), multipathd=False)
LINKED = frozenset({"libmpathpersist.so.0"})


def test_nothing_speaks_against_it() -> None:
    verdict = judge(GOOD)
    assert (verdict.refusal, verdict.failure, verdict.multipath) == ("", "", Multipath.NONE)


@pytest.mark.parametrize("libraries", [GOOD.libraries, None], ids=["not linked", "unreadable"])
def test_multipath_devices_and_no_library_is_refused(libraries: frozenset[str] | None) -> None:
    verdict = judge(replace(GOOD, devices=("dm-0",), libraries=libraries))
    assert verdict.multipath is Multipath.UNSUPPORTED
    assert "/usr/bin/helper is built without libmpathpersist" in verdict.refusal
    assert "dm-0" in verdict.refusal


def test_with_the_library_it_depends_on_multipathd() -> None:
    found = replace(GOOD, devices=("dm-0",), libraries=LINKED)
    assert judge(found).multipath is Multipath.UNREACHABLE
    assert judge(replace(found, multipathd=True)).multipath is Multipath.OK
    assert judge(found).refusal == ""
    assert judge(found).failure == ""


def test_a_missing_program_is_a_failure_and_no_refusal() -> None:
    verdict = judge(replace(GOOD, trouble="it is not there", libraries=None, devices=("dm-0",)))
    assert (verdict.failure, verdict.refusal) == ("it is not there", "")


@pytest.mark.parametrize("bit", preflight.NEEDED)
def test_each_capability_counts(bit: int) -> None:
    assert preflight.NEEDED[bit] in judge(replace(GOOD, capabilities=ALL & ~(1 << bit))).failure


def test_multipath_takes_one_more_and_the_drop_in_gives_it() -> None:
    found = replace(GOOD, capabilities=ALL & ~(1 << 21))
    assert judge(found).failure == ""
    failure = judge(replace(found, devices=("dm-0",), libraries=LINKED)).failure
    assert "CAP_SYS_ADMIN" in failure
    assert "drop-in" in failure


@pytest.fixture
def places(tmp_path: Path) -> Places:
    program = tmp_path / "helper"
    shutil.copy(os.path.realpath("/bin/true"), program)
    (tmp_path / "block").mkdir()
    return Places(
        os.fsencode(program), str(tmp_path / "block"), (os.fsencode(tmp_path / "multipathd"),), str(tmp_path / "no")
    )


def test_a_program_that_can_be_run(places: Places) -> None:
    found = Preflight(places).look(places.program, ALL)
    assert found.trouble == ""
    assert found.libraries
    assert any(name.startswith("libc.") for name in found.libraries)


def test_programs_that_cannot(places: Places, tmp_path: Path) -> None:
    look = Preflight(places)
    os.chmod(places.program, 0o644)
    assert "not an executable file" in look.look(places.program, ALL).trouble
    os.unlink(places.program)
    assert "No such file" in look.look(places.program, ALL).trouble
    assert "not an executable file" in look.look(os.fsencode(tmp_path), ALL).trouble


def test_a_program_that_is_replaced_is_read_again(places: Places) -> None:
    look = Preflight(places)
    assert look.look(places.program, ALL).libraries
    with open(places.program, "wb") as file:
        file.write(b"#!/bin/sh\n")
    assert look.look(places.program, ALL).libraries is None


def test_only_multipath_devices_count(places: Places) -> None:
    for name, uuid in {"dm-0": "LVM-x", "dm-1": "mpath-3600", "dm-2": "part1-mpath-3600", "sda": "mpath-no"}.items():
        (Path(places.sys_block) / name / "dm").mkdir(parents=True)
        (Path(places.sys_block) / name / "dm" / "uuid").write_text(uuid)
    (Path(places.sys_block) / "dm-9").mkdir()
    assert multipath.devices(places.sys_block) == ["dm-1"]
    assert multipath.devices(places.sys_block + "/none") == []


def test_multipathd_is_reachable_where_it_listens(places: Places) -> None:
    abstract = b"\0hostd-test-%d" % os.getpid()
    for name in (places.multipathd[0], abstract):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            assert not multipath.reachable((name,))
            listener.listen(0)
            assert multipath.reachable((b"/no/such/socket", name))
            assert multipath.reachable((name,), abstract=False) is not name.startswith(b"\0")
    assert not multipath.reachable((abstract,))


def test_nobody_asks_multipathd_where_there_are_no_devices(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipath, "reachable", lambda *_: pytest.fail("asked"))
    assert not Preflight(places).look(places.program, ALL).multipathd


def test_our_own_capabilities() -> None:
    with open("/proc/self/status") as file:
        bounding = next(line.split()[1] for line in file if line.startswith("CapBnd"))
    if os.geteuid() == 0:
        assert own_capabilities() == int(bounding, 16)
