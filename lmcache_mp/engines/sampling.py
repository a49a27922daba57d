"""Sampling parameters of the embedded engine, and choosing a token from logits.

Names and meanings are those of OpenAI's completions and of vLLM's ``SamplingParams``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.errors import UsageError

#: Fields of servers that do not change which tokens come, so they may be given and say nothing.
_WITHOUT_EFFECT = frozenset(
    {
        "detokenize",
        "priority",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream",
        "stream_options",
        "user",
    }
)
#: Fields that are taken only with the value that switches them off.
_NEUTRAL: Mapping[str, object] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one pass chooses its tokens and when it ends; made by :meth:`parse`.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. Before ``min_tokens``
    tokens neither the end of the sequence nor a stop token is chosen, and no stop string ends the
    pass. ``max_tokens`` None is up to the model's context.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Sampling:
        """From a mapping of JSON-like values; None is the default. UsageError: a wrong one."""
        given = {name: value for name, value in params.items() if value is not None}
        for name in given.keys() - set(cls.__slots__) - _WITHOUT_EFFECT:
            if name not in _NEUTRAL:
                known = ", ".join(cls.__slots__)
                raise UsageError(f"unknown sampling parameter {name!r}; there are: {known}")
            if given[name] != _NEUTRAL[name]:
                raise UsageError(
                    f"{name}={given[name]!r}: the embedded engine has only {_NEUTRAL[name]!r}"
                )
        max_tokens, seed = given.get("max_tokens"), given.get("seed")
        top_k = _integer("top_k", given.get("top_k", 0), at_least=-1)
        parsed = cls(
            max_tokens=None if max_tokens is None else _integer("max_tokens", max_tokens, 1),
            min_tokens=_integer("min_tokens", given.get("min_tokens", 0), 0),
            temperature=_real("temperature", given.get("temperature", 1.0), math.inf),
            top_p=_real("top_p", given.get("top_p", 1.0), 1.0),
            top_k=max(0, top_k),
            seed=None if seed is None else _integer("seed", seed, None),
            ignore_eos=_flag("ignore_eos", given.get("ignore_eos", False)),
            stop=_strings("stop", given.get("stop", ())),
            stop_token_ids=frozenset(
                _integer("stop_token_ids", token, 0)
                for token in _items("stop_token_ids", given.get("stop_token_ids", ()))
            ),
        )
        if parsed.top_p == 0:
            raise UsageError("top_p=0 leaves no token; use temperature=0 for greedy decoding")
        if parsed.max_tokens is not None and parsed.min_tokens > parsed.max_tokens:
            raise UsageError(f"min_tokens={parsed.min_tokens} is more than max_tokens={max_tokens}")
        return parsed


class Sampler:
    """Chooses the tokens of one pass.

    With a seed the choices depend on the seed, the prompt and the logits alone: streams that share
    a seed do not sample in step, and no company or order of work changes a stream's tokens.
    """

    def __init__(self, sampling: Sampling, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._rng = _generator(sampling.seed, prompt_token_ids)

    def choose(self, logits: NDArray[np.float32], barred: Collection[int] = ()) -> int:
        """A token id from logits [V], never one of ``barred``."""
        if barred:
            logits = logits.copy()
            logits[list(barred)] = -np.inf
        if self._sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, weights = self._candidates(logits)
        cumulated = np.cumsum(weights)
        chosen = np.searchsorted(cumulated, self._rng.random() * cumulated[-1], side="right")
        return int(ids[min(int(chosen), len(ids) - 1)])

    def _candidates(
        self, logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The token ids that may be chosen, and their unnormalised probabilities."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        ids = np.arange(len(logits))
        if 0 < top_k < len(logits):
            ids = np.argpartition(logits, -top_k)[-top_k:]
        scaled = logits[ids].astype(np.float64)
        with np.errstate(over="ignore"):  # a temperature close to 0 is greedy
            weights = np.exp((scaled - scaled.max()) / self._sampling.temperature)
        if top_p < 1:
            # What is below this has, all together, less than 1 - top_p: no need to sort it.
            threshold = top_p * weights.sum()
            likely = np.flatnonzero(weights >= (weights.sum() - threshold) / len(weights))
            likely = likely[np.argsort(-weights[likely], kind="stable")]
            enough = np.searchsorted(np.cumsum(weights[likely]), threshold)
            ids, weights = ids[likely[: enough + 1]], weights[likely[: enough + 1]]
        return ids, weights


def _generator(seed: int | None, prompt_token_ids: Sequence[int]) -> np.random.Generator:
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    ids = np.asarray(prompt_token_ids, "<i8").tobytes()
    digest = hashlib.blake2b(f"{seed}:".encode() + ids, digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _integer(name: str, value: object, at_least: int | None) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{name} must be an integer, not {value!r}")
    if at_least is not None and value < at_least:
        raise UsageError(f"{name} must be at least {at_least}, not {value}")
    return int(value)


def _real(name: str, value: object, at_most: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, not {value!r}")
    number = float(value)
    if not 0 <= number <= at_most or math.isinf(number):
        limit = "" if math.isinf(at_most) else f" and at most {at_most:g}"
        raise UsageError(f"{name} must be at least 0{limit}, not {value}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _items(name: str, value: object) -> Iterable[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list, not {value!r}")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(_items(name, value))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"{name} must be a string or a list of strings that are not empty")
    return tuple(str(string) for string in strings)
