"""What the HTTP engine sends and refuses, whose secrets it keeps, and its streams in a batch."""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp import openai_engine
from lmcache_mp.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_mp.engines.openai import OpenAIEngine
from lmcache_mp.errors import EngineError, KVError, UsageError
from lmcache_mp.stream import LMCacheStream, create_request
from tests.engines.scripted_server import (
    DONE,
    LIMIT,
    Answer,
    ScriptedServer,
    event,
    tokens,
    usage,
)
from tests.helpers import CHUNK, MemoryKV, TokenKV, kv_of
from tests.pool.programs import program

KEY = "sk-proj/ab+cd=="
PROMPT = list(range(1, 2 * CHUNK + 2))  # two chunks and a token


def stream_of(engine: OpenAIEngine, salt: str = "") -> LMCacheStream:
    return create_request(MemoryKV(), engine, PROMPT, salt)


def batch_of(
    server: ScriptedServer, folder: Path, streams: int, **options: Any
) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream(workers=2, **options)
    engine, context = openai_engine(server.url, "m"), TokenKV(str(folder))
    for number in range(streams):
        batch.add(create_request(context, engine, [*PROMPT[:-1], number]))
    return batch


# --- the wire -------------------------------------------------------------------------------------

EVENTS = [event([i], f"{i}\u00e9\u2028\x85\U0001f600") for i in range(20)]
TEXT = "".join(f"{i}\u00e9\u2028\x85\U0001f600" for i in range(20))


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_and_their_sizes_cut_anywhere(newline: bytes, size: int) -> None:
    """The packets do not even respect the framing of HTTP."""
    parts = [b": ping\n\n", *EVENTS, event([], "", "stop"), usage(20), DONE]
    body = b"".join(b"%x\r\n%s\r\n" % (len(it), it) for it in _with(newline, parts)) + b"0\r\n\r\n"
    packets = [body[at : at + size] for at in range(0, len(body), size)]
    with ScriptedServer([Answer(packets, framing="raw")]) as server:
        engine = openai_engine(server.url, "m")
        stream = stream_of(engine)
        stream.generate({"max_tokens": 20})
        engine.close()
    assert stream.output_tokens() == list(range(20))
    assert stream.output_text() == TEXT
    assert stream.is_done()


def _with(newline: bytes, parts: list[bytes]) -> list[bytes]:
    return [part.replace(b"\n", newline) for part in parts]


def test_a_stream_goes_through_its_phases_alone() -> None:
    """Prefill, an edit, and a decode whose server says that it used the edited KV."""
    answers = [Answer(tokens(50)), Answer(tokens(51, 52, cached=CHUNK))]
    with ScriptedServer(answers) as server:
        engine = openai_engine(server.url, "m")
        stream = stream_of(engine, "tenant")
        stream.generate({"max_tokens": 1})
        context = stream.contexts[0]
        context.store(kv_of(PROMPT[: 2 * CHUNK]), PROMPT[: 2 * CHUNK], "tenant")
        stream.modify_kv(lambda kv, ids: (kv[:, :, ::2], ids[::2]))
        stream.generate({"max_tokens": 2})
        engine.close()
        first, second = server.bodies()
    assert first["cache_salt"] == "tenant"
    assert second["cache_salt"] == stream.state.kv_salt != "tenant"
    assert first["prompt"] == PROMPT
    assert second["prompt"] == [*PROMPT[: 2 * CHUNK : 2], PROMPT[-1], 50]
    assert stream.output_tokens() == [50, 51, 52]


def test_a_server_that_did_not_use_the_edited_kv_is_found_out() -> None:
    answers = [Answer(tokens(50)), Answer(tokens(51, cached=0))]
    with ScriptedServer(answers) as server:
        engine = openai_engine(server.url, "m")
        stream = stream_of(engine)
        stream.generate({"max_tokens": 1})
        stream.contexts[0].store(kv_of(PROMPT[: 2 * CHUNK]), PROMPT[: 2 * CHUNK])
        stream.modify_kv(lambda kv, ids: (kv, ids))
        with pytest.raises(KVError, match="reused 0 of the"):
            stream.generate({"max_tokens": 1})
        engine.close()
    assert stream.output_tokens() == [50]


# --- servers that do not know return_token_ids ----------------------------------------------------


def test_a_server_that_knows_no_flag_at_all_is_asked_twice() -> None:
    plain = Answer([event(None, "a"), event(None, "b", "stop"), DONE])
    words = {"tokens": ["a", "b"]}  # logprobs, but not as token ids
    named = Answer([event(None, "ab", "stop", logprobs=words), DONE])
    with ScriptedServer([plain, named]) as server:
        engine = openai_engine(server.url, "m")
        with pytest.raises(EngineError, match="--return-tokens-as-token-ids"):
            list(engine([1], {}, ""))
        assert len(server.requests) == 2
        engine.close()


def test_ids_that_stop_coming_are_not_asked_for_again() -> None:
    """What has come would come twice."""
    with ScriptedServer([Answer([event([5], "a"), event(None, "b", "stop"), DONE])]) as server:
        events = iter(openai_engine(server.url, "m")([1], {}, ""))
        assert next(events).text == "a"
        with pytest.raises(EngineError, match="without token ids"):
            next(events)
        assert len(server.requests) == 1


# --- secrets --------------------------------------------------------------------------------------

ECHOES = {
    "as it is": b'{"error": {"message": "wrong key %s"}}',
    "escaped": b'{"error": {"message": "wrong key sk-proj\\/ab\\u002bcd=="}}',
    "in other words": b"wrong key: %s",
    "where it is cut": b"x" * 295 + b"%s",
    "as a whole": b"%s",
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=list(ECHOES))
@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "503 Busy"])
def test_a_key_that_a_server_repeats_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, echo: bytes, status: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = echo.replace(b"%s", KEY.encode())
    with ScriptedServer([Answer([body], status, framing="length")]) as server:
        engine = openai_engine(server.url, "m", retries=0)
        with pytest.raises(EngineError) as caught:
            list(engine([1], {}, ""))
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        engine.close()
    assert "sk-p" not in "".join(traceback.format_exception(caught.value))
    assert KEY.encode() not in pickle.dumps(engine)


@pytest.mark.parametrize("space", ["\n", " ", "\r\n"])
def test_space_around_a_key_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    monkeypatch.setenv("THE_KEY", space + KEY + space)
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = openai_engine(server.url, "m", api_key_env="THE_KEY")
        list(engine([1], {}, ""))
        engine.close()
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("wrong", ["sk-a\nsk-b", "sk-\u00fc", "sk-\x07", "sk-\u20ac"])
def test_a_key_that_no_header_can_hold_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("THE_KEY", wrong)
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = openai_engine(server.url, "m", api_key_env="THE_KEY")
        with pytest.raises(EngineError, match="THE_KEY") as caught:
            list(engine([1], {}, ""))
        engine.close()
        assert server.requests == []
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("value", [None, "", " "])
def test_without_a_key_there_is_no_header(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("OPENAI_API_KEY", value)
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = openai_engine(server.url, "m")
        list(engine([1], {}, ""))
        engine.close()
        assert "authorization" not in server.requests[0].headers


def test_a_workers_key_is_sent_and_is_in_no_failure(tmp_path: Path) -> None:
    refused = Answer([b'{"error": "wrong key %s"}' % KEY.encode()], "401 No", framing="length")
    env = {"OPENAI_API_KEY": KEY}
    with ScriptedServer([refused]) as server, batch_of(server, tmp_path, 2, env=env) as batch:
        with pytest.raises(LMCacheBatchedStreamError, match="OPENAI_API_KEY is not right") as error:
            batch.prefill({})
        assert {it.headers["authorization"] for it in server.requests} == {f"Bearer {KEY}"}
    shown = [*map(repr, error.value.failures.values()), *traceback.format_exception(error.value)]
    assert error.value.metrics is not None
    assert "sk-" not in "".join([*shown, error.value.metrics.failures.to_string()])


# --- what is refused before anything is sent ------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"stream": False}, {"n": 2}, {"temperature": float("nan")}, {"stop": {"a"}}]
)
def test_parameters_are_refused_before_anything_is_sent(
    params: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = params
    with ScriptedServer([Answer(tokens(5))]) as server:
        stream = stream_of(openai_engine(server.url, "m"))
        with pytest.raises(UsageError, match=name):
            stream.generate(params)
        with batch_of(server, tmp_path, 2) as batch, pytest.raises(UsageError, match=name):
            batch.decode(params)
        assert server.connections == 0
    assert stream.output_tokens() == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://", "no http:// or https:// URL"),
        ("ftp://me:secret@host", "no http:// or https:// URL"),
        ("http://[::1", "no valid port or host"),
        ("http://host:99999", "no valid port"),
        ("http://me:secret@host:port", "no valid port"),
        ("https://:secret@host", "plain URL"),
        ("https://secret@host", "plain URL"),
        ("http://host#secret", "plain URL"),
        ("http://host/a b", "visible ASCII"),
        ("http://host/\u00fc", "visible ASCII"),
    ],
)
def test_a_wrong_url_is_refused_and_shows_no_secret(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        openai_engine(url, "m")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/", "https://host/v1/completions"),
        ("http://host:80/api/v1/", "http://host:80/api/v1/completions"),
        ("http://[::1]:8000", "http://[::1]:8000/v1/completions"),
        ("http://host/v1beta", "http://host/v1beta/v1/completions"),
    ],
)
def test_where_requests_go(url: str, shown: str) -> None:
    assert str(openai_engine(url, "m").settings.endpoint) == shown


@pytest.mark.parametrize("name", ["", None, 5])
def test_api_key_env_is_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="api_key_env"):
        openai_engine("http://host", "m", api_key_env=name)


# --- pickles --------------------------------------------------------------------------------------


def test_an_engine_pickles_to_a_small_recipe_without_its_connections() -> None:
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = openai_engine(server.url, "m", retries=7, first_token_timeout=9.0)
        list(engine([1], {}, ""))
        pickled = pickle.dumps(engine)
        assert len(pickled) < 1000
        copy = pickle.loads(pickled)
        assert copy.settings == engine.settings and repr(copy) == repr(engine)
        list(copy([1], {}, ""))
        assert server.connections == 2
        engine.close()
        copy.close()


# --- batches --------------------------------------------------------------------------------------


def test_attempts_and_counts_are_in_the_frame(tmp_path: Path) -> None:
    busy = Answer([b"busy"], "503 Busy", ["Retry-After: 0"], "length")
    answers = [busy, busy, Answer(tokens(5, 6))]
    with ScriptedServer(answers) as server, batch_of(server, tmp_path, 1) as batch:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            frame = batch.decode({"max_tokens": 2}).to_frame()
        assert server.connections == 1
    assert frame["attempt"].item() == 3
    assert frame["output_tokens"].item() == frame["reported_tokens"].item() == 2


def test_counts_that_disagree_are_a_warning_and_two_columns(tmp_path: Path) -> None:
    steps = [event([5, 6], "ab", "stop"), usage(3), DONE]
    with (
        ScriptedServer([Answer(steps)]) as server,
        batch_of(server, tmp_path, 2) as batch,
        pytest.warns(RuntimeWarning, match="reports 3 generated tokens and sent 2 ids"),
    ):
        frame = batch.decode({"max_tokens": 3}).to_frame()
    assert frame["output_tokens"].tolist() == [2, 2]
    assert frame["reported_tokens"].tolist() == [3, 3]


def test_phases_use_the_same_connections(tmp_path: Path) -> None:
    together = threading.Barrier(20)
    prefill = Answer([lambda _: together.wait(LIMIT), *tokens(5)])
    answers = [*[prefill] * 20, Answer(tokens(6))]
    with ScriptedServer(answers) as server, batch_of(server, tmp_path, 20) as batch:
        batch.prefill({})
        assert server.connections == 20
        batch.decode({"max_tokens": 1})
        assert len(server.requests) == 40
        assert server.connections == 20
        batch.close()
        server.wait_until(lambda: server.open == 0)


def test_ctrl_c_closes_the_connections_of_300_streams_and_keeps_the_workers(tmp_path: Path) -> None:
    """In a program of its own, whose whole process group is interrupted, as by a terminal."""
    text = """
    from lmcache_mp import openai_engine
    batch = LMCacheBatchedStream(2)
    fill(batch, openai_engine((folder / "url").read_text(), "m"), 300)
    batch.start()
    say(*batch.worker_pids)
    try:
        batch.decode({"max_tokens": 2})
    except KeyboardInterrupt:
        say(*batch.worker_pids)
        wait_for("go on")
    frame = batch.decode({"max_tokens": 1}, stream_ids=list(batch.streams)[:4]).to_frame()
    say(*frame["output_tokens"])
    batch.close()
    """
    hanging = Answer([event([5], "a")], end="open")
    answers = [*[hanging] * 300, Answer(tokens(6))]
    with ScriptedServer(answers) as server:
        (tmp_path / "url").write_text(server.url)
        with program(tmp_path, text) as run:
            workers = run.pids()
            server.wait_until(lambda: server.running == 300)
            assert server.most_at_once == server.connections == 300
            run.interrupt()
            assert run.pids() == workers
            server.wait_until(lambda: server.gone == 300 and server.open == 0)
            (tmp_path / "go on").touch()
            assert run.pids() == [1] * 4
            assert run.end() == 0
            assert run.stderr == ""
