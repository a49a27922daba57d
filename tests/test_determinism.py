"""The same streams give the same tokens, KV and logits, bit for bit, in any company."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import lmcache_mp
import lmcache_mp.stream as lmc_stream
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.engines.local import LocalContext

STREAMS = 8


def halve(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def make_witness(model: str | None) -> Any:
    """An edit that changes nothing and tells the bits of the KV and of the logits that follow."""

    def witness(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, str]]:
        from lmcache_mp.engines.llama import Llama

        llama = Llama.open(model)
        cache = llama.new_cache(edited=True)
        cache.load(kv)
        logits = llama.decode([tokens[-1]], [cache])
        digest = lambda array: hashlib.blake2b(array.tobytes()).hexdigest()  # noqa: E731 - short
        return kv, tokens, {"kv_bits": digest(kv), "logits_bits": digest(logits)}

    return witness


def prompts(vocab: int) -> list[list[int]]:
    """Different lengths around blocks; the first two share 300 tokens."""
    random = np.random.default_rng(7)
    lengths = [300, 330, 40, 257, 33, 90, 256, 120]
    made = [random.integers(3, min(vocab, 20_000), length).tolist() for length in lengths]
    made[1][:300] = made[0]
    return made


def run(
    ctx: LocalContext, model: str | None, workers: int, streams: list[int], salt: str = ""
) -> dict[int, tuple[Any, ...]]:
    """Everything that must not differ, by stream."""
    texts = prompts(ctx.config.vocab)
    with LMCacheBatchedStream(workers) as batch:
        ids = [
            batch.add(
                lmc_stream.create_request(ctx, ctx.post_completion, texts[i], cache_salt=salt),
                custom_id=str(i),
            )
            for i in streams
        ]
        batch.prefill({"temperature": 0})
        plain = batch.decode({"max_tokens": 3, "temperature": 0, "ignore_eos": True})
        unedited = batch.modify(make_witness(model)).to_frame()
        batch.modify(halve)
        # Long enough for a chunk of generated tokens, whose KV decoding has made, to be stored.
        batch.decode({"max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True})
        edited = batch.modify(make_witness(model)).to_frame()
        assert plain.to_frame()["status"].eq("completed").all()
        return {
            stream: (
                batch.get_stream(key).output_tokens(),
                *unedited.loc[key, ["kv_bits", "logits_bits"]],
                *edited.loc[key, ["kv_bits", "logits_bits"]],
            )
            for stream, key in zip(streams, ids, strict=True)
        }


@pytest.mark.parametrize(
    "model",
    ["random:0", pytest.param(None, marks=pytest.mark.weights)],
    ids=["random", "packaged"],
)
def test_alone_among_others_one_worker_or_two_cold_or_warm(model: str | None) -> None:
    everyone = list(range(STREAMS))
    with lmcache_mp.connect_local(model) as ctx:
        cold = run(ctx, model, 2, everyone)
        warm = run(ctx, model, 2, everyone)
        assert warm == cold
        assert run(ctx, model, 1, everyone, salt="one-worker") == cold
        for alone in (1, 6):
            assert run(ctx, model, 1, [alone], salt=f"alone-{alone}")[alone] == cold[alone]
        ctx.clear()
        assert run(ctx, model, 1, everyone) == cold
