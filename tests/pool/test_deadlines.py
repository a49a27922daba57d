"""When passes are overdue and workers silent, by a clock that the test turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.pool.deadlines import GRACE, Deadlines
from lmcache_mp.pool.state import PassOverdue, WorkerSilent


def test_a_pass_is_overdue_once_when_its_time_is_over() -> None:
    clocks = Deadlines(10.0)
    clocks.begin(0, 7, 100.0)
    assert clocks.due([0], 109.9) == []
    assert clocks.due([0], 110.0) == [PassOverdue(0, 7)]
    assert clocks.due([0], 200.0) == []


def test_a_pass_that_has_ended_is_not_overdue() -> None:
    clocks = Deadlines(10.0)
    clocks.begin(0, 7, 100.0)
    clocks.end(7)
    clocks.end(7)
    assert clocks.due([0], 200.0) == []


def test_every_pass_has_its_own_time_also_when_it_is_repeated() -> None:
    clocks = Deadlines(10.0)
    clocks.begin(0, 1, 100.0)
    clocks.begin(1, 2, 105.0)
    assert clocks.due([0, 1], 111.0) == [PassOverdue(0, 1)]
    clocks.begin(1, 1, 112.0)
    assert clocks.due([0, 1], 116.0) == [PassOverdue(1, 2)]
    assert clocks.due([0, 1], 122.0) == [PassOverdue(1, 1)]


def test_a_worker_that_ends_takes_its_passes_clocks_with_it() -> None:
    clocks = Deadlines(10.0)
    clocks.begin(0, 1, 100.0)
    clocks.begin(1, 2, 100.0)
    clocks.to_ping([0, 1], 100.0)
    clocks.forget(0)
    clocks.heard(1)
    assert clocks.due([0, 1], 115.0) == [PassOverdue(1, 2)]


def test_busy_workers_are_asked_once_a_second() -> None:
    clocks = Deadlines(10.0)
    assert clocks.to_ping([0], 100.0) == [0]
    assert clocks.to_ping([0, 1], 100.5) == [1]
    assert clocks.to_ping([0, 1], 101.0) == [0]
    assert clocks.to_ping([0, 1], 101.5) == [1]
    clocks.forget(0)  # a new process is asked at once
    assert clocks.to_ping([0, 1], 101.6) == [0]


def test_a_worker_that_does_not_answer_is_silent_once_and_its_old_passes_are_overdue() -> None:
    clocks = Deadlines(10.0)
    clocks.begin(0, 1, 100.0)
    clocks.begin(0, 2, 104.0)
    clocks.to_ping([0], 100.0)
    assert clocks.due([0], 110.0) == [PassOverdue(0, 1)]
    assert clocks.due([0], 100.0 + 10.0 + GRACE) == []
    assert clocks.due([0], 112.1) == [WorkerSilent(0, ())]
    assert clocks.due([0], 300.0) == []


def test_passes_that_are_overdue_when_a_worker_is_found_silent_are_named_with_it() -> None:
    clocks = Deadlines(10.0)
    clocks.to_ping([0, 1], 100.0)
    clocks.begin(0, 1, 101.0)
    clocks.begin(0, 2, 106.0)
    clocks.begin(1, 3, 101.0)
    clocks.heard(1)
    assert clocks.due([0, 1], 113.0) == [WorkerSilent(0, (1,)), PassOverdue(1, 3)]


def test_a_worker_that_answers_is_not_silent_however_long_its_passes_take() -> None:
    clocks = Deadlines(10.0)
    now = 100.0
    for _ in range(100):
        assert clocks.to_ping([0], now) == [0]
        assert clocks.due([0], now + 0.9) == []
        clocks.heard(0)
        now += 1.0


def test_a_parent_that_was_stopped_for_long_blames_no_worker() -> None:
    """An answer that was read before the stop is no reason; the next question decides."""
    clocks = Deadlines(10.0)
    clocks.to_ping([0], 100.0)
    clocks.heard(0)
    assert clocks.due([0], 5000.0) == []
    assert clocks.to_ping([0], 5000.0) == [0]
    assert clocks.due([0], 5012.0) == []
    assert clocks.due([0], 5012.1) == [WorkerSilent(0, ())]


def test_idle_workers_are_not_silent() -> None:
    clocks = Deadlines(10.0)
    clocks.to_ping([0], 100.0)
    assert clocks.due([], 200.0) == []


def test_without_a_timeout_nothing_is_ever_due() -> None:
    clocks = Deadlines(None)
    assert not clocks.active
    clocks.begin(0, 1, 0.0)
    assert clocks.wait(1e9) is None
    assert clocks.to_ping([0], 1e9) == []
    assert clocks.due([0], 1e9) == []


@given(
    timeout=st.floats(0.01, 1e4),
    begins=st.lists(st.floats(0, 100), max_size=5),
    now=st.floats(100, 200),
)
def test_waiting_as_long_as_told_misses_nothing(
    timeout: float, begins: list[float], now: float
) -> None:
    clocks = Deadlines(timeout)
    assert clocks.active
    for stream, begin in enumerate(begins):
        clocks.begin(0, stream, begin)
    told = {event.stream for event in clocks.due([0], now) if isinstance(event, PassOverdue)}
    assert told == {stream for stream, begin in enumerate(begins) if begin + timeout <= now}
    wait = clocks.wait(now)
    assert wait is not None and 0.0 <= wait <= 1.0
    earlier = math.nextafter(now + wait, 0.0)
    assert earlier < now or clocks.due([0], min(earlier, now + wait * 0.999)) == []


@pytest.mark.parametrize("begin", [99.0, 95.0])
def test_the_wait_is_until_the_nearest_deadline(begin: float) -> None:
    clocks = Deadlines(5.25)
    clocks.begin(0, 1, begin)
    clocks.begin(0, 2, 99.5)
    assert clocks.wait(100.0) == min(1.0, begin + 5.25 - 100.0)
    assert clocks.wait(200.0) == 0.0
