from __future__ import annotations

import re

import pytest

from hostd import errors
from hostd.errors import TABLE, ConfigError, HostdError

#: As the design lists them; the page of the bus is made from the same table.
OWN = {
    *("NoSuchVM", "VMExists", "VMAlive", "NoSuchProcess", "ProcessMismatch", "NotATarget", "LayerBusy"),
    *("NoSuchDevice", "DeviceBusy", "NotEnabled", "HelperFailed", "LimitExceeded"),
}
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HostdError)]


def test_the_table_has_every_error_once() -> None:
    assert {kind for kind, _ in TABLE.values()} == set(CLASSES) - {ConfigError}
    assert all(kind.dbus_name == name for name, (kind, _) in TABLE.items())


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not ConfigError], ids=lambda kind: kind.__name__)
def test_an_error_is_named_as_its_class(kind: type[HostdError]) -> None:
    if kind is HostdError:
        assert kind.dbus_name == "org.freedesktop.DBus.Error.Failed"
        return
    prefix = "io.kubevirt.hostd1.Error." if kind.__name__ in OWN else "org.freedesktop.DBus.Error."
    assert kind.dbus_name == prefix + kind.__name__
    assert "dbus_name" in vars(kind)


def test_the_names_of_the_bus_are_the_designs() -> None:
    ours = {name.rpartition(".")[2] for name in TABLE if name.startswith("io.kubevirt.hostd1.Error.")}
    assert ours == OWN


@pytest.mark.parametrize("name", TABLE)
def test_every_error_has_a_line_of_documentation(name: str) -> None:
    line = TABLE[name][1]
    assert re.fullmatch(r"[A-Za-z].{10,140}\.", line)
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+", name)


def test_the_tree_is_drawn_in_the_modules_docstring() -> None:
    drawn = re.findall(r"\w+", errors.__doc__ or "")
    assert not [kind.__name__ for kind in CLASSES if kind.__name__ not in drawn]


def test_the_message_is_the_sentence() -> None:
    error = errors.VMAlive("pod x has a live QEMU (pid 7): stop the VM first")
    assert error.message == str(error) == "pod x has a live QEMU (pid 7): stop the VM first"
    assert HostdError().message == ""
