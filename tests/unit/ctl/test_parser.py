"""The command line; the man page is held against it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.ctl.parser import build, parse

PACKAGING = Path(__file__).parents[3] / "packaging"
PAGE = PACKAGING / "man/hostctl.1"
COMMON = {"--json", "--bus", "--help", "-h"}


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """`devices claim` and all the others."""
    for name, parser in below(build()).items():
        yield name, parser
        for inner, inner_parser in below(parser).items():
            yield f"{name} {inner}", inner_parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


COMMANDS = dict(commands())


def sections() -> dict[str, str]:
    """The page's text by command; `pr-helper [status]` stands for both."""
    text = PAGE.read_text().replace("\\-", "-")
    found = {}
    for part in re.split(r"^\.SS ", text.partition(".SH COMMANDS")[2].partition(".SH EXIT")[0], flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        words = re.split(r" \\f| \[| \{", head)[0].strip()
        found[words] = head + "\n" + body
    return found


def test_every_command_is_in_the_man_page_and_no_other() -> None:
    assert set(sections()) | {"pr-helper status"} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_man_page_has_the_options_of_each_command(name: str) -> None:
    text = sections().get(name) or sections()[name.rpartition(" ")[0]]
    said = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", re.sub(r"\\f[BIR]", "", text)))
    known = options_of(COMMANDS[name]) - COMMON
    assert known <= said
    assert said - known <= {"--end", "--config"}, "an option that does not exist"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_man_page_has_the_choices_of_each_option(name: str) -> None:
    text = sections().get(name) or ""
    for action in COMMANDS[name]._actions:
        if action.choices and not isinstance(action, argparse._SubParsersAction):
            for choice in action.choices:
                assert re.search(rf"(?<![\w-]){choice}(?![\w-])", text), f"{name} {action.dest}: {choice}"


def test_the_man_page_is_clean() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(PAGE)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_common_options_stand_on_either_side() -> None:
    for line in (["--json", "--bus", "x", "list"], ["list", "--json", "--bus", "x"], ["--json", "list", "--bus", "x"]):
        options = parse(line)
        assert (options.json, options.bus) == (True, "x")
    assert not hasattr(parse(["list"]), "json")


def test_what_stands_behind_two_dashes_is_the_command() -> None:
    options = parse(["hold", "shop/db", "--why", "x", "--", "sh", "-c", "echo --", "--"])
    assert (options.vm, options.why, options.command) == ("shop/db", "x", ["sh", "-c", "echo --", "--"])
    options = parse(["hold", "--all", "--", "sleep", "1"])
    assert (options.vm, options.all, options.command) == (None, True, ["sleep", "1"])


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["dance"],
        ["list", "--state", "asleep"],
        ["list", "--", "ls"],
        ["show"],
        ["hold", "x", "--keep", "--end"],
        ["devices", "claim", "usb/1-2"],
        ["layers", "--kin", "pci"],
    ],
)
def test_wrong_usage_is_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(line)
    assert raised.value.code == 2
    assert "usage: hostctl" in capsys.readouterr().err


def test_the_help_fits_a_terminal_a_command_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = build().format_help().splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines[lines.index("commands:") + 2 :][: len(below(build()))]} == set(
        below(build())
    )
    for parser in COMMANDS.values():
        # Choices are words that cannot be broken.
        assert max(len(line) for line in parser.format_help().splitlines() if "{" not in line) <= 80


def test_every_command_has_a_sentence_and_a_way_to_run() -> None:
    for name, parser in COMMANDS.items():
        assert parser.description, name
        assert parser.description.endswith("."), name
        defaults = parser._defaults
        assert callable(defaults["run"] or defaults["run_local"]), name
