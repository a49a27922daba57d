"""Small questions to servers that may not be there: does it answer, and if not, why."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from lmcache_mp.errors import UsageError
from lmcache_mp.kv import lmcache_server
from lmcache_mp.kv.lmcache_server import Failed, get_json

#: The environment variable whose key is sent to an engine, as openai_engine sends it.
KEY_ENV = "OPENAI_API_KEY"
#: Seconds that a question may take.
TIMEOUT = 5.0

_POLL = 0.5
#: Of a server that is starting, or of a proxy before one.
_STARTING = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Address:
    """A server: an engine, an LMCache server's messages ("lmcache") or its HTTP side ("http")."""

    kind: Literal["engine", "lmcache", "http"]
    url: str

    def ask(self, timeout: float = TIMEOUT) -> None:
        """Return if it answers that it is up; raises one of ``Failed``."""
        if self.kind == "engine":
            get(f"{self.url}/health", timeout)
        elif self.kind == "http":
            get_json(f"{self.url}/healthcheck", timeout)
        else:
            greeting(self.url, timeout)


def get(url: str, timeout: float = TIMEOUT) -> bytes:
    """What an engine answers to a GET, with the key of the environment. One of ``Failed``."""
    request = urllib.request.Request(url)
    if key := os.environ.get(KEY_ENV):
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    return lmcache_server.get(request, timeout)


def greeting(url: str, timeout: float = TIMEOUT) -> bytes:
    """The first 10 bytes that a port sends unasked, fewer where that is all. OSError: it is shut"""
    parts = urlsplit(url)
    came = b""
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout) as connection:
        try:
            while len(came) < 10 and (data := connection.recv(10 - len(came))):
                came += data
        except OSError:  # it waits for us to speak, or hung up: what came tells what it is
            pass
    return came


def speaks_zeromq(came: bytes) -> bool:
    """Whether a greeting is ZeroMQ's: the signature of ZMTP 2 and 3 (rfc.zeromq.org/spec/23)."""
    return len(came) == 10 and came[0] == 0xFF and came[9] == 0x7F


def wait_until_up(addresses: Sequence[Address], seconds: float, say: Callable[[str], None]) -> None:
    """Poll until none of ``addresses`` is down or starting, or ``seconds`` are over.

    ``say`` is given a line for people when there is something to wait for. An answer that time
    won't change (a 404, another protocol) is not waited for.
    """
    deadline = time.monotonic() + seconds
    down = list(addresses)
    told = False
    while True:
        left = deadline - time.monotonic()
        down = [it for it in down if _is_down(it, min(TIMEOUT, max(left, 0.1)))]
        left = deadline - time.monotonic()
        if not down or left <= 0:
            return
        if not told:
            say(f"waiting up to {seconds:g} s for {', '.join(it.url for it in down)}")
            told = True
        time.sleep(min(_POLL, left))  # a server that starts gives no sign to wait on


def _is_down(address: Address, timeout: float) -> bool:
    try:
        address.ask(timeout)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code in _STARTING
    except OSError:
        return True
    except Failed:
        return False
    return False


def why(url: str, error: BaseException, start: str) -> tuple[str, str]:
    """What a failed question means, and what to do; ``start`` is that for a server not there."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code in _STARTING:
            wait = "--wait SECONDS waits for it; if it stays so, see its log"
            return f"{url} answers {error.code}: it is starting, or broken", wait
        return f"{url} answers {error.code}", start
    if not isinstance(error, OSError):
        return f"{url} does not answer as expected: {_named(error)}", start
    reason = getattr(error, "reason", error)
    return f"{url}: {getattr(reason, 'strerror', None) or reason or _named(error)}", start


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def check_message_url(name: str, url: str) -> None:
    """UsageError unless ``url`` is tcp://host:port."""
    try:
        parts = urlsplit(url)
        complete = parts.scheme == "tcp" and parts.hostname and parts.port
    except ValueError:
        complete = False
    if not complete or not re.fullmatch("tcp://[^/?#@]+", url):
        raise UsageError(f"{name} must be tcp://host:port, not {url!r}")
