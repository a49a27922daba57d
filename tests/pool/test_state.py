"""The pool's state machine, without a process: what is handed out, to whom, and after a death."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.pool.state import (
    Assign,
    Event,
    FailPass,
    GiveUp,
    Instruction,
    KillWorker,
    PassBegan,
    PassEnded,
    PassOverdue,
    Plan,
    PoolState,
    StartWorker,
    WorkerLost,
    WorkerReady,
    WorkerSilent,
)


def ready(workers: int) -> PoolState:
    state = PoolState(workers)
    assert state.step([WorkerReady(worker) for worker in range(workers)]) == []
    return state


def assigned(instructions: list[Instruction]) -> dict[int, int]:
    """Worker by stream."""
    return {
        stream: instruction.worker
        for instruction in instructions
        if isinstance(instruction, Assign)
        for stream in instruction.streams
    }


def finish(state: PoolState) -> None:
    for worker in (0, 1):
        state.step([PassEnded(worker, stream) for stream in state.in_flight(worker)])
    assert state.settled


def test_largest_streams_go_first_to_the_worker_with_the_fewest_pending_tokens() -> None:
    state = ready(2)
    owners = assigned(state.begin(Plan([(0, 10), (1, 40), (2, 30), (3, 20)])))
    assert owners == {1: 0, 2: 1, 3: 1, 0: 0}


def test_a_stream_stays_with_its_owner_in_the_next_phase() -> None:
    state = ready(2)
    first = assigned(state.begin(Plan([(0, 1), (1, 9), (2, 5)])))
    finish(state)
    assert assigned(state.begin(Plan([(0, 50), (1, 1), (2, 1)]))) == first


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize(("streams", "limit"), [(17, 17), (50, 50), (50, 7), (3, 50), (50, 1)])
def test_the_limit_is_one_count_over_all_workers(workers: int, streams: int, limit: int) -> None:
    state = ready(workers)
    plan = Plan([(stream, 100 + stream) for stream in range(streams)], limit=limit)
    for _ in range(2):  # streams without an owner, then with one
        flying = assigned(state.begin(plan))
        assert len(flying) == min(streams, limit)
        while not state.settled:
            worker = next(w for w in range(workers) if state.in_flight(w))
            flying = assigned(state.step([PassEnded(worker, state.in_flight(worker)[0])]))
            in_flight = sum(len(state.in_flight(w)) for w in range(workers))
            assert in_flight == min(len(state.unfinished), limit)


def test_with_a_limit_below_the_streams_all_workers_take_part() -> None:
    state = ready(2)
    plan = Plan([(stream, 1) for stream in range(8)], limit=2)
    assert set(assigned(state.begin(plan)).values()) == {0, 1}
    while not state.settled:
        assert len(state.in_flight(0)) <= 1 and len(state.in_flight(1)) <= 1
        worker = 0 if state.in_flight(0) else 1
        state.step([PassEnded(worker, state.in_flight(worker)[0])])
    assert set(assigned(state.begin(plan)).values()) == {0, 1}


def test_a_death_fails_what_was_in_flight_and_restarts_the_worker() -> None:
    state = ready(2)
    state.begin(Plan([(0, 4), (1, 3), (2, 2), (3, 1)], per_worker=1))
    lost = state.in_flight(0)
    assert state.step([WorkerLost(0)]) == [FailPass(0, lost[0], 1), StartWorker(0)]
    assert set(state.unfinished) == {0, 1, 2, 3} - set(lost)
    assert assigned(state.step([WorkerReady(0)])) == {2: 0}


def test_retries_repeat_a_lost_pass_with_the_next_attempt() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1), (1, 1)], retries=1))
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    assert state.step([WorkerReady(0)]) == [Assign(0, (0, 1), 2)]
    assert state.step([WorkerLost(0)]) == [FailPass(0, 0, 2), FailPass(0, 1, 2), StartWorker(0)]
    assert state.settled


def test_where_passes_are_announced_only_those_that_have_begun_are_lost() -> None:
    state = ready(1)
    state.begin(Plan([(0, 2), (1, 1)], per_worker=2, announced=True))
    state.step([PassBegan(0, 0)])
    assert state.step([WorkerLost(0)]) == [FailPass(0, 0, 1), StartWorker(0)]
    assert state.step([WorkerReady(0)]) == [Assign(0, (1,), 1)]


def test_a_stream_that_continues_keeps_its_place() -> None:
    state = ready(2)
    assert set(assigned(state.begin(Plan([(0, 3), (1, 2), (2, 1)], limit=2)))) == {0, 1}
    assert state.step([PassEnded(0, 0, continues=True)]) == [Assign(0, (0,), 1)]
    assert state.unfinished == (0, 1, 2)
    assert assigned(state.step([PassEnded(0, 0)])) == {2: 0}


def test_a_stream_that_continues_waits_for_its_workers_successor() -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2)], limit=1, retries=1))
    assert state.step([PassEnded(0, 0, continues=True), WorkerLost(0)]) == [StartWorker(0)]
    assert state.step([WorkerReady(0)]) == [Assign(0, (0,), 1)], "before one that has not begun"


def test_each_pass_of_a_stream_has_attempts_of_its_own() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1)], retries=1))
    state.step([WorkerLost(0)])
    assert state.step([WorkerReady(0)]) == [Assign(0, (0,), 2)]
    assert state.step([PassEnded(0, 0, continues=True)]) == [Assign(0, (0,), 1)]


def test_too_many_deaths_give_up_instead_of_looping() -> None:
    state = ready(1)
    state.begin(Plan([(stream, 1) for stream in range(9)], per_worker=1, max_restarts=2))
    for _ in range(2):
        assert StartWorker(0) in state.step([WorkerLost(0)])
        state.step([WorkerReady(0)])
    assert state.step([WorkerLost(0)])[-1] == GiveUp()
    assert len(state.unfinished) == 6
    state.abandon()
    assert state.settled


def test_a_worker_that_is_not_ready_is_given_nothing() -> None:
    state = PoolState(2)
    state.step([WorkerReady(1)])
    assert set(assigned(state.begin(Plan([(0, 1), (1, 1)]))).values()) == {1}


def test_a_late_result_of_an_abandoned_phase_changes_nothing() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1)]))
    state.abandon()
    state.begin(Plan([(1, 1)]))
    state.step([PassEnded(0, 0)])
    assert state.unfinished == (1,)


def test_a_phase_waits_for_the_one_before() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1)]))
    with pytest.raises(ValueError, match="settled"):
        state.begin(Plan([(0, 1)]))


# --- too late, or silent --------------------------------------------------------------------------


def test_an_overdue_edits_worker_is_killed_at_once_and_replaced_without_counting() -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2), (2, 1)], per_worker=2, announced=True, max_restarts=0))
    state.step([PassBegan(0, 0)])
    assert state.step([PassOverdue(0, 0)]) == [FailPass(0, 0, 1, overdue=True), KillWorker(0)]
    assert state.in_flight(0) == (1,)  # it gets nothing new
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    assert set(assigned(state.step([WorkerReady(0)]))) == {1, 2}


def test_an_overdue_generates_worker_ends_its_other_passes_first() -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2), (2, 1)], limit=2, max_restarts=0))
    state.step([PassBegan(0, 0), PassBegan(0, 1)])
    assert state.step([PassOverdue(0, 0)]) == [FailPass(0, 0, 1, overdue=True)]
    assert state.in_flight(0) == (1,)
    assert state.step([PassEnded(0, 1)]) == [KillWorker(0)]
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    assert assigned(state.step([WorkerReady(0)])) == {2: 0}


def test_passes_that_have_not_begun_behind_an_overdue_one_are_repeated_elsewhere() -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2), (2, 1)], max_restarts=0))
    state.step([PassBegan(0, 0), PassBegan(0, 1)])
    assert state.step([PassOverdue(0, 0)]) == [FailPass(0, 0, 1, overdue=True)]
    assert state.step([PassEnded(0, 1)]) == [KillWorker(0)]  # 2 would never begin
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    assert state.step([WorkerReady(0)]) == [Assign(0, (2,), 2)]


def test_the_last_pass_of_a_worker_that_is_overdue_needs_no_waiting() -> None:
    state = ready(2)
    state.begin(Plan([(0, 2), (1, 1)]))
    assert state.step([PassOverdue(1, 1)]) == [FailPass(1, 1, 1, overdue=True), KillWorker(1)]
    state.step([PassEnded(0, 0)])
    assert state.settled
    # The phase is over before the death is seen: the next one starts the worker again.
    assert assigned(state.begin(Plan([(0, 1), (1, 1)]))) == {0: 0}
    assert state.step([WorkerLost(1)]) == [StartWorker(1)]
    assert assigned(state.step([WorkerReady(1)])) == {1: 1}


def test_a_death_before_a_replacement_repeats_the_other_passes() -> None:
    state = ready(1)
    state.begin(Plan([(0, 2), (1, 1)], max_restarts=0))
    state.step([PassOverdue(0, 0)])
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    assert state.step([WorkerReady(0)]) == [Assign(0, (1,), 2)]


@pytest.mark.parametrize("overdue", [(), (0,), (0, 1), (9,)])
def test_a_silent_worker_is_killed_and_what_is_not_overdue_repeated(
    overdue: tuple[int, ...],
) -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2), (2, 1)]))
    failed = [FailPass(0, stream, 1, overdue=True) for stream in overdue if stream != 9]
    assert state.step([WorkerSilent(0, overdue)]) == [*failed, KillWorker(0)]
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]
    left = tuple(stream for stream in range(3) if stream not in overdue)
    assert state.step([WorkerReady(0)]) == [Assign(0, left, 2)]


def test_workers_that_are_silent_again_and_again_without_a_pass_to_blame_are_given_up() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1)], max_restarts=2))
    for _ in range(2):
        assert state.step([WorkerSilent(0, ())]) == [KillWorker(0)]
        assert state.step([WorkerLost(0)]) == [StartWorker(0)]
        state.step([WorkerReady(0)])
    state.step([WorkerSilent(0, ())])
    assert state.step([WorkerLost(0)]) == [GiveUp()]


def test_a_result_that_comes_too_late_changes_nothing() -> None:
    state = ready(1)
    state.begin(Plan([(0, 2), (1, 1)]))
    state.step([PassOverdue(0, 0)])
    assert not state.is_in_flight(0, 0)
    assert state.step([PassEnded(0, 0)]) == []
    assert state.unfinished == (1,)
    assert state.step([PassOverdue(0, 0)]) == []


def test_a_worker_about_to_be_replaced_when_its_phase_is_abandoned_runs_the_next_one() -> None:
    state = ready(1)
    state.begin(Plan([(0, 2), (1, 1)]))
    state.step([PassBegan(0, 0), PassBegan(0, 1), PassOverdue(0, 0)])
    state.abandon()  # cancelling stops the overdue pass too, or ends the worker
    assert set(assigned(state.begin(Plan([(0, 1), (1, 1)])))) == {0, 1}
    assert state.step([PassEnded(0, 0)]) == []  # and is not replaced for what is long over


def test_a_killed_worker_is_given_nothing_when_its_phase_is_abandoned() -> None:
    state = ready(1)
    state.begin(Plan([(0, 1)]))
    assert KillWorker(0) in state.step([PassOverdue(0, 0)])
    state.abandon()
    assert state.begin(Plan([(0, 1)])) == []
    assert state.step([WorkerLost(0)]) == [StartWorker(0)]


@given(
    workers=st.integers(1, 4),
    weights=st.lists(st.integers(1, 50), max_size=20),
    limit=st.none() | st.integers(1, 8),
    per_worker=st.none() | st.integers(1, 4),
    announced=st.booleans(),
    retries=st.integers(0, 2),
    max_restarts=st.integers(0, 4),
    choices=st.randoms(use_true_random=False),
)
def test_every_stream_ends_exactly_once_whatever_happens(
    workers: int,
    weights: list[int],
    limit: int | None,
    per_worker: int | None,
    announced: bool,
    retries: int,
    max_restarts: int,
    choices: object,
) -> None:
    from random import Random

    assert isinstance(choices, Random)
    state = ready(workers)
    rounds = [choices.randint(1, 3) for _ in weights]
    plan = Plan(list(enumerate(weights)), limit, per_worker, announced, retries, max_restarts)
    ends: Counter[int] = Counter()
    up = set(range(workers))
    killed: set[int] = set()
    instructions = state.begin(plan)
    while True:
        for instruction in instructions:
            if isinstance(instruction, FailPass):
                ends[instruction.stream] += 1
            elif isinstance(instruction, KillWorker):
                killed.add(instruction.worker)
            elif isinstance(instruction, Assign):
                assert instruction.worker in up - killed, "work for a worker that is not there"
            elif isinstance(instruction, GiveUp):
                ends.update(state.unfinished)
                state.abandon()
        flights = {worker: state.in_flight(worker) for worker in range(workers)}
        total = sum(map(len, flights.values()))
        assert limit is None or total <= limit
        assert per_worker is None or max(map(len, flights.values())) <= per_worker
        if state.settled:
            break
        assert total or killed or up != set(range(workers)), "nothing runs and nothing will"
        event: Event
        busy = [worker for worker in up if flights[worker]]
        if up != set(range(workers)) and (not busy or choices.random() < 0.5):
            event = WorkerReady(choices.choice(sorted(set(range(workers)) - up)))
            up.add(event.worker)
        elif not busy or choices.random() < 0.2:
            event = WorkerLost(choices.choice(sorted(killed or up)))
            up.discard(event.worker)
            killed.discard(event.worker)
        elif choices.random() < 0.2:
            worker = choices.choice(busy)
            event = PassBegan(worker, choices.choice(flights[worker]))
        elif choices.random() < 0.2:
            worker = choices.choice(busy)
            event = PassOverdue(worker, choices.choice(flights[worker]))
        elif choices.random() < 0.1:
            worker = choices.choice(busy)
            begun = flights[worker]
            event = WorkerSilent(worker, begun[: choices.randint(0, len(begun))])
        else:
            worker = choices.choice(busy)
            stream = choices.choice(flights[worker])
            rounds[stream] -= 1
            event = PassEnded(worker, stream, continues=rounds[stream] > 0)
            ends[stream] += not event.continues
        instructions = state.step([event])
    assert ends == Counter(range(len(weights)))


def test_a_retiring_worker_that_dies_by_itself_loses_what_was_in_flight() -> None:
    state = ready(1)
    state.begin(Plan([(0, 3), (1, 2), (2, 1)]))
    for stream in (0, 1, 2):
        state.step([PassBegan(0, stream)])
    assert state.step([PassOverdue(0, 0)]) == [FailPass(0, 0, 1, overdue=True)]
    lost = state.step([WorkerLost(0)])
    assert lost == [FailPass(0, 1, 1), FailPass(0, 2, 1), StartWorker(0)]
