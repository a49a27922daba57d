"""Every ready edit, and KV to run them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lmcache_mp.edits import (
    Rope,
    Selection,
    StreamView,
    chunk_drop,
    compose,
    identity,
    keydiff,
    knorm,
    lagkv,
    quantize,
    random_drop,
    rkv,
    sink_recent,
    snapkv,
    tova,
)
from lmcache_mp.edits.view import stream_rng, takes_stream

HEAD_DIM = 16
ROPE = Rope(HEAD_DIM, 1e4)
CHUNK = 16

#: All selections, made with the same way to say how many.
SELECTIONS: dict[str, Callable[..., Selection]] = {
    "sink_recent": sink_recent,
    "random_drop": random_drop,
    "chunk_drop": chunk_drop,
    "knorm": knorm,
    "keydiff": keydiff,
    "lagkv": lambda *a, **k: lagkv(*a, lag=32, **k),
    "snapkv": lambda *a, **k: snapkv(*a, window_size=8, **k),
    "tova": tova,
    "rkv": rkv,
}

EDITS: dict[str, Any] = {
    **{name: make(0.5) for name, make in SELECTIONS.items()},
    "unmoved": knorm(0.5, rerotate=False),
    "whole chunks": sink_recent(0.4, align="chunk"),
    "identity": identity(),
    "int8": quantize(8, group=HEAD_DIM),
    "int4": quantize(4, group=HEAD_DIM),
    "composed": compose(knorm(0.5), quantize(4, group=HEAD_DIM)),
    "twice": compose(sink_recent(0.75), random_drop(0.5)),
}

#: Layers, tokens, heads of keys.
SHAPES = {
    "plain": (3, 208, 2),
    "one chunk": (2, CHUNK, 2),
    "one layer": (1, 96, 2),
    "one head": (2, 96, 1),
}


def kv_of(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> Any:
    layers, tokens, heads = shape
    kv = np.random.default_rng(seed).standard_normal((2, layers, tokens, heads * HEAD_DIM))
    return kv.astype(dtype)


def view_of(shape: tuple[int, int, int], kind: Callable[[Any], Any] = lambda x: x) -> StreamView:
    """A stream with 8 queries, two for each head of keys, the last two of tokens past the KV."""
    layers, tokens, heads = shape
    queries = np.random.default_rng(1).standard_normal((layers, 8, 2 * heads * HEAD_DIM))
    return StreamView(
        chunk_size=CHUNK,
        rng=stream_rng(0, "s", 1),
        rope=ROPE,
        queries=(kind(queries.astype(np.float32)), np.arange(tokens - 6, tokens + 2)),
    )


def run(edit: Any, kv: Any, shape: tuple[int, int, int], kind: Any = lambda x: x) -> Any:
    """What an edit makes of KV whose tokens are numbered from 1000."""
    options = {"stream": view_of(shape, kind)} if takes_stream(edit) else {}
    result = edit(kv, list(range(1000, 1000 + kv.shape[2])), **options)
    return result if len(result) == 3 else (*result, {})
