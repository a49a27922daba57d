"""An engine behind HTTP: vLLM's streaming ``/v1/completions``, or a server that speaks the same."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lmcache_mp.arguments import check_count, check_seconds
from lmcache_mp.engines.completions_api import (
    NoTokenIds,
    check_params,
    error_message,
    parse_chunk,
    request_body,
)
from lmcache_mp.engines.engine import TokenEvent, TokensEvent
from lmcache_mp.engines.http_stream import (
    ConnectionFailure,
    Connections,
    Endpoint,
    Exchange,
    PassingFailure,
    seconds_of,
)
from lmcache_mp.engines.sse import EventParser
from lmcache_mp.errors import EngineError, UsageError
from lmcache_mp.kv.context import check_salt

_PATH = "/completions"
#: Statuses of a server that is only busy: too many requests, and overloaded or starting.
_BUSY = (429, 503)
#: Seconds: the first pause before a retry, the longest one, and the longest that a server may ask.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_ASKED = 0.5, 30.0, 300.0
#: The most seconds that a socket takes as its timeout, about: 24 days.
_LONGEST_TIMEOUT = 24 * 86400.0
#: Seconds: 0 would make a socket not wait at all.
_SHORTEST_TIMEOUT = 0.001
#: Seconds that a body may take to end after [DONE]; past it the connection is not kept.
_LAST_BYTES = 1.0


def openai_engine(
    base_url: str,
    model: str,
    *,
    connect_timeout: float = 10.0,
    first_token_timeout: float | None = None,
    idle_timeout: float = 300.0,
    retries: int = 3,
    api_key_env: str = "OPENAI_API_KEY",
) -> OpenAIEngine:
    """The engine at ``base_url`` ("http://host:8000" or ".../v1"), asked for ``model``.

    ``connect_timeout`` seconds bound the connecting. Silence before the first token is queueing in
    the engine, and has no limit unless ``first_token_timeout`` sets one; silence after it is an
    EngineError after ``idle_timeout`` seconds. ``retries``: how often a request is sent again after
    a failure that passes (connection refused or reset, 429, 503), as long as nothing of its answer
    has arrived; they count in the column ``attempt``. The environment variable ``api_key_env`` of
    the worker, if set, is sent as a bearer token.

    Raises UsageError for a wrong argument. Nothing is sent before the first pass.
    """
    if not isinstance(model, str) or not model:
        raise UsageError(f"model must be the name that the engine serves, not {model!r}")
    if not isinstance(base_url, str):
        raise UsageError(f"base_url must be a URL, not {base_url!r}")
    if not isinstance(api_key_env, str) or not api_key_env:
        raise UsageError("api_key_env must be the name of an environment variable")
    stem = base_url.rstrip("/")
    stem = stem.removesuffix(_PATH) if stem.endswith("/v1" + _PATH) else stem
    endpoint = Endpoint.parse(stem, _PATH if stem.endswith("/v1") else "/v1" + _PATH)
    limit = first_token_timeout
    return OpenAIEngine(
        _Settings(
            endpoint,
            model,
            _check_timeout(connect_timeout, "connect_timeout"),
            None if limit is None else _check_timeout(limit, "first_token_timeout"),
            _check_timeout(idle_timeout, "idle_timeout"),
            check_count(retries, "retries", least=0),
            api_key_env,
        )
    )


def _check_timeout(value: object, name: str) -> float:
    return min(check_seconds(value, name, positive=True), _LONGEST_TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What travels to other processes."""

    endpoint: Endpoint
    model: str
    connect_timeout: float
    first_token_timeout: float | None
    idle_timeout: float
    retries: int
    api_key_env: str


class OpenAIEngine:
    """A :class:`~lmcache_mp.engines.engine.PostCompletion`; see :func:`openai_engine`.

    A pass has a connection of its own, which is kept for later passes. There is no limit on passes
    in flight.
    """

    #: How to make the engine say how much of a prompt it had in its caches.
    cached_tokens_hint = "start vLLM with --enable-prompt-tokens-details"

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self.ids_in_logprobs = False  # what a server that does not know return_token_ids needs

    def __call__(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str
    ) -> CompletionStream:
        """A pass; its request is sent when the first event is asked for."""
        check_params(sampling_params)
        return CompletionStream(
            self, list(prompt_token_ids), dict(sampling_params), check_salt(cache_salt)
        )

    def check_sampling_params(self, sampling_params: Mapping[str, Any]) -> None:
        """UsageError: a field that the engine sets by itself, or a value that JSON lacks."""
        check_params(sampling_params)

    @property
    def settings(self) -> _Settings:
        """What the engine was made with."""
        return self._settings

    @property
    def connections(self) -> Connections:
        """This process' connections."""
        with self._lock:
            if self._connections is None:
                settings = self._settings
                self._connections = Connections(settings.endpoint, settings.connect_timeout)
            return self._connections

    def api_key(self) -> str | None:
        """The key in this process' environment, or None; EngineError if no header can hold it."""
        name = self._settings.api_key_env
        key = os.environ.get(name, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise EngineError(f"{name} in the environment holds characters that can't be sent")
        return key or None

    def close(self) -> None:
        """Close the connections that no pass uses. Idempotent."""
        with self._lock:
            if self._connections is not None:
                self._connections.close()

    def __reduce__(self) -> tuple[type[OpenAIEngine], tuple[_Settings]]:
        return OpenAIEngine, (self._settings,)

    def __repr__(self) -> str:
        return f"OpenAIEngine({str(self._settings.endpoint)!r}, {self._settings.model!r})"


class _PassingError(Exception):
    """A failure that may not come again; ``wait`` is how many seconds the server asked for."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class CompletionStream:
    """The events of one pass. ``retried`` says how often its request was sent again."""

    def __init__(
        self, engine: OpenAIEngine, prompt: list[int], params: dict[str, Any], cache_salt: str
    ) -> None:
        self.retried = 0
        self._engine = engine
        self._request = prompt, params, cache_salt
        self._exchange = Exchange(engine.connections)
        self._cancelled = threading.Event()
        self._tokens = 0
        self._arrived = False  # whether an event has
        self._heard_at = 0.0  # when the request was sent, or the last token came
        self._silence_limit: float | None = None  # what the socket has as its timeout
        self._events = self._run()

    def __iter__(self) -> CompletionStream:
        return self

    def __next__(self) -> TokenEvent | TokensEvent:
        return next(self._events)

    def cancel(self) -> None:
        """End the pass from another thread: its connection is shut, so the server aborts."""
        self._cancelled.set()
        self._exchange.cancel()

    def close(self) -> None:
        """Give up the pass and its connection."""
        self._events.close()

    def _run(self) -> Generator[TokenEvent | TokensEvent, None, None]:
        begun, retries = time.monotonic(), self._engine.settings.retries
        while True:
            with_logprobs = self._engine.ids_in_logprobs
            try:
                yield from self._attempt(with_logprobs)
                return
            except NoTokenIds:
                if with_logprobs or self._tokens:
                    raise
                self._engine.ids_in_logprobs = True
            except _PassingError as failure:
                if self.retried >= retries:
                    spent = time.monotonic() - begun
                    tries = f" ({self.retried + 1} attempts in {spent:.1f} s)"
                    raise EngineError(f"{failure}{tries if self.retried else ''}") from failure
                self._pause(failure.wait)
                self.retried += 1
            finally:
                self._exchange.close()
            self._exchange = Exchange(self._engine.connections)
            if self._cancelled.is_set():
                self._exchange.cancel()

    def _attempt(self, with_logprobs: bool) -> Iterator[TokenEvent | TokensEvent]:
        """Send the request once. Raises EngineError, or _PassingError where nothing came back."""
        exchange, finish = self._exchange, None
        self._heard_at = time.monotonic()
        self._silence_limit = self._engine.settings.first_token_timeout
        try:
            response = self._send(with_logprobs)
            if response.status != 200:
                self._refused(response)
            for payload in self._payloads():
                event = self._parse(payload)
                if event is not None:
                    self._count(event)
                    self._arrived = True
                    finish = event.finish_reason or finish
                    yield event
        except ConnectionFailure as error:
            self._broke(error)
        if finish is None:
            raise self._ended_without("a finish_reason")
        exchange.finish()

    def _payloads(self) -> Iterator[bytes]:
        """The data of each event up to [DONE], and the rest of the body read away."""
        exchange, parser = self._exchange, EventParser()
        body = exchange.read()
        for data in body:
            tokens = self._tokens
            for payload in parser.feed(data):
                if payload == b"[DONE]":
                    exchange.set_timeout(_LAST_BYTES)
                    with contextlib.suppress(*ConnectionFailure):  # it said all there is to say
                        for _ in body:
                            pass
                    return
                yield payload
            self._heed_silence(self._tokens > tokens)
        raise self._ended_without("[DONE]")

    def _masked(self, message: str) -> str:
        """Without the key, which a server may send back."""
        key = self._engine.api_key()
        return message if key is None else message.replace(key, "***")

    def _parse(self, payload: bytes) -> TokenEvent | TokensEvent | None:
        try:
            return parse_chunk(payload)
        except NoTokenIds:
            raise
        except EngineError as error:
            key = self._engine.api_key()
            if key is not None and key.encode() in payload:
                return parse_chunk(payload.replace(key.encode(), b"***"))
            raise EngineError(self._masked(str(error))) from None

    def _heed_silence(self, progress: bool) -> None:
        """What comes without a token (a proxy's pings) does not prolong the wait for one."""
        settings, now = self._engine.settings, time.monotonic()
        limit = settings.idle_timeout if self._tokens else settings.first_token_timeout
        if progress:
            self._heard_at = now
        elif limit is not None:
            limit = max(limit - (now - self._heard_at), _SHORTEST_TIMEOUT)
        if limit != self._silence_limit:
            self._silence_limit = limit
            self._exchange.set_timeout(limit)

    def _count(self, event: TokenEvent | TokensEvent) -> None:
        if isinstance(event, TokenEvent):
            count = 1
        else:
            count = len(event.token_ids)
            if event.reported_tokens and not self._tokens + count:
                raise NoTokenIds  # they had no text either
        self._tokens += count

    def _ended_without(self, what: str) -> EngineError:
        if self._cancelled.is_set():
            return EngineError("the pass was cancelled")
        endpoint = self._engine.settings.endpoint
        return EngineError(
            f"{endpoint} ended its answer without {what}, after {self._tokens} tokens"
        )

    def _send(self, with_logprobs: bool) -> http.client.HTTPResponse:
        settings = self._engine.settings
        prompt, params, salt = self._request
        body = request_body(settings.model, prompt, params, salt, ids_in_logprobs=with_logprobs)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        key = self._engine.api_key()
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self._exchange.send(body, headers, settings.first_token_timeout)

    def _refused(self, response: http.client.HTTPResponse) -> NoReturn:
        settings, key = self._engine.settings, self._engine.api_key()
        body = b"".join(self._exchange.read())
        self._exchange.finish()
        if key is not None:  # here before it is cut short, and below without JSON's escapes
            body = body.replace(key.encode(), b"***")
        said = error_message(body)
        message = f"{settings.endpoint} answered {response.status} {response.reason}: {said}"
        message = self._masked(message)
        if response.status in _BUSY:
            raise _PassingError(message, seconds_of(response.getheader("Retry-After")))
        if response.status == 401:
            state = "is not right" if key is not None else "is not set"
            message += f" (the environment variable {settings.api_key_env} {state})"
        raise EngineError(message)

    def _broke(self, error: OSError | http.client.HTTPException) -> NoReturn:
        """Say what the failure of a connection means, and whether it may pass."""
        settings, tokens = self._engine.settings, self._tokens
        if self._cancelled.is_set():
            raise EngineError("the pass was cancelled") from error
        # A limit that was set here; the kernel's own, for a peer that vanished, has an errno.
        silent = isinstance(error, TimeoutError) and error.errno is None
        if tokens and silent:
            raise EngineError(
                f"{settings.endpoint} fell silent after {tokens} tokens: none came for "
                f"{settings.idle_timeout:g} s (idle_timeout)"
            ) from error
        if silent and self._exchange.connected:
            raise EngineError(
                f"{settings.endpoint} sent no token for {settings.first_token_timeout:g} s "
                "(first_token_timeout)"
            ) from error
        if self._arrived:
            raise EngineError(
                f"{settings.endpoint} broke off after {tokens} tokens: {_named(error)}"
            ) from error
        message = f"{settings.endpoint} can't be reached: {_named(error)}; is the server running?"
        if isinstance(error, PassingFailure):
            raise _PassingError(message) from error
        raise EngineError(message) from error

    def _pause(self, asked: float | None) -> None:
        """Wait before a retry: as long as the server asked, else twice as long each time."""
        if asked is None:
            pause = min(_FIRST_PAUSE * 2.0 ** min(self.retried, 9), _LONGEST_PAUSE)
            pause *= random.uniform(0.5, 1.0)  # so that many streams don't come back at once
        else:
            pause = min(asked, _LONGEST_ASKED)
        if self._cancelled.wait(pause):
            raise EngineError("the pass was cancelled")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
