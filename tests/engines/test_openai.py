"""The HTTP engine against a server that answers by script."""

from __future__ import annotations

import email.utils
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp import openai_engine
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.engines.engine import TokenEvent
from lmcache_mp.engines.openai import OpenAIEngine
from lmcache_mp.errors import EngineError, UsageError
from lmcache_mp.stream import create_request
from tests.engines.scripted_server import (
    DONE,
    Answer,
    Exchange,
    ScriptedServer,
    data,
    event,
    tokens,
    usage,
)
from tests.helpers import TokenKV

BUSY = Answer([b"busy"], "503 Service Unavailable", framing="length")


def ask(
    engine: OpenAIEngine, salt: str = "", **params: Any
) -> tuple[list[int], str, str | None, int]:
    """All that came of one pass: ids, text, finish reason, and how often it was sent again."""
    ids: list[int] = []
    text, finish = "", None
    stream = engine([1, 2, 3], {"max_tokens": 8, **params}, salt)
    for it in stream:
        ids += [it.token_id] if isinstance(it, TokenEvent) else it.token_ids
        text += it.text
        finish = it.finish_reason or finish
    return ids, text, finish, stream.retried


def answered(*answers: Answer, **options: Any) -> tuple[list[int], str, str | None, int]:
    with ScriptedServer(answers) as server:
        return ask(openai_engine(server.url, "m", **options))


def failing(*answers: Answer, **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        answered(*answers, **options)
    return str(caught.value)


# --- what an answer may look like -----------------------------------------------------------------


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_an_answer(framing: str):
    assert answered(Answer(tokens(5, 6, 7), framing=framing)) == (
        [5, 6, 7],
        "5 6 7 ",
        "length",
        0,
    )


def test_three_ids_in_one_event():
    steps = [event([5, 6, 7], "five six seven", "stop"), usage(3), DONE]
    assert answered(Answer(steps)) == ([5, 6, 7], "five six seven", "stop", 0)


def test_ids_without_text_text_without_ids_and_a_late_reason():
    steps = [event([5], ""), event([], "late"), event(None, "", "stop"), usage(1), DONE]
    assert answered(Answer(steps)) == ([5], "late", "stop", 0)


BODY = b"".join(
    [
        b": ping\r\n\r\n",
        *(event([i], f"{i}é\u2028😀") for i in range(19)),
        event([19], "end", "stop").replace(b"\n", b"\r\n"),
        usage(20),
        DONE,
    ]
)
WHOLE = (
    list(range(20)),
    "".join(f"{i}é\u2028😀" for i in range(19)) + "end",
    "stop",
    0,
)


def test_one_byte_at_a_time():
    assert answered(Answer([BODY[i : i + 1] for i in range(len(BODY))])) == WHOLE


def test_every_packet_boundary():
    """Cut in two at every place, of which many are inside of a character."""
    answers = [Answer([BODY[:i], BODY[i:]]) for i in range(1, len(BODY))]
    with ScriptedServer(answers) as server:
        engine = openai_engine(server.url, "m")
        for _ in answers:
            assert ask(engine) == WHOLE
        assert server.connections == 1, "one connection for all of them"


def test_times_are_taken_as_tokens_come(tmp_path: Path):
    """The second token is sent only after the first has been seen."""
    seen = threading.Event()
    steps = [event([5], "a"), lambda exchange: seen.wait(30), event([6], "b", "stop"), DONE]
    with ScriptedServer([Answer(steps)]) as server:
        events = iter(openai_engine(server.url, "m")([1], {"max_tokens": 2}, ""))
        assert next(events).text == "a"
        seen.set()
        assert next(events).text == "b"


# --- servers that do not know return_token_ids ----------------------------------------------------


def test_an_older_server_is_asked_again_for_ids_in_logprobs():
    plain = Answer([event(None, "a"), event(None, "b", "stop"), usage(2), DONE])
    named = [
        event(None, "a", logprobs={"tokens": ["token_id:5"]}),
        event(None, "b", "stop", logprobs={"tokens": ["token_id:6"]}),
    ]
    with ScriptedServer([plain, Answer([*named, usage(2), DONE])]) as server:
        engine = openai_engine(server.url, "m")
        assert ask(engine) == ([5, 6], "ab", "stop", 0), "it was no failure"
        assert ask(engine) == ([5, 6], "ab", "stop", 0), "it is remembered"
        bodies = server.bodies()
    assert "return_token_ids" in bodies[0]
    assert [body.get("return_tokens_as_token_ids") for body in bodies] == [None, True, True]


def test_an_older_server_whose_only_token_has_no_text():
    """A prefill's token may be half of a character."""
    plain = Answer([event(None, "", "length"), usage(1), DONE])
    named = event(None, "", "length", logprobs={"tokens": ["token_id:5"]})
    assert answered(plain, Answer([named, usage(1), DONE])) == ([5], "", "length", 0)


def test_a_server_that_never_tells_ids():
    assert "--return-tokens-as-token-ids" in failing(Answer([event(None, "a", "stop"), DONE]))


# --- failures inside of an answer -----------------------------------------------------------------


def test_an_error_inside_the_answer_is_raised_although_done_follows():
    steps = [event([5], "a"), data({"error": {"message": "it broke", "code": 500}}), DONE]
    assert failing(Answer(steps)).endswith("sent an error: it broke")


def test_an_answer_without_its_end():
    assert "without [DONE], after 1 tokens" in failing(Answer([event([5], "a", "stop")]))
    assert "without a finish_reason" in failing(Answer([event([5], "a"), DONE]))


@pytest.mark.parametrize(("framing", "end"), [("chunked", "cut"), ("length", "cut")])
def test_an_answer_that_is_cut_off(framing: str, end: str):
    said = failing(Answer([event([5], "a"), event([6], "b")], framing=framing, end=end))
    assert "broke off after 2 tokens" in said


def test_a_connection_reset_in_the_middle_is_not_asked_again():
    with ScriptedServer([Answer([event([5], "a")], end="reset")]) as server:
        with pytest.raises(EngineError, match="broke off after 1 tokens"):
            ask(openai_engine(server.url, "m"))
        assert len(server.requests) == 1


def test_silence_after_a_token():
    said = failing(Answer([event([5], "a"), Exchange.hang]), idle_timeout=0.2)
    assert "fell silent after 1 tokens: none came for 0.2 s (idle_timeout)" in said


def test_silence_before_a_token_is_queueing():
    """It may be longer than idle_timeout, and is bounded only on request."""
    queued = threading.Event()
    steps = [b": ping\n\n", lambda exchange: queued.wait(30), *tokens(5)]
    with ScriptedServer([Answer(steps)]) as server:
        engine = openai_engine(server.url, "m", idle_timeout=0.05)
        timer = threading.Timer(0.5, queued.set)
        timer.start()
        assert ask(engine)[0] == [5]
    said = failing(Answer([Exchange.hang], status=""), first_token_timeout=0.2)
    assert "sent no token for 0.2 s (first_token_timeout)" in said


# --- refusals and retries -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        ("400 Bad Request", b'{"error": {"message": "too long"}}', "answered 400 Bad Request: too"),
        ("404 Not Found", b'{"detail": "no such model"}', "404 Not Found: no such model"),
        ("500 Internal Server Error", b"<h1>oops</h1>", "<h1>oops</h1>"),
    ],
)
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_refusal(status: str, body: bytes, says: str, framing: str):
    with ScriptedServer([Answer([body], status, framing=framing)]) as server:
        with pytest.raises(EngineError, match=says):
            ask(openai_engine(server.url, "m"))
        assert len(server.requests) == 1, "it would be refused again"


def test_a_key_comes_from_the_environment_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    refused = Answer(
        [b'{"error": {"message": "bad key sk-secret"}}'], "401 Unauthorized", framing="length"
    )
    with ScriptedServer([refused]) as server:
        engine = openai_engine(server.url, "m", api_key_env="MY_KEY")
        with pytest.raises(EngineError, match=r"bad key \*\*\* .*MY_KEY is not right") as caught:
            ask(engine)
        assert server.requests[0].headers["authorization"] == "Bearer sk-secret"
        for shown in (repr(engine), str(caught.value), pickle.dumps(engine).decode("latin1")):
            assert "sk-secret" not in shown
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(EngineError, match="MY_KEY is not set"):
            ask(engine)
        assert "authorization" not in server.requests[1].headers


def test_a_busy_server_is_asked_again():
    started = time.monotonic()
    date = email.utils.formatdate(time.time() + 1, usegmt=True)
    answers = [
        BUSY,
        Answer([b""], "429 Too Many Requests", ["Retry-After: 0.01"], framing="length"),
        Answer([b""], "503 Service Unavailable", [f"Retry-After: {date}"], framing="length"),
        Answer(tokens(5)),
    ]
    assert answered(*answers) == ([5], "5 ", "length", 3)
    assert time.monotonic() - started < 30


def test_retries_come_to_an_end():
    said = failing(BUSY, retries=1)
    assert "503 Service Unavailable" in said and "2 attempts" in said
    assert "attempts" not in failing(BUSY, retries=0)


def test_a_reset_before_anything_came_is_asked_again():
    reset = Answer(status="", end="reset")
    assert answered(reset, Answer(tokens(5))) == ([5], "5 ", "length", 1)


def test_nobody_listens():
    with ScriptedServer([]) as server:
        url = server.url
    engine = openai_engine(url, "m", retries=1)
    with pytest.raises(
        EngineError, match=r"can't be reached: .*is the server running\?.*2 attempt"
    ):
        ask(engine)


def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    """That is no failure of the server's: it takes none of the retries."""
    with ScriptedServer(
        [Answer(tokens(5)), Answer(end="reset", status=""), Answer(tokens(6))]
    ) as s:
        engine = openai_engine(s.url, "m", retries=0)
        assert ask(engine)[0] == [5]
        assert ask(engine) == ([6], "6 ", "length", 0)
        assert s.connections == 2


# --- what is sent ---------------------------------------------------------------------------------


def test_what_is_sent():
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = openai_engine(f"{server.url}/v1/", "the model")
        ask(engine, "salt", temperature=0.5)
        ask(openai_engine(server.url, "m"), seed=None)
        first, second = server.bodies()
    assert first["model"] == "the model" and first["prompt"] == [1, 2, 3]
    assert first["temperature"] == 0.5 and first["cache_salt"] == "salt"
    assert "cache_salt" not in second and "seed" not in second


@pytest.mark.parametrize(
    ("url", "model", "options", "says"),
    [
        ("localhost:8000", "m", {}, "no http:// or https:// URL"),
        ("http://", "m", {}, "no http:// or https:// URL"),
        ("http://host:port", "m", {}, "no valid port"),
        ("http://me:secret@host", "m", {}, "must be a plain URL"),
        ("http://host/?key=secret", "m", {}, "must be a plain URL"),
        (None, "m", {}, "base_url must be a URL"),
        ("http://host", "", {}, "model must be"),
        ("http://host", "m", {"idle_timeout": 0}, "idle_timeout must be above 0"),
        ("http://host", "m", {"retries": -1}, "retries must be at least 0"),
    ],
)
def test_wrong_arguments(url: str, model: str, options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says) as caught:
        openai_engine(url, model, **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host/v1", "http://host", "http://host/v1/completions/"])
def test_base_urls(url: str):
    assert repr(openai_engine(url, "m")) == "OpenAIEngine('http://host/v1/completions', 'm')"


# --- in a batch -----------------------------------------------------------------------------------


def batch_of(
    server: ScriptedServer, folder: Path, streams: int, **options: Any
) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream(workers=2, **options)
    engine = openai_engine(server.url, "m", **({"retries": 1} if streams < 10 else {}))
    context = TokenKV(str(folder))
    for number in range(streams):
        batch.add(create_request(context, engine, [number % 7 + 1, number + 1]))
    return batch


def bodies_by_phase(server: ScriptedServer) -> list[Sequence[int]]:
    return [body["prompt"] for body in server.bodies()]


def test_attempts_are_counted(tmp_path: Path):
    answers = [BUSY, *[Answer(tokens(5))] * 4, Answer(tokens(6, 7))]
    with ScriptedServer(answers) as server, batch_of(server, tmp_path, 4) as batch:
        first = batch.prefill({}).to_frame()
        second = batch.decode({"max_tokens": 2}).to_frame()
    assert sorted(first["attempt"]) == [1, 1, 1, 2]
    assert second["attempt"].tolist() == [1] * 4
    assert second["reported_tokens"].tolist() == second["output_tokens"].tolist() == [2] * 4
    assert all(body["max_tokens"] == 1 for body in server.bodies()[:5])


def test_parameters_are_refused_before_anything_is_sent(tmp_path: Path):
    with ScriptedServer([Answer(tokens(5))]) as server, batch_of(server, tmp_path, 2) as batch:
        with pytest.raises(UsageError, match="'stream' is no sampling parameter"):
            batch.decode({"stream": True})
        with pytest.raises(UsageError, match="n must be 1"):
            batch.decode({"n": 2})
        assert server.requests == [] and batch.worker_pids == []


def test_300_streams_are_at_the_server_at_once(tmp_path: Path):
    together = threading.Barrier(300)
    steps = [event([5], "a"), lambda exchange: together.wait(60), event([6], "b", "length"), DONE]
    with ScriptedServer([Answer(steps)]) as server, batch_of(server, tmp_path, 300) as batch:
        frame = batch.decode({"max_tokens": 2}).to_frame()
        assert server.connections == 300
    assert frame["output_tokens"].tolist() == [2] * 300


def test_a_closed_batch_closes_its_connections(tmp_path: Path):
    hanging = Answer([event([5], "a"), Exchange.hang])
    with ScriptedServer([hanging]) as server, batch_of(server, tmp_path, 40) as batch:
        failed: list[BaseException] = []

        def decode() -> None:
            try:
                batch.decode({"max_tokens": 2})
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=decode)
        thread.start()
        server.wait_until(lambda: len(server.requests) == 40)
        batch.close()
        server.wait_until(lambda: server.gone == 40)
        thread.join(60)
        assert not thread.is_alive() and failed
