"""The rotary embedding that a model's config asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_mp.edits.rope import Rope
from lmcache_mp.errors import UsageError

HF = {"hidden_size": 512, "num_attention_heads": 8, "rope_theta": 1e4}
GGUF = {
    "general.architecture": "llama",
    "llama.rope.freq_base": 1e4,
    "llama.rope.dimension_count": 64,
    "llama.embedding_length": 512,
    "llama.attention.head_count": 8,
}


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        (HF, Rope(64, 1e4)),
        (HF | {"head_dim": 128, "rope_scaling": None}, Rope(128, 1e4)),
        (HF | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(64, 5e5)),
        (HF | {"partial_rotary_factor": 0.5}, Rope(64, 1e4, 32)),
        (HF | {"rotary_pct": 0.25}, Rope(64, 1e4, 16)),
        (HF | {"model_type": "gptj", "rotary_dim": 32}, Rope(64, 1e4, 32, True)),
        ({"text_config": HF}, Rope(64, 1e4)),
        (GGUF, Rope(64, 1e4)),
        (GGUF | {"llama.rope.dimension_count": 16}, Rope(64, 1e4, 16)),
        (GGUF | {"llama.rope.scaling.type": "none"}, Rope(64, 1e4)),
        (
            GGUF | {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128},
            Rope(128, 1e4),
        ),
    ],
)
def test_plain_ones(config: dict[str, Any], rope: Rope) -> None:
    assert Rope.from_config(config) == rope


def test_from_a_file_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF))
    assert Rope.from_config(path) == Rope.from_config(str(tmp_path)) == Rope(64, 1e4)


def test_the_layout_may_be_given() -> None:
    assert Rope.from_config(HF, interleaved=True) == Rope(64, 1e4, interleaved=True)


def test_linear_scaling_divides_all() -> None:
    plain = Rope(64, 1e4).inv_freq
    for config in (
        HF | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        GGUF | {"llama.rope.scaling.factor": 4.0},
        GGUF | {"llama.rope.scale_linear": 4.0},
        GGUF | {"rope_freqs.weight": np.full(32, 4.0, np.float32)},
    ):
        np.testing.assert_allclose(Rope.from_config(config).inv_freq, plain / 4)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_short_wavelengths_are_kept_and_long_ones_divided(scaling: dict[str, Any]) -> None:
    plain = Rope(64, 1e4).inv_freq
    ratio = Rope.from_config(HF | {"rope_scaling": scaling}).inv_freq / plain
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / scaling["factor"])
    assert (np.diff(ratio) <= 1e-12).all() and ((ratio > 0.3) & (ratio < 0.9)).any()


def test_dynamic_has_the_one_base_of_the_longest_context() -> None:
    rope = Rope.from_config(HF | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    base = 1e4 * (2 * 2 - 1) ** (64 / 62)
    np.testing.assert_allclose(rope.inv_freq, base ** (-np.arange(0, 64, 2) / 64))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 512, "num_attention_heads": 8}, "does not say rope_theta"),
        ({"rope_theta": 1e4}, "does not say hidden_size"),
        (HF | {"rope_scaling": {"type": "linear"}}, "does not say factor"),
        (HF | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position"),
        (HF | {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (HF | {"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        (HF | {"rope_parameters": {"full": {"rope_theta": 1.0}}}, "differ by kind of layer"),
        (HF | {"rope_scaling": "yarn"}, "not a dict"),
        ({k: v for k, v in GGUF.items() if "freq" not in k}, "does not say rope_theta"),
        (3, "a dict or a path"),
        ("/nowhere/config.json", "no model config"),
    ],
)
def test_what_is_needed_must_be_there(config: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Rope.from_config(config)
