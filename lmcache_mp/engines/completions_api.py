"""What goes over the wire to a streaming ``/v1/completions``, and what comes back.

https://platform.openai.com/docs/api-reference/completions, with vLLM's extensions: a prompt of
token ids, ``return_token_ids``, ``cache_salt``, and token ids as ``"token_id:N"`` in ``logprobs``
for servers that are older than ``return_token_ids``.

Decoding an event takes msgspec, with the types below, 0.7 us, and json 5.6 us
(``benchmarks/engine_clients.py``, medians of one run).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lmcache_mp.engines.engine import TokenEvent, TokensEvent
from lmcache_mp.errors import EngineError, MissingExtraError, UsageError

try:
    import msgspec
except ImportError as error:  # pragma: no cover - the tests have the extra
    raise MissingExtraError("an engine behind HTTP", "http") from error

#: Fields that the engine itself fills in.
RESERVED = ("cache_salt", "echo", "model", "prompt", "stream", "stream_options")
_AS_TOKEN_ID = "token_id:"
_LOGPROBS_WITH_IDS = {"logprobs": 0, "return_tokens_as_token_ids": True}


class Logprobs(msgspec.Struct):
    """The part of ``logprobs`` that is read: ``tokens`` as ``"token_id:N"``."""

    tokens: list[str] | None = None


class Choice(msgspec.Struct):
    """One choice of an event: its new text and token ids."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, those whose KV was reused."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count of tokens."""

    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """The data of one event."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None  # a dict in vLLM, a string elsewhere


_decode = msgspec.json.Decoder(Chunk).decode
_encode = msgspec.json.Encoder().encode


def request_body(
    model: str,
    prompt: Sequence[int],
    sampling_params: Mapping[str, Any],
    cache_salt: str,
    *,
    ids_in_logprobs: bool,
) -> bytes:
    """The JSON body of a request. UsageError names a parameter that JSON does not have."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        **{key: value for key, value in sampling_params.items() if value is not None},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= _LOGPROBS_WITH_IDS if ids_in_logprobs else {"return_token_ids": True}
    if ids_in_logprobs:  # the user may ask for more of them
        body["logprobs"] = max(0, int(sampling_params.get("logprobs") or 0))
    if cache_salt:  # an empty one is refused by vLLM
        body["cache_salt"] = cache_salt
    try:
        return _encode(body)
    except (TypeError, ValueError, OverflowError):
        check_params(sampling_params)
        raise


def check_params(sampling_params: Mapping[str, Any]) -> None:
    """UsageError for a field that is the engine's own, or a value that JSON does not have."""
    for key, value in sampling_params.items():
        if key in RESERVED:
            raise UsageError(f"{key!r} is no sampling parameter: the engine sets it by itself")
        if key in ("n", "best_of") and value not in (None, 1):
            raise UsageError(f"{key} must be 1, not {value!r}: a stream is one sequence of tokens")
        try:
            _encode(value)
            json.dumps(value, allow_nan=False)  # msgspec writes NaN as null, and a set as a list
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"sampling parameter {key!r} can't be sent: {error}") from None


def parse_chunk(data: bytes) -> TokenEvent | TokensEvent | None:
    """The event in ``data``; None for one that says nothing. EngineError: an error the server sent.

    An event that has text and no ids has ``token_ids`` None in the wire format: see
    :class:`NoTokenIds`.
    """
    try:
        chunk = _decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine sent {_shown(data)}, which is no event: {error}") from None
    if chunk.error is not None:
        _raise_error(chunk.error)
    cached = reported = None
    if chunk.usage is not None:
        reported = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
    if not chunk.choices:
        return None if chunk.usage is None else TokensEvent((), "", None, cached, reported)
    choice = chunk.choices[0]
    ids = choice.token_ids
    if ids is None:
        ids = _ids_of(choice.logprobs)
        if ids is None and choice.text:
            raise NoTokenIds
    text = choice.text or ""
    if ids is not None and len(ids) == 1 and reported is None:
        return TokenEvent(ids[0], text, choice.finish_reason, cached)
    return TokensEvent(ids or (), text, choice.finish_reason, cached, reported)


class NoTokenIds(EngineError):
    """The server sent text without token ids."""

    def __init__(self) -> None:
        super().__init__(
            "the engine sent text without token ids: use a vLLM that knows return_token_ids, or "
            "start it with --return-tokens-as-token-ids"
        )


def error_message(body: bytes) -> str:
    """What the body of a refused request says, in whatever form."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _shown(body)
    if isinstance(found, dict):
        found = found.get("error") or found.get("detail") or found
    return _text_of(found)


def _ids_of(logprobs: Logprobs | None) -> list[int] | None:
    if logprobs is None or logprobs.tokens is None:
        return None
    if not all(token.startswith(_AS_TOKEN_ID) for token in logprobs.tokens):
        return None
    return [int(token[len(_AS_TOKEN_ID) :]) for token in logprobs.tokens]


def _raise_error(error: Any) -> NoReturn:  # Any: whatever JSON the server put there
    raise EngineError(f"the engine sent an error: {_text_of(error)}")


def _text_of(error: Any) -> str:  # Any: likewise
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else _encode(error).decode()


def _shown(data: bytes, most: int = 300) -> str:
    text = data[:most].decode("utf-8", "replace").strip()
    return repr(text + ("..." if len(data) > most else "")) if text else "nothing"
