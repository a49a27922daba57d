"""A model's rotary embedding, read from its config.

Scalings: linear (positions divided by a factor); llama3 (Grattafiori et al., The Llama 3 Herd of
Models, https://arxiv.org/abs/2407.21783: long wavelengths divided, short ones kept); yarn (Peng et
al., https://arxiv.org/abs/2309.00071); dynamic (NTK-aware: a larger base). A scaling of the
attention itself (yarn) is a factor of all keys, so it does not matter where keys are only turned.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.edits.rope import Rope, powers
from lmcache_mp.errors import UsageError

Frequencies = NDArray[np.float64]

#: Model types that pair neighbours (GPT-J); all others pair halves (NeoX).
_INTERLEAVED = {"gptj", "codegen", "cohere", "cohere2", "chatglm", "glm", "glm4", "ernie4_5"}


def read_rope(config: Mapping[str, Any] | str | os.PathLike[str], interleaved: bool | None) -> Rope:
    """See :meth:`Rope.from_config`."""
    fields = _load(config)
    if "general.architecture" in fields:
        fields = _from_gguf(fields)
    fields = fields.get("text_config", fields)  # of a model that also sees
    scaling = _scaling(fields)
    both = {**fields, **scaling}
    theta = _number(both, "rope_theta")
    head_dim = _head_dim(fields)
    width = _rotary_dim(both, head_dim)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if interleaved is None:
        interleaved = str(fields.get("model_type", "")) in _INTERLEAVED
    frequencies = _scaled(kind, theta, width, scaling, both)
    return Rope(
        head_dim,
        theta,
        None if width == head_dim else width,
        interleaved,
        () if frequencies is None else tuple(frequencies.tolist()),
    )


def _load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):  # a configuration object of transformers
        to_dict = getattr(config, "to_dict", None)
        if to_dict is None:
            raise UsageError(f"a config must be a dict or a path, not a {type(config).__name__}")
        loaded: Mapping[str, Any] = to_dict()
        return loaded
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"no model config can be read from {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{path} holds no model config")
    return parsed


def _scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says of RoPE in a part of its own; the name depends on the config's age."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UsageError(f"the config's rope parameters are {scaling!r}, not a dict")
    if any(isinstance(part, Mapping) for part in scaling.values()):
        raise UsageError(
            "the model has rotary embeddings that differ by kind of layer, which can't be moved "
            "by one: use rerotate=False"
        )
    return {name: value for name, value in scaling.items() if value is not None}


def _head_dim(fields: Mapping[str, Any]) -> int:
    if fields.get("head_dim"):
        return int(fields["head_dim"])
    hidden = _either(fields, "hidden_size", "n_embd")
    return int(hidden) // int(_either(fields, "num_attention_heads", "n_head"))


def _rotary_dim(fields: Mapping[str, Any], head_dim: int) -> int:
    if fields.get("rotary_dim"):
        return int(fields["rotary_dim"])
    share = fields.get("partial_rotary_factor", fields.get("rotary_pct"))
    return head_dim if share is None else int(head_dim * float(share))


def _scaled(
    kind: str, theta: float, width: int, scaling: Mapping[str, Any], both: Mapping[str, Any]
) -> Frequencies | None:
    """``inv_freq`` where it is not the plain one."""
    if kind in ("default", "none", ""):
        return None
    plain = powers(theta, width)
    if kind == "factors":  # GGUF's form of llama3: one divisor a pair
        return plain / np.asarray(scaling["factors"], np.float64)
    if kind == "linear":
        return plain / _number(scaling, "factor")
    if kind == "dynamic":
        return powers(_dynamic_base(theta, width, scaling), width)
    if kind == "llama3":
        return _llama3(plain, scaling)
    if kind == "yarn":
        return _yarn(plain, theta, width, both)
    raise UsageError(
        f"RoPE of the type {kind!r} is not supported (default, linear, llama3, yarn, dynamic are): "
        "give its frequencies, Rope(head_dim, theta, frequencies=...)"
    )


def _dynamic_base(theta: float, width: int, scaling: Mapping[str, Any]) -> float:
    """vLLM's one base, that of a context ``factor`` times as long as the model was trained for."""
    if width == 2:  # the one pair turns by 1 a position whatever the base
        return theta
    power = width / (width - 2)
    if scaling.get("alpha"):
        return float(theta * float(scaling["alpha"]) ** power)
    factor = _number(scaling, "factor")
    return float(theta * (factor * factor - (factor - 1)) ** power)


def _llama3(plain: Frequencies, scaling: Mapping[str, Any]) -> Frequencies:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)  # 0: divided, 1: kept
    frequencies: Frequencies = plain * (blend + (1 - blend) / factor)
    return frequencies


def _yarn(plain: Frequencies, theta: float, width: int, fields: Mapping[str, Any]) -> Frequencies:
    original = _number(fields, "original_max_position_embeddings")
    if fields.get("factor") is None and "max_position_embeddings" in fields:
        factor = float(fields["max_position_embeddings"]) / original
    else:
        factor = _number(fields, "factor")

    def dimension(turns: float) -> float:
        """The pair that makes so many turns within the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(fields.get("beta_fast") or 32))
    high = dimension(float(fields.get("beta_slow") or 1))
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    divided = np.clip((np.arange(width // 2) - low) / span, 0, 1)
    frequencies: Frequencies = plain * (1 - divided + divided / factor)
    return frequencies


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF metadata by Hugging Face's names."""
    family = metadata["general.architecture"]

    def get(name: str) -> Any:
        return metadata.get(f"{family}.{name}")

    names = {
        "rope_theta": "rope.freq_base",
        "rotary_dim": "rope.dimension_count",
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
    }
    fields = {name: get(key) for name, key in names.items() if get(key) is not None}
    # Without a type, and in files older than types, a factor alone scales linearly.
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    kind = get("rope.scaling.type") or ("linear" if factor not in (None, 0, 1) else "none")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        scaling[name] = get(f"rope.scaling.{key}")
    if "rope_freqs.weight" in metadata:
        scaling = {"rope_type": "factors", "factors": metadata["rope_freqs.weight"]}
    return {**fields, "model_type": family, "rope_parameters": scaling}


def _either(fields: Mapping[str, Any], *names: str) -> float:
    found = [name for name in names if fields.get(name) is not None]
    return _number(fields, (found or names)[0])


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if value is None or isinstance(value, bool | str):
        raise UsageError(
            f"the config does not say {name}, which the rotary embedding needs: nothing is guessed "
            "for it, as keys turned by a wrong angle are garbage"
        )
    return float(value)
