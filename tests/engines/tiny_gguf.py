"""Tiny Llamas as GGUF files, with the rows of Q and K in GGUF's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, VOCAB = 2, 96, 4, 2, 16, 80, 100
THETA = 5000.0
EPS = 1e-5

METADATA: dict[str, Any] = {
    "general.name": "tiny",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": WIDTH,
    "llama.attention.layer_norm_rms_epsilon": EPS,
    "llama.rope.freq_base": THETA,
    "llama.rope.dimension_count": WIDTH,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}

Tensors = dict[str, np.ndarray]


def random_tensors(seed: int = 0, *, head: bool = True) -> Tensors:
    """A Llama's tensors under their names in a GGUF, Q and K in the order of Hugging Face."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return random.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    tensors = {"token_embd.weight": 8 * matrix(VOCAB, HIDDEN), "output_norm.weight": norm()}
    if head:
        tensors["output.weight"] = 3 * matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        named = {
            "attn_norm": norm(),
            "attn_q": 2 * matrix(HEADS * WIDTH, HIDDEN),
            "attn_k": 2 * matrix(KV_HEADS * WIDTH, HIDDEN),
            "attn_v": 2 * matrix(KV_HEADS * WIDTH, HIDDEN),
            "attn_output": 2 * matrix(HIDDEN, HEADS * WIDTH),
            "ffn_norm": norm(),
            "ffn_gate": 2 * matrix(FFN, HIDDEN),
            "ffn_up": 2 * matrix(FFN, HIDDEN),
            "ffn_down": 2 * matrix(HIDDEN, FFN),
        }
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in named.items()}
    return tensors


def interleaved(rows: np.ndarray) -> np.ndarray:
    """GGUF's order: row 2 i + j of a head is row i of the head's half j."""
    out = np.empty_like(rows)
    for head in range(len(rows) // WIDTH):
        for i in range(WIDTH // 2):
            for j in range(2):
                out[head * WIDTH + 2 * i + j] = rows[head * WIDTH + j * WIDTH // 2 + i]
    return out


def in_file_order(name: str, tensor: np.ndarray) -> np.ndarray:
    return interleaved(tensor) if "attn_q" in name or "attn_k" in name else tensor


def write(
    path: Path,
    tensors: Tensors | None = None,
    *,
    quant: gguf.GGMLQuantizationType | None = None,
    family: str = "llama",
    **changes: Any,
) -> Path:
    """A GGUF of tensors in Hugging Face's order; changes of metadata: ``llama__x=None`` drops."""
    writer = gguf.GGUFWriter(path, family)
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in metadata.items():
        if value is None:
            continue
        add: Callable[[str, Any], None] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name, tensor in (random_tensors() if tensors is None else tensors).items():
        stored = in_file_order(name, tensor)
        if quant is not None and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(stored, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weight_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.f32"))
