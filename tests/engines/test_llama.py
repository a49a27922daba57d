"""The decoder's promises: bits that depend on nothing but the tokens before, and its edges."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from lmcache_mp.engines.llama import BLOCK, KVCache, Llama

LENGTHS = [1, 2, 31, 32, 33, 100, 255, 256, 257, 300, 511, 512, 513, 600]


@pytest.fixture(scope="module", params=["random:0", pytest.param(None, marks=pytest.mark.weights)])
def llama(request: pytest.FixtureRequest) -> Llama:
    return Llama.open(request.param)


def tokens_of(llama: Llama, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, llama.config.vocab, count)


def prefilled(llama: Llama, tokens: np.ndarray) -> tuple[KVCache, np.ndarray]:
    cache = llama.new_cache()
    return cache, llama.prefill(tokens, cache)


def test_a_tokens_kv_does_not_depend_on_what_follows(llama: Llama) -> None:
    tokens = tokens_of(llama, 600)
    whole = prefilled(llama, tokens)[0].export(0, 600)
    lengths = LENGTHS if llama.config.hidden < 100 else [33, 300]
    for length in lengths:
        part = prefilled(llama, tokens[:length])[0]
        assert np.array_equal(part.export(0, length), whole[:, :, :length]), length


@pytest.mark.parametrize("threads", ["1", "2"])
def test_nor_does_it_with_the_kernels_that_the_machine_would_choose(threads: str) -> None:
    """A BLAS takes other kernels on other processors; here they may have been set by hand."""
    program = """
import numpy as np
from lmcache_mp.engines.llama import Llama

llama = Llama.open("random:0")
tokens = np.random.default_rng(0).integers(0, 256, 1100)

def kv(length):
    cache = llama.new_cache()
    llama.prefill(tokens[:length], cache)
    return cache.export(0, length)

whole = kv(1100)
for length in (1, 20, 60, 130, 250, 257, 300, 400, 513, 530, 600, 769, 800, 1025):
    assert np.array_equal(kv(length), whole[:, :, :length]), length
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment["OPENBLAS_NUM_THREADS"] = threads
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_going_on_from_stored_blocks_equals_a_cold_prefill(llama: Llama) -> None:
    tokens = tokens_of(llama, 600)
    cold, logits = prefilled(llama, tokens)
    for blocks in (1, 2):
        warm = llama.new_cache()
        warm.load(cold.export(0, blocks * BLOCK))
        assert np.array_equal(llama.prefill(tokens[blocks * BLOCK :], warm), logits)
        assert np.array_equal(warm.export(0, 600), cold.export(0, 600))


def test_a_stream_decodes_to_the_same_bits_in_any_company(llama: Llama) -> None:
    starts = [
        prefilled(llama, tokens_of(llama, 20 + 7 * i, i))[0].export(0, 20 + 7 * i) for i in range(8)
    ]

    def decode(streams: list[int]) -> dict[int, list[np.ndarray]]:
        caches = []
        for stream in streams:
            caches.append(llama.new_cache())
            caches[-1].load(starts[stream])
        current, logits = [5 + s for s in streams], {s: [] for s in streams}
        for _ in range(4):
            rows = llama.decode(current, caches)
            current = rows.argmax(axis=1).tolist()
            for stream, row in zip(streams, rows, strict=True):
                logits[stream].append(row)
        return logits

    together = decode(list(range(8)))
    for company in ([0], [3], [7, 3], [2, 3, 0], [6, 5, 4, 3, 2]):
        apart = decode(company)
        for stream in company:
            assert np.array_equal(apart[stream], together[stream]), (company, stream)


def test_decoding_agrees_with_prefill(llama: Llama) -> None:
    tokens = tokens_of(llama, 40)
    cache, _ = prefilled(llama, tokens[:30])
    stepped = [llama.decode([token], [cache])[0] for token in tokens[30:]]
    every = llama.prefill(tokens, llama.new_cache(), all_logits=True)
    assert every.shape == (40, llama.config.vocab)
    np.testing.assert_allclose(np.stack(stepped), every[30:], atol=2e-3)
    np.testing.assert_allclose(prefilled(llama, tokens)[1], every[-1], atol=1e-3)


def test_kv_goes_out_and_in_unchanged(llama: Llama) -> None:
    cache, _ = prefilled(llama, tokens_of(llama, 50))
    kv = cache.export(0, 50)
    config = llama.config
    assert kv.shape == (2, config.layers, 50, config.kv_heads * config.head_dim)
    assert kv.dtype == np.float32 and kv.flags.c_contiguous and kv.flags.writeable
    other = llama.new_cache()
    other.load(kv[:, :, :20])
    other.load(kv[:, :, 20:])
    assert other.length == 50 and np.array_equal(other.export(0, 50), kv)
    assert np.array_equal(other.export(7, 9), kv[:, :, 7:9])


def test_a_cache_grows_past_a_block_while_decoding() -> None:
    llama = Llama.open("random:1")
    tokens = tokens_of(llama, BLOCK + 3)
    cache, _ = prefilled(llama, tokens[: BLOCK - 2])
    for token in tokens[BLOCK - 2 :]:
        llama.decode([token], [cache])
    assert cache.length == BLOCK + 3
    whole = prefilled(llama, tokens)[0].export(0, BLOCK + 3)
    np.testing.assert_allclose(cache.export(0, BLOCK + 3), whole, atol=1e-3)


def test_seeds_are_different_models_and_the_same_seed_is_the_same() -> None:
    def logits(name: str) -> np.ndarray:
        return prefilled(Llama.open(name), np.arange(10))[1]

    assert np.array_equal(logits("random:3"), logits("random:3"))
    assert not np.allclose(logits("random:3"), logits("random:4"))


def test_wrong_steps_are_refused() -> None:
    llama = Llama.open("random:0")
    cache = llama.new_cache()
    with pytest.raises(ValueError, match="at least one"):
        llama.prefill([], cache)
    for tokens, caches in (([], []), ([1], [cache, cache]), ([1] * 9, [cache] * 9)):
        with pytest.raises(ValueError, match="1 to 8"):
            llama.decode(tokens, caches)
