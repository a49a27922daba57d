"""The HTTP engine's connections: kept, replaced, broken, silent, cancelled; and what is retried."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import http.client
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp import openai_engine
from lmcache_mp.engines.engine import TokenEvent
from lmcache_mp.engines.openai import CompletionStream, OpenAIEngine
from lmcache_mp.errors import EngineError
from tests.engines.scripted_server import (
    DONE,
    LIMIT,
    Answer,
    Exchange,
    ScriptedServer,
    data,
    event,
    tokens,
)

MakeEngine = Callable[..., OpenAIEngine]
RESET = Answer(status="", end="reset")
FRAMINGS = ("chunked", "length", "close")


def busy(status: str = "503 Service Unavailable", *headers: str) -> Answer:
    return Answer([b'{"error": "busy"}'], status, headers, "length")


NOW = "Retry-After: 0"


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines whose connections are closed after the test."""
    made: list[OpenAIEngine] = []

    def make(server: ScriptedServer | str, **options: Any) -> OpenAIEngine:
        url = server if isinstance(server, str) else server.url
        made.append(openai_engine(url, "m", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def begin(engine: OpenAIEngine) -> CompletionStream:
    return engine([1, 2, 3], {"max_tokens": 8}, "")


def ids_of(events: CompletionStream) -> list[int]:
    """The ids that come."""
    ids: list[int] = []
    for it in events:
        ids += [it.token_id] if isinstance(it, TokenEvent) else it.token_ids
    return ids


def error_of(events: CompletionStream) -> str:
    with pytest.raises(EngineError) as caught:
        ids_of(events)
    return str(caught.value)


# --- kept connections -----------------------------------------------------------------------------


@pytest.mark.parametrize(("framing", "connections"), [("chunked", 1), ("length", 1), ("close", 3)])
def test_a_connection_is_kept_if_the_server_keeps_it(
    make_engine: MakeEngine, framing: str, connections: int
) -> None:
    with ScriptedServer([Answer(tokens(5), framing=framing)]) as server:
        engine = make_engine(server)
        for _ in range(3):
            assert ids_of(begin(engine)) == [5]
        assert server.connections == connections


def test_a_connection_is_kept_after_a_refusal_and_a_busy_answer(make_engine: MakeEngine) -> None:
    refused = Answer([b'{"error": {"message": "too long"}}'], "400 Bad Request", framing="length")
    answers = [refused, busy("503 Service Unavailable", NOW), Answer(tokens(5))]
    with ScriptedServer(answers) as server:
        engine = make_engine(server)
        error_of(begin(engine))
        assert ids_of(begin(engine)) == [5]
        assert server.connections == 1


def test_a_pass_has_a_connection_of_its_own(make_engine: MakeEngine) -> None:
    with ScriptedServer([Answer(tokens(5, 6))]) as server:
        engine = make_engine(server)
        passes = [begin(engine) for _ in range(5)]
        for events in passes:
            assert next(events).text == "5 "
        assert server.connections == 5
        for events in passes:
            assert ids_of(events) == [6]
        assert ids_of(begin(engine)) == [5, 6]
        assert server.connections == 5


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_a_connection_that_the_server_hung_up_is_replaced(
    make_engine: MakeEngine, framing: str
) -> None:
    """Also several of them, one after the other: that takes none of the retries."""
    hang_up = Answer(tokens(5), framing=framing, end="hang up")
    with ScriptedServer([*[hang_up] * 3, Answer(tokens(6))]) as server:
        engine = make_engine(server, retries=0)
        passes = [begin(engine) for _ in range(3)]
        assert [next(events).text for events in passes] == ["5 "] * 3
        assert [ids_of(events) for events in passes] == [[]] * 3
        server.wait_until(lambda: server.open == 0)
        last = begin(engine)
        assert ids_of(last) == [6]
        assert last.retried == 0
        assert server.connections == 4


def test_a_body_that_does_not_end_after_done_costs_its_connection_only(
    make_engine: MakeEngine,
) -> None:
    with ScriptedServer([Answer(tokens(5), end="open"), Answer(tokens(6))]) as server:
        engine = make_engine(server)
        assert ids_of(begin(engine)) == [5]
        server.wait_until(lambda: server.gone == 1)
        assert ids_of(begin(engine)) == [6]


def test_close_closes_what_is_kept(make_engine: MakeEngine) -> None:
    with ScriptedServer([Answer(tokens(5))]) as server:
        engine = make_engine(server)
        engine.close()
        assert ids_of(begin(engine)) == [5]
        engine.close()
        engine.close()
        server.wait_until(lambda: server.open == 0)
        assert ids_of(begin(engine)) == [5]


# --- failures and retries -------------------------------------------------------------------------


def test_a_server_that_is_not_there_yet(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer([Answer(tokens(5))], listening=False) as server:

        def listen_in_the_pause(low: float, high: float) -> float:
            server.listen()
            return 0.0

        monkeypatch.setattr(random, "uniform", listen_in_the_pause)
        events = begin(make_engine(server))
        assert ids_of(events) == [5]
        assert events.retried == 1


def test_pauses_double_up_to_half_a_minute(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting itself is left out: each pause is multiplied by what random gives."""
    pauses: list[float] = []

    class Nothing(float):
        def __rmul__(self, pause: float) -> float:
            pauses.append(pause)
            return 0.0

    monkeypatch.setattr(random, "uniform", lambda low, high: Nothing())
    with ScriptedServer([], listening=False) as server:
        events = begin(make_engine(server, retries=1100))
        assert "(1101 attempts in" in error_of(events)
    assert pauses[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(pauses[8:]) == {30.0} and len(pauses) == 1100


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_server_says_when_to_come_again(make_engine: MakeEngine, status: str) -> None:
    answers = [busy(status, "Retry-After: 0.3"), Answer(tokens(5))]
    with ScriptedServer(answers) as server:
        events = begin(make_engine(server))
        assert ids_of(events) == [5]
        assert events.retried == 1
        first, second = server.requests
        # The wall clock may be set meanwhile, but not by much.
        assert second.came - first.came > 0.25


def test_a_busy_server_says_at_what_time_to_come_again(make_engine: MakeEngine) -> None:
    then = int(time.time()) + 2  # a date has whole seconds: it is one to two of them ahead
    date = email.utils.formatdate(then, usegmt=True)
    answers = [busy("503 Said", f"Retry-After: {date}"), Answer(tokens(5))]
    with ScriptedServer(answers) as server:
        assert ids_of(begin(make_engine(server))) == [5]
        assert server.requests[1].came >= then - 0.05


@pytest.mark.parametrize(
    "header", ["Retry-After: Thu, 01 Jan 1970 00:00:00 GMT", "Retry-After: -5", "Retry-After: nan"]
)
def test_a_time_that_is_over_is_now(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: pytest.fail("its own pause"))
    with ScriptedServer([busy("503 Said", header), Answer(tokens(5))]) as server:
        assert ids_of(begin(make_engine(server))) == [5]


def test_a_retry_after_that_is_neither_is_as_good_as_none(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda low, high: pauses.append(low) or 0.0)
    with ScriptedServer([busy("503 Said", "Retry-After: soon"), Answer(tokens(5))]) as server:
        assert ids_of(begin(make_engine(server))) == [5]
    assert len(pauses) == 1


def test_retries_come_to_an_end_and_say_what_the_last_one_met(make_engine: MakeEngine) -> None:
    answers = [RESET, busy("429 Slow", NOW), busy("503 Down", NOW)]
    with ScriptedServer(answers) as server:
        said = error_of(begin(make_engine(server, retries=2)))
        assert len(server.requests) == 3
    assert "503 Down: busy (3 attempts in " in said


@pytest.mark.parametrize(
    ("framing", "end"),
    [
        ("chunked", "cut"),
        ("length", "cut"),
        ("chunked", "reset"),
        ("length", "reset"),
        ("close", "reset"),
    ],
)
def test_what_breaks_before_the_first_event_is_sent_again(
    make_engine: MakeEngine, framing: str, end: str
) -> None:
    broken = Answer([b": ping\n\n"], framing=framing, end=end)
    with ScriptedServer([broken, Answer(tokens(5))]) as server:
        events = begin(make_engine(server))
        assert ids_of(events) == [5]
        assert events.retried == 1


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("first", [event([5], "a"), event([], "<")], ids=["a token", "a text"])
def test_what_breaks_after_it_is_not(make_engine: MakeEngine, framing: str, first: bytes) -> None:
    """Nothing of it may come twice."""
    arrived = threading.Event()
    broken = Answer([first, lambda _: arrived.wait(LIMIT)], framing=framing, end="reset")
    with ScriptedServer([broken]) as server:
        events = begin(make_engine(server))
        next(events)
        arrived.set()
        assert "broke off after" in error_of(events)
        assert len(server.requests) == 1


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_body_that_is_cut(make_engine: MakeEngine, framing: str) -> None:
    with ScriptedServer([Answer([event([5], "a")], framing=framing, end="cut")]) as server:
        said = error_of(begin(make_engine(server)))
        assert ("without [DONE]" if framing == "close" else "broke off") in said
        assert "after 1 tokens" in said
        assert len(server.requests) == 1


def test_what_is_no_stream_of_events(make_engine: MakeEngine) -> None:
    body = [b'{"choices": [{"text": "all at once", "finish_reason": "stop"}]}']
    with ScriptedServer([Answer(body, framing="length")]) as server:
        assert "without [DONE], after 0 tokens" in error_of(begin(make_engine(server)))


def test_an_error_event_takes_no_retry(make_engine: MakeEngine) -> None:
    steps = [data({"error": {"message": "no room", "code": 503}}), DONE]
    with ScriptedServer([Answer(steps)]) as server:
        assert "no room" in error_of(begin(make_engine(server)))
        assert len(server.requests) == 1


def test_a_key_that_comes_back_in_an_error_event_is_masked(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    error = data({"error": {"message": "not for sk-secret"}})
    garbage = b"data: {" + b"x" * 295 + b"sk-secret\n\n"
    with ScriptedServer([Answer([error]), Answer([garbage])]) as server:
        said = error_of(begin(make_engine(server)))
        assert "not for ***" in said
        said = error_of(begin(make_engine(server)))
        assert "no event" in said and "sk-" not in said


# --- time limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", FRAMINGS)
def test_silence_after_a_token(make_engine: MakeEngine, framing: str) -> None:
    with ScriptedServer([Answer([event([5], "a")], framing=framing, end="open")]) as server:
        said = error_of(begin(make_engine(server, idle_timeout=0.2)))
        assert "fell silent after 1 tokens: none came for 0.2 s (idle_timeout)" in said
        server.wait_until(lambda: server.gone == 1)
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", ["", "200 OK"], ids=["no head", "a head"])
def test_silence_before_the_first_token(make_engine: MakeEngine, status: str) -> None:
    with ScriptedServer([Answer(status=status, end="open")]) as server:
        said = error_of(begin(make_engine(server, first_token_timeout=0.2)))
        assert "sent no token for 0.2 s (first_token_timeout)" in said
        server.wait_until(lambda: server.gone == 1)
        assert len(server.requests) == 1


def _ping(exchange: Exchange) -> None:
    """As a proxy does that keeps a connection alive, until the client is gone."""
    while True:
        exchange.send(b": still there\n\n")
        time.sleep(0.02)


def test_pings_are_silence_too(make_engine: MakeEngine) -> None:
    first = Answer([_ping], framing="close")
    later = Answer([event([5], "a"), _ping], framing="close")
    with ScriptedServer([first, later]) as server:
        engine = make_engine(server, first_token_timeout=0.3, idle_timeout=0.4)
        assert "sent no token for 0.3 s" in error_of(begin(engine))
        assert "fell silent after 1 tokens: none came for 0.4 s" in error_of(begin(engine))


def test_a_token_after_pings_has_the_whole_limit_again(make_engine: MakeEngine) -> None:
    def pings(exchange: Exchange) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < 0.7:
            exchange.send(b": still there\n\n")
            time.sleep(0.02)

    def silence(exchange: Exchange) -> None:
        time.sleep(0.7)

    body = [event([5], "a"), pings, event([6], "b"), silence, event([7], "c", "stop"), DONE]
    with ScriptedServer([Answer(body, framing="close")]) as server:
        assert ids_of(begin(make_engine(server, idle_timeout=1.2))) == [5, 6, 7]


def test_the_limit_of_one_pass_is_not_that_of_the_next(make_engine: MakeEngine) -> None:
    """It was set on a connection that is kept."""
    waited = threading.Event()
    queueing = Answer([lambda _: waited.wait(0.6), *tokens(6)], status="200 OK")
    with ScriptedServer([Answer(tokens(5)), queueing]) as server:
        engine = make_engine(server, idle_timeout=0.2)
        assert ids_of(begin(engine)) == [5]
        assert ids_of(begin(engine)) == [6]
        assert server.connections == 1


def answer_once(listener: socket.socket) -> None:
    """Answer one request, and hang up."""
    connection, _ = listener.accept()
    answer = Answer(tokens(5), framing="length")
    with connection:
        while not connection.recv(1 << 16).endswith(b"}"):
            pass
        connection.sendall(answer.head() + b"".join(tokens(5)))


@pytest.mark.parametrize("answers", [0, 1], ids=["at first", "after one that was kept"])
def test_connecting_has_a_limit_of_its_own(make_engine: MakeEngine, answers: int) -> None:
    """The kernel takes no connections for a listener that leaves enough of them waiting."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = make_engine(url, connect_timeout=0.2, retries=0)
        for _ in range(answers):
            thread = threading.Thread(target=answer_once, args=[listener])
            thread.start()
            assert ids_of(begin(engine)) == [5]
            thread.join(LIMIT)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        said = error_of(begin(engine))
    assert "can't be reached" in said and "first_token" not in said


@pytest.mark.parametrize("limit", [float("inf"), 1e300, 3e9])
def test_no_limit_is_too_large(make_engine: MakeEngine, limit: float) -> None:
    limits = dict.fromkeys(("connect_timeout", "first_token_timeout", "idle_timeout"), limit)
    with ScriptedServer([Answer(tokens(5))]) as server:
        assert ids_of(begin(make_engine(server, **limits))) == [5]


def test_a_peer_that_vanished_is_not_taken_for_a_limit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel notices it by keep-alive probes, and its error is a TimeoutError too."""

    def vanish(self: http.client.HTTPConnection) -> http.client.HTTPResponse:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", vanish)
    with ScriptedServer([Answer(tokens(5))]) as server:
        said = error_of(begin(make_engine(server, retries=0)))
    assert "Connection timed out" in said and "first_token_timeout" not in said


# --- cancelling -----------------------------------------------------------------------------------


def cancelled_when(server: ScriptedServer, engine: OpenAIEngine, ready: Callable[[], bool]) -> str:
    """What a pass says that is cancelled by another thread once the server is ``ready``."""
    events = begin(engine)

    def cancel() -> None:
        server.wait_until(ready)
        events.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        return error_of(events)
    finally:
        thread.join(LIMIT)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("body", [[], [event([5], "a")]], ids=["before a token", "after one"])
def test_a_pass_that_waits_for_the_server_is_cancelled(
    make_engine: MakeEngine, framing: str, body: list[bytes]
) -> None:
    with ScriptedServer([Answer(body, framing=framing, end="open")]) as server:
        said = cancelled_when(server, make_engine(server), lambda: server.running == 1)
        assert said == "the pass was cancelled"
        server.wait_until(lambda: server.gone == 1)
        assert len(server.requests) == 1


def test_a_pass_that_waits_before_a_retry_is_cancelled(make_engine: MakeEngine) -> None:
    with ScriptedServer([busy("503 Down", "Retry-After: 300")]) as server:
        said = cancelled_when(
            server, make_engine(server), lambda: bool(server.requests) and not server.running
        )
        assert "cancelled" in said
        assert len(server.requests) == 1


def test_a_pass_that_was_cancelled_before_it_began_sends_nothing(make_engine: MakeEngine) -> None:
    with ScriptedServer([Answer(tokens(5))]) as server:
        events = begin(make_engine(server))
        events.cancel()
        assert "cancelled" in error_of(events)
        assert server.requests == []


def test_cancelling_a_pass_that_has_ended_leaves_its_connection_alone(
    make_engine: MakeEngine,
) -> None:
    with ScriptedServer([Answer(tokens(5, 6))]) as server:
        engine = make_engine(server)
        ended = begin(engine)
        assert ids_of(ended) == [5, 6]
        events = begin(engine)
        next(events)
        ended.cancel()
        assert ids_of(events) == [6]
        assert server.connections == 1


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_pass_that_is_given_up_leaves_its_connection(
    make_engine: MakeEngine, framing: str
) -> None:
    with ScriptedServer([Answer([event([5], "a")], framing=framing, end="open")]) as server:
        events = begin(make_engine(server))
        next(events)
        events.close()
        server.wait_until(lambda: server.gone == 1)
        assert list(events) == []


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that signs itself, and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext"
    try:
        subprocess.run(
            [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", f"{path}.c"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.SubprocessError):
        pytest.skip("openssl makes no certificate here")
    path.write_text(path.read_text() + Path(f"{path}.c").read_text())
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_https(
    make_engine: MakeEngine,
    tls: ssl.SSLContext,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    answers = [
        Answer(tokens(5)),
        Answer(tokens(6), end="hang up"),
        Answer(tokens(7)),
        Answer([event([5], "a")], framing="close", end="open"),
    ]
    with ScriptedServer(answers, tls=tls) as server:
        engine = make_engine(server, retries=0)
        assert [ids_of(begin(engine)) for _ in range(3)] == [[5], [6], [7]]
        assert server.connections == 2
        assert "cancelled" in cancelled_when(server, engine, lambda: server.running == 1)
        server.wait_until(lambda: server.gone == 1)


def test_https_with_a_certificate_that_nobody_knows(
    make_engine: MakeEngine, tls: ssl.SSLContext
) -> None:
    with ScriptedServer([Answer(tokens(5))], tls=tls) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in error_of(begin(make_engine(server)))
        assert server.connections == 1
