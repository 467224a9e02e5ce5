"""Both libraries, one after the other, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.bus import Client, PrivateBus, adapter_on, staged
from tests.support.fake_service import FakeService, vm


@pytest.fixture
def bus_library(dbus_library: str) -> Iterator[str]:
    """The adapter on this library."""
    with adapter_on(dbus_library) as name:
        yield name


@pytest.fixture
async def stage(bus_library: str) -> AsyncIterator[tuple[PrivateBus, FakeService]]:
    """A service with one running VM, on a private bus."""
    async with staged(vm(1)) as both:
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
async def client(stage: tuple[PrivateBus, FakeService]) -> AsyncIterator[Client]:
    """A client of the other library."""
    async with await Client.connect(stage[0].address) as connected:
        yield connected
