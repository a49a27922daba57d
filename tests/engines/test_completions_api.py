"""Bodies of requests to ``/v1/completions``, and what its events and errors say."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.engines.completions_api import (
    RESERVED,
    NoTokenIds,
    check_params,
    error_message,
    parse_chunk,
    request_body,
)
from lmcache_mp.engines.engine import TokenEvent, TokensEvent
from lmcache_mp.errors import EngineError, UsageError

# --- requests -------------------------------------------------------------------------------------


def body_of(
    params: dict[str, Any] | None = None, salt: str = "", *, ids_in_logprobs: bool = False
) -> dict[str, Any]:
    made = request_body("m", [1, 2], params or {}, salt, ids_in_logprobs=ids_in_logprobs)
    body: dict[str, Any] = json.loads(made)
    return body


def test_a_body_asks_for_a_stream_of_token_ids_with_a_count() -> None:
    assert body_of() == {
        "model": "m",
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_sampling_parameters_are_passed_on_and_nones_are_left_out() -> None:
    params = {"max_tokens": 5, "stop": ["a", "\u2028"], "logit_bias": {"3": -1.5}, "seed": None}
    body = body_of(params)
    assert {key: body[key] for key in ("max_tokens", "stop", "logit_bias")} == {
        key: value for key, value in params.items() if value is not None
    }
    assert "seed" not in body


def test_a_salt_is_sent_when_there_is_one() -> None:
    assert body_of(salt="tenant")["cache_salt"] == "tenant"
    assert "cache_salt" not in body_of(salt="")


def test_ids_are_asked_for_whatever_the_parameters_say() -> None:
    assert body_of({"return_token_ids": False})["return_token_ids"] is True


@pytest.mark.parametrize(("wanted", "sent"), [(None, 0), (0, 0), (3, 3)])
def test_a_server_without_return_token_ids_puts_ids_into_logprobs(
    wanted: int | None, sent: int
) -> None:
    body = body_of({"logprobs": wanted}, ids_in_logprobs=True)
    assert body["logprobs"] == sent
    assert body["return_tokens_as_token_ids"] is True
    assert "return_token_ids" not in body


@pytest.mark.parametrize("name", RESERVED)
def test_what_the_engine_sets_itself_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_params({name: None})


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_a_stream_is_one_sequence(name: str) -> None:
    check_params({name: 1})
    check_params({name: None})
    for wrong in (0, 2, "1"):
        with pytest.raises(UsageError, match=f"{name} must be 1"):
            check_params({name: wrong})


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        [0.5, -float("inf")],
        {"a": float("nan")},
        {1, 2},
        b"bytes",
        object(),
        np.float32(0.5),
        np.arange(2),
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_does_not_have_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match="'temperature'"):
        check_params({"max_tokens": 3, "temperature": value})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    # Encoders differ in the digits of the smallest and largest numbers, not in their value.
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(json_values)
def test_every_json_value_arrives_as_it_is(value: Any) -> None:
    check_params({"extra": value})
    assert body_of({"extra": value}).get("extra") == value


# --- events ---------------------------------------------------------------------------------------


def parsed(choice: dict[str, Any] | None = None, **chunk: Any) -> Any:
    choices = [] if choice is None else [choice]
    return parse_chunk(json.dumps({"id": "cmpl-1", "choices": choices, **chunk}).encode())


def test_one_token() -> None:
    assert parsed({"text": "a", "token_ids": [5]}) == TokenEvent(5, "a")
    assert parsed({"text": "a", "token_ids": [5], "finish_reason": "stop"}) == TokenEvent(
        5, "a", "stop"
    )


def test_several_tokens() -> None:
    assert parsed({"text": "abc", "token_ids": [5, 6, 7]}) == TokensEvent([5, 6, 7], "abc")


@pytest.mark.parametrize("text", ["", None])
def test_ids_without_text(text: str | None) -> None:
    assert parsed({"text": text, "token_ids": [5]}) == TokenEvent(5)


@pytest.mark.parametrize("ids", [[], None])
def test_only_a_finish_reason(ids: list[int] | None) -> None:
    event = parsed({"text": "", "token_ids": ids, "finish_reason": "length"})
    assert event == TokensEvent((), "", "length")


def test_a_late_text_belongs_to_no_token() -> None:
    assert parsed({"text": "late", "token_ids": []}) == TokensEvent((), "late")


def test_text_without_ids_names_the_flag() -> None:
    with pytest.raises(NoTokenIds, match="--return-tokens-as-token-ids"):
        parsed({"text": "a"})
    with pytest.raises(NoTokenIds):  # logprobs of a server that does not know the flag
        parsed({"text": "a", "logprobs": {"tokens": ["a"]}})


def test_ids_in_logprobs() -> None:
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [0.0, -1.0]}
    assert parsed({"text": "ab", "logprobs": logprobs}) == TokensEvent([5, 6], "ab")
    assert parsed({"text": "", "logprobs": {"tokens": []}}) == TokensEvent()


def test_the_servers_count() -> None:
    assert parsed(usage={"completion_tokens": 7}) == TokensEvent((), "", None, None, 7)
    cached = {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}
    assert parsed(usage=cached) == TokensEvent((), "", None, 32, 7)
    nothing = {"completion_tokens": 0, "prompt_tokens_details": None}
    assert parsed(usage=nothing) == TokensEvent((), "", None, None, 0)
    with_token = parsed({"text": "a", "token_ids": [5]}, usage=cached)
    assert with_token == TokensEvent([5], "a", None, 32, 7)


def test_an_event_that_says_nothing() -> None:
    assert parsed() is None
    assert parsed(usage=None) is None
    assert parse_chunk(b"{}") is None


def test_unknown_fields_are_ignored() -> None:
    event = parsed(
        {"text": "a", "token_ids": [5], "index": 0, "stop_reason": {"x": [1]}, "new": None},
        object="text_completion",
        system_fingerprint=[{}],
    )
    assert event == TokenEvent(5, "a")


def test_line_separators_and_escapes_are_text() -> None:
    text = "\u2028\x85\n\U0001f600"
    raw = json.dumps({"choices": [{"text": text, "token_ids": [5]}]}, ensure_ascii=False).encode()
    assert parse_chunk(raw) == parsed({"text": text, "token_ids": [5]}) == TokenEvent(5, text)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ({"message": "out of memory", "code": 500}, "out of memory"),
        ("plain words", "plain words"),
        ({"code": 7}, '{"code":7}'),
        ([1], "[1]"),
    ],
)
def test_an_error_event_is_an_engine_error(error: Any, shown: str) -> None:
    with pytest.raises(EngineError) as caught:
        parsed(error=error)
    assert str(caught.value) == f"the engine sent an error: {shown}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[1]",
        b'"text"',
        b'{"choices": 7}',
        b'{"choices": [{"text": 7}]}',
        b'{"choices": [{"token_ids": ["5"]}]}',
        b'{"choices": [{"text": "\xff", "token_ids": [5]}]}',
        b'{"choices": [{"text": "a", ',
    ],
)
def test_what_is_no_event_is_an_engine_error_that_shows_it(data: bytes) -> None:
    with pytest.raises(EngineError, match="which is no event") as caught:
        parse_chunk(data)
    assert (repr(data[:5].decode())[1:-1] if data else "nothing") in str(caught.value)


@given(st.binary(max_size=40))
def test_whatever_comes_only_engine_errors_are_raised(data: bytes) -> None:
    with contextlib.suppress(EngineError):
        parse_chunk(data)


def test_a_long_wrong_event_is_cut_short() -> None:
    with pytest.raises(EngineError) as caught:
        parse_chunk(b"x" * 10_000)
    assert len(str(caught.value)) < 500


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b'"too long"', "too long"),
        (b"[1, 2]", "[1,2]"),
        (b"null", "null"),
        (b"<html>bad gateway</html>\n", "'<html>bad gateway</html>'"),
        (b"\xff\xfe", "'\ufffd\ufffd'"),
        (b"", "nothing"),
    ],
)
def test_what_a_refusal_says(body: bytes, message: str) -> None:
    assert error_message(body) == message


def test_a_long_refusal_is_cut_short() -> None:
    assert error_message(b"x" * 1000) == repr("x" * 300 + "...")
