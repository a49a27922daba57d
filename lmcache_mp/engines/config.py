"""The shape of a Llama."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_mp.edits.rope import Rope


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What is needed to compute a Llama, and to check what is asked of it.

    ``name`` tells models apart, by content: KV of one is never taken for that of another.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    norm_eps: float
    rope: Rope
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
