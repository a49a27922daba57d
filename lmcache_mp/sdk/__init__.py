"""The names of LMCache's own ``lmcache.sdk`` (0.5.6) for the same things here.

A notebook written for it changes ``import lmcache.sdk as lmc_sdk`` to
``import lmcache_mp.sdk as lmc_sdk``, and nothing else: streams then run in worker processes. Where
LMCache's meaning differs from ours, LMCache's holds here: ``output_tokens`` is the whole sequence,
``modify`` takes its arguments in LMCache's order, edit functions get a mapping by kind.
"""

from lmcache_mp.sdk import batch, context, kvcache, qcache, request
from lmcache_mp.sdk.context import LMCacheSDKCacheKind, connect

__all__ = [
    "LMCacheSDKCacheKind",
    "batch",
    "connect",
    "context",
    "kvcache",
    "qcache",
    "request",
]
