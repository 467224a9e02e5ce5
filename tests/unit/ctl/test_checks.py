"""What doctor finds on hosts of other kinds than this one."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from hostd import config
from hostd.config import Config, Host
from hostd.ctl import check_bus, check_host, check_parts
from hostd.ctl.doctor import show
from hostd.ctl.findings import Finding, Level, bad, good
from hostd.ctl.screen import Screen
from hostd.linux.mount_table import MountTable, parse
from hostd.prhelper.preflight import Places
from tests.support.bus import private_bus, staged
from tests.support.fake_service import pod_uid, vm

TABLE = b"""\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
40 21 8:2 / /var/lib/kubelet rw - xfs /dev/sda2 rw
41 21 8:3 / /var/lib/kubelet rw shared:7 - xfs /dev/sda3 rw
42 21 0:5 / /var rw - tmpfs none rw
"""


def levels(findings: list[Finding]) -> set[Level]:
    for finding in findings:
        assert finding.what
        assert bool(finding.to_do) is (finding.level is not Level.GOOD)
    return {finding.level for finding in findings}


def test_the_mount_that_a_path_is_on() -> None:
    mounts = parse(TABLE)
    for path, mount_id in (
        (b"/var/lib/kubelet/pods", 41),
        (b"/var/lib/kubelet", 41),
        (b"/var/libx", 42),
        (b"/usr", 21),
    ):
        found = check_host.mount_of(mounts, path)
        assert found is not None
        assert found.mount_id == mount_id
    assert check_host.mount_of([], b"/") is None


@pytest.mark.parametrize(("line", "level"), [(0, Level.GOOD), (1, Level.WARNING)])
def test_a_kubelet_root_that_is_not_shared(
    line: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TABLE.splitlines(keepends=True)[line].replace(b" /var/lib/kubelet ", b" / ")
    monkeypatch.setattr(MountTable, "read", lambda _: table)
    (found,) = check_host.kubelet_root(Host(kubelet_root=os.fsencode(tmp_path)))
    assert found.level is level
    assert ("make-rshared" in found.to_do) == (level is Level.WARNING)


def test_a_host_without_anything(tmp_path: Path) -> None:
    nothing = os.fsencode(tmp_path / "none")
    host = Host(kubelet_root=nothing, mount_namespace=os.fsdecode(nothing), cgroup_root=nothing)
    assert levels(list(check_host.mount_namespace(host))) == {Level.BAD}
    assert levels(list(check_host.kubelet_root(host))) == {Level.WARNING}
    assert Level.BAD in levels(list(check_host.cgroups(host)))


def test_this_host() -> None:
    own = Host(mount_namespace="/proc/self/ns/mnt")
    assert levels(list(check_host.mount_namespace(own))) == {Level.GOOD}
    assert Level.BAD not in levels(list(check_host.check(own)))


def test_a_configuration_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "hostd.toml"
    file.write_text("[cleanup]\ngrace = 7\n")
    settings, found = check_parts.configured(str(file))
    assert (settings, found.level) == (Config(), Level.BAD)
    assert "cleanup.grace" in found.what
    file.write_text('[cleanup]\nmode = "observe"\n')
    settings, found = check_parts.configured(str(file))
    assert found.level is Level.GOOD
    assert "observe" in " ".join(each.what for each in check_parts.check(settings))


def test_the_configuration_of_the_hostd_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, own = tmp_path / "usual.toml", tmp_path / "own.toml"
    own.write_text('[cleanup]\nmode = "observe"\n')
    drop_ins = tmp_path / "hostd.toml.d"
    places = (str(usual), str(tmp_path / "none.toml"), str(drop_ins))
    monkeypatch.setattr(config, "PLACES", places)
    monkeypatch.setattr(config.load, "__defaults__", (None, places))
    # It was started with --config.
    settings, found = check_parts.configured(None, [str(own)])
    assert (settings.cleanup.mode, found.level, found.what) == ("observe", Level.GOOD, str(own))
    # It was not.
    _, found = check_parts.configured(None, [])
    assert (found.level, found.what) == (Level.GOOD, "no file: everything has its default")
    # A file came since it looked.
    drop_ins.mkdir()
    (drop_ins / "50-mine.toml").write_text('[cleanup]\nmode = "observe"\n')
    settings, found = check_parts.configured(None, [])
    assert (settings.cleanup.mode, found.level) == ("observe", Level.WARNING)
    assert "50-mine.toml now" in found.what
    assert "reload" in found.to_do
    _, found = check_parts.configured(None, [str(drop_ins / "50-mine.toml")])
    assert found.level is Level.GOOD


ACTIVE = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "NRestarts": "0",
    "FileDescriptorStoreMax": "4096",
    "UnitFileState": "enabled",
}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, Level.GOOD, "active"),
        ({"NRestarts": "3"}, Level.NOTE, "3 times"),
        ({"ActiveState": "failed", "Result": "exit-code"}, Level.BAD, "exit-code"),
        ({"FileDescriptorStoreMax": "0"}, Level.WARNING, "fd store"),
        ({"UnitFileState": "disabled"}, Level.WARNING, "boot"),
        ({"LoadState": "not-found"}, Level.WARNING, "not installed"),
        ({"LoadState": ""}, Level.WARNING, "no answer"),
    ],
)
def test_systemd(changed: dict[str, str], level: Level, words: str) -> None:
    found = list(check_parts.systemd(booted=True, ask=lambda: ACTIVE | changed))
    assert level in levels(found)
    assert any(words in each.what for each in found if each.level is level)


def test_a_host_without_systemd() -> None:
    (found,) = check_parts.systemd(booted=False, ask=dict)
    assert found.level is Level.NOTE


@pytest.mark.parametrize(("enabled", "level"), [(True, Level.BAD), (False, Level.NOTE)])
def test_a_helper_that_is_not_installed(enabled: bool, level: Level, tmp_path: Path) -> None:
    places = Places(program=os.fsencode(tmp_path / "none"))
    (found,) = check_parts.pr_helper(enabled=enabled, places=places)
    assert found.level is level


def test_the_textfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_parts.metrics(None)) == []
    assert levels(list(check_parts.metrics(os.fsencode(tmp_path / "x.prom")))) == {Level.GOOD}
    assert levels(list(check_parts.metrics(os.fsencode(tmp_path / "none/x.prom")))) == {Level.BAD}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (found,) = check_parts.metrics(os.fsencode(tmp_path / "x.prom"))
    assert "python3-prometheus-client" in found.to_do


async def test_the_bus_and_hostd() -> None:
    async with staged(vm(1)) as (bus, service):
        found = [each async for each in check_bus.check(bus.address)]
        assert Level.BAD not in levels(found)
        service.health["workers"] = "1 hangs"
        service.block(pod_uid(1), "busy")
        found = [each async for each in check_bus.check(bus.address)]
        said = [each.what for each in found if each.level is Level.BAD]
        assert said == ["workers: 1 hangs", "shop/vm1: 1 layer busy, busy"]


async def test_a_bus_without_hostd_and_no_bus(tmp_path: Path) -> None:
    async with private_bus() as bus:
        found = [each async for each in check_bus.check(bus.address)]
        assert [each.area for each in found if each.level is Level.BAD] == ["hostd"]
    found = [each async for each in check_bus.check(f"unix:path={tmp_path}/none")]
    assert [(each.area, each.level) for each in found] == [("bus", Level.BAD)]


def test_findings_are_shown_with_what_to_do() -> None:
    out = io.StringIO()
    show(Screen(out), [good("kernel", "fine"), bad("bus", "gone", "bring it back")])
    assert out.getvalue() == (
        "ok       kernel         fine\n"
        "BAD      bus            gone\n"
        "                        To do: bring it back\n\n"
        "2 findings: 1 bad, 0 warnings.\n"
    )
