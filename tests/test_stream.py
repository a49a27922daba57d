"""A stream alone in this process: what it accepts, its passes, and what they leave."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import lmcache_mp.stream as lmc_stream
from lmcache_mp.errors import EngineError, KVError, LMCacheStreamError, UsageError
from lmcache_mp.stream import (
    LMCacheStream,
    StreamPerfMetrics,
    TokenEvent,
    TokensEvent,
    create_request,
)
from tests.helpers import CHUNK, CountingEngine, MemoryKV, Script, kv_of

PROMPT = list(range(1, 10))  # two chunks and one token


class StoringEngine:
    """An engine that stores the whole chunks of its prompts' KV, then counts on from 100."""

    def __init__(self, context: MemoryKV) -> None:
        self.context = context
        self.prompts: list[list[int]] = []

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Any:
        self.prompts.append(prompt_token_ids)
        whole = prompt_token_ids[: len(prompt_token_ids) // CHUNK * CHUNK]
        cached = self.context.lookup(whole, cache_salt)
        if cached < len(whole):
            kv = kv_of(whole)
            if cached:
                kv[:, :, :cached] = self.context.retrieve(whole, cache_salt)[:, :, :cached]
            self.context.store(kv, whole, cache_salt)
        for i in range(sampling_params["max_tokens"]):
            yield TokenEvent(100 + i, f"{100 + i} ", cached_tokens=cached)


@pytest.fixture
def context() -> MemoryKV:
    return MemoryKV()


@pytest.fixture
def engine(context: MemoryKV) -> StoringEngine:
    return StoringEngine(context)


@pytest.fixture
def stream(context: MemoryKV, engine: StoringEngine) -> LMCacheStream:
    return create_request(context, engine, PROMPT, "tenant")


def halve(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    return kv[:, :, ::2], tokens[::2]


# --- creating -------------------------------------------------------------------------------------


def test_a_new_request(stream: LMCacheStream) -> None:
    assert uuid.UUID(stream.stream_id()).version == 4
    assert stream.tokens == PROMPT
    assert stream.cache_salt == "tenant"
    assert stream.suffix_tokens() == [] and stream.output_tokens() == []
    assert stream.decoded_tokens() == 0 and stream.output_text() == ""
    assert not stream.is_done() and not stream.done


def test_numpy_ids_are_fine(context: MemoryKV) -> None:
    for prompt in (np.array(PROMPT), np.array(PROMPT, np.uint8), list(np.array(PROMPT)), range(9)):
        tokens = create_request(context, CountingEngine(), prompt).tokens
        assert tokens == [int(token) for token in prompt] and set(map(type, tokens)) == {int}


def test_the_largest_id_is_fine(context: MemoryKV) -> None:
    assert create_request(context, CountingEngine(), [2**31 - 1]).tokens == [2**31 - 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (np.empty(0, int), "empty"),
        ("text", "not text"),
        (b"text", "not text"),
        (None, "sequence of ints, not NoneType"),
        (5, "sequence of ints, not int"),
        ([1, True], "True at position 1"),
        ([np.True_], "position 0"),
        ([1, 2, -1], "-1 at position 2"),
        ([2**31], "not in 0..2147483647"),
        ([1.0], "1.0 at position 0"),
        (np.ones(3), "position 0"),
        (np.ones((2, 2), int), "position 0"),
        (["1"], "'1' at position 0"),
        ([None], "None at position 0"),
    ],
)
def test_prompts_that_are_refused(context: MemoryKV, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_request(context, CountingEngine(), prompt)


@pytest.mark.parametrize("salt", ["x" * 129, "a@b", "a/b", "a\\b", "a\0b", None])
def test_salts_that_are_refused(context: MemoryKV, salt: Any) -> None:
    with pytest.raises(UsageError, match="cache_salt"):
        create_request(context, CountingEngine(), PROMPT, salt)


@pytest.mark.parametrize("engine", [None, "http://localhost:8000", 3])
def test_an_engine_must_be_callable(context: MemoryKV, engine: Any) -> None:
    with pytest.raises(UsageError, match="post_completion must be callable"):
        create_request(context, engine, PROMPT)


class Choosy(CountingEngine):
    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        if max(prompt_token_ids) >= 50:
            raise UsageError(f"{max(prompt_token_ids)} is beyond the vocabulary")


def test_the_engine_may_refuse_a_prompt(context: MemoryKV) -> None:
    assert create_request(context, Choosy(), [49])
    with pytest.raises(UsageError, match="50 is beyond"):
        create_request(context, Choosy(), [50])


class Queries(MemoryKV):
    kind = "query"


def test_contexts_may_come_from_any_iterable(context: MemoryKV) -> None:
    kinds = [Queries(), context]
    made = create_request((kind for kind in kinds), CountingEngine(), PROMPT)
    assert made.contexts == tuple(kinds)
    assert create_request(context, CountingEngine(), PROMPT).contexts == (context,)


@pytest.mark.parametrize("contexts", [[], Queries(), [Queries()]])
def test_one_context_must_hold_kv(contexts: Any) -> None:
    with pytest.raises(UsageError, match="kind 'kv'"):
        create_request(contexts, CountingEngine(), PROMPT)


@pytest.mark.parametrize("contexts", [None, object(), "tcp://server", [MemoryKV(), object()]])
def test_what_is_no_context_is_refused(contexts: Any) -> None:
    with pytest.raises(UsageError, match=r"has no lookup\(\)"):
        create_request(contexts, CountingEngine(), PROMPT)


# --- generating -----------------------------------------------------------------------------------


def test_output_adds_up_over_passes(stream: LMCacheStream, engine: StoringEngine) -> None:
    metrics = stream.generate({"max_tokens": 1})
    assert (metrics.input_tokens, metrics.output_tokens) == (9, 1)
    assert stream.tokens == [*PROMPT, 100]
    stream.generate({"max_tokens": 2})
    assert engine.prompts == [PROMPT, [*PROMPT, 100]]
    assert stream.tokens == [*PROMPT, 100, 100, 101]
    assert stream.output_tokens() == [100, 100, 101]
    assert stream.output_text() == "100 100 101 "
    assert stream.decoded_tokens() == 3


def test_a_suffix_is_sent_after_the_tokens_and_joins_them(
    stream: LMCacheStream, engine: StoringEngine
) -> None:
    stream.generate({"max_tokens": 1}, [7, np.int64(8)])
    assert engine.prompts == [[*PROMPT, 7, 8]]
    assert stream.tokens == [*PROMPT, 7, 8, 100]
    assert stream.output_tokens() == [100]


@pytest.mark.parametrize("suffix", [[-1], [True], [1.5], "text"])
def test_a_bad_suffix_is_refused_before_anything_is_sent(
    stream: LMCacheStream, engine: StoringEngine, suffix: Any
) -> None:
    with pytest.raises(UsageError):
        stream.generate({"max_tokens": 1}, suffix)
    assert engine.prompts == []


def test_done_and_how_it_is_cleared(context: MemoryKV) -> None:
    stream = create_request(context, Script(TokenEvent(100, "", "stop")), PROMPT)
    context.store(kv_of(PROMPT[:8]), PROMPT[:8])
    stream.generate({})
    assert stream.is_done() and stream.done
    stream.modify_kv(halve)
    assert not stream.is_done()


def test_done_is_what_the_last_pass_says(context: MemoryKV) -> None:
    engine = Script(TokenEvent(100, "", "stop"))
    stream = create_request(context, engine, PROMPT)
    stream.generate({})
    engine.events = (TokenEvent(100, "", "length"),)
    stream.generate({})
    assert not stream.is_done()


def test_a_failed_pass_adds_nothing_and_can_be_repeated(context: MemoryKV) -> None:
    engine = Script(TokensEvent([1, 2], "ab"), EngineError("broke off"))
    stream = create_request(context, engine, PROMPT)
    for _ in range(2):
        with pytest.raises(EngineError, match="broke off"):
            stream.generate({"max_tokens": 5}, [7])
        assert stream.tokens == PROMPT
        assert stream.output_tokens() == [] and stream.output_text() == ""
        assert not stream.is_done()
    engine.events = (TokenEvent(3, "c"),)
    stream.generate({"max_tokens": 5})
    assert stream.tokens == [*PROMPT, 3]
    assert [call[0] for call in engine.calls] == [[*PROMPT, 7], [*PROMPT, 7], PROMPT]


def test_an_engines_system_exit_is_raised_as_it_is(context: MemoryKV) -> None:
    stream = create_request(context, Script(SystemExit(3)), PROMPT)
    with pytest.raises(SystemExit):
        stream.generate({})
    assert stream.tokens == PROMPT


def test_metrics_of_one_pass() -> None:
    metrics = StreamPerfMetrics(2.0, 10, 4, 0.5, np.array([0.5, 0.75, 1.5]).tobytes())
    assert metrics.tpot == [0.25, 0.75]
    assert (metrics.input_tput, metrics.output_tput) == (5.0, 2.0)


def test_metrics_of_a_pass_without_tokens(context: MemoryKV) -> None:
    metrics = create_request(context, Script(), PROMPT).generate({"max_tokens": 1})
    assert np.isnan(metrics.ttft) and metrics.tpot == []
    assert metrics.output_tokens == 0
    assert np.isnan(StreamPerfMetrics(0.0, 1, 0, 0.1).output_tput)


def test_metrics_of_a_pass(stream: LMCacheStream) -> None:
    metrics = stream.generate({"max_tokens": 3})
    assert 0 < metrics.ttft <= metrics.duration
    assert len(metrics.tpot) == 2
    assert metrics.ttft + sum(metrics.tpot) <= metrics.duration


# --- KV -------------------------------------------------------------------------------------------


def test_retrieve_kv_gives_the_prompts_whole_chunks(stream: LMCacheStream) -> None:
    stream.generate({"max_tokens": 1})
    np.testing.assert_array_equal(stream.retrieve_kv(), kv_of(PROMPT[:8]))


def test_retrieve_kv_of_a_stream_that_was_not_prefilled(stream: LMCacheStream) -> None:
    with pytest.raises(KVError, match="0 of 8 tokens"):
        stream.retrieve_kv(timeout=0)


def test_chunks_that_generated_tokens_complete_are_not_waited_for(
    context: MemoryKV, engine: StoringEngine
) -> None:
    stream = create_request(context, engine, PROMPT)
    stream.generate({"max_tokens": 3})
    assert len(stream.tokens) == 3 * CHUNK
    assert stream.retrieve_kv(timeout=0).shape[2] == 2 * CHUNK
    stream.generate({"max_tokens": 1})
    assert stream.retrieve_kv(timeout=0).shape[2] == 3 * CHUNK


def test_prefill_edit_decode(
    stream: LMCacheStream, engine: StoringEngine, context: MemoryKV
) -> None:
    stream.generate({"max_tokens": 1})
    stream.modify_kv(halve)
    assert stream.tokens == [1, 3, 5, 7]
    assert stream.suffix_tokens() == [9, 100]
    np.testing.assert_array_equal(stream.retrieve_kv(), kv_of([1, 3, 5, 7]))
    assert stream.output_tokens() == [100], "an edit touches no output"
    stream.generate({"max_tokens": 2})
    assert engine.prompts[1] == [1, 3, 5, 7, 9, 100]
    assert stream.tokens == [1, 3, 5, 7, 9, 100, 100, 101]
    assert stream.suffix_tokens() == []
    assert stream.cache_salt == "tenant"


def test_kv_replaced_by_a_second_edit_is_released(stream: LMCacheStream, context: MemoryKV) -> None:
    stream.generate({"max_tokens": 1})
    stream.modify_kv(lambda kv, tokens: (kv, tokens))
    assert context.released == [], "plain KV belongs to all"
    first = stream.state.kv_salt
    stream.modify_kv(halve)
    assert context.released == [first]
    assert stream.state.kv_salt not in context.released


def test_a_failed_edit_changes_nothing(stream: LMCacheStream, context: MemoryKV) -> None:
    stream.generate({"max_tokens": 1})
    stream.modify_kv(halve)
    state, stored = stream.state, dict(context.chunks)

    def fails(kv: Any, tokens: list[int]) -> Any:
        kv[:] = 0
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        stream.modify_kv(fails)
    with pytest.raises(KVError, match="must return"):
        stream.modify_kv(lambda kv, tokens: None)
    assert stream.state == state
    assert context.chunks.keys() == stored.keys()
    np.testing.assert_array_equal(stream.retrieve_kv(), kv_of([1, 3, 5, 7]))


def test_a_generate_whose_edited_kv_is_gone(
    stream: LMCacheStream, engine: StoringEngine, context: MemoryKV
) -> None:
    stream.generate({"max_tokens": 1})
    stream.modify_kv(halve)
    context.release(stream.state.kv_salt)
    before = stream.state
    with pytest.raises(KVError, match="edited KV is gone"):
        stream.generate({"max_tokens": 1})
    assert stream.state == before and len(engine.prompts) == 1


def test_an_engine_that_counts_otherwise_is_doubted_aloud(context: MemoryKV) -> None:
    engine = Script(TokensEvent((5, 6), "ab", "stop", reported_tokens=3))
    stream = create_request(context, engine, PROMPT)
    with pytest.warns(RuntimeWarning, match="3"):
        stream.generate({"max_tokens": 4})
    assert stream.output_tokens() == [5, 6]


def test_update_kv(stream: LMCacheStream, engine: StoringEngine) -> None:
    stream.generate({"max_tokens": 1})
    stream.update_kv(kv_of([20, 21, 22, 23, 24]), [30, 31, 32, 33, 34])
    assert stream.tokens == [30, 31, 32, 33, 34]
    assert stream.suffix_tokens() == [9, 100]
    np.testing.assert_array_equal(stream.retrieve_kv(), kv_of([20, 21, 22, 23]))
    stream.generate({"max_tokens": 1})
    assert engine.prompts[1] == [30, 31, 32, 33, 34, 9, 100]


@pytest.mark.parametrize(
    ("kv", "tokens"),
    [
        (None, PROMPT[:8]),
        (kv_of(PROMPT[:8])[0], PROMPT[:8]),
        (kv_of(PROMPT[:8]), PROMPT[:7]),
        (kv_of(PROMPT[:3]), PROMPT[:3]),
        (kv_of(PROMPT[:8]), [True] * 8),
        (kv_of(PROMPT[:8])[..., :2], PROMPT[:8]),
        (kv_of(PROMPT[:8]).astype(np.float16), PROMPT[:8]),
    ],
)
def test_update_kv_refuses_what_does_not_fit(stream: LMCacheStream, kv: Any, tokens: Any) -> None:
    stream.generate({"max_tokens": 1})
    before = stream.state
    with pytest.raises(KVError):
        stream.update_kv(kv, tokens)
    assert stream.state == before


# --- in a batch -----------------------------------------------------------------------------------


def test_a_stream_in_a_batch_runs_no_pass_of_its_own(
    stream: LMCacheStream, engine: StoringEngine
) -> None:
    stream.generate({"max_tokens": 1})
    stream.join_batch()
    with pytest.raises(UsageError, match=r"prefill\(\) or decode\(\)"):
        stream.generate({"max_tokens": 1})
    with pytest.raises(UsageError, match=r"modify\(\)"):
        stream.modify_kv(halve)
    with pytest.raises(UsageError, match=r"modify\(\)"):
        stream.update_kv(kv_of(PROMPT[:8]), PROMPT[:8])
    assert len(engine.prompts) == 1 and stream.tokens == [*PROMPT, 100]
    np.testing.assert_array_equal(stream.retrieve_kv(), kv_of(PROMPT[:8]))


def test_the_module_has_the_names_of_lmcaches() -> None:
    assert issubclass(lmc_stream.LMCacheStreamError, RuntimeError)
    assert lmc_stream.LMCacheStreamError is LMCacheStreamError
    assert {"PostCompletion", "TokenEvent", "LMCacheStream"} <= set(lmc_stream.__all__)


def test_the_repr_says_how_far_a_stream_is(stream: LMCacheStream) -> None:
    stream.generate({"max_tokens": 2})
    assert f"{stream.stream_id()}: 11 tokens, 2 generated>" in repr(stream)
