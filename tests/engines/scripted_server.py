"""An HTTP server that answers by a script: these bytes, in these packets, and then this end.

It runs in threads of the test, so a script can wait for the test, and the test for what the server
has seen; worker processes connect to it as to any server.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Seconds after which a test says that something hangs.
LIMIT = 60.0

# --- scripts --------------------------------------------------------------------------------------


def data(value: Any) -> bytes:
    """One server-sent event, of any JSON."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def event(
    ids: Sequence[int] | None, text: str = "", finish: str | None = None, **choice: Any
) -> bytes:
    """An event as vLLM sends it; ``ids`` None is that of a server that sends none."""
    told = {} if ids is None else {"token_ids": list(ids)}
    first = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **told, **choice}
    return data({"object": "text_completion", "choices": [first]})


def usage(count: int, cached: int | None = None) -> bytes:
    """The last event: the server's own count of what it generated, and of what it reused."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"completion_tokens": count, "prompt_tokens_details": details}
    return data({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def tokens(*ids: int, cached: int | None = None) -> list[bytes]:
    """A whole completion that ended by its length: an event for each id, whose text is the id."""
    last = len(ids) - 1
    events = [event([i], f"{i} ", "length" if at == last else None) for at, i in enumerate(ids)]
    return [*events, usage(len(ids), cached), DONE]


@dataclass(frozen=True)
class Answer:
    """What one request is answered with.

    ``body`` has packets, each sent on its own, and functions of the :class:`Exchange`, in which a
    script may wait. ``status`` "" sends no head at all. ``framing`` says how the body is delimited:
    "chunked" (a chunk for each packet, so a client reads exactly these), "raw" (chunked, and the
    packets are what goes over the wire, the sizes of chunks included), "length" (Content-Length),
    or "close" (by the end of the connection).

    ``end``: "whole"; "hang up" is whole, and then the server closes the connection that it did not
    say it would close; "open" is a body that goes on for ever without another byte; "cut" closes
    the connection before the body is whole, "reset" resets it.
    """

    body: Sequence[bytes | Callable[[Exchange], object]] = ()
    status: str = "200 OK"
    headers: Sequence[str] = ()
    framing: str = "chunked"
    end: str = "whole"

    @property
    def is_whole(self) -> bool:
        """Whether the body comes to its end."""
        return self.end in ("whole", "hang up")

    def head(self) -> bytes:
        """The status line and the headers."""
        size = sum(len(packet) for packet in self.body if isinstance(packet, bytes))
        framed = {
            "chunked": "Transfer-Encoding: chunked",
            "raw": "Transfer-Encoding: chunked",
            "length": f"Content-Length: {size + (not self.is_whole)}",
            "close": "Connection: close",
        }[self.framing]
        return "\r\n".join([f"HTTP/1.1 {self.status}", framed, *self.headers, "", ""]).encode()

    def packet(self, part: bytes) -> bytes:
        """``part`` as it goes over the wire."""
        return b"%x\r\n%s\r\n" % (len(part), part) if self.framing == "chunked" and part else part


# --- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request as it came: over which connection, from 1 on, and when, in seconds of the epoch."""

    connection: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    came: float


class _Gone(Exception):
    """The client closed its connection before it had all of the answer."""


class Exchange:
    """A request and the connection that it came over, for the steps of a script."""

    def __init__(self, request: Request, sock: socket.socket) -> None:
        self.request = request
        self._socket = sock

    def send(self, packet: bytes) -> None:
        """Send ``packet`` on its own."""
        try:
            self._socket.sendall(packet)
        except OSError as error:
            raise _Gone from error

    def hang(self) -> None:
        """Say nothing more until the client closes its connection."""
        with contextlib.suppress(OSError):
            while self._socket.recv(1 << 16):
                pass
        raise _Gone


class ScriptedServer:
    """Gives one answer after the other, in the order that requests come; the last one again.

    Its port is its own from the beginning, but it listens only within a ``with`` block, or from
    :meth:`listen` on if ``listening`` is False: until then connections are refused.

    ``connections`` counts those ever made, ``open`` those there are now, ``most_at_once`` the most
    requests that were being answered at a time, and ``gone`` the requests that the client left
    before it had all of the answer.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        listening: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.connections = self.open = self.running = self.most_at_once = self.gone = 0
        self._answers = list(answers)
        self._listening = listening
        self._tls = tls
        self._changed = threading.Condition()
        self._errors: list[Exception] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def bodies(self) -> list[dict[str, Any]]:
        """The body of each request."""
        return [request.body for request in self.requests]

    def wait_until(self, condition: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for what the server has seen to be so."""
        with self._changed:
            assert self._changed.wait_for(condition, limit), (
                f"after {limit:g} s: {len(self.requests)} requests, {self.running} of them running "
                f"and {self.gone} left, over {self.connections} connections, {self.open} open"
            )

    def listen(self) -> None:
        """Take connections from now on."""
        self._listener.listen(1000)
        self._start(self._accept)

    def __enter__(self) -> ScriptedServer:
        if self._listening:
            self.listen()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT)
        if exception[0] is None and self._errors:
            raise self._errors[0]

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="server", daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._change():
                    self._sockets.add(sock)
                    self.connections += 1
                    self.open += 1
                self._start(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        wrapped = sock
        try:
            if self._tls is not None:
                wrapped = self._tls.wrap_socket(sock, server_side=True)
            with wrapped.makefile("rb") as reader:
                while (request := _read_request(reader, number)) is not None:
                    if not self._respond(Exchange(request, wrapped), wrapped):
                        break
        except OSError:
            pass  # the client is gone
        except Exception as error:  # a script's own, which the test should hear of
            self._errors.append(error)
        finally:
            wrapped.close()
            with self._change():
                self._sockets.discard(sock)
                self.open -= 1

    def _respond(self, exchange: Exchange, sock: socket.socket) -> bool:
        """Answer a request; whether the connection is kept."""
        with self._change():
            answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
            self.requests.append(exchange.request)
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        gone = False
        try:
            _send(answer, exchange)
        except _Gone:
            gone = True
        finally:
            with self._change():
                self.running -= 1
                self.gone += gone
        if answer.end == "reset":  # a socket that does not linger ends with a reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return not gone and answer.end == "whole" and answer.framing != "close"


def _send(answer: Answer, exchange: Exchange) -> None:
    if answer.status:
        exchange.send(answer.head())
    for step in answer.body:
        if isinstance(step, bytes):
            exchange.send(answer.packet(step))
        else:
            step(exchange)
    if answer.end == "open":
        exchange.hang()
    if answer.framing == "chunked" and answer.is_whole:
        exchange.send(b"0\r\n\r\n")


def _read_request(reader: Any, connection: int) -> Request | None:
    line = reader.readline()
    if not line:
        return None
    headers: dict[str, str] = {}
    while header := reader.readline().strip():
        name, _, value = header.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = json.loads(reader.read(int(headers["content-length"])))
    return Request(connection, line.decode().split()[1], headers, body, time.time())
