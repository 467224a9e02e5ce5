"""A node whose hostd does not run yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon
from tests.support.node import Node


@pytest.fixture(params=["changed rows", "whole table"])
def mount_source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two ways in which hostd learns of mounts, in turn: as the kernel allows, and as older ones do."""
    monkeypatch.setattr(Daemon, "older_kernel", request.param == "whole table")


@pytest.fixture
def node() -> Iterator[Node]:
    """One node with the tests' own settings."""
    with Node() as made:
        yield made
