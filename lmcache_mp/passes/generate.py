"""A generate pass: a prompt to an engine, and every event of its answer measured."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from lmcache_mp import records
from lmcache_mp.engines.engine import PostCompletion, SamplingParams, TokenEvent
from lmcache_mp.errors import EngineError, KVError
from lmcache_mp.kv.context import KVContext
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Generated, Ids, StreamState
from lmcache_mp.passes.view import kv_context

_ENDED_BADLY = ("abort", "error")

_Events = TypeVar("_Events")


class PassGuard:
    """Lets another thread stop a generate pass: between two events, or inside one that waits.

    An engine's iterator that can be interrupted from another thread has a method ``cancel()``.
    """

    __slots__ = ("_events", "stopped")

    def __init__(self) -> None:
        self.stopped = False
        self._events: object = None

    def watch(self, events: _Events) -> _Events:
        """The same iterator, from now on within reach of :meth:`stop`."""
        self._events = events
        if self.stopped:  # it was stopped before there was anything to watch
            self.stop()
        return events

    def stop(self) -> None:
        """Make the pass end soon."""
        self.stopped = True
        cancel = getattr(self._events, "cancel", None)
        if cancel is not None:
            cancel()


class _Arrivals:
    """What came out of an engine so far: kept, with its times, when the engine breaks off."""

    __slots__ = ("cached", "counts", "finish", "ids", "parts", "reported", "times")

    def __init__(self) -> None:
        self.ids: Ids[int] = array("i")
        self.parts: list[str] = []
        self.times = array("d")
        self.counts = array("i")
        self.finish: str | None = None
        self.cached = records.UNKNOWN
        self.reported = records.UNKNOWN

    def take(self, event: Any, elapsed: float) -> None:  # Any: LMCache's own events are taken too
        if type(event) is TokenEvent:
            ids: Sequence[int] = (event.token_id,)
        else:
            several = getattr(event, "token_ids", None)
            ids = (event.token_id,) if several is None else several
        if ids:
            new = array("i", ids)
            self.times.append(elapsed)
            self.counts.append(len(new))
            self.ids += new
            if min(new) < 0:
                raise EngineError(
                    "the engine sent no token ids: start vLLM with --return-tokens-as-token-ids, "
                    "or use a version that knows return_token_ids"
                )
        if event.text:
            self.parts.append(event.text)
        finish = getattr(event, "finish_reason", None) or self.finish
        if finish is not None and not isinstance(finish, str):
            raise EngineError(
                f"the engine sent the finish reason {finish!r}, which is not a string"
            )
        self.finish = finish
        cached = getattr(event, "cached_tokens", None)
        if cached is not None:
            self.cached = array("i", [cached])[0]  # nothing else fits into a record
        reported = getattr(event, "reported_tokens", None)
        if reported is not None:
            self.reported = array("i", [reported])[0]

    def ended_by_itself(self, params: SamplingParams) -> bool:
        if self.finish is not None:
            return self.finish != "length"
        limit = params.get("max_tokens")
        return len(self.ids) < (1 if limit is None else limit)

    def disagreement(self) -> str:
        """What to say if the engine's own count differs from what it sent; empty if not."""
        if self.reported in (records.UNKNOWN, len(self.ids)):
            return ""
        return (
            f"the engine reports {self.reported} generated tokens and sent {len(self.ids)} ids: "
            "text and ids may not belong together"
        )

    def change(self, params: SamplingParams, suffix_tokens: tuple[int, ...]) -> Generated:
        """What a pass that ended well adds to its stream."""
        text, done = "".join(self.parts), self.ended_by_itself(params)
        return Generated(self.ids.tobytes(), text, done, suffix_tokens)


def generate_pass(
    state: StreamState,
    engine: PostCompletion,
    contexts: Sequence[KVContext],
    params: SamplingParams,
    label: PassLabel,
    *,
    suffix_tokens: tuple[int, ...] = (),
    warn_unused_kv: bool = False,
    guard: PassGuard | None = None,
) -> Outcome:
    """Send the state's prompt to ``engine`` and measure every event until it ends.

    The clock (TTFT, duration) starts just before the engine is called, so an engine that works
    eagerly is timed too. After an edit the pass proves that the edited KV was used, as far as the
    engine tells: ``kv_used`` is 1, 0 (a KVError, or a warning with ``warn_unused_kv``) or unknown.
    """
    arrivals = _Arrivals()
    prompt = state.prompt(suffix_tokens)
    change: Generated | None = None
    error: BaseException | None = None
    used, doubt, warning = records.UNKNOWN, "", ""
    events: Iterable[Any] | None = None
    start = time.perf_counter()
    try:
        doubt = _missing_kv(state, contexts, prompt)
        if doubt and not warn_unused_kv:
            raise KVError(doubt)
        start = time.perf_counter()
        guard = guard or PassGuard()
        events = guard.watch(engine(prompt.tolist(), dict(params), state.kv_salt))
        _take_all(events, arrivals, start, guard)
        if arrivals.finish in _ENDED_BADLY:
            raise EngineError(f"the engine ended the request with {arrivals.finish!r}")
        if state.stored_tokens:
            used, late_doubt = _kv_used(state, arrivals.cached, len(prompt))
            doubt = doubt or late_doubt
            if doubt and not warn_unused_kv:
                raise KVError(doubt)
            used, warning = (0, doubt) if doubt else (used, "")
        warning = warning or arrivals.disagreement()
        change = arrivals.change(params, suffix_tokens)
    except BaseException as caught:  # a user's SystemExit is a failed pass too
        error = caught
    end = time.perf_counter()
    row = (
        *label.row_head(error is not None, start, end, _retried(events)),
        len(prompt),
        arrivals.cached,
        len(arrivals.ids),
        arrivals.reported,
        used,
        (arrivals.finish or "").encode("ascii", "replace"),
    )
    return Outcome(
        records.pack_generate(*row),
        change,
        error,
        arrivals.times.tobytes(),
        arrivals.counts.tobytes(),
        warning,
    )


def _take_all(events: Iterable[Any], arrivals: _Arrivals, start: float, guard: PassGuard) -> None:
    """Take every event. An iterator that is left early is closed, to free what it holds."""
    try:
        for event in events:
            try:
                arrivals.take(event, time.perf_counter() - start)
            except (AttributeError, OverflowError, TypeError, ValueError) as error:
                raise EngineError(
                    f"the engine sent {event!r:.200}, which is no event: {error}"
                ) from error
            if guard.stopped:
                break
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    if guard.stopped:  # also when cancel() just made the iterator end
        raise EngineError("the pass was cancelled")


def _retried(events: object) -> int:
    """How often an engine repeated its request, if its iterator says so."""
    retried = getattr(events, "retried", 0)
    return retried if isinstance(retried, int) and 0 <= retried < 1 << 31 else 0


def _missing_kv(state: StreamState, contexts: Sequence[KVContext], prompt: Ids[int]) -> str:
    """Why the edited KV can't be used, found before the prompt is sent; empty if it can."""
    if not state.stored_tokens:
        return ""
    found = kv_context(contexts).lookup(prompt[: state.stored_tokens], state.kv_salt)
    if found >= state.stored_tokens:
        return ""
    return (
        f"the edited KV is gone: {found} of {state.stored_tokens} tokens are still stored, the "
        "engine would compute plain KV instead (give the store more room, or edit again)"
    )


def _kv_used(state: StreamState, cached: int, prompt_length: int) -> tuple[int, str]:
    """Whether the engine reused the edited KV (1, 0, UNKNOWN), and what to say if not."""
    if cached == records.UNKNOWN:
        return records.UNKNOWN, ""
    # The last prompt token is always computed: its logits are the next token's.
    if cached >= min(state.stored_tokens, prompt_length - 1):
        return 1, ""
    return (
        0,
        f"the engine reused {cached} of the {state.stored_tokens} edited tokens' KV",
    )
