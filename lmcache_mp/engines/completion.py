"""The output of one pass: chosen tokens, their text, and the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.engines.engine import TokenEvent
from lmcache_mp.engines.sampling import Sampler, Sampling
from lmcache_mp.engines.tokenizer import TextStream, Tokenizer


class StopText:
    """Lets text through up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown now that ``text`` has come."""
        held = self._held + text
        found = [at for at in map(held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            shown = min(found)
            self._held = ""
        else:
            shown = len(held) - self._beginning(held)
            self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """The text held back: no stop string will come."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the start of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Completion:
    """Makes tokens from logits until one ends the pass, a stop string comes, or a limit is reached.

    ``room`` is how many tokens fit into the model's context after the prompt; ``eos_ids`` end the
    sequence unless ``ignore_eos``. A token that ends the pass is part of it, without text.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int],
        room: int,
    ) -> None:
        self.token_ids: list[int] = []
        self._limit = min(room, sampling.max_tokens or room)
        self._min_tokens = sampling.min_tokens
        self._ends = sampling.stop_token_ids | (set() if sampling.ignore_eos else set(eos_ids))
        self._sampler = Sampler(sampling, prompt_token_ids)
        self._text = TextStream(tokenizer)
        self._stop = StopText(sampling.stop)

    def accept(self, logits: NDArray[np.float32], cached_tokens: int | None = None) -> TokenEvent:
        """The next token, from the logits [V] after all that came before."""
        early = len(self.token_ids) < self._min_tokens
        barred = [token for token in self._ends if token < len(logits)] if early else ()
        token = self._sampler.choose(logits, barred)
        self.token_ids.append(token)
        if token in self._ends:
            return TokenEvent(token, self._rest(), "stop", cached_tokens)
        piece = self._text.push(token)
        text = piece if early else self._stop.push(piece)
        if not self._stop.stopped and len(self.token_ids) == self._limit:
            text += self._rest()
            reason = "stop" if self._stop.stopped else "length"
            return TokenEvent(token, text, reason, cached_tokens)
        return TokenEvent(token, text, "stop" if self._stop.stopped else None, cached_tokens)

    def _rest(self) -> str:
        """Text that waited for more: an incomplete character, the start of a stop string."""
        text = self._stop.push(self._text.flush())
        return text if self._stop.stopped else text + self._stop.flush()
