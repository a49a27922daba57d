"""Which stored KV a pass of the embedded engine may reuse, and what it stores.

Prefill's KV is a pure function of the tokens before it, as long as it is computed in blocks that
begin at multiples of :data:`BLOCK`. So plain KV is reused down to such a multiple, and of what a
pass computes only the prompt's chunks are stored: decoding gives other bits in the last place.
Edited KV can't be computed again: it is reused to its last token, and all that follows it in its
stream, generated tokens too, is stored with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_mp.engines.llama import BLOCK, KVCache
from lmcache_mp.kv.local import ChunkStore


def load(store: ChunkStore, prompt: Sequence[int], salt: str, cache: KVCache, edited: bool) -> int:
    """Fill an empty ``cache`` with stored KV; returns the prompt tokens that it covers.

    The last prompt token is always left to compute: its logits choose the next one.
    """

    def usable(stored: int) -> int:
        tokens = min(stored, len(prompt) - 1)
        return tokens if edited else tokens - tokens % BLOCK

    wanted = usable(store.lookup(prompt, salt))
    if not wanted:
        return 0
    chunks = -(-wanted // store.chunk_size)
    kv = store.retrieve(prompt[: chunks * store.chunk_size], salt)
    wanted = 0 if kv is None else usable(kv.shape[2])  # some may have been evicted meanwhile
    if kv is not None and wanted:
        cache.load(kv[:, :, :wanted])
    return wanted


def save(store: ChunkStore, tokens: Sequence[int], salt: str, cache: KVCache) -> None:
    """Store the whole chunks of ``tokens``, which ``cache`` covers, that are not there yet."""
    whole = len(tokens) - len(tokens) % store.chunk_size
    stored = store.lookup(tokens[:whole], salt)
    if stored < whole:
        store.store(cache.export(stored, whole), tokens[:whole], salt, start=stored)
