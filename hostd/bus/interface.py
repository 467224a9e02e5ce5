"""Binds a class to an interface of the contract.

    class Manager(Exported, interface=names.MANAGER):
        @method("GetVM")
        def get_vm(self, pod_uid: str) -> str: ...

        @getter("NVMs")
        def n_vms(self) -> int: ...

A method gets its arguments by the names of the contract (before them the call, if it asks for `call`), and returns
nothing, its one out-argument, or a list of them; it may be a coroutine. Structs are lists (dbus-next takes no tuples),
a descriptor in the answer belongs to the answer. A class that has a member too few, one too many or one of another
shape cannot be defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hostd.bus import library
from hostd.bus.contract import Interface, Method, Property, contract, signature_text
from hostd.errors import InvalidArgs, PropertyReadOnly, UnknownMethod, UnknownProperty

if TYPE_CHECKING:
    from hostd.bus.call import Call
    from hostd.bus.library import Value

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "_hostd_member"


class ContractError(Exception):
    """A class does not fit its interface in the contract."""


def method(name: str) -> Callable[[Function], Function]:
    """Marks the handler of a method."""
    return _marker("method", name)


def getter(name: str) -> Callable[[Function], Function]:
    """Marks what gives a property's value."""
    return _marker("getter", name)


def setter(name: str) -> Callable[[Function], Function]:
    """Marks what sets a property; it gets the value."""
    return _marker("setter", name)


def _marker(kind: str, name: str) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        setattr(function, _MARK, (kind, name))
        return function

    return mark


class Exported:
    """An object's side of one interface."""

    contract: ClassVar[Interface]
    _bound: ClassVar[dict[str, dict[str, str]]]
    _with_call: ClassVar[frozenset[str]]
    _getters: ClassVar[dict[str, tuple[str, str]]]
    #: Which method changes a property that cannot be set, for the error's sentence.
    changed_by: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, interface: str) -> None:
        cls.contract = contract()[interface]
        cls._bound = {"method": {}, "getter": {}, "setter": {}}
        for attribute, value in vars(cls).items():
            kind, name = getattr(value, _MARK, (None, ""))
            if kind is not None:
                cls._bound[kind][name] = attribute
        _check_members(cls, cls._bound)
        # A thousand objects are asked for all of these in one call: one look-up each, then.
        cls._getters = {
            name: (found.type, cls._bound["getter"][name]) for name, found in cls.contract.properties.items()
        }
        cls._with_call = frozenset(name for name in cls._bound["method"] if _wants_call(cls, name, cls._bound))

    def invoke(self, call: Call, member: Method) -> Value:
        """The handler's result, or its coroutine."""
        handler = getattr(self, self._bound["method"][member.name])
        return handler(call, *call.message.body) if member.name in self._with_call else handler(*call.message.body)

    def find_method(self, name: str, signature: str) -> Method:
        """The contract's method. Raises UnknownMethod, or InvalidArgs for other types than it takes."""
        found = self.contract.methods.get(name)
        if found is None:
            raise UnknownMethod(f"{self.contract.name} has no method {name}")
        if found.in_signature != signature:
            raise InvalidArgs(f"{name} takes {signature_text(found.takes)}, not ({signature})")
        return found

    def find_property(self, name: str) -> Property:
        """The contract's property. Raises UnknownProperty."""
        found = self.contract.properties.get(name)
        if found is None:
            raise UnknownProperty(f"{self.contract.name} has no property {name}")
        return found

    def find_writable(self, name: str, signature: str) -> Property:
        """The same for setting it. Raises PropertyReadOnly and InvalidArgs, too."""
        found = self.find_property(name)
        if not found.writable:
            hint = self.changed_by.get(name)
            raise PropertyReadOnly(f"{name} cannot be set" + (f"; {hint} changes it" if hint else ""))
        if found.type != signature:
            raise InvalidArgs(f"{name} is of type {found.type}, not {signature}")
        return found

    def get(self, name: str) -> Value:
        """A property's value as a variant. Raises what its source raises."""
        kind, attribute = self._getters[name]
        return library.variant(kind, getattr(self, attribute)())

    def set(self, name: str, value: Value) -> None:
        """Sets a property. Raises what its setter raises."""
        getattr(self, self._bound["setter"][name])(value)


def _check_members(cls: type[Exported], bound: dict[str, dict[str, str]]) -> None:
    """Raises ContractError for members that one of the two does not have."""
    wanted = {
        "method": set(cls.contract.methods),
        "getter": set(cls.contract.properties),
        "setter": {name for name, found in cls.contract.properties.items() if found.writable},
    }
    for kind, names in wanted.items():
        differing = ", ".join(sorted(names ^ set(bound[kind])))
        if differing:
            raise ContractError(f"{cls.__name__} and {cls.contract.name} differ in {kind}s: {differing}")


def _wants_call(cls: type[Exported], name: str, bound: dict[str, dict[str, str]]) -> bool:
    """Whether a handler asks for the call. Raises ContractError for other arguments than the contract's."""
    takes = [arg.name for arg in cls.contract.methods[name].takes]
    given = list(inspect.signature(getattr(cls, bound["method"][name])).parameters)[1:]
    if given not in (takes, ["call", *takes]):
        raise ContractError(f"{cls.__name__}.{bound['method'][name]} takes {given}, {name} takes {takes}")
    return given != takes
