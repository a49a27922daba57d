"""The KV port: what a stream asks of the place where KV lives; chunk keys and edit salts.

KV is ``[2, L, T, D]``: key and value, layers, tokens, ``D = kv_heads * head_dim``. It is kept in
chunks of ``chunk_size`` tokens. A chunk's identity is its tokens, all tokens before it, the model
and the salt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lmcache_mp.errors import UsageError

_MAX_SALT = 128
_FORBIDDEN_IN_SALT = "@/\\\0"


class KVContext(Protocol):
    """Any picklable object with these; arrays are numpy or torch, as the context likes.

    Optional: ``clear()`` empties it; ``open()`` connects before first use; ``pin(salt)`` and
    ``release(salt)`` keep and give up what is stored under a salt; ``kind`` is "kv" or "query".
    """

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        ...

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest stored prefix, a multiple of ``chunk_size``."""
        ...

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any | None:
        """KV of the longest stored prefix, private and writable, or None when there is none."""
        ...

    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Store the whole chunks of ``kv``. False: every chunk was there. A failure raises."""
        ...

    def close(self) -> None:
        """Give up connections and what else the context holds. Idempotent."""
        ...


@runtime_checkable
class PinningContext(Protocol):
    """A context that can protect what is stored under a salt from eviction."""

    def pin(self, cache_salt: str) -> None:
        """Keep whatever is and will be stored under ``cache_salt`` until it is released."""
        ...

    def release(self, cache_salt: str) -> None:
        """Drop what is stored under ``cache_salt``: nobody will ask for it again."""
        ...


def check_salt(salt: str) -> str:
    """``salt`` itself, or a UsageError: LMCache takes at most 128 characters, no @ / \\ NUL."""
    if not isinstance(salt, str):
        raise UsageError(f"cache_salt must be a string, not {type(salt).__name__}")
    if len(salt) > _MAX_SALT:
        raise UsageError(f"cache_salt has {len(salt)} characters; at most {_MAX_SALT} are allowed")
    for character in _FORBIDDEN_IN_SALT:
        if character in salt:
            raise UsageError(f"cache_salt {salt!r} contains {character!r}, which is not allowed")
    return salt


def edit_salt(cache_salt: str, nonce: str, stream_key: str, edits: int, attempt: str) -> str:
    """The salt of a stream's edited KV: 32 hex digits, different for every attempt of every edit.

    So edited KV can neither be served to another request nor be taken for the unedited KV of the
    same tokens. The parts are length-prefixed: no two different tuples hash the same bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (cache_salt, nonce, stream_key, str(edits), attempt):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def chunk_keys(
    tokens: Sequence[int], chunk_size: int, *, model: str, cache_salt: str = ""
) -> list[str]:
    """Keys (32 hex digits) of the whole chunks of ``tokens``, each over all tokens up to its end.

    Equal in every process and on every platform: nothing here depends on ``hash()``.
    """
    ids = np.ascontiguousarray(tokens, dtype="<i4")
    seed = f"{len(model)}:{model}{len(cache_salt)}:{cache_salt}:{chunk_size}"
    link = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    keys = []
    for start in range(0, len(ids) - chunk_size + 1, chunk_size):
        data = link + ids[start : start + chunk_size].tobytes()
        link = hashlib.blake2b(data, digest_size=16).digest()
        keys.append(link.hex())
    return keys
