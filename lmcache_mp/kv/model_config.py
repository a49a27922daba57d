"""The shape of a model, from the config.json of its folder (Hugging Face's format)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_mp.edits.rope import Rope
from lmcache_mp.errors import UsageError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``latent`` says that KV is compressed (MLA); ``rope`` is None where it can't be read."""

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
        rope=_rope(config),
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


def _rope(config: Mapping[str, Any]) -> Rope | None:
    try:
        return Rope.from_config(config)
    except UsageError:  # an edit that needs it says so
        return None
