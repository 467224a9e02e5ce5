"""The journal's catalog explains every event of hostd, and no other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hostd.log import Message

CATALOG = Path(__file__).parents[3] / "systemd" / "hostd.catalog"


def entries() -> list[tuple[str, str]]:
    """(MESSAGE_ID, text) in the order of the file."""
    _, *blocks = re.split(r"^-- ", CATALOG.read_text("utf-8"), flags=re.MULTILINE)
    return [(block.partition("\n")[0].strip(), block.partition("\n")[2]) for block in blocks]


def test_every_event_is_explained_once_and_none_that_is_not_there() -> None:
    assert sorted(ids := [message_id for message_id, _ in entries()]) == sorted(message.value for message in Message)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("message", Message)
def test_an_entry_has_a_subject_a_page_and_an_explanation(message: Message) -> None:
    head, _, text = dict(entries())[message.value].partition("\n\n")
    assert re.search(r"^Subject: \S", head, re.MULTILINE)
    assert re.search(r"^Defined-By: hostd$", head, re.MULTILINE)
    assert re.search(r"^Documentation: man:host", head, re.MULTILINE)
    assert text.strip()


def test_journalctl_takes_it(tmp_path: Path) -> None:
    if shutil.which("journalctl") is None:
        pytest.skip("journalctl is not installed")
    where = tmp_path / "usr/lib/systemd/catalog"
    where.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    (where / CATALOG.name).write_bytes(CATALOG.read_bytes())
    for option in ("--update-catalog", "--list-catalog"):
        done = subprocess.run(["journalctl", f"--root={tmp_path}", option], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^[0-9a-f]{32} hostd: ", done.stdout, re.MULTILINE)) == len(Message)
