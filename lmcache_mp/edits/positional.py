"""Edits that look at nothing but positions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from lmcache_mp.arguments import check_count
from lmcache_mp.edits.selection import Scores, Selection
from lmcache_mp.edits.view import StreamView


@dataclass(frozen=True, slots=True, repr=False)
class sink_recent(Selection):
    """Keeps the first ``sinks`` tokens and the most recent ones: KV [2, L, T, D] to [2, L, n, D].

    score[t] = t. StreamingLLM, Xiao et al., https://arxiv.org/abs/2309.17453. See
    :class:`~lmcache_mp.edits.selection.Selection` for the parameters.
    """

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """Later is better: [T]."""
        return np.arange(kv.shape[2], dtype=np.float64)


@dataclass(frozen=True, slots=True, repr=False)
class random_drop(Selection):
    """Keeps tokens drawn at random: KV [2, L, T, D] to [2, L, n, D]. The one to compare with.

    score[t] is uniform, drawn from ``stream.rng``: equal in every run of a program, different from
    stream to stream and from round to round.
    """

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        drawn: Scores = stream.rng.random(kv.shape[2])
        return drawn


@dataclass(frozen=True, slots=True, repr=False)
class chunk_drop(Selection):
    """Keeps chunks drawn at random, each a run of ``size`` tokens: KV [2, L, T, D] to [2, L, n, D].

    ``size`` None is the store's chunk. score[t] is uniform, one for each chunk, from
    ``stream.rng``; the last chunk drawn is cut to the count. Whole runs keep their meaning better
    than single tokens: ChunkKV, Liu et al., https://arxiv.org/abs/2502.00299.
    """

    _: KW_ONLY
    size: int | None = None

    def __post_init__(self) -> None:
        Selection.__post_init__(self)
        if self.size is not None:
            check_count(self.size, "size")

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        tokens, size = kv.shape[2], self.size or stream.chunk_size
        drawn: Scores = stream.rng.random(-(-tokens // size)).repeat(size)[:tokens]
        return drawn
