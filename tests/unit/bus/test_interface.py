"""Classes that do not fit the contract cannot be defined."""

from __future__ import annotations

import pytest

from hostd.bus import names
from hostd.bus.interface import ContractError, Exported, getter, method, setter
from hostd.errors import InvalidArgs, PropertyReadOnly, UnknownMethod, UnknownProperty


class Fitting(Exported, interface=names.LOG_CONTROL):
    @getter("LogLevel")
    def level(self) -> str:
        return "info"

    @setter("LogLevel")
    def set_level(self, value: str) -> None:
        raise InvalidArgs(value)

    @getter("LogTarget")
    def target(self) -> str:
        return "console"

    @setter("LogTarget")
    def set_target(self, value: str) -> None:
        raise InvalidArgs(value)

    @getter("SyslogIdentifier")
    def identifier(self) -> str:
        return "x"


def test_a_member_too_few() -> None:
    with pytest.raises(ContractError, match="Ping"):

        class _Peer(Exported, interface=names.PEER):
            @method("GetMachineId")
            def get_machine_id(self) -> str:
                return ""


def test_a_member_too_many() -> None:
    with pytest.raises(ContractError, match="Pong"):

        class _Peer(Exported, interface=names.PEER):
            @method("GetMachineId")
            def get_machine_id(self) -> str:
                return ""

            @method("Ping")
            def ping(self) -> None: ...

            @method("Pong")
            def pong(self) -> None: ...


def test_members_of_a_parent_do_not_count() -> None:
    with pytest.raises(ContractError, match="LogTarget"):

        class _Control(Fitting, interface=names.LOG_CONTROL):
            pass


def test_other_arguments() -> None:
    with pytest.raises(ContractError, match="Ping takes"):

        class _Peer(Exported, interface=names.PEER):
            @method("GetMachineId")
            def get_machine_id(self) -> str:
                return ""

            @method("Ping")
            def ping(self, why: str) -> None: ...


def test_what_is_asked_for_must_be_there() -> None:
    fitting = Fitting()
    with pytest.raises(UnknownMethod):
        fitting.find_method("Nope", "")
    with pytest.raises(UnknownProperty):
        fitting.find_property("Nope")
    with pytest.raises(PropertyReadOnly):
        fitting.find_writable("SyslogIdentifier", "s")
    with pytest.raises(InvalidArgs, match="type s, not u"):
        fitting.find_writable("LogLevel", "u")
    assert fitting.get("LogLevel").value == "info"
