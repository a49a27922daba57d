"""A context and an engine that cost nearly nothing, so a benchmark measures what is around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmcache_mp.stream import TokenEvent

CHUNK = 16


@dataclass
class ZeroKV:
    """KV of zeros, [2, 4, T, 64], for any tokens; edits are kept as a count of tokens."""

    chunk_size: int = CHUNK
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
