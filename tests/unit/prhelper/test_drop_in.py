from __future__ import annotations

import os
from pathlib import Path

from hostd.config import PRHelper
from hostd.prhelper import drop_in

UNIT = Path(__file__).parents[3] / "systemd" / "hostd-pr-helper.socket"


def test_the_unit_is_right_for_the_default_configuration() -> None:
    assert drop_in.text(PRHelper()) == ""
    listens = [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("ListenStream=")]
    assert drop_in.text(PRHelper(socket=listens[0].encode())) == ""


def test_another_path_is_told() -> None:
    assert drop_in.text(PRHelper(socket=b"/run/50%/x.sock")).endswith(
        "[Socket]\nListenStream=\nListenStream=/run/50%%/x.sock\n"
    )


def test_it_is_written_when_it_changes_and_goes_when_it_is_not_needed(tmp_path: Path) -> None:
    path = str(tmp_path / "unit.d" / "50-hostd.conf")
    assert not drop_in.write("", path)
    assert not os.path.exists(tmp_path / "unit.d")
    wanted = drop_in.text(PRHelper(socket=b"/run/other/\xff.sock"))
    assert drop_in.write(wanted, path)
    assert not drop_in.write(wanted, path)
    assert Path(path).stat().st_mode & 0o777 == 0o644
    assert b"\xff.sock" in Path(path).read_bytes()
    assert drop_in.write("", path)
    assert os.listdir(tmp_path / "unit.d") == []
