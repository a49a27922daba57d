"""A POST whose answer is read as it comes, over connections that are kept; stdlib only.

Chosen by ``benchmarks/engine_clients.py``, which measures the CPU time of receiving an event that
comes in a packet of its own: http.client needs 38 us, urllib3 the same within noise, aiohttp 2.1
and httpx 2.6 times as much. http.client is in the standard library, has no limit on connections,
and shows its socket, which a pass must reach to set its timeouts and to be cancelled.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from lmcache_mp.errors import UsageError

_READ = 1 << 16
#: A peer that vanished without a word is noticed after about two minutes of silence.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))

#: What a request fails with when its connection does.
ConnectionFailure = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    tls: bool
    host: str
    port: int | None
    path: str

    @classmethod
    def parse(cls, url: str, suffix: str) -> Endpoint:
        """``url`` (http or https) with ``suffix`` after its path; UsageError if it is no URL."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} has no valid port: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no http:// or https:// URL")
        if parts.query or parts.fragment or parts.username:
            raise UsageError(f"{_bare(url)!r} must be a plain URL: no user, query or fragment")
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") + suffix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.tls else 'http'}://{host}{port}{self.path}"


def _bare(url: str) -> str:
    """A URL for a message, without what may be a secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"


class Connections:
    """Connections to an endpoint: as many as there are requests at once, kept between them."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float) -> None:
        self.endpoint = endpoint
        self._timeout = connect_timeout
        self._idle: list[http.client.HTTPConnection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it has been used before (its server may have closed it)."""
        with contextlib.suppress(IndexError):
            return self._idle.pop(), True
        host, port = self.endpoint.host, self.endpoint.port
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        else:
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout, context=self._tls
            )
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection, False

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()


class Exchange:
    """One request and its answer. ``cancel`` may come from another thread, at any time.

    ``connected`` says whether there was a connection, so that the server may have seen the request.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self.cancelled = False
        self.connected = False

    def send(
        self, body: bytes, headers: Mapping[str, str], timeout: float | None
    ) -> http.client.HTTPResponse:
        """Send the request; returns once the answer's head is there.

        ``timeout`` seconds of silence are a TimeoutError. A kept connection that its server has
        closed meanwhile is replaced. Raises a ConnectionFailure.
        """
        while True:
            connection, reused = self._connections.take()
            self.connected = True
            try:
                return self._send_over(connection, body, headers, timeout)
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if not reused or self.cancelled:
                    raise

    def _send_over(
        self,
        connection: http.client.HTTPConnection,
        body: bytes,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> http.client.HTTPResponse:
        with self._lock:
            self._connection = connection
            if self.cancelled:
                raise ConnectionAbortedError("cancelled")
        self.set_timeout(timeout)
        connection.request("POST", self._connections.endpoint.path, body, dict(headers))
        self._response = connection.getresponse()
        return self._response

    def set_timeout(self, timeout: float | None) -> None:
        """From now on so many seconds of silence are a TimeoutError; None: no limit."""
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)

    def read(self) -> Iterator[bytes]:
        """The answer's body as it arrives. A body that is cut off is a ConnectionFailure."""
        response = self._response
        if response is not None:
            while data := response.read1(_READ):
                yield data
            if response.length:  # read1 says nothing when Content-Length promised more
                raise http.client.IncompleteRead(b"", response.length)

    def finish(self) -> None:
        """The answer was read to its end: keep the connection, if the server does."""
        response, connection = self._response, self._connection
        if response is None or connection is None:
            return
        if response.isclosed() and not response.will_close and not self.cancelled:
            with self._lock:
                self._connection = None
            connection.sock.settimeout(None)
            self._connections.give_back(connection)
        self.close()

    def close(self) -> None:
        """Give up the connection, if there still is one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def cancel(self) -> None:
        """Make whoever waits for this exchange fail now."""
        with self._lock:
            self.cancelled = True
            connection = self._connection
            if connection is not None and connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
