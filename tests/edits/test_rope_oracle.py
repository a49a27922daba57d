"""Frequencies and moved keys against transformers' own tables, and torch against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmcache_mp.edits.rope import Rope, rerotate

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.oracle

SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies(kind: str, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = "default" if kind == "partial" else kind
    parameters = {"rope_type": rope_type, "rope_theta": theta, **KINDS[kind]}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=parameters)
    if rope_type == "default":
        from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

        config.rope_parameters["partial_rotary_factor"] = KINDS[kind].get(
            "partial_rotary_factor", 1.0
        )
        theirs, _ = GlmRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        longest = int(SHAPE["max_position_embeddings"] * KINDS[kind]["factor"])
        options = {"seq_len": longest} if kind == "dynamic" else {}
        theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", **options)
    for mine in (
        Rope.from_config(config),
        Rope.from_config(SHAPE | {"rope_parameters": parameters}),
    ):
        np.testing.assert_allclose(mine.inv_freq, theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rope", [Rope(16, 1e4), Rope(16, 1e4, 8), Rope(16, 1e4, 8, True)])
def test_torch_and_numpy_agree(name: str, rope: Rope) -> None:
    dtype = getattr(torch, name)
    keys = torch.randn(3, 700, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = keys.clone()
    old, new = np.arange(700) * 3, np.arange(700)
    moved = rerotate(keys, old, new, rope)
    assert moved.dtype == dtype and moved.shape == keys.shape and torch.equal(keys, before)
    expected = torch.from_numpy(rerotate(keys.float().numpy(), old, new, rope)).to(dtype)
    assert torch.equal(moved, expected)


def test_one_step_in_bfloat16_is_nearer_than_two() -> None:
    rope, tokens = Rope(64, 1e4), 2000
    raw = np.random.default_rng(0).standard_normal((1, tokens, 128)).astype(np.float32)
    zero, old, new = np.zeros(tokens, int), np.arange(tokens) * 5, np.arange(tokens)
    exact = rerotate(raw, zero, new, rope)
    keys = torch.from_numpy(rerotate(raw, zero, old, rope)).bfloat16()
    one = rerotate(keys, old, new, rope).float().numpy()
    two = rerotate(rerotate(keys, old, zero, rope), zero, new, rope).float().numpy()
    errors = [np.linalg.norm(moved - exact) / np.linalg.norm(exact) for moved in (one, two)]
    assert errors[0] < 2.5e-3 < errors[1]
