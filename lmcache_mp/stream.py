"""One request: generate, retrieve its KV, edit it, generate on. Works alone, in one process.

In a batch the same object is a handle: a worker runs the passes, and the handle is kept up to date.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from lmcache_mp import records
from lmcache_mp.engines.engine import (
    PostCompletion,
    SamplingParams,
    TokenEvent,
    TokensEvent,
)
from lmcache_mp.errors import KVError, LMCacheStreamError, UsageError
from lmcache_mp.kv.context import KVContext, PinningContext, check_salt
from lmcache_mp.passes.checks import check_edit, expected_kv
from lmcache_mp.passes.edit import edit_pass, retrieve_whole
from lmcache_mp.passes.generate import generate_pass
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Edited, Generated, Ids, StreamState, ids_of
from lmcache_mp.passes.view import check_needs, kind_of, kv_context

__all__ = [
    "LMCacheStream",
    "LMCacheStreamError",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "TokensEvent",
    "create_request",
]

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class StreamPerfMetrics:
    """What one generate measured; times in seconds, throughputs in tokens per second.

    ``ttft`` and the throughputs are NaN where they are undefined. ``tpot`` is LMCache's list of
    gaps between events, made on access.
    """

    duration: float
    input_tokens: int
    output_tokens: int
    ttft: float
    event_times: bytes = b""

    @classmethod
    def from_outcome(cls, row: bytes, times: bytes) -> StreamPerfMetrics:
        """From a GENERATE row and its events' times, as a pass sends them."""
        record = np.frombuffer(row, records.GENERATE)[0]
        first = float(np.frombuffer(times, np.float64, 1)[0]) if times else float("nan")
        return cls(
            float(record["duration"]),
            int(record["input_tokens"]),
            int(record["output_tokens"]),
            first,
            times,
        )

    @property
    def tpot(self) -> list[float]:
        """Gaps between consecutive events, in seconds."""
        gaps: list[float] = np.diff(np.frombuffer(self.event_times, np.float64)).tolist()
        return gaps

    @property
    def input_tput(self) -> float:
        """Prompt tokens per second over the whole pass."""
        return self.input_tokens / self.duration if self.duration > 0 else float("nan")

    @property
    def output_tput(self) -> float:
        """Generated tokens per second over the whole pass."""
        return self.output_tokens / self.duration if self.duration > 0 else float("nan")


def create_request(
    ctx: KVContext | Iterable[KVContext],
    post_completion: PostCompletion,
    prompt_token_ids: Sequence[int],
    cache_salt: str = "",
) -> LMCacheStream:
    """A new request. Nothing is opened or sent; a bad prompt or salt is a UsageError.

    ``ctx`` may be an iterable of contexts of different kinds; one of them must hold KV.
    """
    contexts = _contexts(ctx)
    if not callable(post_completion):
        raise UsageError(
            "post_completion must be callable as (prompt_token_ids, sampling_params, cache_salt), "
            f"which a {type(post_completion).__name__} is not"
        )
    prompt = _check_prompt(prompt_token_ids, post_completion)
    return LMCacheStream(contexts, post_completion, prompt, check_salt(cache_salt))


def _contexts(ctx: KVContext | Iterable[KVContext]) -> tuple[KVContext, ...]:
    contexts = tuple(ctx) if isinstance(ctx, Iterable) else (ctx,)
    for context in contexts:
        if type(context).__module__.startswith("lmcache."):
            raise UsageError(_instead_of(context))
        for name in ("lookup", "retrieve", "store"):
            if not callable(getattr(context, name, None)):
                raise UsageError(
                    f"a {type(context).__name__} is no KV context, as it has no {name}(): use "
                    "lmcache_mp.connect_local() or lmcache_mp.connect(...)"
                )
    if not any(kind_of(context) == "kv" for context in contexts):
        raise UsageError("a request needs a context that holds KV (kind 'kv')")
    return contexts


def _instead_of(context: object) -> str:
    """The line to use in place of a context of LMCache's own SDK."""
    http_url, model = (getattr(context, name, "...") for name in ("_http_url", "_model_name"))
    return (
        "a context of LMCache's own SDK holds sockets, which can't be sent to a worker: use "
        f"lmcache_mp.connect(url, {http_url!r}, {model!r}), with the url that it was connected by"
    )


def _check_prompt(prompt: Sequence[int], engine: PostCompletion) -> Ids[int]:
    if isinstance(prompt, str | bytes):
        raise UsageError("prompt_token_ids must be token ids, not text: encode it first")
    try:
        ids = list(prompt)
    except TypeError:
        kind = type(prompt).__name__
        raise UsageError(f"prompt_token_ids must be a sequence of ints, not {kind}") from None
    if not ids:
        raise UsageError("the prompt is empty: at least one token id is needed")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise UsageError(f"token id {token!r} at position {position} is not an integer")
        if not 0 <= token <= _LARGEST_ID:
            raise UsageError(f"token id {token} at position {position} is not in 0..{_LARGEST_ID}")
    check = getattr(engine, "check_prompt", None)
    if check is not None:
        check(ids)
    return ids_of(ids)


class LMCacheStream:
    """A logical request that may span several passes; made by :func:`create_request`.

    ``contexts`` and ``post_completion`` are what it was created with. ``tokens`` is the sequence
    behind the stored KV; ``output_tokens()`` are the generated ids only.
    """

    def __init__(
        self,
        contexts: tuple[KVContext, ...],
        post_completion: PostCompletion,
        prompt_token_ids: Ids[int],
        cache_salt: str,
    ) -> None:
        self.contexts = contexts
        self.post_completion = post_completion
        self._id = str(uuid.uuid4())
        self._state = StreamState.start(prompt_token_ids, cache_salt)
        self._output: Ids[int] = ids_of(())
        self._text: list[str] = []
        self._done = False
        self._in_batch = False

    def __repr__(self) -> str:
        return (
            f"<LMCacheStream {self._id}: {len(self._state.tokens)} tokens, "
            f"{len(self._output)} generated{', done' if self._done else ''}>"
        )

    def stream_id(self) -> str:
        """The unique id of the request."""
        return self._id

    @property
    def tokens(self) -> list[int]:
        """The sequence that backs the stored KV: the prompt, then what was generated or edited."""
        return self._state.tokens.tolist()

    @property
    def cache_salt(self) -> str:
        """The salt the request was created with."""
        return self._state.cache_salt

    @property
    def state(self) -> StreamState:
        """What the next pass starts from; immutable."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether the request ended by itself, at an end of sequence; an edit clears it."""
        return self._done

    def is_done(self) -> bool:
        """Whether the request ended by itself; see :attr:`done`."""
        return self._done

    def suffix_tokens(self) -> list[int]:
        """Tokens without stored KV, which the next generate sends after ``tokens``."""
        return self._state.suffix.tolist()

    def decoded_tokens(self) -> int:
        """How many tokens were generated over all passes."""
        return len(self._output)

    def output_text(self) -> str:
        """The generated text of all passes."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def output_tokens(self) -> list[int]:
        """The generated token ids of all passes, without the prompt."""
        return self._output.tolist()

    def generate(
        self, sampling_params: SamplingParams, suffix_tokens: Sequence[int] = ()
    ) -> StreamPerfMetrics:
        """One pass: send ``tokens``, the pending suffix and ``suffix_tokens``; take what comes.

        Raises the engine's error. A failed pass adds nothing to the stream and can be repeated.
        """
        self._refuse_in_batch("prefill() or decode()")
        suffix = tuple(_check_prompt(suffix_tokens, _no_engine)) if len(suffix_tokens) else ()
        outcome = generate_pass(
            self._state,
            self.post_completion,
            self.contexts,
            sampling_params,
            self._label(),
            suffix_tokens=suffix,
        )
        self.commit(_change_of(outcome))
        if outcome.warning:
            warnings.warn(f"stream {self._id}: {outcome.warning}", RuntimeWarning, stacklevel=2)
        return StreamPerfMetrics.from_outcome(outcome.row, outcome.times)

    def retrieve_kv(self, timeout: float = 30.0, poll_interval: float = 0.2) -> Any:
        """The stored KV, [2, L, T, D], T in whole chunks; waits for the prompt's chunks.

        The array is private and writable, of the context's kind (numpy or torch). The context is
        opened in this process. Raises a KVError when the KV is not there after ``timeout`` seconds.
        """
        return self.retrieve_kind("kv", timeout, poll_interval)

    def retrieve_kind(self, kind: str, timeout: float = 30.0, poll_interval: float = 0.2) -> Any:
        """What the context of a kind has for the tokens that have KV; see :meth:`retrieve_kv`.

        Queries (kind "query") are [1, L, T, query_heads * head_dim]. KVError: no such context.
        """
        for context in self.contexts:
            if kind_of(context) == kind:
                return retrieve_whole(
                    self._state, context, timeout=timeout, poll_interval=poll_interval
                )
        raise KVError(f"the request has no context of kind {kind!r}")

    def update_kv(self, kv: Any, tokens: Sequence[int]) -> None:
        """Store ``kv`` [2, L, T, D] for ``tokens`` [T], from which the stream then goes on.

        Only whole chunks are stored. Raises a KVError for shapes or dtypes that do not fit.
        """
        self._refuse_in_batch("modify()")

        def replace_kv(old: Any, old_tokens: list[int]) -> tuple[Any, Sequence[int]]:
            return kv, tokens

        check_edit(
            (kv, tokens),
            expected_kv(kv),
            replace_kv,
            kv_context(self.contexts).chunk_size,
        )
        self._edit(replace_kv, 30.0, 0.2)

    def modify_kv(
        self, fn: Callable[..., Any], timeout: float = 30.0, poll_interval: float = 0.2
    ) -> None:
        """Replace the stored KV by what ``fn(kv, tokens)`` returns: (new_kv, new_tokens[, info]).

        ``kv`` is [2, L, T, D] and may be edited in place; ``tokens`` are its T ids. Tokens past
        the stored chunks become the suffix. A function with a third parameter ``stream`` gets a
        :class:`~lmcache_mp.edits.view.StreamView`. ``timeout`` bounds the wait for
        the KV. A failed edit changes nothing; the function's own error is raised.
        """
        self._refuse_in_batch("modify()")
        self._edit(fn, timeout, poll_interval)

    def _edit(self, fn: Callable[..., Any], timeout: float, poll_interval: float) -> None:
        check_needs(fn, self.contexts)
        old_salt, was_edited = self._state.kv_salt, self._state.edits > 0
        outcome = edit_pass(
            self._state,
            fn,
            self.contexts,
            self._label(),
            timeout=timeout,
            poll_interval=poll_interval,
        )
        self.commit(_change_of(outcome))
        context = kv_context(self.contexts)
        if was_edited and isinstance(context, PinningContext):
            context.release(old_salt)

    def commit(self, change: Generated | Edited) -> None:
        """Make a successful pass' change part of the stream."""
        if isinstance(change, Generated):
            self._state = self._state.after_generate(change)
            self._output = self._output + ids_of(change.ids)
            self._text.append(change.text)
            self._done = change.done
        else:
            self._state = self._state.after_edit(change)
            self._done = False

    def join_batch(self) -> None:
        """From now on a batch runs the passes; calls that would run one here are refused.

        UsageError for a stream of another batch: two owners would edit it unknown to each other.
        """
        if self._in_batch:
            raise UsageError(
                f"stream {self._id} belongs to another batch: make a request for each batch"
            )
        self._in_batch = True

    def _label(self) -> PassLabel:
        # The nonce alone makes its salts its own; random numbers are those of a batch's first.
        return PassLabel(self._id, nonce=self._id, key="position:0", round=self._state.edits)

    def _refuse_in_batch(self, instead: str) -> None:
        if self._in_batch:
            raise UsageError(
                f"stream {self._id} belongs to a batch, whose worker owns it: use its {instead}"
            )


def _change_of(outcome: Outcome) -> Generated | Edited:
    if outcome.error is not None:
        raise outcome.error
    if outcome.change is None:
        raise KVError("the pass ended without a result")
    return outcome.change


def _no_engine(
    prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
) -> NoReturn:
    raise LMCacheStreamError("this engine only stands in where prompts are checked")
