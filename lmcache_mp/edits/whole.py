"""Edits that keep every token, and edits made of edits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache_mp.arguments import check_count
from lmcache_mp.edits.arrays import as_float32, empty_like, module_of, to_numpy
from lmcache_mp.edits.selection import Edit, Selection, plain_repr
from lmcache_mp.edits.view import StreamView, takes_stream
from lmcache_mp.errors import UsageError

#: Tokens quantized at a time: float32 copies of them stay in the processor's cache.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class identity:
    """Changes nothing: KV [2, L, T, D] to itself. What an edit costs that does nothing."""

    def __call__(self, kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Its arguments."""
        return kv, tokens


@dataclass(frozen=True, slots=True, repr=False)
class quantize:
    """KV [2, L, T, D] rounded to ``bits`` (8 or 4) and back, in its own dtype.

    Each run of ``group`` dimensions of a token has its own scale: q = round((x - min) / s) with
    s = (max - min) / (2^bits - 1), and x' = q * s + min. The info has what is lost, ||x' - x|| /
    ||x||, of keys and of values. Rounding by token: Liu et al., KIVI,
    https://arxiv.org/abs/2402.02750 (which has keys by channel).
    """

    bits: int = 8
    group: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise UsageError(f"bits must be 8 or 4, not {self.bits!r}")
        check_count(self.group, "group")

    def __repr__(self) -> str:
        return plain_repr(self)

    def __call__(self, kv: Any, tokens: list[int]) -> Edit:
        """The rounded KV, the tokens as they are, and the errors."""
        if kv.shape[3] % self.group:
            raise UsageError(f"KV {kv.shape[3]} wide is not made of groups of {self.group}")
        out = empty_like(kv, tuple(kv.shape))
        lost, whole = np.zeros(2), np.zeros(2)
        for plane in range(2):
            for layer in range(kv.shape[1]):
                for start in range(0, kv.shape[2], _ROWS):
                    rows = slice(start, start + _ROWS)
                    x = as_float32(kv[plane, layer, rows])
                    rounded = self._round(x)
                    out[plane, layer, rows] = rounded
                    lost[plane] += _squares(rounded - x)
                    whole[plane] += _squares(x)
        errors = np.sqrt(lost / np.maximum(whole, 1e-30))
        info = {"key_error": float(errors[0]), "value_error": float(errors[1])}
        return out, tokens, info

    def _round(self, x: Any) -> Any:
        module = module_of(x)
        groups = x.reshape(x.shape[0], -1, self.group)
        low = module.amin(groups, axis=-1)[..., None]
        step = (module.amax(groups, axis=-1)[..., None] - low) / (2**self.bits - 1)
        step = module.where(step > 0, step, module.ones_like(step))
        return (module.round((groups - low) / step) * step + low).reshape(x.shape)


def _squares(x: Any) -> float:
    flat = to_numpy(x).reshape(-1)
    return float(np.dot(flat, flat))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class compose:
    """One edit after another, of ready ones and of your own: ``compose(knorm(0.5), quantize())``.

    Their infos come back with the position of the edit before each key, ``0_kept``, ``1_kept``,
    where several edits return the same key.
    """

    edits: tuple[Callable[..., Any], ...]

    def __init__(self, *edits: Callable[..., Any]) -> None:
        for edit in edits:
            if not callable(edit):
                raise UsageError(f"compose takes edit functions, not {edit!r}")
        selections = [edit for edit in _flat(edits) if isinstance(edit, Selection)]
        for earlier, later in itertools.pairwise(selections):
            if "queries" in later.needs:
                raise UsageError(f"{later!r} needs queries, which {earlier!r} takes the sense from")
            if later.rerotate and not earlier.rerotate:
                raise UsageError(
                    f"{later!r} would turn keys from positions that {earlier!r} left behind: "
                    "let both have rerotate=True"
                )
        object.__setattr__(self, "edits", edits)

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.edits))})"

    @property
    def needs(self) -> frozenset[str]:
        """What a context must have."""
        return frozenset().union(*(getattr(edit, "needs", ()) for edit in self.edits))

    def __call__(self, kv: Any, tokens: list[int], stream: StreamView | None = None) -> Edit:
        """What the last edit returns, and the infos of all."""
        infos: list[dict[str, Any]] = []
        for edit in self.edits:
            result = edit(kv, tokens, stream=stream) if takes_stream(edit) else edit(kv, tokens)
            kv, tokens = result[:2]
            infos.append(dict(result[2] or {}) if len(result) == 3 else {})
        keys = [key for info in infos for key in info]
        named = {
            key if keys.count(key) == 1 else f"{place}_{key}": value
            for place, info in enumerate(infos)
            for key, value in info.items()
        }
        return kv, tokens, named


def _flat(edits: tuple[Callable[..., Any], ...]) -> list[Callable[..., Any]]:
    return [
        inner
        for edit in edits
        for inner in (_flat(edit.edits) if isinstance(edit, compose) else [edit])
    ]
