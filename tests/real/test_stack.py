"""Streams through real vLLM and a real LMCache server, edited by worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import lmcache_mp
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import KVError, LMCacheBatchedStreamError
from lmcache_mp.stream import LMCacheStream, create_request
from tests.helpers import pid_is_alive
from tests.real.servers import SERVED_NAME, Engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
CHUNK = 256
#: Batching may change the last bits of a logit: where tokens must be equal, one stream at a time.
ONE = {"max_concurrency": 1}

Edit = Callable[..., Any]


def untouched(kv, tokens):
    return kv, tokens


def without_values(kv, tokens):
    kv[1] = 0
    return kv, tokens


def every_other_chunk(kv, tokens):
    keep = [i for i in range(len(tokens)) if i // 256 % 2 == 0]
    return kv[:, :, keep], [tokens[i] for i in keep]


def first_chunk(kv, tokens):
    return kv[:, :, :256], tokens[:256]


@pytest.fixture(scope="module")
def texts() -> Sequence[list[int]]:
    """Eight prompts of 1,100 tokens."""
    import json

    lines = Path("examples/prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    with lmcache_mp.connect_local() as local:
        joined = [
            local.encode(" ".join(prompts[(n + k) % len(prompts)] for k in range(3)))
            for n in range(8)
        ]
    assert all(len(tokens) > 1100 for tokens in joined)
    return [tokens[:1100] for tokens in joined]


class Stack:
    """Makes requests against the running servers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.post = lmcache_mp.openai_engine(engine.base_url, SERVED_NAME)
        self.context = lmcache_mp.connect(engine.cache.url, engine.cache.http_url, engine.model)

    def request(self, tokens: Sequence[int], salt: str = "") -> LMCacheStream:
        return create_request(self.context, self.post, tokens, salt)

    def decoded(
        self, prompts: Sequence[Sequence[int]], edit: Edit | None, salt: str, workers: int = 2
    ) -> list[list[int]]:
        """The generated tokens of each prompt, one stream in flight."""
        with LMCacheBatchedStream(workers=workers) as batch:
            for prompt in prompts:
                batch.add(self.request(prompt, salt))
            batch.prefill(GREEDY, **ONE)
            if edit is not None:
                batch.modify(edit)
            batch.decode(GREEDY, **ONE)
            return [stream.output_tokens() for stream in batch.streams.values()]


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    made = Stack(engine)
    yield made
    made.context.close()


@pytest.fixture(scope="module")
def plain(stack: Stack, texts: Sequence[list[int]]) -> list[list[int]]:
    """What two prompts decode to without an edit."""
    return stack.decoded(texts[:2], None, "plain")


def test_eight_streams_drop_every_other_chunk(stack: Stack, texts: Sequence[list[int]]):
    with LMCacheBatchedStream(workers=2) as batch:
        for tokens in texts:
            batch.add(stack.request(tokens, "eight"))
        prefill = batch.prefill(GREEDY)
        modify = batch.modify(every_other_chunk)
        decode = batch.decode(GREEDY)
    for metrics in (prefill, modify, decode):
        metrics.emit()
    first, edits, last = prefill.to_frame(), modify.to_frame(), decode.to_frame()
    assert first["input_tokens"].tolist() == [1100] * 8
    assert edits["tokens_before"].tolist() == [1024] * 8
    assert edits["stored_tokens"].tolist() == [512] * 8
    # 512 kept, 76 beyond the last chunk, and the token that the prefill generated.
    assert last["input_tokens"].tolist() == [589] * 8
    assert last["cached_tokens"].min() >= 512
    assert last["kv_used"].all()
    assert last["output_tokens"].tolist() == [24] * 8
    assert last["reported_tokens"].tolist() == [24] * 8
    assert edits["worker_pid"].nunique() == 2


def test_the_doctor_finds_nothing_wrong(engine: Engine):
    command = [
        *(sys.executable, "-m", "lmcache_mp", "doctor", "--engine", engine.base_url),
        *("--lmcache", engine.cache.url, "--lmcache-http", engine.cache.http_url),
        *("--model", engine.model, "--wait", "10"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert SERVED_NAME in run.stdout and engine.model in run.stdout
    assert "fails" not in run.stdout


def test_an_unchanged_copy_decodes_to_the_same_tokens(
    stack: Stack, texts: Sequence[list[int]], plain: list[list[int]]
):
    assert stack.decoded(texts[:2], untouched, "copy") == plain


def test_without_values_it_does_not(
    stack: Stack, texts: Sequence[list[int]], plain: list[list[int]]
):
    zeroed = stack.decoded(texts[:2], without_values, "zeroed")
    assert all(ours[1:] != theirs[1:] for ours, theirs in zip(zeroed, plain, strict=True))


def test_one_worker_and_two_give_the_same_tokens(stack: Stack, texts: Sequence[list[int]]):
    one = stack.decoded(texts[:3], every_other_chunk, "one", workers=1)
    assert one == stack.decoded(texts[:3], every_other_chunk, "two", workers=2)


@pytest.mark.parametrize("length", [255 + CHUNK, 2 * CHUNK, 2 * CHUNK + 1, CHUNK, CHUNK + 1])
def test_prompts_around_a_whole_chunk(stack: Stack, texts: Sequence[list[int]], length: int):
    """The wait is for the whole chunks of the prompt, never for one with a generated token."""
    with LMCacheBatchedStream(workers=1) as batch:
        batch.add(stack.request(texts[0][:length], "around"))
        batch.prefill(GREEDY)
        frame = batch.modify(untouched).to_frame()
        # The prefill's token fills up a chunk of which the prompt is one token short.
        assert frame["tokens_before"].item() >= length // CHUNK * CHUNK
        assert batch.decode(GREEDY).to_frame()["kv_used"].all()


def test_a_single_kept_chunk_is_used(stack: Stack, texts: Sequence[list[int]]):
    with LMCacheBatchedStream(workers=1) as batch:
        batch.add(stack.request(texts[0], "single"))
        batch.prefill(GREEDY)
        batch.modify(first_chunk)
        frame = batch.decode(GREEDY).to_frame()
    assert frame["cached_tokens"].item() >= CHUNK
    assert frame["kv_used"].tolist() == [True]


def test_a_hit_halves_the_time_to_the_first_token(stack: Stack, texts: Sequence[list[int]]):
    with LMCacheBatchedStream(workers=1) as batch:
        for tokens in texts[:4]:
            batch.add(stack.request(tokens, "cold"))
        cold = batch.prefill(GREEDY, **ONE).to_frame()["ttft"]
        batch.modify(untouched)  # under another salt: the engine's own cache does not have it
        hit = batch.decode(GREEDY, **ONE).to_frame()["ttft"]
    print(f"TTFT of 1,100 tokens: cold {cold.median():.3f} s, after a hit {hit.median():.3f} s")
    assert hit.median() < cold.median() / 2


def test_the_engine_keeps_kv_bit_for_bit(stack: Stack, texts: Sequence[list[int]]):
    import torch

    stream = stack.request(texts[1], "bits")
    stream.generate({**GREEDY, "max_tokens": 1})
    kv = stream.retrieve_kv()
    assert tuple(kv.shape) == (2, 30, 1024, 192) and kv.dtype == torch.float32
    assert stack.context.store(kv, texts[1][:1024], "bits-copy")
    assert torch.equal(stack.context.retrieve(texts[1][:1024], "bits-copy"), kv)


def test_keys_are_those_of_the_embedded_decoder(stack: Stack, texts: Sequence[list[int]]):
    """The fused layout is taken apart rightly: another implementation computes the same numbers."""
    import numpy as np

    stream = stack.request(texts[1], "decoder")
    stream.generate({**GREEDY, "max_tokens": 1})
    theirs = stream.retrieve_kv()[:, :, :512].numpy()
    with lmcache_mp.connect_local() as local:
        ours = create_request(local, local.post_completion, texts[1][:512])
        ours.generate({"max_tokens": 1, "temperature": 0})
        mine = ours.retrieve_kv()
    # vLLM has the weights in bfloat16 here, rounded from the GGUF's.
    scale = np.abs(mine).max(axis=(2, 3), keepdims=True)
    assert np.median(np.abs(theirs - mine) / scale) < 1e-3
    assert np.abs(theirs[:, 0] - mine[:, 0]).max() < 0.02 * scale[:, 0].max()


def test_a_worker_killed_between_edit_and_decode(stack: Stack, texts: Sequence[list[int]]):
    undisturbed = stack.decoded(texts[:4], every_other_chunk, "undisturbed")
    with LMCacheBatchedStream(workers=2) as batch:
        for tokens in texts[:4]:
            batch.add(stack.request(tokens, "killed"))
        batch.prefill(GREEDY, **ONE)
        batch.modify(every_other_chunk)
        killed = batch.worker_pids[0]
        os.kill(killed, signal.SIGKILL)
        while pid_is_alive(killed):  # else it may still be there when the decode begins
            time.sleep(0.01)
        frame = batch.decode(GREEDY, **ONE).to_frame()
        tokens = [stream.output_tokens() for stream in batch.streams.values()]
    assert frame["kv_used"].all()
    assert tokens == undisturbed


def test_a_cleared_server_is_reported_for_every_stream(stack: Stack, texts: Sequence[list[int]]):
    with LMCacheBatchedStream(workers=2) as batch:
        for tokens in texts[:4]:
            batch.add(stack.request(tokens, "cleared"))
        batch.prefill(GREEDY)
        batch.modify(every_other_chunk)
        stack.context.clear()
        with pytest.raises(LMCacheBatchedStreamError) as caught:
            batch.decode(GREEDY)
        assert len(caught.value.failures) == 4
        for failure in caught.value.failures.values():
            assert isinstance(failure.exception, KVError)
            assert "the edited KV is gone" in failure.error_message
    with LMCacheBatchedStream(workers=1, on_unused_kv="warn") as batch:
        batch.add(stack.request(texts[0], "warned"))
        batch.prefill(GREEDY)
        batch.modify(every_other_chunk)
        stack.context.clear()
        with pytest.warns(RuntimeWarning, match="the edited KV is gone"):
            frame = batch.decode(GREEDY).to_frame()
        assert frame["kv_used"].tolist() == [False]


def test_lmcaches_own_batch_gives_the_same_tokens(
    stack: Stack, texts: Sequence[list[int]], capsys: pytest.CaptureFixture[str]
):
    """LMCache's batch over our context, as its own can't read this layout."""
    import lmcache.sdk as lmc_sdk
    from lmcache.sdk.batch import LMCacheBatchedStream as TheirBatch
    from lmcache.sdk.request import create_request as their_request

    class TheirContext:
        kind = lmc_sdk.LMCacheSDKCacheKind.KV
        retrieve = staticmethod(stack.context.retrieve)

        @staticmethod
        def store(kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
            whole = len(tokens) // CHUNK * CHUNK
            return stack.context.store(kv[:, :, :whole], tokens[:whole], cache_salt)

    def post(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        events = stack.post(prompt, params, salt)
        return (event for event in events if hasattr(event, "token_id"))

    theirs = TheirBatch()
    for number, tokens in enumerate(texts[:4]):
        theirs.add(their_request([TheirContext()], post, tokens, f"theirs{number}"))
    one_by_one = list(theirs.request_streams)
    for key in one_by_one:
        theirs.run_request_streams({**GREEDY, "max_tokens": 1}, [key])
    theirs.modify_request_streams(
        lambda kv, tokens: every_other_chunk(kv[lmc_sdk.LMCacheSDKCacheKind.KV], tokens)
    )
    for key in one_by_one:
        theirs.run_request_streams(GREEDY, [key])
    generated = [stream.tokens[-24:] for stream in theirs.request_streams.values()]
    ours = stack.decoded(texts[:4], every_other_chunk, "ours")
    assert [tokens[-24:] for tokens in ours] == generated
    with capsys.disabled():
        _side_by_side(stack, texts, TheirBatch, their_request, TheirContext, post)


def _side_by_side(stack, texts, their_batch, their_request, their_context, post) -> None:
    """Both batches with all streams in flight, and their tables."""
    import lmcache.sdk as lmc_sdk

    kind = lmc_sdk.LMCacheSDKCacheKind.KV
    theirs = their_batch()
    for tokens in texts:
        theirs.add(their_request([their_context()], post, tokens, "theirs-all"))
    print("\n\nLMCache's own batch, threads:")
    theirs.prefill(GREEDY).emit()
    theirs.modify(lambda kv, tokens: every_other_chunk(kv[kind], tokens)).emit()
    theirs.decode(GREEDY).emit()
    print("\nlmcache_mp, 2 workers:")
    with LMCacheBatchedStream(workers=2) as batch:
        for tokens in texts:
            batch.add(stack.request(tokens, "ours-all"))
        batch.prefill(GREEDY).emit()
        batch.modify(every_other_chunk).emit()
        batch.decode(GREEDY).emit()


NOTEBOOK = """
import lmcache_mp
import lmcache_mp.sdk as lmc_sdk

KV = lmc_sdk.LMCacheSDKCacheKind.KV
ctx = lmc_sdk.connect(KV, {url!r}, {http_url!r}, {model!r})
engine = lmcache_mp.openai_engine({base_url!r}, {name!r})

def make_dropper(ratio):
    def drop(tensors, tokens):
        kv = tensors[KV]
        keep = list(range(int(len(tokens) * (1 - ratio))))
        return kv[:, :, keep], [tokens[i] for i in keep]
    return drop

batch = lmc_sdk.batch.LMCacheBatchedStream()
for tokens in {prompts!r}:
    batch.add(lmc_sdk.request.create_request([ctx], engine, tokens, "notebook"))
batch.prefill(sampling_params={{"temperature": 0}}).emit()
batch.modify(make_dropper(0.5)).emit()
result = batch.decode(sampling_params={{"temperature": 0, "max_tokens": 8}})
assert result.to_dict()["metrics"]["results"]["output_tput"] > 0
for stream in batch.request_streams.values():
    assert stream.output_text and len(stream.output_tokens) > 500, stream
print("the notebook ran")
"""


def test_a_notebook_of_lmcaches(stack: Stack, texts: Sequence[list[int]], tmp_path: Path):
    engine = stack.engine
    program = tmp_path / "notebook.py"
    program.write_text(
        NOTEBOOK.format(
            url=engine.cache.url,
            http_url=engine.cache.http_url,
            model=engine.model,
            base_url=engine.base_url,
            name=SERVED_NAME,
            prompts=texts[:2],
        )
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the notebook ran" in done.stdout
