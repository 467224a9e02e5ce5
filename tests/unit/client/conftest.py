"""A service in memory on a private bus, and the client on it, with either library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import hostd.client
from hostd.client.node import Node
from tests.support.bus import PrivateBus, adapter_on, staged
from tests.support.fake_service import FakeService, vm


@pytest.fixture
def bus_library(dbus_library: str) -> Iterator[str]:
    """The adapter on this library."""
    with adapter_on(dbus_library) as name:
        yield name


@pytest.fixture
async def stage(bus_library: str) -> AsyncIterator[tuple[PrivateBus, FakeService]]:
    """Two running VMs, the second with three layers."""
    async with staged(vm(1), vm(2, layers=3)) as both:
        yield both


@pytest.fixture
def bus(stage: tuple[PrivateBus, FakeService]) -> PrivateBus:
    """The private bus."""
    return stage[0]


@pytest.fixture
def service(stage: tuple[PrivateBus, FakeService]) -> FakeService:
    """The service that is on it."""
    return stage[1]


@pytest.fixture
async def node(bus: PrivateBus) -> AsyncIterator[Node]:
    """The client."""
    async with hostd.client.connect(bus.address) as connected:
        yield connected
