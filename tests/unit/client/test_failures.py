"""Each error of the table comes back as its own class, with the daemon's sentence."""

from __future__ import annotations

import pytest

from hostd.bus.connection import CallFailed
from hostd.client.failures import Unreachable, as_error
from hostd.errors import TABLE, AccessDenied, HostdError


@pytest.mark.parametrize("name", TABLE)
def test_a_name_is_its_class_again(name: str) -> None:
    error = as_error(CallFailed(name, "pod 7 is alive (really)"))
    assert type(error) is TABLE[name][0]
    assert error.message == "pod 7 is alive (really)"


def test_a_name_that_nobody_knows_is_an_error_all_the_same() -> None:
    error = as_error(CallFailed("io.kubevirt.hostd1.Error.FromTheFuture", "words"))
    assert type(error) is HostdError
    assert str(error) == "words"


@pytest.mark.parametrize(
    "name", ["ServiceUnknown", "NameHasNoOwner", "NoReply", "Spawn.ChildExited", "Spawn.ExecFailed"]
)
def test_what_the_bus_says_of_an_absent_hostd(name: str) -> None:
    error = as_error(CallFailed(f"org.freedesktop.DBus.Error.{name}", "The name … was not provided"))
    assert type(error) is Unreachable
    assert "systemctl status hostd" in str(error)


@pytest.mark.parametrize(
    "words", ["Rejected send message, 2 matched rules; type=…", "Sender is not authorized to send message"]
)
def test_the_policy_of_the_bus_is_told_with_what_to_do(words: str) -> None:
    error = as_error(CallFailed("org.freedesktop.DBus.Error.AccessDenied", words))
    assert type(error) is AccessDenied
    assert "group hostd" in str(error)
