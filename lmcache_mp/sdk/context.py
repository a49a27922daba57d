"""Contexts and their kinds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache_mp import connect as connect_to
from lmcache_mp.errors import KVError
from lmcache_mp.kv.lmcache import LMCacheContext
from lmcache_mp.kv.lmcache_server import QUERY_SUFFIX

__all__ = [
    "LMCacheSDKCacheKind",
    "LMCacheSDKContext",
    "LMCacheSDKError",
    "ModifyFnType",
    "connect",
]

LMCacheSDKContext = LMCacheContext
LMCacheSDKError = KVError


class LMCacheSDKCacheKind(enum.Enum):
    """What a context holds."""

    KV = "kv"
    QUERY = "query"

    def server_model_name(self, model_name: str) -> str:
        """What the server calls the cache of this kind of a model."""
        return model_name + (QUERY_SUFFIX if self is LMCacheSDKCacheKind.QUERY else "")

    def base_model_name(self, model_name: str) -> str:
        """The model that a server's name of a cache of this kind stands for."""
        is_query = self is LMCacheSDKCacheKind.QUERY
        return model_name.removesuffix(QUERY_SUFFIX) if is_query else model_name


#: An edit function: tensors by kind and token ids to (new_kv, new_tokens).
ModifyFnType = Callable[[Mapping[LMCacheSDKCacheKind, Any], Sequence[int]], tuple[Any, ...]]


def connect(
    kind: LMCacheSDKCacheKind, url: str, http_url: str, model_name: str, timeout: float = 60.0
) -> LMCacheContext:
    """A context of a kind; see :func:`lmcache_mp.connect`. ValueError: there is no such kind."""
    return connect_to(url, http_url, model_name, timeout, kind=LMCacheSDKCacheKind(kind).value)
