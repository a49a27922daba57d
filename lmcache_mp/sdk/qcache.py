"""Contexts that hold queries."""

from __future__ import annotations

from lmcache_mp.kv.lmcache import LMCacheContext
from lmcache_mp.sdk.context import LMCacheSDKCacheKind
from lmcache_mp.sdk.context import connect as connect_kind


def connect(url: str, http_url: str, model_name: str, timeout: float = 60.0) -> LMCacheContext:
    """Queries of ``model_name``; see :func:`lmcache_mp.connect`."""
    return connect_kind(LMCacheSDKCacheKind.QUERY, url, http_url, model_name, timeout)
