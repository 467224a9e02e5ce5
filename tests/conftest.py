"""Fixtures for all tests: what needs root says so, and a node is one word away."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from tests.support.bound import bounded

# `make fuzz` looks for longer at the same properties (a quarter of an hour); nowhere is time asserted.
settings.register_profile("default", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

LIBRARIES = ("dbus-fast", "dbus-next")


def pytest_configure() -> None:
    """A test run that is told to end (by timeout(1), say) takes away what it has made, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _bounded() -> Generator[None, object, object]:
    """Around each part of a test: nothing in it hangs for ever."""
    with bounded():
        return (yield)


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_bounded)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_bounded)
pytest_runtest_teardown = pytest.hookimpl(wrapper=True)(_bounded)


@pytest.fixture
def root() -> None:
    """The test needs root: mounts, namespaces, cgroups."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(params=LIBRARIES)
def dbus_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each D-Bus library in turn, for this process and the daemons that it starts (HOSTD_DBUS_LIBRARY)."""
    library: str = request.param
    if find_spec(library.replace("-", "_")) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("HOSTD_DBUS_LIBRARY", library)
    return library
