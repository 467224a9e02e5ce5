"""Whose turn it is."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hostd.core import turns
from hostd.core.model import VM
from hostd.core.turns import Turns
from hostd.linux.pool import Worker, WorkerError


class Served:
    """Turns over a number of workers, and who got one."""

    def __init__(self, workers: int) -> None:
        self.free = workers
        self.error: Exception | None = None
        self.begun: list[list[str]] = []
        self.starved: list[str] = []
        self.give_back_at_once = False
        self.turns = Turns(self.take, lambda: self.error, self.begin, lambda vm, _: self.starved.append(vm.pod_uid))

    def take(self) -> Worker | None:
        if not self.free:
            return None
        self.free -= 1
        return cast("Worker", object())

    def begin(self, vms: list[VM], _: Any) -> None:
        self.begun.append([vm.pod_uid for vm in vms])
        if self.give_back_at_once:
            self.give_back()

    def give_back(self) -> None:
        self.free += 1
        self.turns.serve()


def test_one_after_the_other_and_those_that_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_TOGETHER", 3)
    served = Served(1)
    for name in "abcdef":
        served.turns.add(VM(name))
    assert (served.begun, served.turns.crowded) == ([["a"]], True)
    served.give_back()
    served.give_back()
    assert (served.begun, served.turns.crowded) == ([["a"], ["b", "c", "d"], ["e", "f"]], False)


def test_not_more_together_than_can_be_looked_at_in_a_moment() -> None:
    served = Served(0)
    for number in range(200):
        served.turns.add(VM(str(number)))
    for _ in range(4):
        served.give_back()
    assert [len(vms) for vms in served.begun] == [64, 64, 64, 8]


def test_what_was_taken_back_comes_first() -> None:
    served = Served(0)
    served.turns.add(VM("c"))
    served.turns.take_back([VM("a"), VM("b")])
    served.give_back()
    assert served.begun == [["a", "b", "c"]]


def test_workers_that_come_back_at_once_take_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_TOGETHER", 1)
    served = Served(0)
    served.give_back_at_once = True
    for number in range(5000):
        served.turns.add(VM(str(number)))
    served.give_back()
    assert len(served.begun) == 5000


def test_where_no_worker_will_come_all_hear_of_it() -> None:
    served = Served(0)
    served.turns.add(VM("a"))
    served.error = WorkerError("all hang")
    served.turns.add(VM("b"))
    assert (served.starved, served.begun) == (["a", "b"], [])
