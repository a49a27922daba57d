"""One request, by LMCache's second generation of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lmcache_mp import stream as ours
from lmcache_mp.engines.engine import PostCompletion, SamplingParams, TokenEvent
from lmcache_mp.errors import LMCacheMPError, LMCacheStreamError
from lmcache_mp.kv.context import KVContext
from lmcache_mp.passes.edit import OverKinds
from lmcache_mp.sdk.context import LMCacheSDKCacheKind, ModifyFnType
from lmcache_mp.stream import StreamPerfMetrics

__all__ = [
    "LMCacheRequestStream",
    "LMCacheRequestStreamError",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
]

LMCacheRequestStreamError = LMCacheStreamError


def create_request(
    contexts: Iterable[KVContext],
    post_completion: PostCompletion,
    prompt_token_ids: Sequence[int],
    cache_salt: str = "",
) -> LMCacheRequestStream:
    """A new request; see :func:`lmcache_mp.stream.create_request`."""
    return LMCacheRequestStream(contexts, post_completion, prompt_token_ids, cache_salt)


def over_kinds(fn: ModifyFnType) -> OverKinds:
    """``fn`` as an edit that is given its arrays by :class:`LMCacheSDKCacheKind`."""
    return OverKinds(fn, LMCacheSDKCacheKind)


class LMCacheRequestStream:
    """A request over several passes; ``stream`` is the same thing by this library's own names."""

    def __init__(
        self,
        contexts: Iterable[KVContext],
        post_completion: PostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        self.stream = ours.create_request(contexts, post_completion, prompt_token_ids, cache_salt)

    def __repr__(self) -> str:
        return f"<LMCacheRequestStream of {self.stream!r}>"

    @property
    def post_completion(self) -> PostCompletion:
        """The engine."""
        return self.stream.post_completion

    @property
    def cache_salt(self) -> str:
        """The salt that the request was created with."""
        return self.stream.cache_salt

    @property
    def tokens(self) -> list[int]:
        """The sequence that backs the stored KV."""
        return self.stream.tokens

    @property
    def done(self) -> bool:
        """Whether the request ended by itself."""
        return self.stream.done

    @property
    def request_stream_id(self) -> str:
        """The unique id of the request."""
        return self.stream.stream_id()

    @property
    def suffix_tokens(self) -> list[int]:
        """Tokens without stored KV, which the next generate sends after ``tokens``."""
        return self.stream.suffix_tokens()

    @property
    def decoded_tokens(self) -> int:
        """How many tokens were generated over all passes."""
        return self.stream.decoded_tokens()

    @property
    def output_text(self) -> str:
        """The generated text of all passes."""
        return self.stream.output_text()

    @property
    def output_tokens(self) -> list[int]:
        """LMCache's meaning: the whole sequence, ``tokens``, prompt included."""
        return self.stream.tokens

    @property
    def is_done(self) -> bool:
        """Whether the request ended by itself."""
        return self.stream.done

    def generate(
        self, sampling_params: SamplingParams, suffix_tokens: Sequence[int] = ()
    ) -> StreamPerfMetrics:
        """One pass. Whatever the engine raises is an LMCacheRequestStreamError."""
        try:
            return self.stream.generate(sampling_params, suffix_tokens)
        except LMCacheMPError:
            raise
        except Exception as error:
            raise LMCacheRequestStreamError(
                f"stream {self.request_stream_id} failed while it generated: {error}"
            ) from error

    def retrieve(
        self, kind: LMCacheSDKCacheKind, timeout: float = 30.0, poll_interval: float = 0.2
    ) -> Any:
        """What is stored for the request's tokens: KV [2, L, T, D], or queries [1, L, T, D]."""
        return self.stream.retrieve_kind(kind.value, timeout, poll_interval)

    def update(self, kind: LMCacheSDKCacheKind, kv: Any, tokens: Sequence[int]) -> None:
        """Store KV [2, L, T, D] for ``tokens`` [T], from which the request then goes on."""
        if kind is not LMCacheSDKCacheKind.KV:
            raise LMCacheRequestStreamError("only KV can be updated: queries are the engine's own")
        self.stream.update_kv(kv, tokens)

    def modify_kv(
        self, fn: ModifyFnType, timeout: float = 30.0, poll_interval: float = 0.2
    ) -> None:
        """Replace the stored KV by what ``fn({kind: array}, tokens)`` returns."""
        self.stream.modify_kv(over_kinds(fn), timeout, poll_interval)
