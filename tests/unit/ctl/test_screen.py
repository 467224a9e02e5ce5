"""Tables fit, and nothing that is shown can move the cursor."""

from __future__ import annotations

import io
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from hostd.client.model import VM
from hostd.ctl.screen import Cell, Screen, Style, fitted, printable, shortened, width_of


def shown(width: int | None, *, colour: bool = False) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(out, width=width, colour=colour), out


def test_a_table_lines_up() -> None:
    screen, out = shown(None)
    screen.table(("A", "LONGER"), [["1", "x"], ["22222", "y"]])
    assert out.getvalue() == "A      LONGER\n1      x\n22222  y\n"


def test_without_rows_the_headers_stand_alone() -> None:
    screen, out = shown(80)
    screen.table(("A", "B"), [])
    assert out.getvalue() == "A  B\n"


def test_a_table_fits_its_terminal() -> None:
    screen, out = shown(40)
    screen.table(("VM", "TARGET"), [["shop/db", "/var/lib/kubelet/pods/" + "x" * 80 + "/disk_0.img"]])
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("shop/db  /var")
    assert lines[1].endswith("disk_0.img")
    assert "…" in lines[1]


def test_a_path_is_never_cut() -> None:
    long = "/var/lib/kubelet/pods/" + "x" * 80 + "/disk_0.img"
    screen, out = shown(40)
    screen.table(("VM", "STATE"), [["shop/db", "busy"], ["shop/web", "gone"]], paths=[long, "/short"])
    assert out.getvalue() == f"VM        STATE\nshop/db   busy\n  {long}\nshop/web  gone\n  /short\n"
    screen, out = shown(None)
    screen.table(("VM",), [["shop/db"]], paths=[long])
    assert out.getvalue().splitlines()[1] == f"shop/db  {long}"


def test_nobody_looks_so_nothing_is_cut() -> None:
    screen, out = shown(None)
    screen.table(("A",), [["x" * 500]])
    assert "x" * 500 in out.getvalue()


def test_colour_only_where_it_is_wanted() -> None:
    screen, out = shown(80, colour=True)
    screen.line("is ", Cell("blocked", Style.BAD))
    assert out.getvalue() == "is \x1b[1;31mblocked\x1b[0m\n"
    screen, out = shown(80)
    screen.line("is ", Cell("blocked", Style.BAD))
    assert out.getvalue() == "is blocked\n"


def test_colour_does_not_count_as_width() -> None:
    screen, out = shown(80, colour=True)
    screen.table(("A", "B"), [[Cell("x", Style.GOOD), "y"], ["long", "z"]])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain == "A     B\nx     y\nlong  z\n"


def test_escape_sequences_are_defused() -> None:
    screen, out = shown(80)
    screen.line("a\x1b[2Jb\x9b1mc\n")
    assert out.getvalue() == "a\\x1b[2Jb\\x9b1mc\\n\n"


@given(st.text(), st.integers(3, 60))
def test_shortened_is_never_too_wide(text: str, width: int) -> None:
    assert width_of(shortened(printable(text), width)) <= width


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 200))
def test_fitted_only_ever_cuts(widths: list[int], total: int) -> None:
    found = fitted(widths, total)
    assert all(new <= old for new, old in zip(found, widths, strict=True))
    assert sum(found) <= max(total, 6 * len(widths))
    if sum(widths) <= total:
        assert found == widths


def test_json_is_one_line_for_programs_and_several_for_people() -> None:
    screen, out = shown(None)
    screen.give([VM("7", name="größe")])
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue())[0]["name"] == "größe"
    screen, out = shown(80)
    screen.give({"a": 1})
    assert out.getvalue() == '{\n  "a": 1\n}\n'
