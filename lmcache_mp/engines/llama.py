"""A Llama decoder in numpy: prefill in blocks, and decoding of up to eight streams in one batch.

The KV row and the logits of a token are, bit for bit, a function of the tokens before it, whatever
the prompt's length and whatever runs beside it. Matrix products do not give that by themselves: a
BLAS takes other kernels for other shapes. So

* prefill works in blocks that begin at multiples of BLOCK positions; the rows of the last one are
  padded to a quantum, and its attention always spans the whole block's keys;
* decoding always multiplies 2 to 8 rows, with the weights seen as blocks of 64 rows, and attends
  for each stream alone.

Which paddings make rows equal depends on the BLAS: it is measured, with the model's own shapes.
Decoding's bits differ from prefill's in the last place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_mp.edits.rope import rotate
from lmcache_mp.engines.config import LlamaConfig
from lmcache_mp.engines.weights import Weights, open_weights

F32 = NDArray[np.float32]

#: Prefill's blocks, in tokens.
BLOCK = 256

#: The most streams in one decoding step.
MOST_ROWS = 8

_WEIGHT_ROWS = 64
_QUANTA = (24, 32, 48, 64, 96, 128, BLOCK)


class KVCache:
    """The KV of one stream: it grows as tokens are computed.

    ``position`` is the RoPE position of the next token; it differs from ``length`` only where KV
    was loaded whose tokens kept their old positions. With ``edited`` it holds KV that no prefill
    made: nobody else will compute the same rows, so they need no padding to be equal.
    """

    def __init__(self, config: LlamaConfig, edited: bool = False) -> None:
        self.edited = edited
        shape = (config.layers, config.kv_heads, 0, config.head_dim)
        self.keys: F32 = np.zeros(shape, np.float32)
        self.values: F32 = np.zeros(shape, np.float32)
        self.length = 0
        self.position = 0

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all; rows beyond ``length`` are zeros."""
        layers, heads, room, width = self.keys.shape
        if tokens <= room:
            return
        room = _whole(tokens, BLOCK)
        for name in ("keys", "values"):
            grown: F32 = np.zeros((layers, heads, room, width), np.float32)
            grown[:, :, : self.length] = getattr(self, name)[:, :, : self.length]
            setattr(self, name, grown)

    def load(self, kv: ArrayLike) -> None:
        """Append KV [2, L, T, D]."""
        both = np.asarray(kv, np.float32)
        tokens = both.shape[2]
        self.reserve(self.length + tokens)
        rows = slice(self.length, self.length + tokens)
        layers, heads, _, width = self.keys.shape
        for mine, theirs in ((self.keys, both[0]), (self.values, both[1])):
            mine[:, :, rows] = theirs.reshape(layers, tokens, heads, width).transpose(0, 2, 1, 3)
        self.advance(tokens)

    def export(self, start: int, stop: int) -> F32:
        """A copy of the KV of tokens ``start`` to ``stop``: [2, L, stop - start, D]."""
        layers, heads, _, width = self.keys.shape
        out = np.empty((2, layers, stop - start, heads, width), np.float32)
        for plane, mine in enumerate((self.keys, self.values)):
            out[plane] = mine[:, :, start:stop].transpose(0, 2, 1, 3)
        return out.reshape(2, layers, stop - start, heads * width)

    def advance(self, tokens: int) -> None:
        """Count tokens whose KV has been written."""
        self.length += tokens
        self.position += tokens


class Llama:
    """Computes logits; knows nothing of files, text or sampling."""

    def __init__(self, weights: Weights) -> None:
        self.config = weights.config
        self._weights = weights
        self._scale = np.float32(self.config.head_dim**-0.5)
        self._eps = np.float32(self.config.norm_eps)
        self._paddings = Paddings(weights)

    @classmethod
    def open(cls, model: str | os.PathLike[str] | None) -> Llama:
        """The model of that name or path; see :func:`open_weights`."""
        return cls(open_weights(model))

    def new_cache(self, *, edited: bool = False) -> KVCache:
        """An empty cache for a stream of this model; see :class:`KVCache`."""
        return KVCache(self.config, edited)

    def prefill(self, tokens: ArrayLike, cache: KVCache, *, all_logits: bool = False) -> F32:
        """Compute ``tokens`` [n], which follow those of ``cache``, and append their KV.

        Returns the logits of the last one, [V], or of all, [n, V]. Bits do not depend on how a
        prompt is cut as long as it is cut at multiples of BLOCK.
        """
        ids = np.asarray(tokens, np.int64)
        if not len(ids):
            raise ValueError("prefill needs at least one token")
        cache.reserve(_whole(cache.length + len(ids), BLOCK))
        hidden: list[F32] = []
        start = 0
        while start < len(ids):
            rows = min(BLOCK - cache.length % BLOCK, len(ids) - start)
            block = self._prefill_block(ids[start : start + rows], cache)
            hidden = [*hidden, block] if all_logits else [block]
            start += rows
        if not all_logits:
            last: F32 = self._head(hidden[-1][-1:])[0]
            return last
        head = self._weights.head
        logits = [self._norm(_padded(x, BLOCK), self._weights.norm) @ head.T for x in hidden]
        vocab = self.config.vocab
        parts = [y[: len(x), :vocab] for x, y in zip(hidden, logits, strict=True)]
        return np.concatenate(parts)

    def decode(self, tokens: ArrayLike, caches: Sequence[KVCache]) -> F32:
        """One step of 1 to 8 streams: their next tokens [B] in, logits [B, V] out."""
        ids = np.asarray(tokens, np.int64)
        if not 1 <= len(ids) <= MOST_ROWS or len(ids) != len(caches):
            raise ValueError(f"a step takes 1 to {MOST_ROWS} tokens, each with a cache")
        config = self.config
        for cache in caches:
            cache.reserve(cache.length + 1)
        cos, sin = config.rope.tables([cache.position for cache in caches])
        x = self._weights.embedding[ids]
        for index, layer in enumerate(self._weights.layers):
            mixed = self._project(self._norm(x, layer.norm_attention), layer.qkv)
            q, k, v = self._split(mixed, cos, sin)
            attended = np.empty((len(ids), config.heads * config.head_dim), np.float32)
            for row, cache in enumerate(caches):
                attended[row] = self._attend_one(q[row], k[row], v[row], cache, index)
            x = x + self._project(attended, layer.out)[:, : config.hidden]
            gate_up = self._project(self._norm(x, layer.norm_ffn), layer.gate_up)
            x = x + self._project(_swiglu(gate_up, config.ffn), layer.down)[:, : config.hidden]
        for cache in caches:
            cache.advance(1)
        return self._head(x)

    # --- prefill ----------------------------------------------------------------------------------

    def _prefill_block(self, ids: NDArray[np.int64], cache: KVCache) -> F32:
        """Hidden states [n, E] of tokens within one block, whose KV is appended."""
        count, start, hidden = len(ids), cache.length, self.config.hidden
        span = _whole(start + count, BLOCK)
        x = self._weights.embedding[ids]
        if not cache.edited:
            x = _padded(x, self._paddings.prefill(span))
        positions = np.arange(cache.position, cache.position + len(x))
        cos, sin = self.config.rope.tables(positions)
        mask = np.triu(np.full((len(x), span), -np.inf, np.float32), start + 1)
        for index, layer in enumerate(self._weights.layers):
            q, k, v = self._split(self._norm(x, layer.norm_attention) @ layer.qkv.T, cos, sin)
            cache.keys[index, :, start : start + count] = k[:count].transpose(1, 0, 2)
            cache.values[index, :, start : start + count] = v[:count].transpose(1, 0, 2)
            attended = self._attend_block(
                q, cache.keys[index, :, :span], cache.values[index, :, :span], mask
            )
            x = x + (attended @ layer.out.T)[:, :hidden]
            gate_up = self._norm(x, layer.norm_ffn) @ layer.gate_up.T
            x = x + (_swiglu(gate_up, self.config.ffn) @ layer.down.T)[:, :hidden]
        cache.advance(count)
        return x[:count]

    def _attend_block(self, q: F32, keys: F32, values: F32, mask: F32) -> F32:
        """Causal attention of queries [R, H, hd] over keys and values [KH, S, hd]: [R, H * hd]."""
        rows, heads, width = q.shape
        kv_heads, span, _ = keys.shape
        group = heads // kv_heads
        grouped = q.reshape(rows, kv_heads, group, width).transpose(1, 2, 0, 3)
        stacked = np.ascontiguousarray(grouped).reshape(kv_heads, group * rows, width)
        scores = stacked @ keys.transpose(0, 2, 1)
        by_head = scores.reshape(kv_heads * group, rows, span)
        by_head += mask
        _softmax(by_head)
        mixed: F32 = (scores @ values).reshape(kv_heads, group, rows, width)
        by_row: F32 = mixed.transpose(2, 0, 1, 3).reshape(rows, heads * width)
        return by_row

    # --- decode -----------------------------------------------------------------------------------

    def _attend_one(self, q: F32, k: F32, v: F32, cache: KVCache, layer: int) -> F32:
        """Attention of one stream's token over its own KV, to which it is added: [H * hd]."""
        position = cache.length
        cache.keys[layer, :, position] = k
        cache.values[layer, :, position] = v
        keys = cache.keys[layer, :, : position + 1]
        heads, width = q.shape
        grouped = q.reshape(len(keys), heads // len(keys), width)
        scores = grouped @ keys.transpose(0, 2, 1)
        _softmax(scores)
        mixed: F32 = (scores @ cache.values[layer, :, : position + 1]).reshape(heads * width)
        return mixed

    def _project(self, x: F32, weights: F32) -> F32:
        """x [B, k] times weights [n, k], B at most 8: [B, n]; a row's bits do not depend on B."""
        return multiply_rows(x, weights, self._paddings.decode)

    def _head(self, x: F32) -> F32:
        logits = self._project(self._norm(x, self._weights.norm), self._weights.head)
        return logits[:, : self.config.vocab]

    # --- both -------------------------------------------------------------------------------------

    def _split(self, mixed: F32, cos: F32, sin: F32) -> tuple[F32, F32, F32]:
        """Queries (rotated and scaled), keys (rotated) and values of a qkv product [R, ...]."""
        config, rows, width = self.config, len(mixed), self.config.head_dim
        heads = mixed[:, : (config.heads + 2 * config.kv_heads) * width].reshape(rows, -1, width)
        split = config.heads + config.kv_heads
        rotated = rotate(heads[:, :split], cos, sin)
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        return queries * self._scale, keys, heads[:, split:]

    def _norm(self, x: F32, weight: F32) -> F32:
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        normed: F32 = x / np.sqrt(mean + self._eps) * weight
        return normed


def _softmax(scores: F32) -> None:
    """Softmax over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


def _swiglu(gate_up: F32, width: int) -> F32:
    """SiLU of the first ``width`` columns times the next ``width``: [R, width]."""
    gate, up = gate_up[:, :width], gate_up[:, width : 2 * width]
    activated = np.negative(gate)
    with np.errstate(over="ignore"):  # exp of a large number is inf, and gate / inf is 0: right
        np.exp(activated, out=activated)
    activated += 1
    np.divide(gate, activated, out=activated)
    activated *= up
    return activated


def multiply_rows(x: F32, weights: F32, least_rows: int) -> F32:
    """x [B, k] @ weights [n, k].T as products of 64 weight rows with at least ``least_rows``."""
    rows = max(least_rows, len(x))
    columns = np.zeros((weights.shape[1], rows), np.float32)
    columns[:, : len(x)] = x.T
    blocks = weights.reshape(-1, _WEIGHT_ROWS, weights.shape[1])
    product = (blocks @ columns).reshape(-1, rows)
    return np.ascontiguousarray(product.T[: len(x)])


# --- paddings -------------------------------------------------------------------------------------


class Paddings:
    """The least paddings with which rows are bitwise equal, found by trying the model's own shapes.

    Padding to the whole block, or to eight rows, always is right, as the shapes are then the same.
    A decoding step has at least ``decode`` rows.
    """

    def __init__(self, weights: Weights) -> None:
        layer = weights.layers[0]
        self._matrices = [layer.qkv, layer.out, layer.gate_up, layer.down]
        self._config = weights.config
        self._weights_equal: dict[int, bool] = {}  # by quantum
        self._prefill: dict[int, int] = {}  # by span
        self.decode = 2 if all(map(_decode_rows_equal, self._matrices)) else MOST_ROWS

    def prefill(self, span: int) -> int:
        """The quantum of the rows of a block that attends to ``span`` keys.

        A BLAS may choose its kernel by the count of keys too, so each span is tried as it comes.
        """
        if span not in self._prefill:
            self._prefill[span] = next(q for q in _QUANTA if self._rows_equal(q, span))
        return self._prefill[span]

    def _rows_equal(self, quantum: int, span: int) -> bool:
        if quantum not in self._weights_equal:
            self._weights_equal[quantum] = _weight_rows_equal(self._matrices, quantum)
        return self._weights_equal[quantum] and _attention_rows_equal(self._config, quantum, span)


def _row_counts(quantum: int) -> range:
    """The rows that blocks are padded to, but for whole ones: all are tried."""
    return range(quantum, _whole(BLOCK, quantum), quantum)


def _weight_rows_equal(matrices: Sequence[F32], quantum: int) -> bool:
    random = np.random.default_rng(0)
    for matrix in matrices:
        rows = random.standard_normal((_whole(BLOCK, quantum), matrix.shape[1]), np.float32)
        whole = rows @ matrix.T
        if not all(np.array_equal(rows[:n] @ matrix.T, whole[:n]) for n in _row_counts(quantum)):
            return False
    return True


def _attention_rows_equal(config: LlamaConfig, quantum: int, span: int) -> bool:
    random = np.random.default_rng(0)
    group, width = config.heads // config.kv_heads, config.head_dim
    queries = random.standard_normal((group, _whole(BLOCK, quantum), width), np.float32)
    keys = random.standard_normal((span, width), np.float32)
    whole = _attention_products(queries, keys)
    return all(
        np.array_equal(_attention_products(queries[:, :n], keys), whole[:, :n])
        for n in _row_counts(quantum)
    )


def _attention_products(queries: F32, keys: F32) -> F32:
    """Both products of a block's attention, in its shapes: queries [G, R, hd], keys [S, hd]."""
    group, rows, width = queries.shape
    stacked = np.ascontiguousarray(queries).reshape(1, group * rows, width)
    scores = stacked @ keys[None].transpose(0, 2, 1)
    mixed: F32 = scores @ keys[None]
    return mixed.reshape(group, rows, width)


def _decode_rows_equal(matrix: F32) -> bool:
    x = np.random.default_rng(0).standard_normal((MOST_ROWS, matrix.shape[1]), np.float32)
    whole = multiply_rows(x, matrix, MOST_ROWS)
    return all(
        np.array_equal(multiply_rows(x[:n], matrix, 2), whole[:n]) for n in range(1, MOST_ROWS)
    )


def _whole(count: int, quantum: int) -> int:
    """``count`` rounded up to a multiple of ``quantum``."""
    return -(-count // quantum) * quantum


def _padded(x: F32, quantum: int) -> F32:
    """Rows [n, E], filled up with zeros to a multiple of ``quantum``."""
    missing = _whole(len(x), quantum) - len(x)
    return np.concatenate([x, np.zeros((missing, x.shape[1]), np.float32)]) if missing else x
