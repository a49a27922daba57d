"""What an edit function may know of its stream: its third parameter, named ``stream``."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.edits.rope import Rope
from lmcache_mp.errors import KVError

#: Queries [L, W, H * head_dim], and the positions [W] of their tokens.
Queries = tuple[Any, NDArray[np.int64]]


class StreamView:
    """A stream as an edit sees it; read-only. ``rope`` and ``queries`` are made when asked for.

    Edits get one from a batch; to call an edit by hand make one: ``StreamView(rope=ctx.rope)``.
    """

    __slots__ = (
        "_chunk_size",
        "_custom_id",
        "_queries",
        "_rng",
        "_rope",
        "_round",
        "_stream_id",
    )

    def __init__(
        self,
        *,
        stream_id: str = "",
        custom_id: str | None = None,
        round: int = 0,
        chunk_size: int = 1,
        rng: np.random.Generator | None = None,
        rope: Rope | Callable[[], Rope] | None = None,
        queries: Queries | Callable[[], Queries] | None = None,
    ) -> None:
        self._stream_id = stream_id
        self._custom_id = custom_id
        self._round = round
        self._chunk_size = chunk_size
        self._rng = rng or stream_rng(0, "", 0)
        self._rope = rope
        self._queries = queries

    @property
    def stream_id(self) -> str:
        """The unique id of the stream."""
        return self._stream_id

    @property
    def custom_id(self) -> str | None:
        """What ``add`` was told to call it."""
        return self._custom_id

    @property
    def round(self) -> int:
        """The phase of the batch, from 0 (column ``round``); alone, how many edits went before."""
        return self._round

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk of the store."""
        return self._chunk_size

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this stream in this round, equal in every run of the program."""
        return self._rng

    @property
    def rope(self) -> Rope:
        """The model's rotary embedding. KVError: the context does not know it."""
        if callable(self._rope):
            self._rope = self._rope()
        if self._rope is None:
            raise KVError(
                "the model's rotary embedding is not known to the context: give an edit its "
                "rope=Rope.from_config(...), or rerotate=False to leave keys as they are"
            )
        return self._rope

    @property
    def queries(self) -> Any:
        """Queries [L, W, H * head_dim], after RoPE, of the last prompt tokens. KVError: none."""
        return self._found_queries()[0]

    @property
    def query_positions(self) -> NDArray[np.int64]:
        """The positions [W] of the tokens of ``queries``; the last ones may be past the KV."""
        return self._found_queries()[1]

    def _found_queries(self) -> Queries:
        if callable(self._queries):
            self._queries = self._queries()
        if self._queries is None:
            raise KVError(
                "there are no queries of this stream: connect_local(..., capture_queries=64) or a "
                "context of the kind 'query' has them, until the stream is edited"
            )
        return self._queries

    def __repr__(self) -> str:
        return f"<StreamView {self._custom_id or self._stream_id}, round {self._round}>"


def stream_rng(seed: int, key: str, round: int) -> np.random.Generator:
    """Random numbers of (seed, a stable hash of the stream's key, round)."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng([seed, int.from_bytes(digest, "little"), round])


def takes_stream(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named ``stream``."""
    try:
        return "stream" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # of some callables written in C
        return False
