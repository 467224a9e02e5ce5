"""The bus starts hostd for whoever asks first, but only a hostd that is enabled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.checks.node import UNIT, call, get, prop, run, until, versions


@pytest.fixture
def stopped() -> Iterator[None]:
    run("systemctl", "stop", UNIT)
    yield
    run("systemctl", "enable", "--now", UNIT)
    until(lambda: prop("ActiveState") == "active", "hostd is active")


@pytest.mark.usefixtures("stopped")
def test_the_first_question_starts_it() -> None:
    assert get("Version") == versions()[0]
    assert prop("ActiveState") == "active"


@pytest.mark.usefixtures("stopped")
def test_a_disabled_one_stays_off() -> None:
    run("systemctl", "disable", UNIT)
    done = call("ListVMs", check=False)
    assert done.returncode != 0
    assert "dbus-io.kubevirt.hostd1.service" in done.stderr, done.stderr
    assert prop("ActiveState") == "inactive"
