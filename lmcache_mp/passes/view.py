"""An edit's third parameter, and what edits say they need of their contexts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmcache_mp.edits.rope import Rope
from lmcache_mp.edits.view import Queries, StreamView, stream_rng
from lmcache_mp.errors import KVError, UsageError
from lmcache_mp.kv.context import KVContext
from lmcache_mp.passes.checks import describe
from lmcache_mp.passes.outcome import PassLabel
from lmcache_mp.passes.state import StreamState


def kind_of(context: KVContext) -> str:
    """What a context holds: "kv" unless it says otherwise."""
    return str(getattr(context, "kind", "kv"))


def kv_context(contexts: Sequence[KVContext]) -> KVContext:
    """The context that holds keys and values (others hold queries)."""
    for context in contexts:
        if kind_of(context) == "kv":
            return context
    raise KVError("none of the request's contexts holds KV (kind 'kv')")


def stream_view(
    state: StreamState,
    contexts: Sequence[KVContext],
    label: PassLabel,
    fetch_queries: Callable[[KVContext], Any],
) -> StreamView:
    """The view of a stream; ``fetch_queries`` asks a query context, for [1, L, T, H * head_dim]."""
    context = kv_context(contexts)

    def queries() -> Queries:
        if state.edits:
            raise KVError("the stream's queries are gone, as its KV was edited since")
        for other in contexts:
            if kind_of(other) == "query":
                array = fetch_queries(other)[0]
                return array, np.arange(array.shape[1])
        tokens = state.tokens[: state.kv_tokens]
        find = getattr(context, "queries", None)
        array = find(tokens, state.kv_salt) if callable(find) else None
        if array is None:
            raise KVError(
                "no queries of the stream's last prefill are kept: were they captured, "
                "connect_local(..., capture_queries=64), and is the store large enough?"
            )
        return array, np.arange(len(tokens) - array.shape[1], len(tokens))

    def rope() -> Rope:
        found: Rope | None = getattr(context, "rope", None)
        if found is None:
            raise KVError(_no_rope(context, "the edit", "the edit"))
        return found

    return StreamView(
        stream_id=label.stream_id,
        custom_id=label.custom_id,
        round=label.round,
        chunk_size=context.chunk_size,
        rng=stream_rng(label.seed, label.key, label.round),
        rope=rope,
        queries=queries,
    )


def check_needs(fn: Callable[..., Any], contexts: Sequence[KVContext]) -> None:
    """UsageError: the edit says by its attribute ``needs`` what no context of the stream has.

    ``needs`` is a collection of "rope", "head_dim" (which a rope tells, too) and "queries".
    """
    needs, context = getattr(fn, "needs", ()), kv_context(contexts)
    name = type(fn).__name__ if not inspect.isfunction(fn) else describe(fn)
    if "queries" in needs and not (
        any(kind_of(other) == "query" for other in contexts)
        or getattr(context, "capture_queries", False)
    ):
        raise UsageError(
            f"{name} needs queries, and the stream's contexts have none: use "
            "connect_local(..., capture_queries=64), or with LMCache "
            "create_request([ctx, connect(..., kind='query')], ...)"
        )
    if "rope" in needs or "head_dim" in needs:
        try:
            rope = getattr(context, "rope", None)
        except KVError as error:
            raise UsageError(f"{name} needs it, and {error}") from error
        if rope is None and "rope" in needs:
            raise UsageError(_no_rope(context, name, name))
        if rope is None:
            raise UsageError(
                f"{name} needs the dimensions of a head, which a {type(context).__name__} does "
                f"not know: {name}(..., head_dim=...)"
            )


def _no_rope(context: KVContext, who: str, name: str) -> str:
    return (
        f"{who} needs the model's rotary embedding, which a {type(context).__name__} does not "
        f"know: give it, {name}(..., rope=Rope.from_config(...)), or leave keys as they are, "
        f"{name}(..., rerotate=False)"
    )
