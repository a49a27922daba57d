"""A real LMCache server, with layouts that a process of ours registers in an engine's place."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lmcache_mp
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import KVError, UsageError
from lmcache_mp.stream import create_request
from tests.helpers import CountingEngine
from tests.real import register
from tests.real.servers import CacheServer, cache_server, free_port

pytestmark = pytest.mark.real

MODELS = {
    "float": {"dtype": "float32", "query": False},
    "brain": {"dtype": "bfloat16", "query": False},
    "float##query": {"dtype": "float32", "query": True},
}
WIDTH = register.HEADS * register.HEAD_DIM


@contextlib.contextmanager
def registered(server: CacheServer, models: dict[str, object]) -> Iterator[None]:
    command = [sys.executable, register.__file__, server.url, json.dumps(models)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        while "ready" not in (line := process.stdout.readline()):
            assert line, "the process that registers layouts ended"
        yield
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="module")
def server(cache: CacheServer) -> Iterator[CacheServer]:
    with registered(cache, MODELS):
        yield cache


def connect(server: CacheServer, model: str, **more):
    return lmcache_mp.connect(server.url, server.http_url, model, **more)


def random_kv(tokens: int, dtype: str = "float32"):
    import torch

    shape = (2, register.LAYERS, tokens, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(tokens)).to(
        getattr(torch, dtype)
    )


@pytest.mark.parametrize(("model", "dtype"), [("float", "float32"), ("brain", "bfloat16")])
@pytest.mark.parametrize("chunks", [1, 4])
def test_kv_comes_back_bit_for_bit(server: CacheServer, model: str, dtype: str, chunks: int):
    import torch

    kv, tokens = random_kv(256 * chunks, dtype), list(range(256 * chunks))
    with connect(server, model) as context:
        assert context.transport == "shared memory"
        assert context.chunk_size == 256
        salt = f"bits-{chunks}"
        assert context.lookup(tokens, salt) == 0
        assert context.retrieve(tokens, salt) is None
        assert context.store(kv, tokens, salt)
        assert context.lookup(tokens, salt) == len(tokens)
        back = context.retrieve(tokens, salt)
        assert back.dtype == kv.dtype and torch.equal(back, kv)
        back.zero_()  # private: the server's stays
        assert torch.equal(context.retrieve(tokens, salt), kv)
        assert not context.store(kv, tokens, salt), "all of it was there already"
        assert context.lookup(tokens) == 0, "another salt"


@pytest.mark.parametrize("extra", [-1, 0, 1, 255])
def test_only_whole_chunks_are_stored(server: CacheServer, extra: int):
    import torch

    tokens = [7 + i for i in range(512 + extra)]
    kv, salt = random_kv(len(tokens)), f"whole{extra}"
    with connect(server, "float") as context:
        assert context.store(kv, tokens, salt)
        whole = len(tokens) // 256 * 256
        assert context.lookup(tokens, salt) == whole
        assert torch.equal(context.retrieve(tokens, salt), kv[:, :, :whole])


def test_a_store_goes_on_where_another_ended(server: CacheServer):
    import torch

    tokens, kv = list(range(1024)), random_kv(1024)
    with connect(server, "float") as context:
        assert context.store(kv[:, :, :512], tokens[:512], "on")
        assert context.store(kv, tokens, "on")
        assert torch.equal(context.retrieve(tokens, "on"), kv)


def test_threads_share_a_context(server: CacheServer):
    import torch

    kv, tokens = random_kv(512), list(range(512))
    with connect(server, "float") as context, ThreadPoolExecutor(8) as threads:
        salts = [f"thread-{number}" for number in range(40)]
        assert all(threads.map(lambda salt: context.store(kv, tokens, salt), salts))
        assert set(threads.map(lambda salt: context.lookup(tokens, salt), salts)) == {512}
        backs = threads.map(lambda salt: context.retrieve(tokens, salt), salts)
        assert all(torch.equal(back, kv) for back in backs)


def test_misfits_are_refused(server: CacheServer):
    with connect(server, "float") as context:
        with pytest.raises(KVError, match=r"bfloat16 does not fit .*float32"):
            context.store(random_kv(256, "bfloat16"), list(range(256)), "misfit")
        with pytest.raises(KVError, match="does not fit"):
            context.store(random_kv(256)[..., :-1].contiguous(), list(range(256)), "misfit")
        with pytest.raises(KVError, match="given with 255 token ids"):
            context.store(random_kv(256), list(range(255)), "misfit")
        with pytest.raises(KVError, match="less than one chunk of 256"):
            context.store(random_kv(200), list(range(200)), "misfit")
        with pytest.raises(UsageError, match="cache_salt"):
            context.lookup(list(range(256)), "a@b")
        assert context.lookup(list(range(256)), "misfit") == 0


def test_clear_empties_the_server(server: CacheServer):
    with connect(server, "float") as context:
        context.store(random_kv(256), list(range(256)), "clear")
        context.clear()
        assert context.lookup(list(range(256)), "clear") == 0


def test_what_was_registered_is_taken_back(server: CacheServer):
    from lmcache_mp.kv.lmcache_server import get_json

    def registrations() -> int:
        return len(get_json(f"{server.http_url}/status", 10)["non_cuda_context_meta"])

    before = registrations()
    context = connect(server, "float")
    context.store(random_kv(256), list(range(256)), "register")
    assert registrations() == before + 2
    context.close()
    context.close()
    assert registrations() == before
    assert context.lookup(list(range(256)), "register") == 256, "it opens again on use"
    context.close()


def test_a_model_that_is_not_registered(server: CacheServer):
    with pytest.raises(KVError, match=r"'other'.*registered: .*'float', 'brain'"):
        connect(server, "other").open()


def test_queries_are_read_by_an_edit(server: CacheServer, tmp_path: Path):
    import torch

    width = register.QUERY_HEADS * register.HEAD_DIM
    tokens = [11 + i for i in range(512)]
    queries = torch.randn(1, register.LAYERS, 512, width)
    with connect(server, "float", kind="query") as context:
        assert context.store(queries, tokens)
        assert torch.equal(context.retrieve(tokens), queries)
    with pytest.raises(KVError, match="LMCache's patch of vLLM"):
        connect(server, "brain", kind="query").open()


def test_edits_run_in_workers(server: CacheServer):
    import torch

    with connect(server, "float") as context:
        prompts = [[100 * n + i for i in range(600)] for n in range(4)]
        for prompt in prompts:
            context.store(random_kv(600), prompt)

    def halve(kv, tokens):
        info = {"first": float(kv[0, 0, 0, 0]), "cuda": torch.cuda.is_available()}
        return kv[:, :, :256], tokens[:256], info

    with LMCacheBatchedStream(workers=2) as batch:
        for prompt in prompts:
            batch.add(create_request(connect(server, "float"), CountingEngine(), prompt))
        batch.prefill({})
        frame = batch.modify(halve).to_frame()
        assert frame["stored_tokens"].tolist() == [256] * 4
        assert frame["first"].tolist() == [float(random_kv(600)[0, 0, 0, 0])] * 4
        assert not frame["cuda"].any()
        assert frame["worker_pid"].nunique() == 2
        batch.decode({"max_tokens": 2})


def test_without_shared_memory(logs: Path, caplog: pytest.LogCaptureFixture):
    import torch

    kv, tokens = random_kv(512), list(range(512))
    with (
        cache_server(logs, shared=False, chunk_size=128) as server,
        registered(server, MODELS),
        connect(server, "float") as context,
    ):
        with caplog.at_level(logging.WARNING, "lmcache_mp"):
            context.open()
        assert "--shm-name" in caplog.text
        assert context.transport == "pickle"
        assert context.chunk_size == 128
        assert context.store(kv, tokens, "pickle")
        assert not context.store(kv, tokens, "pickle")
        assert torch.equal(context.retrieve(tokens, "pickle"), kv)
        with pytest.raises(KVError, match="--enable transfer_query"):
            connect(server, "brain", kind="query").open()


def test_a_full_server_says_so(logs: Path):
    """A store that finds no room is an error, not a hole that shows up in the next decode."""
    tokens = list(range(256 * 600))
    with (
        cache_server(logs, gigabytes=0.05) as server,
        registered(server, MODELS),
        connect(server, "float") as context,
        pytest.raises(KVError, match="memory is probably full"),
    ):
        context.store(random_kv(len(tokens)), tokens, "full")


def test_a_server_that_is_down():
    http_url = f"http://127.0.0.1:{free_port()}"
    context = lmcache_mp.connect(f"tcp://127.0.0.1:{free_port()}", http_url, "float")
    with pytest.raises(KVError, match="no LMCache server answers at"):
        context.open()


def test_a_wrong_message_port(server: CacheServer):
    url = f"tcp://127.0.0.1:{free_port()}"
    context = lmcache_mp.connect(url, server.http_url, "float", timeout=2)
    with pytest.raises(KVError, match="did not answer within 2 s"):
        context.open()


def test_a_context_of_lmcache_itself_is_recognised(server: CacheServer):
    import lmcache.sdk as lmc_sdk

    theirs = lmc_sdk.connect(lmc_sdk.LMCacheSDKCacheKind.KV, server.url, server.http_url, "float")
    try:
        with pytest.raises(UsageError, match=r"lmcache_mp\.connect\(.*'float'"):
            create_request(theirs, CountingEngine(), [1, 2, 3])
    finally:
        theirs.close()
