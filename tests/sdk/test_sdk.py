"""Programs written for LMCache's second generation of names."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmcache_mp
import lmcache_mp.sdk as lmc_sdk
from lmcache_mp.engines.local import LocalContext
from lmcache_mp.errors import KVError, LMCacheStreamError

KV, QUERY = lmc_sdk.LMCacheSDKCacheKind.KV, lmc_sdk.LMCacheSDKCacheKind.QUERY


@dataclass(frozen=True)
class TokenQueries:
    """Queries that are a function of the tokens, [1, 1, T, 2]; ``most`` of them are there."""

    chunk_size: int = 16
    most: int = 1 << 30
    kind = "query"

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        return min(len(tokens) - len(tokens) % self.chunk_size, self.most)

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any:
        ids = np.asarray(tokens[: self.lookup(tokens)], np.float32)
        return np.stack([ids, ids + 1], axis=-1)[None, None]

    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        raise AssertionError("queries are never stored")

    def close(self) -> None:
        pass


@pytest.fixture
def local() -> Iterator[LocalContext]:
    with lmcache_mp.connect_local("random:0") as context:
        yield context


PROMPT = [3 + i % 90 for i in range(40)]


def request(local: LocalContext, *more: Any) -> Any:
    return lmc_sdk.request.create_request([local, *more], local.post_completion, PROMPT)


def test_a_stream_has_the_second_generations_names(local: LocalContext):
    stream = request(local)
    metrics = stream.generate({"max_tokens": 4, "temperature": 0})
    assert isinstance(metrics, lmc_sdk.request.StreamPerfMetrics)
    assert stream.output_tokens == stream.tokens == PROMPT + stream.stream.output_tokens()
    assert stream.decoded_tokens == 4
    assert stream.output_text == stream.stream.output_text()
    assert stream.suffix_tokens == [] and not stream.is_done
    assert stream.retrieve(KV).shape[2] == 32
    with pytest.raises(KVError, match="no context of kind 'query'"):
        stream.retrieve(QUERY)


def test_an_edit_gets_a_mapping_of_kinds(local: LocalContext):
    stream = request(local, TokenQueries())
    stream.generate({"max_tokens": 1, "temperature": 0})
    seen = {}

    def edit(arrays, tokens):
        seen.update({kind: array.shape for kind, array in arrays.items()}, tokens=tokens)
        assert arrays[QUERY][0, 0, :, 0].tolist() == tokens
        return arrays[KV][:, :, :16], tokens[:16]

    stream.modify_kv(edit)
    assert seen[KV][2] == 32 and seen[QUERY] == (1, 1, 32, 2)
    assert seen["tokens"] == PROMPT[:32]
    assert stream.tokens == PROMPT[:16]
    assert len(stream.suffix_tokens) == 9


def test_queries_that_are_not_there(local: LocalContext):
    stream = request(local, TokenQueries(most=16))
    stream.generate({"max_tokens": 1, "temperature": 0})
    with pytest.raises(KVError, match="query cache of 16 of 32 tokens"):
        stream.modify_kv(lambda arrays, tokens: (arrays[KV], tokens), timeout=0.01)


def test_update_replaces_the_kv(local: LocalContext):
    stream = request(local)
    stream.generate({"max_tokens": 1, "temperature": 0})
    kv = stream.retrieve(KV)
    stream.update(KV, kv[:, :, :16], PROMPT[:16])
    assert stream.tokens == PROMPT[:16]
    with pytest.raises(lmc_sdk.request.LMCacheRequestStreamError, match="only KV"):
        stream.update(QUERY, kv, PROMPT)


def test_what_an_engine_raises_is_a_stream_error(local: LocalContext):
    def broken(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        raise ZeroDivisionError("the engine's own")
        yield

    stream = lmc_sdk.request.create_request([local], broken, PROMPT)
    with pytest.raises(LMCacheStreamError, match="the engine's own") as caught:
        stream.generate({})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_batch(local: LocalContext):
    error = lmc_sdk.batch.LMCacheBatchedStreamError
    with lmc_sdk.batch.LMCacheBatchedStream(workers=2) as batch:
        for _ in range(4):
            stream = request(local, TokenQueries())
            assert batch.add(stream) is None
        with pytest.raises(error):
            batch.add(stream)
        prefill = batch.prefill({"temperature": 0})
        config = prefill.to_dict()["metrics"]["config"]
        assert next(iter(config.items())) == ("num_request_streams", 4)

        def halve(arrays, tokens):
            assert set(arrays) == {KV, QUERY}
            return arrays[KV][:, :, :16], tokens[:16]

        batch.modify(halve, "terminal", 80, 30.0, 0.2, None)
        result = batch.decode({"max_tokens": 5, "temperature": 0, "ignore_eos": True})
        assert result.to_dict()["metrics"]["results"]["output_tokens"] == 20
        assert [s.decoded_tokens for s in batch.request_streams.values()] == [6] * 4
        first = next(iter(batch.request_streams))
        assert batch.get_request_stream(first).output_tokens[:16] == PROMPT[:16]
        assert batch.perf_metrics[first].output_tokens == 5
        assert batch.run_request_streams({"max_tokens": 2, "temperature": 0}, [first]) > 0
        assert batch.modify_request_streams(halve, [first]) > 0
        report = batch.get_perf_metrics(1.0, "terminal", 80, "decode")
        assert report["config"].entries[0][1] == "Number of Request Streams"
        for call in (
            lambda: batch.get_request_stream("nobody"),
            lambda: batch.run_request_streams({}, ["nobody"]),
            lambda: batch.get_perf_metrics(1.0, "terminal", 80, "sideways"),
        ):
            with pytest.raises(error):
                call()


def test_connecting_makes_recipes_of_each_kind():
    arguments = ("tcp://127.0.0.1:1", "http://127.0.0.1:1", "model")
    contexts = [
        lmc_sdk.connect(KV, *arguments),
        lmc_sdk.kvcache.connect(*arguments),
        lmc_sdk.connect(QUERY, *arguments, timeout=3.0),
        lmc_sdk.qcache.connect(*arguments),
    ]
    assert [context.kind for context in contexts] == ["kv", "kv", "query", "query"]
    assert isinstance(contexts[0], lmc_sdk.context.LMCacheSDKContext)
    with pytest.raises(ValueError, match="not a valid"):
        lmc_sdk.connect("video", *arguments)
    assert QUERY.server_model_name("m") == "m##query" and KV.server_model_name("m") == "m"
    assert QUERY.base_model_name("m##query") == "m"


NOTEBOOK = """
import lmcache_mp
import lmcache_mp.sdk as lmc_sdk

ctx = lmcache_mp.connect_local("random:0")
KV = lmc_sdk.LMCacheSDKCacheKind.KV

def make_dropper(ratio):
    def drop(tensors, tokens):
        kv = tensors[KV]
        keep = list(range(int(len(tokens) * (1 - ratio))))
        return kv[:, :, keep], [tokens[i] for i in keep]
    return drop

batch = lmc_sdk.batch.LMCacheBatchedStream()
for n in range(3):
    tokens = [5 + (n + i) % 90 for i in range(50)]
    batch.add(lmc_sdk.request.create_request([ctx], ctx.post_completion, tokens))
batch.prefill(sampling_params={"temperature": 0}).emit()
batch.modify(make_dropper(0.5)).emit()
result = batch.decode(sampling_params={"temperature": 0, "max_tokens": 8})
result.emit()
print("throughput", result.to_dict()["metrics"]["results"]["output_tput"] > 0)
print(sum(len(stream.output_text) > 0 for stream in batch.request_streams.values()))
"""


def test_a_notebook_runs_with_one_changed_import(tmp_path: Path):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Number of Request Streams:" in done.stdout
    assert done.stdout.endswith("throughput True\n3\n")


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="needs LMCache")
def test_every_public_call_takes_lmcaches_arguments():
    import lmcache.sdk as theirs

    pairs = [
        (theirs.connect, lmc_sdk.connect),
        (theirs.kvcache.connect, lmc_sdk.kvcache.connect),
        (theirs.qcache.connect, lmc_sdk.qcache.connect),
        (theirs.request.create_request, lmc_sdk.request.create_request),
    ]
    for kind, ours in (
        (theirs.batch.LMCacheBatchedStream, lmc_sdk.batch.LMCacheBatchedStream),
        (theirs.request.LMCacheRequestStream, lmc_sdk.request.LMCacheRequestStream),
    ):
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                assert isinstance(getattr(ours, name), property), name
            else:
                pairs.append((member, getattr(ours, name)))
    for their_call, our_call in pairs:
        wanted = [(p.name, p.default) for p in inspect.signature(their_call).parameters.values()]
        given = [(p.name, p.default) for p in inspect.signature(our_call).parameters.values()]
        assert given == wanted, our_call
    assert {kind.value for kind in theirs.LMCacheSDKCacheKind} == {"kv", "query"}
