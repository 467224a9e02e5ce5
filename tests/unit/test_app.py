"""The program: its command line, its lock, its exit codes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hostd import __version__, app
from hostd.app import EXIT_CONFIG, AlreadyRunning, lock, main, parse
from tests.support.daemon import TREE


@pytest.fixture
def directory(tmp_path: Any) -> str:
    return os.path.join(tmp_path, "run")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """`main` takes the root logger for itself; the test runner gets it back."""
    root, ours = logging.getLogger(), logging.getLogger("hostd")
    handlers, level, own = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(own)


# -- the lock


def test_the_lock_names_its_owner_and_is_private(directory: str) -> None:
    fd = lock(directory)
    path = os.path.join(directory, "lock")
    with open(path) as file:
        assert file.read() == f"{os.getpid()}\n"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_second_one_is_refused_and_told_by_whom(directory: str) -> None:
    fd = lock(directory)
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()} holds"):
        lock(directory)
    os.close(fd)
    os.close(lock(directory))


def test_the_lock_goes_with_its_owner_however_that_ends(directory: str) -> None:
    script = "import sys; from hostd.app import lock; lock(sys.argv[1]); print('ok', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, directory], cwd=TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ok\n"
        with pytest.raises(AlreadyRunning, match=f"process {owner.pid} holds"):
            lock(directory)
        owner.kill()
    os.close(lock(directory))


def test_what_an_earlier_owner_wrote_does_not_matter(directory: str) -> None:
    os.makedirs(directory)
    with open(os.path.join(directory, "lock"), "w") as file:
        file.write("4194304\nand much more")
    fd = lock(directory)
    with open(os.path.join(directory, "lock")) as file:
        assert file.read() == f"{os.getpid()}\n"
    os.close(fd)


def test_a_link_in_place_of_the_lock_is_not_followed(directory: str) -> None:
    os.makedirs(directory)
    victim = os.path.join(directory, "victim")
    with open(victim, "w") as file:
        file.write("precious")
    os.symlink(victim, os.path.join(directory, "lock"))
    with pytest.raises(OSError, match="symbolic"):
        lock(directory)
    with open(victim) as file:
        assert file.read() == "precious"


# -- the command line


def test_without_arguments_all_is_as_configured() -> None:
    chosen = parse([])
    assert (chosen.config, chosen.check_config, chosen.debug) == (None, False, False)


def test_arguments_are_what_they_say() -> None:
    chosen = parse(["--config", "/x", "--check-config", "--debug"])
    assert (chosen.config, chosen.check_config, chosen.debug) == ("/x", True, True)


@pytest.mark.parametrize("arguments", [["--conf", "/x"], ["--check"], ["run"], ["--config"], ["--verbose"]])
def test_what_is_unknown_or_cut_short_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert "usage: hostd" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hostd {__version__}\n"


# -- exit codes


def test_a_good_configuration_is_said_to_be_so(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hostd.toml"
    file.write_text("[cleanup]\ngrace = '1s'\n")
    assert main(["--config", str(file), "--check-config"]) == 0
    assert str(file) in capsys.readouterr().out


@pytest.mark.parametrize("check", [True, False])
def test_a_bad_configuration_has_its_own_exit_code(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], check: bool
) -> None:
    file = tmp_path / "hostd.toml"
    file.write_text("[cleanup]\ngrave = '1s'\n")
    assert main(["--config", str(file), *(["--check-config"] if check else [])]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(
    ("error", "code"), [(AlreadyRunning("x"), app.EXIT_RUNNING), (OSError(13, "x"), app.EXIT_FAILED)]
)
def test_each_failure_has_its_exit_code(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    async def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(app.Daemon, "run", fail)
    file = tmp_path / "hostd.toml"
    file.write_text("")
    assert main(["--config", str(file)]) == code
