"""What a tokenizer is made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenizerMaterial:
    """A GGUF's tokenizer fields; a token's id is its place in ``tokens``.

    ``kind`` is "gpt2" (byte-level BPE), "bytes" (the random models) or another of GGUF's names;
    ``pre`` names the pre-tokenizer; ``types`` are GGUF's: 1 normal, 3 control, 4 user-defined,
    6 byte.
    """

    kind: str
    pre: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    types: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    chat_template: str | None
