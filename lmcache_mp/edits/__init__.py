"""Ready edit functions, and what edits need. Each is made once and given to a batch's ``modify``:

``batch.modify(knorm(keep=0.5))``. They are frozen dataclasses that pickle, and whose repr can be
pasted back. They take numpy arrays and torch tensors alike and write to none of their arguments.
"""

from lmcache_mp.edits.by_key import keydiff, knorm, lagkv
from lmcache_mp.edits.by_query import rkv, snapkv, tova
from lmcache_mp.edits.gather import gather
from lmcache_mp.edits.positional import chunk_drop, random_drop, sink_recent
from lmcache_mp.edits.rope import Rope, rerotate
from lmcache_mp.edits.selection import ByHeads, Selection
from lmcache_mp.edits.view import StreamView
from lmcache_mp.edits.whole import compose, identity, quantize

__all__ = [
    "ByHeads",
    "Rope",
    "Selection",
    "StreamView",
    "chunk_drop",
    "compose",
    "gather",
    "identity",
    "keydiff",
    "knorm",
    "lagkv",
    "quantize",
    "random_drop",
    "rerotate",
    "rkv",
    "sink_recent",
    "snapkv",
    "tova",
]
