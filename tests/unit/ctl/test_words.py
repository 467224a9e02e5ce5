"""In words."""

from __future__ import annotations

import pytest

from hostd.client.model import Holder
from hostd.core.model import LayerState, State
from hostd.ctl.screen import Style
from hostd.ctl.words import age, clock, count, duration, ending, holding, state_cell


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (59, "59s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_age(seconds: int, words: str) -> None:
    assert age(1_000_000, 1_000_000 + seconds * 1_000_000) == words


def test_age_of_what_has_not_come_and_of_a_clock_that_was_set_back() -> None:
    assert age(0, 5) == "-"
    assert age(10_000_000, 5) == "0s"
    assert clock(0) == "-"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("poweroff", 0, -1), "powered off"),
        (("error", 1, -1), "ended with an error (status 1)"),
        (("signal", -1, 9), "was killed (SIGKILL)"),
        (("signal", -1, 99), "was killed (signal 99)"),
        (("", -1, -1), "ended"),
        (("melted", -1, -1), "melted"),
    ],
)
def test_ending(given: tuple[str, int, int], words: str) -> None:
    assert ending(*given) == words


def test_numbers() -> None:
    assert (count(1, "layer"), count(0, "layer")) == ("1 layer", "0 layers")
    assert (duration(4_200), duration(2_500_000)) == ("4.2 ms", "2.5 s")


@pytest.mark.parametrize("how", ["open", "cwd", "root", "exe", "map", "loop", "namespace", "mount", "umount", "new"])
def test_every_way_to_hold_has_words_and_advice(how: str) -> None:
    words, advice = holding(Holder(42, "cat", how, ""), "")
    assert "process 42, cat," in words
    assert advice
    assert "{" not in words + advice


def test_a_holder_in_a_pod_and_one_that_is_no_process() -> None:
    words, advice = holding(Holder(42, "cat", "open", "7"), "shop/db")
    assert words == "process 42, cat in the pod of shop/db, has a file of it open"
    assert "crictl pods --label io.kubernetes.pod.uid=7" in advice
    assert holding(Holder(42, "cat", "open", "7"), "")[0].startswith("process 42, cat in pod 7, ")
    words, advice = holding(Holder(42, "cat", "open", "7"), "shop/db", own=True)
    assert words == "process 42, cat in the VM's own pod, has a file of it open"
    assert "crictl" not in advice
    assert "losetup -d /dev/loop0" in holding(Holder(0, "loop0", "loop", ""), "")[1]


def test_a_qemu_is_not_to_be_killed() -> None:
    words, advice = holding(Holder(42, "qemu-system-x86", "open", "7"), "shop/db")
    assert words == "process 42 is the QEMU of shop/db and has it (open)"
    assert "kill" not in advice


def test_trouble_is_red() -> None:
    for state in (State.BLOCKED, LayerState.BUSY, LayerState.HUNG):
        assert state_cell(state).style is Style.BAD
    assert state_cell("from-the-future").style is Style.NONE
