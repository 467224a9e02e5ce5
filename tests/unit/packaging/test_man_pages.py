"""The man pages are well-formed, and say what the code says: options, exit statuses, keys, defaults, types, errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from typing import Any

import pytest

from hostd import app, config, errors, values
from hostd.config import KEYS, Config
from hostd.core import registry
from tests.support.man import DIRECTORY, ManPage

PAGES = sorted(path.name for path in DIRECTORY.glob("*.[1-8]"))
OURS = ("hostd.8", "hostd.toml.5", "io.kubevirt.hostd1.5")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C.UTF-8"})
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


# -- form


def test_the_pages_are_there() -> None:
    assert set(OURS) <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_groff_has_nothing_to_say(name: str) -> None:
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("needs man and groff: Debian's man-db")
    command = ["man", "--warnings", "-E", "UTF-8", "-Tutf8", "-Z", "-l", str(DIRECTORY / name)]
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PAGES)
def test_mandoc_has_nothing_to_say(name: str) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    assert run("mandoc", "-T", "lint", "-W", "warning", str(DIRECTORY / name)) == ""


@pytest.mark.parametrize("name", OURS)
def test_a_page_has_the_usual_sections_and_its_own_name(name: str) -> None:
    page = ManPage(name)
    subject, _, number = name.rpartition(".")
    assert page.titles[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert page.titles[-1] == "SEE ALSO"
    assert re.search(rf"^\.TH {re.escape(subject.upper())} {number} ", page.head, re.MULTILINE)
    assert page.section("NAME").text.startswith(f"{subject} - ")


@pytest.mark.parametrize("name", OURS)
def test_pages_of_ours_that_a_page_names_exist(name: str) -> None:
    named = re.findall(r"\b((?:io\.kubevirt\.)?host[a-z0-9.]*)\((\d)\)", ManPage(name).section("SEE ALSO").text)
    assert named
    assert {f"{page}.{number}" for page, number in named} <= set(PAGES)


# -- hostd(8)


def test_options_are_those_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.parse(["--help"])
    shown = capsys.readouterr().out
    of_parser = dict(re.findall(r"^  .*?(--[a-z-]+)(?: ([A-Z]+))?", shown, re.MULTILINE))
    documented = {}
    for tag, text in ManPage("hostd.8").section("OPTIONS").tagged():
        option, _, argument = tag.rpartition("--")[2].partition(" ")
        documented[f"--{option}"] = argument
        assert text, f"{tag} is not explained"
    assert documented == of_parser


def test_the_synopsis_names_every_option() -> None:
    page = ManPage("hostd.8")
    for tag, _ in page.section("OPTIONS").tagged():
        assert tag.rpartition(", ")[2].split()[0] in page.section("SYNOPSIS").text


def test_exit_statuses_are_those_of_the_program() -> None:
    # argparse ends with 2 on a wrong command line.
    of_program = {0, 2} | {value for name, value in vars(app).items() if name.startswith("EXIT_")}
    documented = ManPage("hostd.8").section("EXIT STATUS").tagged()
    assert {int(tag) for tag, _ in documented} == of_program
    assert all(text for _, text in documented)


def test_a_wrong_command_line_is_2() -> None:
    with pytest.raises(SystemExit) as ended:
        app.parse(["--no-such-option"])
    assert ended.value.code == 2


# -- hostd.toml(5)

#: What the page calls that which a reader of values takes.
_TYPES = {
    values.path: "path",
    values.path_text: "path",
    values.path_or_nothing: 'path or ""',
    values.socket_path: "path of a socket",
    values.duration: "time",
    values.duration_or_never: "time or never",
    values.flag: "true or false",
    values.file_mode: "three octal digits",
    values.owner: "user:group",
    values.selinux_label: 'SELinux context or ""',
}
_KEY = re.compile(r"([a-z-]+) = (.+) \((.+)\)")


def documented_keys() -> dict[str, tuple[str, str, str]]:
    """Key with its section → default (TOML), type and text, by the page."""
    page = ManPage("hostd.toml.5")
    found = {}
    for title in page.titles:
        section = re.fullmatch(r"SECTION \[(.+)\]", title)
        for tag, text in page.section(title).tagged() if section else ():
            parts = _KEY.fullmatch(tag)
            assert section is not None
            assert parts is not None, f"not a key, its default and its type: {tag}"
            found[f"{section[1]}.{parts[1]}"] = (parts[2], parts[3], text)
    return found


def default_of(key: str) -> object:
    found: Any = Config()
    for part in key.split(".")[:-1]:
        found = getattr(found, part.replace("-", "_"))
    return getattr(found, KEYS[key][0])


def type_of(key: str) -> str:
    reader = KEYS[key][1]
    if reader in _TYPES:
        return _TYPES[reader]
    # A choice says itself which words it takes.
    with pytest.raises(ValueError, match="or") as refused:
        reader(None)
    return "one of " + ", ".join(str(refused.value).split(" or "))


def test_keys_are_those_of_the_configuration() -> None:
    assert set(documented_keys()) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_the_default_and_type_of_the_configuration_and_an_explanation(key: str) -> None:
    default, kind, text = documented_keys()[key]
    assert KEYS[key][1](tomllib.loads(f"value = {default}")["value"]) == default_of(key)
    assert kind == type_of(key)
    assert text


def test_the_bound_of_the_list_is_the_registrys() -> None:
    assert f" {registry.MOST} that are listed" in " ".join((DIRECTORY / "hostd.toml.5").read_text().split())


def test_no_section_of_the_configuration_is_missing_in_the_page() -> None:
    sections = {name.replace("_", "-") for name, value in vars_of(Config()).items() if is_dataclass(value)}
    assert sections == {key.partition(".")[0] for key in documented_keys()}


def vars_of(settings: Config) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def test_the_example_is_a_configuration(tmp_path: Any) -> None:
    examples = ManPage("hostd.toml.5").section("EXAMPLES")
    example = re.search(r"^\.EX\n(.*?)^\.EE", examples.roff, re.MULTILINE | re.DOTALL)
    assert example is not None
    file = tmp_path / "hostd.toml"
    file.write_text(example[1].replace("\\-", "-"))
    assert config.load(str(file)) != Config()


def test_places_are_those_that_are_read() -> None:
    vendor, administrator, drop_ins = config.PLACES
    named = (vendor, administrator, f"{drop_ins}/*.toml")
    assert ManPage("hostd.toml.5").section("SYNOPSIS").text.split() == list(named)
    assert all(path in ManPage("hostd.8").section("FILES").text for path in named)


# -- io.kubevirt.hostd1(5); the rest of it is held against the running daemon by tests/system/test_man_dbus.py


def test_errors_are_those_of_the_table_with_its_words() -> None:
    documented = ManPage("io.kubevirt.hostd1.5").section("ERRORS").entries()
    assert dict(documented) == {name: line for name, (_, line) in errors.TABLE.items()}
    assert len(documented) == len(errors.TABLE)


def test_the_program_runs_as_the_page_shows_it(tmp_path: Any) -> None:
    file = tmp_path / "hostd.toml"
    file.write_text("[cleanup]\nmode = 'observe'\n")
    command = [sys.executable, "-c", "import sys; from hostd.app import main; sys.exit(main())"]
    assert run(*command, "--config", str(file), "--check-config") == f"the configuration is fine: {file}\n"
    assert run(*command, "--version").startswith("hostd ")
