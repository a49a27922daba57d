"""Large batches of LLM request streams in worker processes.

A stream goes through phases: prefill its prompt, edit its KV cache with a function of the user's,
decode from what is left. ``lmcache_mp.batch`` runs many of them; ``lmcache_mp.stream`` is one.

The names below are loaded on first use: a worker process imports this package too, and must not
pay for what it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lmcache_mp.errors import (
    EngineError,
    KVError,
    LMCacheBatchedStreamError,
    LMCacheMPError,
    LMCacheStreamError,
    MissingExtraError,
    RemoteError,
    StreamFailure,
    StreamIdError,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from lmcache_mp.engines.local import connect_local
    from lmcache_mp.engines.openai import openai_engine
    from lmcache_mp.kv.lmcache import connect

__version__ = "0.1.0"

__all__ = [
    "EngineError",
    "KVError",
    "LMCacheBatchedStreamError",
    "LMCacheMPError",
    "LMCacheStreamError",
    "MissingExtraError",
    "RemoteError",
    "StreamFailure",
    "StreamIdError",
    "UsageError",
    "WorkerDied",
    "__version__",
    "connect",
    "connect_local",
    "openai_engine",
]

_LAZY = {
    "connect": "lmcache_mp.kv.lmcache",
    "connect_local": "lmcache_mp.engines.local",
    "openai_engine": "lmcache_mp.engines.openai",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
