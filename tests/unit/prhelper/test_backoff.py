from __future__ import annotations

from hostd.prhelper.backoff import CREDIT, FIRST_USEC, LONGEST_USEC, Backoff

SECOND = 1_000_000


def test_nothing_waits_at_first() -> None:
    assert not Backoff().waits(0)


def test_one_that_was_ready_is_replaced_at_once_fifty_times_in_a_row() -> None:
    backoff = Backoff()
    for number in range(50):
        now = SECOND + number * 1000
        backoff.died(now, ready_usec=10)
        assert not backoff.waits(now)


def test_a_crash_that_every_helper_runs_into_waits_in_the_end() -> None:
    backoff = Backoff()
    now = 1000 * SECOND
    for _ in range(CREDIT):
        backoff.died(now, ready_usec=10)
        assert not backoff.waits(now)
    backoff.died(now, ready_usec=10)
    assert backoff.waits(now)
    assert backoff.retry_at == now + FIRST_USEC


def test_the_credit_comes_back() -> None:
    backoff = Backoff()
    now = 1000 * SECOND
    for _ in range(CREDIT):
        backoff.died(now, ready_usec=10)
    backoff.died(now + 2 * SECOND, ready_usec=10)
    assert not backoff.waits(now + 2 * SECOND)


def test_one_that_never_was_ready_gets_one_try_at_once_and_then_doubling_pauses() -> None:
    backoff = Backoff()
    now, pauses = SECOND, []
    for _ in range(10):
        backoff.died(now, ready_usec=None)
        pauses.append(backoff.retry_at - now)
        now = backoff.retry_at
    assert pauses[:4] == [0, FIRST_USEC, 2 * FIRST_USEC, 4 * FIRST_USEC]
    assert pauses[-1] == LONGEST_USEC == max(pauses)


def test_one_that_died_again_already_had_its_try_at_once() -> None:
    backoff = Backoff()
    now, pauses = SECOND, []
    for _ in range(3):
        backoff.died(now, ready_usec=None, again=True)
        assert backoff.ends(now)
        pauses.append(backoff.retry_at - now)
        now = backoff.retry_at
    assert pauses == [FIRST_USEC, 2 * FIRST_USEC, 4 * FIRST_USEC]


def test_that_the_one_before_was_ready_is_no_merit_of_one_that_died_again() -> None:
    backoff = Backoff()
    backoff.died(SECOND, ready_usec=10, again=True)
    assert backoff.retry_at == SECOND + FIRST_USEC


def test_one_that_was_killed_is_replaced_at_once_though_it_never_was_ready() -> None:
    backoff = Backoff()
    for number in range(50):
        now = SECOND + number * 1000
        backoff.died(now, ready_usec=None, killed=True)
        assert not backoff.waits(now)


def test_while_helpers_die_one_that_comes_all_the_same_is_to_go() -> None:
    backoff = Backoff()
    backoff.failed(SECOND)
    assert backoff.waits(SECOND)
    assert not backoff.ends(SECOND), "a start that failed says nothing of a helper that runs"
    backoff.reset()
    for _ in range(3):
        backoff.died(SECOND, ready_usec=None)
    assert backoff.ends(SECOND)
    assert not backoff.ends(backoff.retry_at)


def test_deaths_in_a_pause_make_it_no_longer() -> None:
    backoff = Backoff()
    for _ in range(20):
        backoff.died(SECOND, ready_usec=None)
    assert backoff.retry_at == SECOND + FIRST_USEC


def test_a_start_that_fails_pauses_from_the_first() -> None:
    backoff = Backoff()
    backoff.failed(SECOND)
    assert backoff.waits(SECOND)
    assert not backoff.waits(SECOND + FIRST_USEC)


def test_a_steady_helper_makes_the_failures_forgotten() -> None:
    backoff = Backoff()
    for number in range(6):
        backoff.died(number * 40 * SECOND, ready_usec=None)
    backoff.died(600 * SECOND, ready_usec=20 * SECOND)
    backoff.died(601 * SECOND, ready_usec=None)
    assert not backoff.waits(601 * SECOND)


def test_reset_ends_the_pause() -> None:
    backoff = Backoff()
    for _ in range(6):
        backoff.failed(SECOND)
    backoff.reset()
    assert not backoff.waits(SECOND)
