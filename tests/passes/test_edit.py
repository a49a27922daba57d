"""An edit pass: KV awaited and retrieved, a function run over it, and the result stored."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp import records
from lmcache_mp.errors import KVError
from lmcache_mp.passes.edit import edit_pass, retrieve_whole
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Edited, StreamState, ids_of
from lmcache_mp.passes.view import kv_context
from tests.helpers import CHUNK, MemoryKV, kv_of

LABEL = PassLabel("s", stream=7, attempt=2, worker=3, nonce="n", key="k")


def prefilled(prompt: int, generated: int = 0, stored: int | None = None) -> tuple[Any, MemoryKV]:
    """A state after a prompt and generated tokens of those lengths, and the KV an engine stored."""
    tokens = list(range(1, prompt + generated + 1))
    context = MemoryKV()
    whole = prompt - prompt % CHUNK if stored is None else stored
    context.store(kv_of(tokens[:whole]), tokens[:whole], "tenant")
    return StreamState(ids_of(tokens), "tenant", "tenant", prompt), context


def edit(state: StreamState, fn: Callable[..., Any], *contexts: Any, **options: Any) -> Outcome:
    options = {"timeout": 0.0, "poll_interval": 0.0, **options}
    return edit_pass(state, fn, contexts, LABEL, **options)


def edited(outcome: Outcome) -> Edited:
    assert outcome.error is None
    assert isinstance(outcome.change, Edited)
    return outcome.change


def row(outcome: Outcome) -> np.void:
    return np.frombuffer(outcome.row, records.MODIFY)[0]


def keep(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    return kv, tokens


def halve(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    return kv[:, :, ::2], tokens[::2]


# --- what an edit makes of a stream ---------------------------------------------------------------


def test_the_function_gets_kv_and_its_tokens_and_the_result_is_stored() -> None:
    state, context = prefilled(17)
    seen: list[Any] = []

    def fn(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        seen.append((kv.copy(), tokens))
        return kv[:, :, 1:], [token + 100 for token in tokens[1:]]

    change = edited(edit(state, fn, context))
    [(kv, tokens)] = seen
    assert tokens == list(range(1, 17)) and type(tokens) is list
    np.testing.assert_array_equal(kv, kv_of(tokens))
    new = list(range(102, 117))
    assert ids_of(change.tokens).tolist() == new
    assert (change.covered, change.stored_tokens) == (16, 12)
    np.testing.assert_array_equal(context.retrieve(new, change.kv_salt), kv_of(range(2, 14)))


def test_tokens_in_full_then_a_suffix_and_the_next_prompt_has_both() -> None:
    state, context = prefilled(9, generated=1)
    after = state.after_edit(edited(edit(state, lambda kv, t: (kv[:, :, :7], t[:7]), context)))
    assert after.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert after.suffix.tolist() == [9, 10], "the tokens without KV"
    assert (after.stored_tokens, after.kv_tokens) == (4, 4)
    assert after.prompt().tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 10]


def test_a_second_edit_starts_from_what_the_first_stored() -> None:
    state, context = prefilled(9)
    first = edited(edit(state, lambda kv, t: (kv[:, :, :7], t[:7]), context))
    state = state.after_edit(first)
    second = edited(edit(state, keep, context))
    assert second.covered == 4
    after = state.after_edit(second)
    assert after.tokens.tolist() == [1, 2, 3, 4]
    assert after.suffix.tolist() == [5, 6, 7, 9]
    assert after.edits == 2


def test_the_record_of_an_edit() -> None:
    state, context = prefilled(17)
    record = row(edit(state, lambda kv, t: (kv[:, :, :10], t[:10]), context))
    assert (record["stream"], record["attempt"], record["worker"]) == (7, 2, 3)
    assert record["status"] == records.COMPLETED
    assert (record["tokens_before"], record["tokens_after"]) == (16, 10)
    assert (record["stored_tokens"], record["recomputed_tokens"]) == (8, 2)
    parts = [record["retrieve_s"], record["fn_s"], record["store_s"]]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= record["duration"]


def test_info_comes_back_with_the_change() -> None:
    state, context = prefilled(9)
    outcome = edit(state, lambda kv, t: (kv, t, {"kept": np.int64(8)}), context)
    assert edited(outcome).info == {"kept": 8}
    assert edited(edit(state, keep, context)).info is None


def test_an_edit_in_place() -> None:
    state, context = prefilled(9)

    def zero(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        kv[:] = 0
        return kv, tokens

    change = edited(edit(state, zero, context))
    assert not context.retrieve(range(1, 9), change.kv_salt).any()
    np.testing.assert_array_equal(context.retrieve(range(1, 9), "tenant"), kv_of(range(1, 9)))


def test_kv_resized_in_place_is_noticed() -> None:
    state, context = prefilled(9)

    def shrink(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        kv.resize((2, 3, 8, 4), refcheck=False)
        return kv, tokens

    outcome = edit(state, shrink, context)
    assert isinstance(outcome.error, KVError) and "[2, 3, T, 5]" in str(outcome.error)


def test_every_edit_and_every_attempt_has_a_salt_of_its_own() -> None:
    state, context = prefilled(9)
    first = edited(edit(state, keep, context)).kv_salt
    again = edited(edit(state, keep, context)).kv_salt
    state = state.after_edit(edited(edit(state, keep, context)))
    salts = {first, again, state.kv_salt, edited(edit(state, keep, context)).kv_salt}
    assert len(salts) == 4
    assert all(len(salt) == 32 and set(salt) <= set(string.hexdigits) for salt in salts)
    assert state.cache_salt == "tenant"


def test_kv_fetched_ahead_is_used() -> None:
    state, context = prefilled(9)
    fetched: Future[Any] = Future()
    fetched.set_result(kv_of([50, 51, 52, 53]))
    change = edited(edit(state, keep, context, fetch=fetched.result))
    np.testing.assert_array_equal(
        context.retrieve([1, 2, 3, 4], change.kv_salt), kv_of([50, 51, 52, 53])
    )
    assert change.covered == 4


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), SystemExit(1), KeyboardInterrupt()])
def test_the_functions_own_error_comes_out_as_it_is(error: BaseException) -> None:
    state, context = prefilled(9)

    def fn(kv: Any, tokens: list[int]) -> Any:
        raise error

    stored = dict(context.chunks)
    outcome = edit(state, fn, context)
    assert outcome.error is error and outcome.change is None
    assert context.chunks == stored and context.pinned == []
    record = row(outcome)
    assert record["status"] == records.FAILED
    assert (record["tokens_before"], record["tokens_after"]) == (8, 0)
    assert record["retrieve_s"] > 0
    assert np.isnan([record["fn_s"], record["store_s"]]).all()


def test_a_wrong_return_names_the_function_and_stores_nothing() -> None:
    state, context = prefilled(9)

    def forgetful(kv: Any, tokens: list[int]) -> None:
        pass

    outcome = edit(state, forgetful, context)
    assert isinstance(outcome.error, KVError)
    assert "forgetful" in str(outcome.error) and __file__ in str(outcome.error)
    assert context.pinned == []


def test_a_successful_edit_stays_pinned() -> None:
    state, context = prefilled(9)
    change = edited(edit(state, keep, context))
    assert context.pinned == [change.kv_salt] and context.released == []


class NothingNew(MemoryKV):
    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        super().store(kv, tokens, cache_salt)
        return len(cache_salt) != 32


class Full(MemoryKV):
    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        if len(cache_salt) == 32:
            raise OSError("no space left")
        return super().store(kv, tokens, cache_salt)


@pytest.mark.parametrize(("kind", "error"), [(NothingNew, KVError), (Full, OSError)])
def test_a_store_that_fails_leaves_no_pin(kind: type[MemoryKV], error: type[Exception]) -> None:
    state, plain = prefilled(9)
    context = kind()
    context.chunks = plain.chunks
    outcome = edit(state, keep, context)
    assert isinstance(outcome.error, error) and outcome.change is None
    assert len(context.pinned) == 1 and context.released == context.pinned
    assert all(salt == "tenant" for salt, _ in context.chunks)


class Plain:
    """A context that can't pin."""

    chunk_size = CHUNK

    def __init__(self, inner: MemoryKV) -> None:
        self.lookup, self.retrieve, self.store = inner.lookup, inner.retrieve, inner.store


def test_a_context_need_not_pin() -> None:
    state, context = prefilled(9)
    assert edited(edit(state, keep, Plain(context)))
    assert context.pinned == []


# --- which context --------------------------------------------------------------------------------


class Queries(MemoryKV):
    kind = "query"


def test_the_context_that_holds_kv_is_edited() -> None:
    state, context = prefilled(9)
    assert kv_context([Queries(), context]) is context
    assert edited(edit(state, keep, Queries(), context))


def test_queries_alone_can_not_be_edited() -> None:
    state, _ = prefilled(9)
    assert isinstance(edit(state, keep, Queries()).error, KVError)


# --- waiting for KV -------------------------------------------------------------------------------


@given(st.integers(1, 4), st.sampled_from([-1, 0, 1]))
def test_whole_chunks_of_the_prompt_are_taken(chunks: int, more: int) -> None:
    prompt = chunks * CHUNK + more
    state, context = prefilled(prompt)
    outcome = edit(state, keep, context)
    if prompt < CHUNK:
        assert isinstance(outcome.error, KVError)
        assert f"3 tokens are less than one chunk of {CHUNK}" in str(outcome.error)
    else:
        assert edited(outcome).covered == prompt - prompt % CHUNK


@pytest.mark.parametrize(("stored", "covered"), [(8, 8), (12, 12)])
def test_chunks_with_generated_tokens_are_taken_if_they_are_there(
    stored: int, covered: int
) -> None:
    state, context = prefilled(10, generated=4, stored=stored)
    after = state.after_edit(edited(edit(state, keep, context)))
    assert len(after.tokens) == covered
    assert after.suffix.tolist() == list(range(covered + 1, 15))


def test_kv_that_never_comes_is_an_error_that_says_how_much_was_there() -> None:
    state, context = prefilled(17, stored=8)
    outcome = edit(state, keep, context)
    assert isinstance(outcome.error, KVError) and "8 of 16 tokens" in str(outcome.error)
    record = row(outcome)
    assert record["tokens_before"] == 0
    assert np.isnan([record["retrieve_s"], record["fn_s"], record["store_s"]]).all()


def test_kv_of_another_salt_is_not_taken() -> None:
    state, context = prefilled(9)
    context.chunks = {("other", key): kv for (_, key), kv in context.chunks.items()}
    assert isinstance(edit(state, keep, context).error, KVError)


class Growing(MemoryKV):
    """An engine stores one chunk more before each lookup after the first."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens, self.lookups = tokens, 0

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        ready = self.tokens[: self.lookups * CHUNK]
        self.store(kv_of(ready), ready, cache_salt)
        self.lookups += 1
        return super().lookup(tokens, cache_salt)


def test_a_prefix_that_grows_is_waited_for_up_to_the_prompts_chunks() -> None:
    tokens = list(range(1, 21))
    context = Growing(tokens)
    state = StreamState(ids_of(tokens), "", "", kv_tokens=14)
    change = edited(edit(state, keep, context, timeout=60.0))
    assert change.covered == 12, "and no longer: a fourth chunk would have come"
    assert context.lookups == 4


def test_kv_stored_by_another_thread_is_waited_for() -> None:
    state, context = prefilled(9, stored=0)
    asked = threading.Event()
    plain_lookup = context.lookup

    def lookup(tokens: Sequence[int], cache_salt: str = "") -> int:
        found = plain_lookup(tokens, cache_salt)
        asked.set()
        return found

    context.lookup = lookup  # type: ignore[method-assign]  # tells when it was asked in vain

    def store_late() -> None:
        assert asked.wait(60)
        context.store(kv_of(range(1, 9)), list(range(1, 9)), "tenant")

    thread = threading.Thread(target=store_late)
    thread.start()
    outcome = edit(state, halve, context, timeout=60.0, poll_interval=0.001)
    thread.join(60)
    assert edited(outcome).covered == 8


class Evicting(MemoryKV):
    """Has everything when asked, and less when it is read."""

    left = 0

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any:
        return kv_of(tokens[: self.left]) if self.left else None


@pytest.mark.parametrize("left", [0, 4])
def test_kv_that_goes_between_lookup_and_retrieve(left: int) -> None:
    state, plain = prefilled(9)
    context = Evicting()
    context.chunks, context.left = plain.chunks, left
    with pytest.raises(KVError, match=f"8 tokens was there and only {left}"):
        retrieve_whole(state, context, timeout=0, poll_interval=0)
