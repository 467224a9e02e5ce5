from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hostd.linux.descriptor import Descriptor


@pytest.fixture
def number() -> Iterator[int]:
    opened = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    before = os.listdir("/proc/self/fd")
    yield opened
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1


def is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_it_is_open_until_it_is_closed(number: int) -> None:
    owned = Descriptor(number)
    assert owned.fileno() == number
    assert is_open(number)
    owned.close()
    assert owned.fileno() == -1
    assert not is_open(number)


def test_the_end_of_a_with_closes_it_whatever_happens(number: int) -> None:
    with pytest.raises(ZeroDivisionError), Descriptor(number) as owned:
        raise ZeroDivisionError
    assert owned.fileno() == -1
    assert not is_open(number)


def test_closed_twice_it_leaves_the_number_to_the_next_owner(number: int) -> None:
    owned = Descriptor(number)
    owned.close()
    assert os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) == number
    owned.close()
    with owned:
        assert is_open(number)
    assert is_open(number)
    os.close(number)
