"""Edits that look at keys and values, and need nothing of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.arguments import check_count
from lmcache_mp.edits.arrays import as_float32, like, module_of, to_numpy
from lmcache_mp.edits.selection import ByHeads, Scores
from lmcache_mp.edits.view import StreamView

#: Tokens looked at together: float32 copies of them stay in the processor's cache.
_ROWS = 512


@dataclass(frozen=True, slots=True, repr=False)
class knorm(ByHeads):
    """Keeps the tokens whose keys are short: KV [2, L, T, D] to [2, L, n, D].

    score[t] = - mean over layers and heads of ||k[t]||. Devoto et al., A Simple and Effective L2
    Norm-Based Strategy for KV Cache Compression, https://arxiv.org/abs/2406.11430. See
    :class:`~lmcache_mp.edits.selection.Selection` for the parameters.
    """

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        head_dim = self.head_width(kv, stream)
        total = _zeros(kv)
        for keys in kv[0]:
            for rows, heads in _blocks(keys, head_dim):
                total[rows] -= _norms(heads).mean(-1)
        return to_numpy(total)


@dataclass(frozen=True, slots=True, repr=False)
class keydiff(ByHeads):
    """Keeps the tokens whose keys are least like the others: KV [2, L, T, D] to [2, L, n, D].

    score[t] = - mean over layers and heads of cos(k[t], a), where the anchor ``a`` is the mean of
    all k / ||k||. Park et al., KeyDiff, https://arxiv.org/abs/2504.15364.
    """

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        head_dim = self.head_width(kv, stream)
        einsum = module_of(kv).einsum
        total = _zeros(kv)
        for keys in kv[0]:
            anchor = 0.0
            for _, heads in _blocks(keys, head_dim):
                anchor = anchor + einsum("thd,th->hd", heads, 1 / _norms(heads))
            anchor = anchor / _norms(anchor)[..., None]
            for rows, heads in _blocks(keys, head_dim):
                total[rows] -= (einsum("thd,hd->th", heads, anchor) / _norms(heads)).mean(-1)
        return to_numpy(total)


@dataclass(frozen=True, slots=True, repr=False)
class lagkv(ByHeads):
    """Keeps the tokens that the next partition predicts least: KV [2, L, T, D] to [2, L, n, D].

    After the sinks, tokens are cut into partitions of ``lag``. With the minimum and the maximum of
    the next partition, each token's keys x become (x - min) / (max - min), whose standard
    deviation over a head's dimensions goes through a softmax over the partition; likewise its
    values. A token's score is its rank in the partition by the mean of both, averaged over layers
    and heads. The last partition, and what is left after it, is kept, latest first. Liang et al.,
    LagKV, https://arxiv.org/abs/2504.04704. A prompt shorter than two partitions and the sinks
    keeps its most recent tokens.
    """

    _: KW_ONLY
    lag: int = 128

    def __post_init__(self) -> None:
        ByHeads.__post_init__(self)
        check_count(self.lag, "lag", least=2)

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        head_dim = self.head_width(kv, stream)
        tokens, lag, sinks = kv.shape[2], self.lag, self.sinks
        scores: Scores = np.arange(tokens) / tokens + 1  # above every rank
        parts = (tokens - sinks) // lag
        if parts < 2:
            return scores
        ranked = slice(sinks, sinks + (parts - 1) * lag)
        ranks = np.zeros((parts - 1, lag))
        for keys, values in zip(kv[0], kv[1], strict=True):
            both = [
                _lag_relative(as_float32(x[sinks : sinks + parts * lag]), lag, head_dim)
                for x in (keys, values)
            ]
            order = np.argsort(both[0] + both[1], axis=1, kind="stable")
            ranks += np.argsort(order, axis=1).mean(-1)
        scores[ranked] = ranks.reshape(-1) / (lag * kv.shape[1])
        return scores


def _lag_relative(x: Any, lag: int, head_dim: int) -> NDArray[np.float32]:
    """Rows [P * lag, D] against the next partition's: [P - 1, lag, H], a softmax over lag."""
    module = module_of(x)
    parts = x.reshape(-1, lag, x.shape[-1] // head_dim, head_dim)
    low = module.amin(parts[1:], axis=1)[:, None]
    high = module.amax(parts[1:], axis=1)[:, None]
    relative = (parts[:-1] - low) / module.clip(high - low, 1e-12, None)
    centred = relative - relative.mean(-1)[..., None]
    spread = to_numpy((centred * centred).sum(-1) / max(1, head_dim - 1)) ** 0.5
    risen = np.exp(spread - spread.max(1, keepdims=True))
    shares: NDArray[np.float32] = risen / risen.sum(1, keepdims=True)
    return shares


def _zeros(kv: Any) -> Any:
    return like(kv, np.zeros(kv.shape[2], np.float32))


def _blocks(keys: Any, head_dim: int) -> Iterator[tuple[slice, Any]]:
    """Keys [T, D] as float32 heads [rows, H, head_dim], some rows at a time."""
    for start in range(0, keys.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        heads = as_float32(keys[rows])
        yield rows, heads.reshape(heads.shape[0], -1, head_dim)


def _norms(heads: Any) -> Any:
    """Lengths along the last axis; never quite 0, so that one may divide by them."""
    module = module_of(heads)
    squares = module.einsum("...d,...d->...", heads, heads)
    return module.clip(squares, 1e-24, None) ** 0.5
