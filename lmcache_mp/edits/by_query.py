"""Edits that ask what the prompt's last tokens attend to; they need ``stream.queries``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.arguments import check_count
from lmcache_mp.edits.arrays import as_float32, like, module_of, to_numpy
from lmcache_mp.edits.selection import ByHeads, Scores
from lmcache_mp.edits.view import StreamView
from lmcache_mp.errors import UsageError

#: Rows of a matrix of similarities made at a time.
_ROWS = 256


@dataclass(frozen=True, slots=True, repr=False)
class ByQueries(ByHeads):
    """A selection by attention of the last ``window`` queries; their own tokens are kept."""

    _: KW_ONLY
    window_size: int = 64

    _looks_at: ClassVar[frozenset[str]] = frozenset({"head_dim", "queries"})

    def __post_init__(self) -> None:
        ByHeads.__post_init__(self)
        check_count(self.window_size, "window_size")

    def window(self, kv: Any, stream: StreamView) -> int:
        """The tokens of the window, or ``recent`` if that is more."""
        return max(self.recent, int(kv.shape[2]) - self.begin(kv, stream))

    def begin(self, kv: Any, stream: StreamView) -> int:
        """The position of the window's first token; tokens before it have scores."""
        return int(min(stream.query_positions[-self.window_size :][0], kv.shape[2]))


@dataclass(frozen=True, slots=True, repr=False)
class snapkv(ByQueries):
    """Keeps what the prompt's last tokens attend to: KV [2, L, T, D] to [2, L, n, D].

    score[t] = mean over layers, heads and the last ``window_size`` queries of their attention to
    token t, averaged over ``kernel_size`` neighbours. Li et al., SnapKV,
    https://arxiv.org/abs/2404.14469. Queries [L, W, H * head_dim].
    """

    _: KW_ONLY
    kernel_size: int = 5

    def __post_init__(self) -> None:
        ByQueries.__post_init__(self)
        check_count(self.kernel_size, "kernel_size")

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        total, begin = np.zeros(kv.shape[2]), self.begin(kv, stream)
        for _, attention in _attention(self, kv, stream):
            total += to_numpy(attention.sum(0).sum(0).sum(0))
        seen = np.pad(total[:begin], self.kernel_size // 2)
        kernel = np.full(self.kernel_size, 1 / self.kernel_size)
        total[:begin] = np.convolve(seen, kernel, "valid")[:begin] if begin else 0
        return total


@dataclass(frozen=True, slots=True, repr=False)
class tova(ByQueries):
    """Keeps what the prompt's last token attends to: KV [2, L, T, D] to [2, L, n, D].

    score[t] = mean over layers and heads of the last query's attention to token t. Oren et al.,
    Transformers are Multi-State RNNs, https://arxiv.org/abs/2401.06104.
    """

    _: KW_ONLY
    window_size: int = 1

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        total = np.zeros(kv.shape[2])
        for _, attention in _attention(self, kv, stream):
            total += to_numpy(attention.sum(0).sum(0).sum(0))
        return total


@dataclass(frozen=True, slots=True, repr=False)
class rkv(ByQueries):
    """Keeps what is attended to and not said twice: KV [2, L, T, D] to [2, L, n, D].

    score[t] = mean over layers and heads of mix * I[t] - (1 - mix) * R[t]. I is the attention of
    the last ``window_size`` queries, the maximum over ``kernel_size`` neighbours. R is a softmax
    over tokens of the mean cosine of k[t] and all other keys, where each token's cosine with the
    latest token that is more than ``threshold`` like it is left out: so of tokens alike, the latest
    stays. Cai et al., R-KV, https://arxiv.org/abs/2505.24133. Its time grows with T squared.
    """

    _: KW_ONLY
    window_size: int = 8
    kernel_size: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        ByQueries.__post_init__(self)
        check_count(self.kernel_size, "kernel_size")
        if not 0 <= self.mix <= 1:
            raise UsageError(f"mix must be between 0 and 1, not {self.mix}")

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """[T]"""
        total, begin = np.zeros(kv.shape[2]), self.begin(kv, stream)
        for keys, attention in _attention(self, kv, stream):
            heads, group, window, _ = attention.shape
            seen = to_numpy(attention[..., :begin].sum(1).sum(1)) / (group * window)
            important = _neighbours_max(seen, self.kernel_size)
            likeness = _likeness(keys[:, :begin], self.threshold)
            risen = np.exp(likeness - likeness.max(-1, keepdims=True, initial=-1))
            redundant = risen / risen.sum(-1, keepdims=True) if begin else risen
            total[:begin] += (self.mix * important - (1 - self.mix) * redundant).sum(0) / heads
        return total


def _attention(edit: ByQueries, kv: Any, stream: StreamView) -> Iterator[tuple[Any, Any]]:
    """Of each layer: float32 keys [KH, T, head_dim], and attention [KH, G, W, T] of queries.

    G queries share a head of keys; a query attends to the tokens up to its own.
    """
    head_dim, tokens, module = edit.head_width(kv, stream), kv.shape[2], module_of(kv)
    queries, positions = stream.queries, stream.query_positions[-edit.window_size :]
    if queries.shape[0] != kv.shape[1] or queries.shape[2] % kv.shape[3]:
        raise UsageError(
            f"queries {list(queries.shape)} do not fit KV {list(kv.shape)}: they must be "
            "[layers, window, heads * head_dim]"
        )
    hidden = np.arange(tokens) > positions[:, None]
    mask = like(kv, np.where(hidden, -np.inf, 0).astype(np.float32))
    for layer in range(kv.shape[1]):
        keys = as_float32(kv[0, layer]).reshape(tokens, -1, head_dim).swapaxes(0, 1)
        asked = as_float32(queries[layer, -edit.window_size :])
        count = asked.shape[0]
        asked = asked.reshape(count, keys.shape[0], -1, head_dim).swapaxes(0, 1).swapaxes(1, 2)
        group = asked.shape[1]
        flat = asked.reshape(keys.shape[0], group * count, head_dim) * head_dim**-0.5
        logits = (flat @ keys.swapaxes(1, 2)).reshape(-1, group, count, tokens)
        logits += mask
        logits -= module.amax(logits, axis=-1)[..., None]
        attention = module.exp(logits)
        attention /= attention.sum(-1)[..., None]
        yield keys, attention


def _neighbours_max(x: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Maximum over ``size`` neighbours along the last axis."""
    if not x.shape[-1]:
        return x
    before, after = size // 2, (size - 1) // 2
    padded = np.pad(x, ((0, 0), (before, after)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, size, axis=-1)
    found: NDArray[np.float32] = windows.max(-1)
    return found


def _likeness(keys: Any, threshold: float) -> NDArray[np.float32]:
    """Mean cosine of each key [KH, T, head_dim] and the others, as R-KV takes it: [KH, T]."""
    module, tokens = module_of(keys), keys.shape[1]
    squares = module.einsum("htd,htd->ht", keys, keys)
    unit = keys / (module.clip(squares, 1e-24, None) ** 0.5)[..., None]
    place = like(keys, np.arange(tokens, dtype=np.float32))
    total = like(keys, np.zeros(keys.shape[:2], np.float32))
    for start in range(0, tokens, _ROWS):
        cosines = unit[:, start : start + _ROWS] @ unit.swapaxes(1, 2)
        itself = place[start : start + _ROWS, None] == place
        cosines = cosines * ~itself
        latest = module.amax((cosines > threshold) * (place + 1), axis=-1) - 1
        cosines = cosines * (place != latest[..., None])
        total += cosines.sum(1)
    mean: NDArray[np.float32] = to_numpy(total) / max(1, tokens)
    return mean
