"""A generate pass: events of every kind, how it ends, what is kept, and proof of edited KV."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp import records
from lmcache_mp.engines.engine import TokenEvent, TokensEvent
from lmcache_mp.errors import EngineError, KVError
from lmcache_mp.passes.generate import PassGuard, generate_pass
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Generated, StreamState, ids_of
from tests.helpers import CHUNK, MemoryKV, Script, kv_of

LABEL = PassLabel("s", stream=7, attempt=2, worker=3)
PROMPT = [5, 6, 7]


def run(engine: Any, params: dict[str, Any] | None = None, **options: Any) -> Outcome:
    state = options.pop("state", StreamState.start(PROMPT, "tenant"))
    contexts = options.pop("contexts", ())
    return generate_pass(state, engine, contexts, params or {}, LABEL, **options)


def row(outcome: Outcome) -> np.void:
    return np.frombuffer(outcome.row, records.GENERATE)[0]


def counts(outcome: Outcome) -> list[int]:
    return np.frombuffer(outcome.counts, np.int32).tolist()


def times(outcome: Outcome) -> list[float]:
    return np.frombuffer(outcome.times, np.float64).tolist()


def generated(outcome: Outcome) -> Generated:
    assert outcome.error is None
    assert isinstance(outcome.change, Generated)
    return outcome.change


def ids(outcome: Outcome) -> list[int]:
    return ids_of(generated(outcome).ids).tolist()


# --- events ---------------------------------------------------------------------------------------


def test_events_of_one_token() -> None:
    engine = Script(TokenEvent(1, "a"), TokenEvent(2, "b"), TokenEvent(3))
    outcome = run(engine, {"max_tokens": 3})
    assert ids(outcome) == [1, 2, 3]
    assert generated(outcome).text == "ab"
    assert counts(outcome) == [1, 1, 1]
    assert row(outcome)["output_tokens"] == 3


def test_events_of_several_tokens() -> None:
    engine = Script(TokensEvent([1, 2], "ab"), TokensEvent((3,), "c"))
    outcome = run(engine, {"max_tokens": 3})
    assert ids(outcome) == [1, 2, 3]
    assert generated(outcome).text == "abc"
    assert counts(outcome) == [2, 1]
    assert len(times(outcome)) == 2


def test_an_object_with_token_id_and_text_is_an_event() -> None:
    """LMCache's own TokenEvent has these two and no others."""
    lmcache_event = dataclasses.make_dataclass("LMCacheEvent", ["token_id", "text"])
    outcome = run(Script(lmcache_event(1, "a"), lmcache_event(np.int64(2), "")), {"max_tokens": 2})
    assert ids(outcome) == [1, 2]
    assert generated(outcome).text == "a"


def test_events_without_tokens_bring_text_and_the_end_and_are_not_recorded() -> None:
    engine = Script(
        TokensEvent(text="<"),
        TokenEvent(1, "a"),
        TokensEvent(text=">"),
        TokensEvent((), "", "stop"),
    )
    outcome = run(engine, {"max_tokens": 1})
    assert generated(outcome) == Generated(ids_of([1]).tobytes(), "<a>", True, ())
    assert counts(outcome) == [1] and len(times(outcome)) == 1
    assert row(outcome)["finish_reason"] == b"stop"


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=8))
def test_whatever_the_grouping_the_tokens_are_the_same(groups: list[list[int]]) -> None:
    outcome = run(Script(*map(TokensEvent, groups)))
    assert ids(outcome) == [token for group in groups for token in group]
    assert counts(outcome) == [len(group) for group in groups if group]
    assert times(outcome) == sorted(times(outcome))
    assert row(outcome)["output_tokens"] == sum(map(len, groups))


@pytest.mark.parametrize("event", [TokenEvent(-1, "a"), TokensEvent([4, -1], "a")])
def test_a_negative_id_names_the_servers_flag(event: Any) -> None:
    outcome = run(Script(event))
    assert isinstance(outcome.error, EngineError)
    assert "--return-tokens-as-token-ids" in str(outcome.error)
    assert outcome.change is None


@pytest.mark.parametrize(
    "event",
    [
        SimpleNamespace(token_id=1, text=b"bytes"),
        SimpleNamespace(token_id=1, text="", finish_reason=3),
        SimpleNamespace(token_id=1, text="", cached_tokens="many"),
        SimpleNamespace(token_id=1, text="", cached_tokens=2**40),
        SimpleNamespace(token_id=2**31, text=""),
        SimpleNamespace(token_id="1", text=""),
        SimpleNamespace(text=""),
        None,
    ],
)
def test_an_event_of_wrong_types_fails_the_pass_and_nothing_else(event: Any) -> None:
    outcome = run(Script(event))
    assert outcome.error is not None and outcome.change is None
    assert row(outcome)["status"] == records.FAILED


# --- what is sent, and what the record says -------------------------------------------------------


def test_the_engine_gets_copies_and_the_salt_of_the_kv() -> None:
    params = {"max_tokens": 1, "stop": ["x"]}
    state = StreamState(ids_of(PROMPT), "tenant", "edited", 3, suffix=ids_of([8]))
    engine = Script(TokenEvent(1))
    outcome = run(engine, params, state=state, suffix_tokens=(9,))
    [(prompt, sent, salt)] = engine.calls
    assert prompt == [5, 6, 7, 8, 9] and type(prompt) is list
    assert sent == params and sent is not params
    assert salt == "edited"
    assert generated(outcome).suffix_tokens == (9,)
    assert row(outcome)["input_tokens"] == 5


def test_the_record_of_a_pass() -> None:
    before = time.time()
    outcome = run(Script(TokenEvent(1, cached_tokens=2), TokenEvent(2, finish_reason="length")))
    record = row(outcome)
    assert (record["stream"], record["attempt"], record["worker"]) == (7, 2, 3)
    assert record["status"] == records.COMPLETED
    assert record["cached_tokens"] == 2
    assert record["kv_used"] == records.UNKNOWN
    assert record["finish_reason"] == b"length"
    assert 0 < times(outcome)[0] <= times(outcome)[1] <= record["duration"]
    assert abs(record["start_time"] - before) < 60


def test_the_clock_starts_before_an_engine_that_works_eagerly() -> None:
    worked: list[float] = []

    def eager(prompt: list[int], params: dict[str, Any], salt: str) -> list[TokenEvent]:
        start = time.perf_counter()
        sum(range(10_000))
        events = [TokenEvent(1)]
        worked.append(time.perf_counter() - start)
        return events

    outcome = run(eager)
    assert times(outcome)[0] >= worked[0]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "tokens", "params", "done"),
    [
        ("stop", 2, {"max_tokens": 2}, True),
        ("length", 1, {"max_tokens": 2}, False),
        (None, 1, {"max_tokens": 2}, True),
        (None, 2, {"max_tokens": 2}, False),
        (None, 0, {"max_tokens": 1}, True),
        (None, 2, {}, False),
        (None, 0, {"max_tokens": None}, True),
    ],
)
def test_a_stream_is_done_when_it_ended_by_itself(
    finish: str | None, tokens: int, params: dict[str, Any], done: bool
) -> None:
    engine = Script(*[TokenEvent(1)] * tokens, TokensEvent((), finish_reason=finish))
    assert generated(run(engine, params)).done is done


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_request_that_ended_badly_has_failed(finish: str) -> None:
    outcome = run(Script(TokenEvent(1, finish_reason=finish)))
    assert isinstance(outcome.error, EngineError) and repr(finish) in str(outcome.error)
    assert outcome.change is None
    assert row(outcome)["finish_reason"] == finish.encode()


class Falsy(Exception):
    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize(
    "error", [EngineError("x"), ValueError("x"), SystemExit(3), KeyboardInterrupt(), Falsy()]
)
def test_whatever_an_engine_raises_is_the_passs_failure(error: BaseException) -> None:
    outcome = run(Script(TokenEvent(1, "a"), TokensEvent((2, 3)), error))
    assert outcome.error is error and outcome.change is None
    record = row(outcome)
    assert record["status"] == records.FAILED
    assert record["output_tokens"] == 3, "what arrived stays in the record"
    assert counts(outcome) == [1, 2] and len(times(outcome)) == 2


def test_an_engine_that_raises_when_called() -> None:
    def refuses(prompt: list[int], params: dict[str, Any], salt: str) -> Any:
        raise SystemExit("no")

    outcome = run(refuses)
    assert isinstance(outcome.error, SystemExit)
    assert row(outcome)["output_tokens"] == 0
    assert row(outcome)["input_tokens"] == len(PROMPT)


def test_an_iterator_left_early_is_closed() -> None:
    closed = []

    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        try:
            yield TokenEvent(-1)
        finally:
            closed.append(True)

    outcome = run(engine)
    assert outcome.error is not None
    assert closed == [True]


# --- stopping -------------------------------------------------------------------------------------


def test_a_stopped_pass_ends_at_the_next_event() -> None:
    guard = PassGuard()

    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        yield TokenEvent(1)
        guard.stop()
        yield TokenEvent(2)
        raise AssertionError("the pass went on")

    outcome = run(engine, guard=guard)
    assert isinstance(outcome.error, EngineError) and "cancelled" in str(outcome.error)
    assert outcome.change is None
    assert row(outcome)["output_tokens"] == 2


class Cancellable:
    """Waits for good after one event, until another thread cancels it."""

    def __init__(self, on_cancel: Callable[[], Any] = lambda: None) -> None:
        self.waits = threading.Event()
        self.cancelled = threading.Event()
        self.calls = 0
        self._on_cancel = on_cancel
        self._sent = False

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Cancellable:
        return self

    def __iter__(self) -> Cancellable:
        return self

    def __next__(self) -> TokenEvent:
        if not self._sent:
            self._sent = True
            return TokenEvent(1)
        self.waits.set()
        assert self.cancelled.wait(60), "nobody cancelled"
        self._on_cancel()
        raise StopIteration

    def cancel(self) -> None:
        self.calls += 1
        self.cancelled.set()


def test_an_iterator_that_waits_is_cancelled_from_another_thread() -> None:
    def break_off() -> None:
        raise ConnectionError("socket shut")

    engine, guard = Cancellable(break_off), PassGuard()
    ended: list[Outcome] = []
    thread = threading.Thread(target=lambda: ended.append(run(engine, guard=guard)))
    thread.start()
    assert engine.waits.wait(60)
    guard.stop()
    thread.join(60)
    assert isinstance(ended[0].error, ConnectionError)
    assert row(ended[0])["output_tokens"] == 1


def test_an_iterator_that_just_ends_when_it_is_cancelled_has_not_completed() -> None:
    engine, guard = Cancellable(), PassGuard()
    ended: list[Outcome] = []
    thread = threading.Thread(target=lambda: ended.append(run(engine, guard=guard)))
    thread.start()
    assert engine.waits.wait(60)
    guard.stop()
    thread.join(60)
    assert isinstance(ended[0].error, EngineError)
    assert ended[0].change is None


def test_a_guard_stopped_before_the_engine_is_called_cancels_at_once() -> None:
    engine, guard = Cancellable(), PassGuard()
    guard.stop()
    assert isinstance(run(engine, guard=guard).error, EngineError)
    assert engine.calls == 1


# --- edited KV ------------------------------------------------------------------------------------

EDITED = list(range(10, 18))  # two chunks, edited


def after_an_edit(extra: int = 2) -> tuple[StreamState, MemoryKV]:
    context = MemoryKV()
    context.store(kv_of(EDITED), EDITED, "edit")
    tokens = ids_of([*EDITED, *range(extra)])
    return StreamState(tokens, "", "edit", len(EDITED), stored_tokens=len(EDITED), edits=1), context


@pytest.mark.parametrize(
    ("cached", "extra", "used"),
    [(8, 2, 1), (9, 2, 1), (7, 0, 1), (None, 2, records.UNKNOWN)],
)
def test_edited_kv_that_was_used(cached: int | None, extra: int, used: int) -> None:
    """The last token of a prompt is always computed, so 7 of 8 tokens are all there can be."""
    state, context = after_an_edit(extra)
    outcome = run(Script(TokenEvent(1, cached_tokens=cached)), state=state, contexts=[context])
    assert generated(outcome)
    assert row(outcome)["kv_used"] == used
    assert outcome.warning == ""


def test_edited_kv_that_was_not_used_is_an_error() -> None:
    state, context = after_an_edit()
    outcome = run(Script(TokenEvent(1, cached_tokens=4)), state=state, contexts=[context])
    assert isinstance(outcome.error, KVError) and "4 of the 8" in str(outcome.error)
    assert outcome.change is None
    assert row(outcome)["kv_used"] == 0


def test_edited_kv_that_was_not_used_may_be_a_warning() -> None:
    state, context = after_an_edit()
    engine = Script(TokenEvent(1, cached_tokens=4))
    outcome = run(engine, state=state, contexts=[context], warn_unused_kv=True)
    assert ids(outcome) == [1]
    assert row(outcome)["kv_used"] == 0
    assert "4 of the 8" in outcome.warning


def test_edited_kv_that_is_gone_is_found_before_anything_is_sent() -> None:
    state, context = after_an_edit()
    context.release("edit")
    engine = Script(TokenEvent(1))
    outcome = run(engine, state=state, contexts=[context])
    assert isinstance(outcome.error, KVError) and "0 of 8" in str(outcome.error)
    assert engine.calls == []


@pytest.mark.parametrize("cached", [None, 8])
def test_edited_kv_that_is_gone_may_be_a_warning(cached: int | None) -> None:
    state, context = after_an_edit()
    context.release("edit")
    engine = Script(TokenEvent(1, cached_tokens=cached))
    outcome = run(engine, state=state, contexts=[context], warn_unused_kv=True)
    assert ids(outcome) == [1]
    assert row(outcome)["kv_used"] == 0
    assert "0 of 8" in outcome.warning


def test_without_an_edit_no_context_is_asked() -> None:
    class Untouchable(MemoryKV):
        def lookup(self, tokens: Any, cache_salt: str = "") -> int:
            raise AssertionError("asked")

    outcome = run(Script(TokenEvent(1, cached_tokens=0)), contexts=[Untouchable(CHUNK)])
    assert generated(outcome)
    assert row(outcome)["kv_used"] == records.UNKNOWN
