"""The package: installed with apt, it is complete, and hostd runs."""

from __future__ import annotations

import grp
import os
import stat

import pytest

from tests.node.checks.documents import follow
from tests.node.checks.node import get, install, prop, run, show, until, versions


def test_apt_installs_it_without_a_network() -> None:
    """Its dependencies are exactly what the image has: nothing is fetched."""
    follow("docs/install.md", "Installing hostd")
    install(versions()[0])
    assert run("dpkg-query", "-W", "-f", "${db:Status-Abbrev}", "hostd").stdout.strip() == "ii"
    assert run("dpkg", "--audit").stdout == ""


def test_it_only_looks_until_it_is_let() -> None:
    """As the page has it: a file before the package, which is then removed."""
    until(lambda: prop("ActiveState") == "active", "hostd.service is active")
    assert get("Mode") == "observe"
    (file,) = get("ConfigFiles")[1:]
    os.unlink(file)
    run("systemctl", "reload", "hostd")
    assert get("Mode") == "enforce"


def test_python_and_libraries_are_the_distributions() -> None:
    """The oldest ones that hostd is for; what they are is in the results."""
    program = """if True:
        import importlib.metadata, sys
        names = "dbus-fast", "dbus-next", "pystemd", "pyudev", "sdnotify"
        print("python", sys.version.split()[0], *(f"{name} {importlib.metadata.version(name)}" for name in names))
        import dbus_fast, hostd, pystemd, pyudev, sdnotify
        print(*(each.__file__ for each in (dbus_fast, hostd, pystemd, pyudev, sdnotify)))"""
    found, files = run("/usr/bin/python3", "-P", "-c", program).stdout.splitlines()
    print(found)
    assert [each for each in files.split() if not each.startswith("/usr/lib/python3/dist-packages/")] == []


def test_hostd_runs_and_is_enabled() -> None:
    until(lambda: prop("ActiveState") == "active", "hostd.service is active")
    assert show("hostd.service", "SubState", "UnitFileState", "NRestarts") == {
        "SubState": "running", "UnitFileState": "enabled", "NRestarts": "0",
    }  # fmt: skip


@pytest.mark.parametrize("unit", ["hostd-pr-helper.socket", "hostd-pr-helper.service"])
def test_the_pr_helper_stays_off(unit: str) -> None:
    assert prop("ActiveState", unit) == "inactive"
    assert run("systemctl", "is-enabled", unit, check=False).stdout.strip() in {"disabled", "static"}


def test_units_are_sound() -> None:
    done = run("systemd-analyze", "--man=no", "verify", "hostd.service", "hostd-pr-helper.socket",
               "hostd-pr-helper.service", check=False)  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "hostd" in line] == []
    assert done.returncode == 0


def test_presets_agree_with_what_was_enabled() -> None:
    run("systemctl", "preset", "hostd.service", "hostd-pr-helper.socket")
    assert prop("UnitFileState") == "enabled"
    assert prop("UnitFileState", "hostd-pr-helper.socket") != "enabled"


def test_the_group_exists() -> None:
    assert grp.getgrnam("hostd").gr_gid < 1000
    run("usermod", "--append", "--groups", "hostd", "member")


@pytest.mark.parametrize("path", ["/run/hostd", "/var/lib/hostd"])
def test_state_is_roots_own(path: str) -> None:
    found = os.stat(path)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o700)


def test_every_file_of_the_package_is_there() -> None:
    assert run("dpkg", "--verify", "hostd").stdout == ""
    owned = run("dpkg", "-L", "hostd").stdout.splitlines()
    for directory in (
        "/usr/share/dbus-1/system.d/", "/usr/share/dbus-1/system-services/", "/usr/share/polkit-1/actions/",
        "/usr/lib/hostd/", "/usr/lib/systemd/catalog/", "/usr/lib/systemd/system-preset/", "/usr/lib/tmpfiles.d/",
        "/usr/lib/sysusers.d/", "/usr/share/bash-completion/completions/", "/usr/share/man/man1/",
        "/usr/share/man/man5/", "/usr/share/man/man8/",
    ):  # fmt: skip
        assert any(path.startswith(directory) and not path.endswith("/") for path in owned), directory


def test_the_completion_loads() -> None:
    loads = "cd /usr/share/bash-completion; . ./bash_completion; . completions/hostctl; complete -p hostctl"
    assert "hostctl" in run("bash", "-c", loads).stdout


def test_the_configuration_is_accepted() -> None:
    run("hostd", "--check-config")
