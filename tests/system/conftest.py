"""A node whose hostd does not run yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.node import Node


@pytest.fixture
def node() -> Iterator[Node]:
    """One node with the tests' own settings."""
    with Node() as made:
        yield made
