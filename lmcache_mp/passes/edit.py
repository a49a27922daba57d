"""An edit pass: KV out of a context, through a user's function, and back under another salt."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lmcache_mp import records
from lmcache_mp.edits.view import takes_stream
from lmcache_mp.errors import KVError
from lmcache_mp.kv.context import KVContext, PinningContext, edit_salt
from lmcache_mp.passes.checks import check_edit, describe, expected_kv
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Edited, Ids, StreamState
from lmcache_mp.passes.view import kind_of, kv_context, stream_view


class OverKinds:
    """An edit function of arrays by kind in place of the KV alone: LMCache's second generation.

    ``fn({name("kv"): kv, name("query"): queries, ...}, tokens) -> (new_kv, new_tokens[, info])``,
    with a third parameter ``stream`` where the function has one.
    """

    def __init__(self, fn: Callable[..., Any], name: Callable[[str], Any]) -> None:
        self.__wrapped__ = fn  # where errors look for the user's own function
        self._name = name

    def __call__(self, arrays: Mapping[str, Any], tokens: list[int], **view: Any) -> Any:
        """What the user's function returns."""
        named = {self._name(kind): array for kind, array in arrays.items()}
        return self.__wrapped__(named, tokens, **view)


def edit_pass(
    state: StreamState,
    fn: Callable[..., Any],
    contexts: Sequence[KVContext],
    label: PassLabel,
    *,
    timeout: float = 30.0,
    poll_interval: float = 0.2,
    fetch: Callable[[], Any] | None = None,
) -> Outcome:
    """Retrieve the KV, let ``fn`` edit it, and store the result under a salt of its own.

    ``timeout`` bounds only the wait for the KV to be there; ``fetch`` hands over KV that is being
    retrieved ahead of time. What was stored under the old salt stays: the caller releases it once
    the change is safe.
    """
    marks = [time.perf_counter()]
    before = after = stored = 0
    change: Edited | None = None
    error: BaseException | None = None
    try:
        context = kv_context(contexts)
        if fetch is None:
            kv = retrieve_whole(state, context, timeout=timeout, poll_interval=poll_interval)
        else:
            kv = fetch()
        given = kv
        if isinstance(fn, OverKinds):
            given = _by_kind(state, contexts, kv, marks[0] + timeout, poll_interval)
        before = int(kv.shape[2])
        view = {}
        if takes_stream(fn):
            ask = partial(_of_kind, state, before, marks[0] + timeout, poll_interval)
            view["stream"] = stream_view(state, contexts, label, ask)
        marks.append(time.perf_counter())
        expected = expected_kv(kv)
        result = fn(given, state.tokens[:before].tolist(), **view)
        marks.append(time.perf_counter())
        new_kv, tokens, info = check_edit(result, expected, fn, context.chunk_size)
        after = len(tokens)
        stored = after - after % context.chunk_size
        salt = edit_salt(state.cache_salt, label.nonce, label.key, state.edits, os.urandom(8).hex())
        _store_edit(context, new_kv[:, :, :stored], tokens[:stored].tolist(), salt, fn)
        marks.append(time.perf_counter())
        change = Edited(tokens.tobytes(), before, salt, stored, info)
    except BaseException as caught:  # a user's SystemExit is a failed pass too
        error = caught
    end = time.perf_counter()
    spans = [b - a for a, b in itertools.pairwise(marks)]
    seconds = (*spans, *[float("nan")] * (3 - len(spans)))
    row = (*label.row_head(error is not None, marks[0], end), before, after, stored)
    row = (*row, after - stored, *seconds)
    return Outcome(records.pack_modify(*row), change, error)


def _by_kind(
    state: StreamState, contexts: Sequence[KVContext], kv: Any, deadline: float, poll: float
) -> dict[str, Any]:
    """The KV, and what the other contexts have for the tokens that it covers."""
    arrays = {"kv": kv}
    covered = int(kv.shape[2])
    for context in contexts:
        if kind_of(context) not in arrays:
            arrays[kind_of(context)] = _of_kind(state, covered, deadline, poll, context)
    return arrays


def _of_kind(
    state: StreamState, covered: int, deadline: float, poll: float, context: KVContext
) -> Any:
    """What another context has for the first ``covered`` tokens."""
    left = max(0.0, deadline - time.perf_counter())
    return _retrieve_covering(state.tokens[:covered], covered, state.kv_salt, context, left, poll)


def retrieve_whole(
    state: StreamState, context: KVContext, *, timeout: float, poll_interval: float
) -> Any:
    """KV [2, L, T, D] of at least the whole chunks of the last pass's prompt; waits for it.

    Engines store in the background, so the stored prefix may still be growing. Chunks with
    generated tokens are taken if they are there, and never waited for.
    """
    wanted = state.kv_tokens - state.kv_tokens % context.chunk_size
    if not wanted:
        raise KVError(
            f"there is no KV to edit: {state.kv_tokens} tokens are less than one chunk of "
            f"{context.chunk_size}"
        )
    return _retrieve_covering(state.tokens, wanted, state.kv_salt, context, timeout, poll_interval)


def _retrieve_covering(
    tokens: Ids[int], wanted: int, salt: str, context: KVContext, timeout: float, poll: float
) -> Any:
    """What ``context`` has of ``tokens``, once it has at least ``wanted`` of them."""
    what = "KV" if kind_of(context) == "kv" else f"the {kind_of(context)} cache"
    deadline = time.perf_counter() + timeout
    found = context.lookup(tokens[:wanted], salt)
    while found < wanted:
        left = deadline - time.perf_counter()
        if left <= 0:
            raise KVError(
                f"{what} of {found} of {wanted} tokens is stored after {timeout:g} s: was the "
                "stream prefilled with the same salt, and is the store large enough?"
            )
        time.sleep(min(poll, left))
        found = context.lookup(tokens[:wanted], salt)
    array = context.retrieve(tokens, salt)
    got = 0 if array is None else int(array.shape[2])
    if got < wanted:
        raise KVError(f"{what} of {wanted} tokens was there and only {got} could be read")
    return array


def _store_edit(
    context: KVContext, kv: Any, tokens: list[int], salt: str, fn: Callable[..., Any]
) -> None:
    pinning = context if isinstance(context, PinningContext) else None
    if pinning:
        pinning.pin(salt)
    try:
        if not context.store(kv, tokens, salt):
            raise KVError(f"the store says that KV edited by {describe(fn)} was already there")
    except BaseException:
        if pinning:
            pinning.release(salt)
        raise
