"""The shape of a model, from the config.json of its folder (Hugging Face's format)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_mp.edits.rope import Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``latent`` says that KV is compressed (MLA); ``rope`` is None unless it is the plain one."""

    layers: int
    kv_heads: int
    head_dim: int
    latent: bool
    rope: Rope | None


def read_model_config(model_name: str) -> ModelConfig | None:
    """The config of a model named by its folder or by its name on the hub; None if not on disk."""
    path = _find(model_name)
    if path is None:
        return None
    config = json.loads(path.read_text("utf-8"))
    config = config.get("text_config", config)  # of a model that also sees
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return ModelConfig(
        layers=int(config["num_hidden_layers"]),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        latent=bool(config.get("kv_lora_rank")),
        rope=_rope(config, head_dim),
    )


def _find(model_name: str) -> Path | None:
    path = Path(model_name) / "config.json"
    if path.is_file():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model_name, "config.json")
    except ValueError:  # not a name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope | None:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    partial = float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)))
    if kind != "default" or theta is None or partial != 1.0:
        return None
    return Rope(head_dim, float(theta))
