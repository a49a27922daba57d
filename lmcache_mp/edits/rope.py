"""Rotary position embedding, and moving keys to new positions after tokens were dropped.

An engine derives positions from the count of tokens, so keys that are kept must be rotated from
their old position to the new one. Su et al., RoFormer, https://arxiv.org/abs/2104.09864. Two
layouts are in use: that of Llama in Hugging Face and vLLM (NeoX) pairs the first half of a head's
rotary dimensions with the second half; the interleaved one (GPT-J) pairs neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_mp.edits.arrays import as_float32, empty_like, like, tokens_at
from lmcache_mp.errors import UsageError

#: Tokens rotated at a time: a float32 copy of them stays in the processor's cache.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model: ``inv_freq[i] = theta ** (-2 i / rotary_dim)``.

    ``head_dim``: dimensions of a head; ``theta``: the base. There is no default for it, as keys
    rotated with a wrong base are garbage. ``rotary_dim``: how many of them rotate, the first ones,
    an even number; None is all. ``interleaved``: neighbours are pairs (GPT-J), else halves (NeoX).
    ``frequencies``: ``inv_freq`` itself [rotary_dim / 2], where a scaling has changed it.
    """

    head_dim: int
    theta: float
    rotary_dim: int | None = None
    interleaved: bool = False
    frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        name = "head_dim" if self.rotary_dim is None else "rotary_dim"
        if self.width < 2 or self.width % 2:
            raise UsageError(f"{name} must be even and at least 2, not {self.width}")
        if self.width > self.head_dim:
            raise UsageError(f"rotary_dim {self.width} is more than head_dim {self.head_dim}")
        if not self.theta > 0:
            raise UsageError(f"theta must be above 0, not {self.theta}")
        object.__setattr__(self, "frequencies", tuple(map(float, self.frequencies)))
        if self.frequencies and len(self.frequencies) != self.width // 2:
            raise UsageError(
                f"{self.width} rotary dimensions need {self.width // 2} frequencies, "
                f"not {len(self.frequencies)}"
            )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str | os.PathLike[str],
        *,
        interleaved: bool | None = None,
    ) -> Rope:
        """From a Hugging Face config (a dict, a config.json or its folder) or GGUF metadata.

        Types: default, linear, llama3, yarn, and dynamic, with the one base that vLLM computes at
        its start. GGUF metadata is a mapping of keys such as "llama.rope.freq_base"; put the tensor
        "rope_freqs.weight" into it where the file has one. ``interleaved``: None is what the model
        type is known to use. UsageError: something that is needed is not there (a base is never
        guessed), or the type is another one.
        """
        from lmcache_mp.edits.rope_config import read_rope

        return read_rope(config, interleaved)

    @property
    def width(self) -> int:
        """Dimensions that rotate: ``rotary_dim``, or all."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def inv_freq(self) -> NDArray[np.float64]:
        """Angle a position of each pair of dimensions: float64 [rotary_dim / 2]."""
        if self.frequencies:
            return np.array(self.frequencies, np.float64)
        return powers(self.theta, self.width)

    @property
    def pairs(self) -> tuple[slice, slice]:
        """Where the first and the second members of the pairs are among a head's dimensions."""
        if self.interleaved:
            return slice(0, self.width, 2), slice(1, self.width, 2)
        return slice(0, self.width // 2), slice(self.width // 2, self.width)

    def tables(self, positions: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) of positions [T]: float32 [T, rotary_dim / 2], of angles made in float64."""
        angles = np.asarray(positions, np.float64)[:, None] * self.inv_freq
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def powers(theta: float, width: int) -> NDArray[np.float64]:
    """``theta ** (-2 i / width)``: float64 [width / 2]."""
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    frequencies: NDArray[np.float64] = theta**-exponents
    return frequencies


def rotate(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rotate whole heads [T, H, head_dim], NeoX, by angles of cos and sin [T, head_dim / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None], sin[:, None]
    out = np.empty_like(x)
    np.multiply(a, c, out=out[..., :half])
    out[..., :half] -= b * s
    np.multiply(b, c, out=out[..., half:])
    out[..., half:] += a * s
    return out


def rerotate(
    keys: Any,
    old_positions: Sequence[int] | NDArray[np.integer],
    new_positions: Sequence[int] | NDArray[np.integer],
    rope: Rope,
) -> Any:
    """Keys [L, T, D], numpy or torch, moved from old to new positions [T]: a new array like them.

    ``D`` is a whole number of heads. One rotation by the difference, in float32: two (undo, redo)
    round twice. UsageError for shapes that do not fit.
    """
    if len(keys.shape) != 3 or keys.shape[2] % rope.head_dim:
        raise UsageError(
            f"keys must be [layers, tokens, heads * {rope.head_dim}], not {list(keys.shape)}"
        )
    layers, tokens, _ = keys.shape
    old, new = np.asarray(old_positions), np.asarray(new_positions)
    if old.shape != (tokens,) or new.shape != (tokens,):
        raise UsageError(
            f"{tokens} tokens of keys need as many positions, not {old.shape} and {new.shape}"
        )
    move = Move(new.astype(np.int64) - old.astype(np.int64), rope, keys)
    out = empty_like(keys, keys.shape)
    for layer in range(layers):
        move.into(out[layer], keys[layer])
    return out


class Move:
    """A rotation of many layers' keys by the same distances [T]."""

    def __init__(self, distances: NDArray[np.int64], rope: Rope, keys: Any) -> None:
        cos, sin = rope.tables(distances)
        self._cos, self._sin = like(keys, cos[:, None]), like(keys, sin[:, None])
        self._rope = rope
        self._tokens = len(distances)

    def into(self, out: Any, keys: Any, index: NDArray[np.int64] | None = None) -> None:
        """Write one layer's keys [T, D], or its rows ``index``, to ``out`` [T, D], turned."""
        first, second = self._rope.pairs
        head_dim, width = self._rope.head_dim, self._rope.width
        for start in range(0, self._tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            taken = keys[rows] if index is None else tokens_at(keys, index[rows])
            heads = as_float32(taken).reshape(-1, keys.shape[-1] // head_dim, head_dim)
            to = out[rows].reshape(heads.shape)
            a, b = heads[..., first], heads[..., second]
            cos, sin = self._cos[rows], self._sin[rows]
            turned = a * cos
            turned -= b * sin
            to[..., first] = turned
            turned = b * cos
            turned += a * sin
            to[..., second] = turned
            if width < head_dim:
                to[..., width:] = heads[..., width:]
