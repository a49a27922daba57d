"""What a stream is to go through: rounds of prefill, modify and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lmcache_mp.arguments import check_sampling_params, check_seconds
from lmcache_mp.errors import UsageError
from lmcache_mp.passes.checks import describe

__all__ = ["Decode", "Modify", "Prefill", "Round", "decode", "modify", "prefill"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The stream's prompt, for one token; its KV is then in the store."""

    sampling_params: Mapping[str, Any]
    phase: ClassVar = "prefill"
    forced: ClassVar[Mapping[str, Any]] = {"max_tokens": 1}

    def __str__(self) -> str:
        return f"prefill({dict(self.sampling_params)})"


@dataclass(frozen=True, slots=True)
class Modify:
    """An edit of the stream's KV; see :meth:`lmcache_mp.batch.LMCacheBatchedStream.modify`."""

    fn: Callable[..., Any]
    timeout: float = 30.0
    poll_interval: float = 0.2
    phase: ClassVar = "modify"

    def __str__(self) -> str:
        return f"modify({describe(self.fn)})"


@dataclass(frozen=True, slots=True)
class Decode:
    """Generation from what is stored."""

    sampling_params: Mapping[str, Any]
    phase: ClassVar = "decode"
    forced: ClassVar[Mapping[str, Any]] = {}

    def __str__(self) -> str:
        return f"decode({dict(self.sampling_params)})"


Round = Prefill | Modify | Decode


def prefill(sampling_params: Mapping[str, Any]) -> Prefill:
    """A round that prefills; ``max_tokens`` is 1 whatever is given. UsageError: no parameters."""
    return Prefill(check_sampling_params(sampling_params, "sampling_params"))


def modify(fn: Callable[..., Any], *, timeout: float = 30.0, poll_interval: float = 0.2) -> Modify:
    """A round that edits KV by ``fn(kv, tokens) -> (new_kv, new_tokens[, info])``.

    ``timeout`` seconds bound the wait for the KV. UsageError for a wrong argument.
    """
    if not callable(fn):
        raise UsageError(f"an edit must be a function of (kv, tokens), not {fn!r}")
    wait = check_seconds(timeout, "timeout")
    return Modify(fn, wait, check_seconds(poll_interval, "poll_interval", positive=True))


def decode(sampling_params: Mapping[str, Any]) -> Decode:
    """A round that generates. UsageError: no parameters."""
    return Decode(check_sampling_params(sampling_params, "sampling_params"))


def check_rounds(rounds: object) -> list[Round]:
    """``rounds`` as a list of at least one, or a UsageError."""
    if isinstance(rounds, Round):
        rounds = [rounds]
    if isinstance(rounds, str) or not isinstance(rounds, Iterable):
        raise UsageError(f"rounds must be a list of prefill, modify and decode, not {rounds!r}")
    found = list(rounds)
    for it in found:
        if not isinstance(it, Round):
            raise UsageError(f"{it!r} is no round: use lmcache_mp.rounds' prefill, modify, decode")
    if not found:
        raise UsageError("a run needs at least one round")
    return found
