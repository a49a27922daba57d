"""The engine port: what a stream asks of whatever produces its tokens.

An engine is any picklable callable of the shape :class:`PostCompletion`. Optional attributes tell a
worker how to drive it:

``max_in_flight: int``
    Passes that one worker may have open at once (no limit without it).
``blocking: bool``
    False says that iterating never waits, so a worker needs no thread for a pass.
``open()`` / ``close()``
    Called once in a worker before its first pass, and when it ends.
``check_prompt(prompt_token_ids)``
    Called in the parent before anything is sent; raises :class:`~lmcache_mp.errors.UsageError` for
    ids beyond the vocabulary or a prompt beyond the model's context.
``check_sampling_params(sampling_params)``
    Likewise, for parameters that it does not know or can't honour.

``cached_tokens_hint``
    What to do so that the engine reports ``cached_tokens``, for the warning where it does not.

The iterator that it returns may have ``cancel()``, called from another thread to end a pass that
waits, ``close()``, called when a pass is given up, and ``retried``, how often its request was sent
again before anything arrived (it counts in the record's ``attempt``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: Sampling parameters are the engine's own JSON-like fields: max_tokens, temperature, seed, ...
SamplingParams = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    ``text`` is what the token adds to the output (it may be empty while a character is incomplete);
    ``finish_reason`` ("stop", "length", ...) stands on the last event of a pass; ``cached_tokens``
    on any event is the count of prompt tokens whose KV the engine reused.
    """

    token_id: int
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Several tokens that arrived together (or none, with a late text or finish reason).

    ``reported_tokens`` is the engine's own count of what it generated in the pass.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None
    reported_tokens: int | None = None


class PostCompletion(Protocol):
    """Submits a prompt and yields its tokens as they come."""

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterable[TokenEvent | TokensEvent]:
        """Generate from ``prompt_token_ids``; ``cache_salt`` names the KV the prompt may use."""
        ...
