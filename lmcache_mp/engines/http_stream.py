"""A POST whose answer is read as it comes, over connections that are kept; stdlib only.

Chosen by ``benchmarks/engine_clients.py``, which measures the CPU time of receiving an event that
comes in a packet of its own: http.client needs 38 us, urllib3 the same within noise, aiohttp 2.1
and httpx 2.6 times as much. http.client is in the standard library, has no limit on connections,
and shows its socket, which a pass must reach to set its timeouts and to be cancelled.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from lmcache_mp.errors import UsageError

_READ = 1 << 16
#: A peer that vanished without a word is noticed after about two minutes of silence.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))

#: What a request fails with when its connection does.
ConnectionFailure = (OSError, http.client.HTTPException)
#: The peer ended the connection; under TLS it may not say so, and then that is no ConnectionError.
_Ended = (ConnectionError, http.client.BadStatusLine, ssl.SSLEOFError, ssl.SSLZeroReturnError)
#: Those of them that may not come again.
PassingFailure = (*_Ended, TimeoutError, http.client.HTTPException)


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
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise UsageError(f"{_bare(url)!r} has no valid port or host") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{_bare(url)!r} is no http:// or https:// URL")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise UsageError(f"{_bare(url)!r} must be a plain URL: no user, query or fragment")
        if not re.fullmatch("[!-~]*", parts.path):
            raise UsageError(f"{_bare(url)!r} may only have visible ASCII characters: quote others")
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") + suffix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.tls else 'http'}://{host}{port}{self.path}"


def _bare(url: str) -> str:
    """A URL for a message, without what may be a secret in it."""
    return re.sub("[?#].*", "", re.sub("//.*@", "//", url))


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
        # Kept here too: a connection forgets its socket once the server said that it will close it.
        self._socket: socket.socket | None = None
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
            self.connected = False
            connection, reused = self._connections.take()
            self.connected = True
            try:
                return self._send_over(connection, body, headers, timeout)
            except _Ended:
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
            self._connection, self._socket = connection, connection.sock
            if self.cancelled:
                raise ConnectionAbortedError("cancelled")
        self.set_timeout(timeout)
        connection.request("POST", self._connections.endpoint.path, body, dict(headers))
        self._response = connection.getresponse()
        return self._response

    def set_timeout(self, timeout: float | None) -> None:
        """From now on so many seconds of silence are a TimeoutError; None: no limit."""
        if self._socket is not None and self._socket.fileno() >= 0:
            self._socket.settimeout(timeout)

    def read(self) -> Iterator[bytes]:
        """The answer's body as it arrives. A body that is cut off is a ConnectionFailure."""
        response = self._response
        if response is None:
            return
        # Content-Length is counted here: how well read1 does it depends on the version of Python.
        left = response.length
        while left != 0 and (data := response.read1(_READ if left is None else min(left, _READ))):
            left = None if left is None else left - len(data)
            yield data
        if left:
            raise http.client.IncompleteRead(b"", left)
        response.close()

    def finish(self) -> None:
        """The answer was read to its end: keep the connection, if the server does."""
        response, connection = self._response, self._connection
        if response is None or connection is None:
            return
        if response.isclosed() and not response.will_close and not self.cancelled:
            with self._lock:
                self._connection = self._socket = None
            self._connections.give_back(connection)
        self.close()

    def close(self) -> None:
        """Give up the connection, if there still is one."""
        with self._lock:
            connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.close()
        if self._response is not None:
            self._response.close()

    def cancel(self) -> None:
        """Make whoever waits for this exchange fail now."""
        with self._lock:
            self.cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def seconds_of(retry_after: str | None) -> float | None:
    """Seconds in a Retry-After header: a number, or a date (RFC 9110, 10.2.3)."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        then = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, then.timestamp() - time.time())
