"""Keeping some of a KV's tokens: one gather, with the keys turned on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.edits.arrays import copy_tokens, empty_like
from lmcache_mp.edits.rope import Move, Rope
from lmcache_mp.errors import UsageError


def gather(kv: Any, index: NDArray[np.int64], rope: Rope | None) -> Any:
    """KV [2, L, T, D] of the tokens ``index`` [n], increasing: a new array [2, L, n, D].

    With ``rope`` the keys of token ``index[i]`` are turned from its position to ``i``. Nothing but
    the result is as large as a layer's keys.
    """
    planes, layers, _, width = kv.shape
    if rope is not None and width % rope.head_dim:
        raise UsageError(f"KV {width} wide is not made of heads of {rope.head_dim} dimensions")
    out = empty_like(kv, (planes, layers, len(index), width))
    move = None if rope is None else Move(np.arange(len(index)) - index, rope, kv)
    for layer in range(layers):
        copy_tokens(out[1, layer], kv[1, layer], index)
        if move is None:
            copy_tokens(out[0, layer], kv[0, layer], index)
        else:
            move.into(out[0, layer], kv[0, layer], index)
    return out
