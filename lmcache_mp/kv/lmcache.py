"""KV in a running LMCache server, shared with the engine that prefilled it.

:func:`connect` returns a small picklable recipe; LMCache is imported and the connection opened on
first use, once per process. See docs/vllm_lmcache.md for how to start the servers.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_mp.arguments import check_choice, check_seconds
from lmcache_mp.edits.rope import Rope
from lmcache_mp.errors import KVError, MissingExtraError, UsageError
from lmcache_mp.kv.context import check_salt
from lmcache_mp.kv.lmcache_server import QUERY_SUFFIX, Registration, ServerFacts, server_facts
from lmcache_mp.kv.model_config import read_model_config

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_mp.kv.lmcache_link import Link

_log = logging.getLogger(__name__)


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    kind: str = "kv",
    device: str = "cpu",
    rope: Rope | None = None,
) -> LMCacheContext:
    """KV of ``model_name`` in the LMCache server at ``url`` ("tcp://host:port").

    ``http_url`` is the address of the server's HTTP side, ``model_name`` the name that the engine
    registered: with vLLM the path of the model, not the served name. ``timeout`` seconds bound each
    request to the server. ``kind`` "query" opens LMCache's query cache instead, whose arrays are
    [1, L, T, query_heads * head_dim]. ``device``: where edits get their tensors; workers see no GPU
    unless it names one. ``rope``: the model's rotary embedding, else it is read from the model's
    config.json where that is on this machine.

    Raises UsageError for a wrong argument. Nothing is opened before the first use.
    """
    for name, value in (("url", url), ("http_url", http_url), ("model_name", model_name)):
        if not isinstance(value, str) or not value:
            raise UsageError(f"{name} must be a non-empty string, not {value!r}")
    if not http_url.startswith(("http://", "https://")):
        raise UsageError(f"http_url must start with http:// or https://, not {http_url!r}")
    check_choice(kind, ("kv", "query"), "kind")
    seconds = check_seconds(timeout, "timeout", positive=True)
    return LMCacheContext(_Recipe(url, http_url, model_name, seconds, kind, device, rope))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What travels to other processes."""

    url: str
    http_url: str
    model_name: str
    timeout: float
    kind: str
    device: str
    rope: Rope | None

    @property
    def server_name(self) -> str:
        """What the server calls the cache."""
        return self.model_name + (QUERY_SUFFIX if self.kind == "query" else "")


class LMCacheContext:
    """A :class:`~lmcache_mp.kv.context.KVContext` of torch tensors; see :func:`connect`."""

    #: Each worker maps the server's whole pool, and pins it where it has a GPU.
    max_workers = 8

    def __init__(self, recipe: _Recipe) -> None:
        self._recipe = recipe
        self._lock = threading.Lock()
        self._facts: ServerFacts | None = None
        self._link: Link | None = None
        self._disconnect: weakref.finalize[[], LMCacheContext] | None = None

    @property
    def kind(self) -> str:
        """ "kv" or "query"."""
        return self._recipe.kind

    @property
    def device(self) -> str:
        """Where edits get their tensors."""
        return self._recipe.device

    @property
    def model_name(self) -> str:
        """The name that the engine registered."""
        return self._recipe.model_name

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk, as the server is set."""
        with self._lock:
            return self._server().chunk_size

    @property
    def transport(self) -> str:
        """How chunks travel: "shared memory", or "pickle" (about ten times slower)."""
        return "shared memory" if self._opened().shares_memory else "pickle"

    @property
    def rope(self) -> Rope:
        """The model's rotary embedding, for edits that move tokens. KVError: it is not known."""
        if self._recipe.rope is not None:
            return self._recipe.rope
        config = read_model_config(self._recipe.model_name)
        if config is None or config.rope is None:
            raise KVError(
                f"the rotary embedding of {self.model_name!r} is not known: its config.json "
                "is not on this machine or does not say all of it; pass connect(..., rope=...)"
            )
        return config.rope

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest stored prefix, a multiple of ``chunk_size``."""
        return self._opened().lookup(_ids(tokens), check_salt(cache_salt))

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Tensor | None:
        """KV [2, L, T, D] of the longest stored prefix, private and writable, or None.

        Queries, for the kind "query", are [1, L, T, query_heads * head_dim].
        """
        kv = self._opened().read(_ids(tokens), check_salt(cache_salt))
        return kv if kv is None or self.device == "cpu" else kv.to(self.device)

    def store(self, kv: Tensor, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Store the whole chunks of ``kv`` [2, L, T, D]. False: every chunk was there already.

        KVError: the shape or dtype is not the server's, or it has no room.
        """
        link = self._opened()
        if kv.shape[2] != len(tokens):
            raise KVError(f"KV of {kv.shape[2]} tokens was given with {len(tokens)} token ids")
        whole = len(tokens) - len(tokens) % link.chunk_size
        if not whole:
            raise KVError(
                f"{len(tokens)} tokens are less than one chunk of {link.chunk_size}: nothing is "
                "stored"
            )
        kept = kv[:, :, :whole].detach().cpu()
        return link.write(kept, _ids(tokens)[:whole], check_salt(cache_salt))

    def clear(self) -> None:
        """Empty the server, for everybody who uses it."""
        self._opened().clear()

    def open(self) -> None:
        """Connect now. KVError says what is wrong: the server, or the model's name."""
        self._opened()

    def close(self) -> None:
        """Take back what this process registered with the server, and disconnect. Idempotent."""
        with self._lock:
            disconnect, self._disconnect = self._disconnect, None
            self._link = self._facts = None
        if disconnect is not None:
            disconnect()

    def __enter__(self) -> LMCacheContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[LMCacheContext], tuple[_Recipe]]:
        return LMCacheContext, (self._recipe,)

    def __repr__(self) -> str:
        return f"LMCacheContext({self._recipe.url!r}, {self._recipe.server_name!r})"

    def _server(self) -> ServerFacts:
        """What the server says of itself; the caller holds the lock."""
        if self._facts is None:
            self._facts = server_facts(self._recipe.http_url, min(10.0, self._recipe.timeout))
        return self._facts

    def _opened(self) -> Link:
        with self._lock:
            if self._link is None:
                facts = self._server()
                registration = _registration(facts, self._recipe)
                # Its dozens of lines a connection would drown the user's own output.
                os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
                try:
                    from lmcache_mp.kv.lmcache_link import Link
                except ImportError as error:
                    raise MissingExtraError("an LMCache server", "lmcache") from error
                recipe = self._recipe
                self._link = Link(recipe.url, facts, registration, recipe.timeout)
                self._disconnect = weakref.finalize(self, self._link.close)
                if not self._link.shares_memory:
                    _log.warning(
                        "KV comes from the LMCache server at %s pickled, about ten times slower "
                        "than over shared memory: start it with --shm-name NAME, on this machine",
                        recipe.url,
                    )
            return self._link


def _registration(facts: ServerFacts, recipe: _Recipe) -> Registration:
    """The model's registration; KVError says which there are, and what does not fit."""
    if facts.drives_transfers:
        raise KVError(
            f"the server at {recipe.http_url} drives all transfers itself: start `lmcache server` "
            "with --supported-transfer-mode auto"
        )
    found = facts.registration(recipe.server_name)
    if found is None:
        raise KVError(_not_registered(facts, recipe))
    if found.world_size > 1 and not found.single_plane:
        raise KVError(
            f"{recipe.model_name!r} runs on {found.world_size} GPUs by tensor parallelism, each of "
            "which keeps its own part of the KV: this is not supported"
        )
    if found.block_size and facts.chunk_size % found.block_size:
        raise KVError(
            f"the server's chunks of {facts.chunk_size} tokens are no multiple of the engine's "
            f"blocks of {found.block_size}: start it with another --chunk-size"
        )
    return found


def _not_registered(facts: ServerFacts, recipe: _Recipe) -> str:
    if recipe.kind == "query":
        if "transfer_query" not in facts.enabled:
            return "the server keeps no queries: start it with --enable transfer_query"
        return (
            f"no engine has registered queries of {recipe.model_name!r}: they need LMCache's patch "
            "of vLLM"
        )
    there = ", ".join(map(repr, facts.models)) or "none"
    return (
        f"no engine has registered {recipe.model_name!r} with the server at {recipe.http_url}; "
        f"registered: {there} (with vLLM it is the path of the model, not the served name)"
    )


def _ids(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens]
