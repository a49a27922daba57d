"""What all edits that drop tokens share: how many are kept, which, and what becomes of the keys."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.arguments import check_choice, check_count
from lmcache_mp.edits.gather import gather
from lmcache_mp.edits.rope import Rope
from lmcache_mp.edits.view import StreamView
from lmcache_mp.errors import UsageError

Scores = NDArray[np.float64]

#: What an edit function returns: KV [2, L, n, D], n token ids, and figures for the report.
Edit = tuple[Any, list[int], dict[str, Any]]


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """Keeps the tokens with the highest scores, in their order; a subclass makes the scores.

    How many: ``keep``, a share above 0 and up to 1; or ``keep_tokens``, a count; or
    ``compression_ratio``, which is 1 - keep. A share is taken as the decimal that it is written as,
    and rounded down, but at least one token is kept. ``align`` "chunk" rounds up to whole chunks
    of the store, as only those are stored; "none" keeps the very count.
    ``sinks`` first and ``recent`` last tokens are kept before any other.
    ``rerotate`` turns kept keys to their new positions, with ``rope`` or what the context knows:
    an engine takes a token's position from the count of tokens before it.

    All layers and heads keep the same tokens, as KV [2, L, T, D] has one T: scores are averages.
    """

    keep: float | None = None
    _: KW_ONLY
    keep_tokens: int | None = None
    compression_ratio: float | None = None
    sinks: int = 4
    recent: int = 16
    rerotate: bool = True
    rope: Rope | None = None
    align: str = "none"

    _looks_at: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        given = [self.keep, self.keep_tokens, self.compression_ratio]
        if sum(value is not None for value in given) != 1:
            raise UsageError(
                f"{type(self).__name__} takes one of keep=0.5 (a share), keep_tokens=1000 and "
                "compression_ratio=0.5"
            )
        if self.keep_tokens is not None:
            check_count(self.keep_tokens, "keep_tokens")
        elif not 0 < self._share() <= 1:
            name = "keep" if self.keep is not None else "1 - compression_ratio"
            raise UsageError(f"{name} must be above 0 and at most 1, not {float(self._share()):g}")
        check_count(self.sinks, "sinks", least=0)
        check_count(self.recent, "recent", least=0)
        check_choice(self.align, ("none", "chunk"), "align")
        if self.rope is not None and not isinstance(self.rope, Rope):
            raise UsageError(f"rope must be a Rope, not {self.rope!r}: Rope.from_config(...)")

    def __repr__(self) -> str:
        return plain_repr(self)

    @property
    def needs(self) -> frozenset[str]:
        """What a context must have: see :func:`lmcache_mp.passes.view.check_needs`."""
        missing = self._looks_at | ({"rope"} if self.rerotate else set())
        if self.rope is not None:
            return missing - {"rope", "head_dim"}
        return missing if getattr(self, "head_dim", None) is None else missing - {"head_dim"}

    def __call__(self, kv: Any, tokens: list[int], stream: StreamView | None = None) -> Edit:
        """KV [2, L, T, D] and its T token ids, to those that are kept, and the counts."""
        view = stream or StreamView()
        total = len(tokens)
        if kv.shape[2] != total:
            raise UsageError(f"KV of {kv.shape[2]} tokens was given with {total} token ids")
        rope = (self.rope or view.rope) if self.rerotate else None
        if stream is None and self.align == "chunk":
            raise UsageError("align='chunk' needs a stream, which says how large a chunk is")
        count = self.count(total, view.chunk_size)
        info = {"kept": count, "dropped": total - count}
        if count == total:
            return kv, list(tokens), info
        index = self.choose(kv, count, view)
        kept: list[int] = np.asarray(tokens)[index].tolist()
        return gather(kv, index, rope), kept, info

    def count(self, tokens: int, chunk_size: int = 1) -> int:
        """How many of ``tokens`` are kept."""
        kept = self.keep_tokens
        if kept is None:
            kept = max(1, math.floor(self._share() * tokens))
        if self.align == "chunk":
            kept = -(-kept // chunk_size) * chunk_size
        return min(tokens, kept)

    def choose(self, kv: Any, count: int, stream: StreamView) -> NDArray[np.int64]:
        """The positions [count] that are kept, increasing. Of equal scores the earliest win."""
        scores = np.array(self.scores(kv, stream), np.float64)
        sinks = min(self.sinks, count)
        recent = min(self.window(kv, stream), count - sinks)
        scores[:sinks] = np.inf
        scores[len(scores) - recent :] = np.inf
        order = np.argsort(-scores, kind="stable")
        return np.sort(order[:count])

    def window(self, kv: Any, stream: StreamView) -> int:
        """How many of the last tokens are kept before any other."""
        return self.recent

    def scores(self, kv: Any, stream: StreamView) -> Scores:
        """How much each token is worth keeping: [T]."""
        raise NotImplementedError

    def _share(self) -> Fraction:
        """The share that is kept, exactly."""
        if self.keep is not None:
            return exactly(self.keep, "keep")
        return 1 - exactly(self.compression_ratio, "compression_ratio")


@dataclass(frozen=True, slots=True, repr=False)
class ByHeads(Selection):
    """A selection that looks into heads. ``head_dim``: their dimensions, else those of the rope."""

    _: KW_ONLY
    head_dim: int | None = None

    _looks_at: ClassVar[frozenset[str]] = frozenset({"head_dim"})

    def __post_init__(self) -> None:
        Selection.__post_init__(self)
        if self.head_dim is not None:
            check_count(self.head_dim, "head_dim")

    def head_width(self, kv: Any, stream: StreamView) -> int:
        """Dimensions of a head. UsageError: ``kv`` is not made of such heads."""
        width = self.head_dim or (self.rope or stream.rope).head_dim
        if kv.shape[3] % width:
            raise UsageError(f"KV {kv.shape[3]} wide is not made of heads of {width} dimensions")
        return width


def exactly(value: object, name: str) -> Fraction:
    """A number as the decimal that it is written as: 0.9 is nine tenths."""
    if isinstance(value, Decimal) and value.is_finite():
        return Fraction(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if isinstance(value, numbers.Rational):
        return Fraction(value)
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a number, not {value!r}")
    return Fraction(repr(number))


def plain_repr(edit: Any) -> str:
    """How an edit would be made: its name and what differs from the defaults."""
    fields = [
        f"{field.name}={getattr(edit, field.name)!r}"
        for field in dataclasses.fields(edit)
        if getattr(edit, field.name) != field.default
    ]
    return f"{type(edit).__name__}({', '.join(fields)})"
