"""Rotary position embedding, and moving keys to new positions after tokens were dropped.

An engine derives positions from the count of tokens, so keys that are kept must be rotated from
their old position to the new one. Su et al., RoFormer, https://arxiv.org/abs/2104.09864; the layout
is that of Llama in Hugging Face and vLLM (NeoX): the first half of a head's dimensions is paired
with the second half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_mp.errors import UsageError

#: Tokens rotated at a time: a float32 copy of them stays in the processor's cache.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model: ``inv_freq[i] = theta ** (-2 i / head_dim)``.

    ``head_dim``: dimensions of a head, even; ``theta``: the base. There is no default for it, as
    keys rotated with a wrong base are garbage.
    """

    head_dim: int
    theta: float

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise UsageError(f"head_dim must be even and at least 2, not {self.head_dim}")
        if not self.theta > 0:
            raise UsageError(f"theta must be above 0, not {self.theta}")

    @property
    def inv_freq(self) -> NDArray[np.float64]:
        """Angle a position of each pair of dimensions: float64 [head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies: NDArray[np.float64] = self.theta**-exponents
        return frequencies

    def tables(self, positions: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) of positions [T]: float32 [T, head_dim / 2], of angles made in float64."""
        angles = np.asarray(positions, np.float64)[:, None] * self.inv_freq
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rotate heads [T, H, head_dim] by the angles of cos and sin [T, head_dim / 2]."""
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
    keys: NDArray[np.floating],
    old_positions: Sequence[int] | NDArray[np.integer],
    new_positions: Sequence[int] | NDArray[np.integer],
    rope: Rope,
) -> NDArray[np.floating]:
    """Keys [L, T, D] moved from old to new positions [T]: a new array of the same dtype.

    ``D`` is a whole number of heads. One rotation by the difference, in float32: two (undo, redo)
    round twice. UsageError for shapes that do not fit.
    """
    if keys.ndim != 3 or keys.shape[2] % rope.head_dim:
        raise UsageError(
            f"keys must be [layers, tokens, heads * {rope.head_dim}], not {list(keys.shape)}"
        )
    layers, tokens, width = keys.shape
    old, new = np.asarray(old_positions), np.asarray(new_positions)
    if old.shape != (tokens,) or new.shape != (tokens,):
        raise UsageError(
            f"{tokens} tokens of keys need as many positions, not {old.shape} and {new.shape}"
        )
    cos, sin = rope.tables(new.astype(np.int64) - old.astype(np.int64))
    out = np.empty_like(keys, order="C")
    for layer in range(layers):
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            heads = (
                keys[layer, rows]
                .astype(np.float32)
                .reshape(-1, width // rope.head_dim, rope.head_dim)
            )
            out[layer, rows] = rotate(heads, cos[rows], sin[rows]).reshape(-1, width)
    return out
