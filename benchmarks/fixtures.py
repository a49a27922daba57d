"""Contexts and engines that cost nearly nothing, so a benchmark measures what is around them.

LMCache's batch and ours take the same objects, and edit functions of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.stream import TokenEvent, create_request

CHUNK = 16


@dataclass
class ZeroKV:
    """KV of zeros, [2, 4, T, 64], for any tokens; edits are kept as a count of tokens."""

    chunk_size: int = CHUNK
    kind: Any = "kv"
    stored: dict[str, int] = field(default_factory=dict)

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Whole chunks, or what was stored under an edit's salt."""
        return self.stored.get(cache_salt, len(tokens) - len(tokens) % self.chunk_size)

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any:
        """A new array for each call."""
        return np.zeros((2, 4, self.lookup(tokens, cache_salt), 64), np.float32)

    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Remember how much there was."""
        self.stored[cache_salt] = len(tokens)
        return True

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class OneEvent:
    """Yields one token and never waits."""

    blocking: bool = False

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        yield TokenEvent(1, "x", "length")


def our_batch(
    engine: Any, streams: int, tokens: int, workers: int | None, context: Any = None
) -> LMCacheBatchedStream:
    """A batch of ours over prompts of ``tokens`` tokens, not started."""
    batch = LMCacheBatchedStream(workers)
    context = ZeroKV() if context is None else context
    for index in range(streams):
        batch.add(create_request(context, engine, [index + 1] * tokens, f"s{index}"))
    return batch


def their_batch(engine: Any, streams: int, tokens: int, context: Any = None) -> Any:
    """The same as LMCache's own batch, which gives each stream a thread."""
    from lmcache.sdk.batch import LMCacheBatchedStream as Theirs
    from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
    from lmcache.sdk.request import create_request as their_request

    batch = Theirs()
    context = ZeroKV(kind=LMCacheSDKCacheKind.KV) if context is None else context
    for index in range(streams):
        batch.add(their_request([context], engine, [index + 1] * tokens, f"s{index}"))
    return batch


def their_edit(fn: Callable[[Any, list[int]], Any]) -> Callable[[Any, list[int]], Any]:
    """An edit function of ours in LMCache's shape: KV comes in a mapping of kinds."""

    def edit(arrays: Any, tokens: list[int]) -> Any:
        (kv,) = arrays.values()
        return fn(kv, tokens)

    return edit
