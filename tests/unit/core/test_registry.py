"""The list of VMs: saved, then told, once for each change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hostd.core import registry as registry_module
from hostd.core.model import VM, LayerState, Policy, State
from hostd.core.registry import Registry
from hostd.core.service import Event, VMChanged, VMExited, VMNew, VMRemoved
from hostd.core.store import Store
from hostd.errors import HostdError, LimitExceeded, NoSuchVM
from tests.support.core import OTHER, POD, a_layer, a_vm


class Unreliable(Store):
    """A store whose disk can be full."""

    full = False
    saves = 0

    def save(self, vm: VM, plain: dict[str, Any] | None = None) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.saves += 1
        super().save(vm, plain)


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Unreliable]:
    made = Unreliable(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def registry(store: Unreliable) -> Registry:
    return Registry(store)


@pytest.fixture
def told(registry: Registry) -> list[Event]:
    events: list[Event] = []
    registry.subscribe(events.append)
    return events


def fields(told: list[Event]) -> list[frozenset[str]]:
    return [event.fields for event in told if isinstance(event, VMChanged)]


def test_a_new_vm_is_saved_before_it_is_told(registry: Registry, store: Store) -> None:
    seen = []
    registry.subscribe(lambda event: seen.append((type(event), [vm.pod_uid for vm in store.load()[0]])))
    registry.add(a_vm())
    assert seen == [(VMNew, [POD])]
    assert registry[POD] is registry.get(POD)
    assert len(registry) == 1


def test_an_unknown_vm_has_a_named_error(registry: Registry) -> None:
    assert registry.get(POD) is None
    with pytest.raises(NoSuchVM, match=POD):
        registry[POD]


def test_one_transition_is_told_once_with_all_that_changed(registry: Registry, told: list[Event]) -> None:
    vm = a_vm()
    registry.add(vm)
    vm.state, vm.exited_at, vm.exited_usec = State.EXITED, 5, 6
    registry.commit(vm, VMExited(vm, vm.exit))
    assert [type(event) for event in told] == [VMNew, VMChanged, VMExited]
    assert fields(told) == [{"state", "exited_at", "exited_usec"}]


def test_nothing_changed_is_neither_saved_nor_told(registry: Registry, store: Unreliable, told: list[Event]) -> None:
    vm = a_vm(a_layer())
    registry.add(vm)
    for _ in range(3):
        registry.commit(vm)
    assert store.saves == 1
    assert fields(told) == []


def test_attempts_are_saved_and_not_told(registry: Registry, store: Unreliable, told: list[Event]) -> None:
    layer = a_layer()
    vm = a_vm(layer)
    registry.add(vm)
    layer.attempts, layer.retry_at = 7, 99
    registry.commit(vm)
    assert (store.saves, fields(told)) == (2, [])
    layer.state = LayerState.BUSY
    registry.commit(vm)
    assert fields(told) == [{"layers"}]


def test_what_must_be_saved_and_cannot_be_is_put_back(registry: Registry, store: Unreliable, told: list[Event]) -> None:
    vm = a_vm(a_layer())
    registry.add(vm)
    store.full = True
    vm.policy, vm.grace_usec, vm.layers = Policy.KEEP, 7, {}
    with pytest.raises(HostdError, match="nothing was changed"):
        registry.commit(vm, must_save=True)
    assert vm == a_vm(a_layer())
    assert fields(told) == []
    with pytest.raises(HostdError):
        registry.add(VM(OTHER), must_save=True)
    assert registry.get(OTHER) is None
    assert [type(event) for event in told] == [VMNew]


def test_what_need_not_be_saved_goes_on_and_is_saved_when_it_can_be(
    registry: Registry, store: Unreliable, told: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    vm = a_vm()
    registry.add(vm)
    store.full = True
    for state in (State.RUNNING, State.EXITED, State.CLEANING):
        vm.state = state
        registry.commit(vm)
    assert registry.unsaved == {POD}
    assert len(caplog.records) == 1, "one line, not one for each attempt"
    assert len(fields(told)) == 3
    store.full = False
    registry.commit(vm)
    assert registry.unsaved == frozenset()
    assert store.load()[0] == [vm]


def test_a_listener_that_fails_does_not_keep_it_from_the_others(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Event] = []

    def fail(event: Event) -> None:
        raise RuntimeError("of mine")

    registry.subscribe(fail)
    registry.subscribe(told.append)
    registry.add(a_vm())
    assert len(told) == 1
    assert "a listener failed on VMNew" in caplog.text


def test_who_unsubscribes_hears_no_more(registry: Registry, told: list[Event]) -> None:
    once: list[Event] = []

    def hear(event: Event) -> None:
        once.append(event)
        end()

    end = registry.subscribe(hear)
    registry.add(a_vm())
    registry.add(VM(OTHER))
    assert (len(once), len(told)) == (1, 2)


def test_a_restored_vm_is_no_news(registry: Registry, told: list[Event]) -> None:
    vm = a_vm(a_layer())
    registry.restore(vm)
    registry.commit(vm)
    assert told == []


def test_a_removed_vm_leaves_no_file(registry: Registry, store: Store, told: list[Event]) -> None:
    vm = a_vm()
    registry.add(vm)
    registry.remove(vm)
    assert isinstance(told[-1], VMRemoved)
    assert (len(registry), os.listdir(store.directory)) == (0, [])


def test_what_failed_for_want_of_room_is_tried_again_once_there_is_some(registry: Registry, store: Unreliable) -> None:
    failures: list[OSError] = []

    def relieve(error: OSError) -> bool:
        failures.append(error)
        store.full = len(failures) > 1
        return True

    registry.relieve = relieve
    store.full = True
    registry.add(a_vm(), must_save=True)
    assert ([error.errno for error in failures], registry.unsaved) == ([28], frozenset())
    store.full = True
    registry.add(VM(OTHER))
    assert registry.unsaved == {OTHER}, "it is tried once more, not for ever"


def test_the_list_may_change_while_it_is_walked_through(registry: Registry) -> None:
    registry.add(a_vm())
    registry.add(VM(OTHER))
    for vm in registry:
        registry.remove(vm)
    assert len(registry) == 0


def test_there_is_a_bound(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MOST", 1)
    registry.add(a_vm())
    with pytest.raises(LimitExceeded, match="UnregisterVM"):
        registry.add(VM(OTHER))
