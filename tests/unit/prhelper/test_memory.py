from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.linux.clock import boot_id
from hostd.prhelper import memory
from hostd.prhelper.memory import Known, Memory
from tests.support.damage import damaged, json_values

SOME = Known("child", (5, 77), 123, (4, 5), "/run/pr\udcff.sock")


def load(top: Path) -> Memory:
    return Memory(os.fsencode(top / "state"), os.fsencode(top / "run"))


def test_the_configuration_counts_where_nobody_chose(tmp_path: Path) -> None:
    assert load(tmp_path).enabled(configured=True)
    assert not load(tmp_path).enabled(configured=False)


def test_a_choice_is_kept(tmp_path: Path) -> None:
    load(tmp_path).choose(enabled=True, configured=False)
    assert load(tmp_path).enabled(configured=False)
    load(tmp_path).choose(enabled=False, configured=False)
    assert not load(tmp_path).enabled(configured=False)


def test_a_newer_word_in_the_configuration_counts_more(tmp_path: Path) -> None:
    load(tmp_path).choose(enabled=True, configured=True)
    load(tmp_path).choose(enabled=False, configured=True)
    assert not load(tmp_path).enabled(configured=False)
    assert load(tmp_path).enabled(configured=True), "and what was said before that is forgotten"


def test_listeners_are_kept(tmp_path: Path) -> None:
    assert load(tmp_path).known == Known()
    load(tmp_path).remember(SOME)
    assert load(tmp_path).known == SOME


def test_listeners_of_another_boot_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path).remember(SOME)
    monkeypatch.setattr(memory, "boot_id", lambda: "another")
    assert load(tmp_path).known == Known()


ENDLESS = '{"version": 1, "boot": "BOOT", "backend": "child", "inode": [Infinity, 1], "number": 1, "retired": []}'
NUL = '{"version": 1, "boot": "BOOT", "backend": "", "inode": null, "number": 1, "retired": [], "path": "/a\\u0000"}'
WRONG_TYPES = '{"version": 1, "boot": "BOOT", "backend": "child", "inode": [1], "number": "x", "retired": []}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "boot": "BOOT"}', "[" * 5000, WRONG_TYPES, ENDLESS, NUL]
)
def test_bad_files_count_as_missing_and_are_said(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    for directory in ("state", "run"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "pr-helper.json").write_text(text.replace("BOOT", boot_id()))
    found = load(tmp_path)
    assert found.known == Known()
    assert not found.enabled(configured=False)
    assert "cannot be used" in caplog.text


GOOD = {
    "version": 1, "boot": boot_id(), "backend": "child", "inode": [5, 77], "number": 123, "retired": [4, 5],
    "path": "/run/pr.sock", "enabled": True, "configured": False,
}  # fmt: skip


@given(st.binary(max_size=60) | (damaged(GOOD) | json_values).map(lambda plain: json.dumps(plain).encode()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_remembered_or_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    for directory in ("state", "run"):
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / "pr-helper.json").write_bytes(content)
    found = load(tmp_path)
    assert type(found.enabled(configured=False)) is bool
    known = found.known
    assert b"\0" not in os.fsencode(known.path)
    assert known.inode is None or len(known.inode) == 2
    assert all(isinstance(each, int) for each in (known.number, *(known.inode or ()), *known.retired))
    found.remember(replace(known, number=known.number + 1))
    assert load(tmp_path).known == found.known


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = load(tmp_path)
    kept.remember(SOME)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            kept.remember(Known())
    assert kept.known == SOME
    assert load(tmp_path).known == SOME
    assert os.listdir(tmp_path / "run") == ["pr-helper.json"]


def test_files_are_private(tmp_path: Path) -> None:
    load(tmp_path).choose(enabled=True, configured=False)
    assert (tmp_path / "state/pr-helper.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "state/pr-helper.json").read_text())["version"] == 1
