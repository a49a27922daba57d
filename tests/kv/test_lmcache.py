"""An LMCache server as far as HTTP tells; what needs LMCache itself is in tests/real."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import lmcache_mp
from lmcache_mp.edits.rope import Rope
from lmcache_mp.errors import KVError, MissingExtraError, UsageError
from lmcache_mp.kv.lmcache_server import PublishedLayout, server_facts
from lmcache_mp.kv.model_config import read_model_config
from lmcache_mp.stream import create_request
from tests.helpers import CountingEngine

CONFIG: dict[str, Any] = {"mp": {"chunk_size": 256, "shm_name": "pool", "enable": []}}


def published(model: str, *, fmt: str = "NL_X_TWO_NB_BS_NH_HS", **more: Any) -> dict[str, Any]:
    """A registration whose layout the server publishes: 3 layers, 2 heads of 8, bfloat16."""
    group = {
        "dtype": "torch.bfloat16",
        "tokens_per_block": 16,
        "engine_kv_format": fmt,
        "is_mla": False,
    }
    layout = {
        "num_layers": 3,
        "cache_size_per_token": 2 * 3 * 16 * 2,
        "kernel_groups": [group | more.pop("group", {})],
    }
    return {"model_name": model, "world_size": 1, "kv_cache_layout": layout} | more


def status(*entries: dict[str, Any], unpublished: tuple[dict[str, Any], ...] = ()) -> Any:
    return {
        "cache_context_meta": {str(i): entry for i, entry in enumerate(entries)},
        "non_cuda_context_meta": {str(i): entry for i, entry in enumerate(unpublished)},
        "storage_manager": {"l1_manager": {"memory_used_bytes": 5, "memory_total_bytes": 50}},
    }


@contextlib.contextmanager
def serving(**documents: Any) -> Iterator[str]:
    """The URL of a server that answers GET /NAME with a document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            document = documents.get(self.path.strip("/"))
            self.send_response(404 if document is None else 200)
            self.end_headers()
            self.wfile.write(b"" if document is None else json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_a_server_says():
    fused = published("cpu", fmt="NL_X_NB_NH_BS_CS")
    queries = published("gpu##query")
    latent = published("mla", group={"is_mla": True})
    silent = {"model_name": "silent", "world_size": 2, "block_size": 128, "use_mla": True}
    ours = {"model_name": "gpu##lmcache_mp", "world_size": 1, "block_size": 16, "use_mla": False}
    found = status(published("gpu"), fused, queries, latent, unpublished=(silent, ours))
    with serving(config=CONFIG, status=found) as url:
        facts = server_facts(url + "/")
    assert (facts.chunk_size, facts.shm_segment) == (256, "lmcache_l1_pool_pool")
    assert (facts.used_bytes, facts.total_bytes) == (5, 50)
    assert facts.models == ["gpu", "cpu", "mla", "silent"], "neither queries nor our own"
    layouts = {it.model_name: it.layout for it in facts.registrations}
    assert layouts["gpu"] == PublishedLayout(2, 3, 16, "bfloat16", False)
    assert layouts["cpu"] == PublishedLayout(2, 3, 16, "bfloat16", True)
    assert layouts["gpu##query"] == PublishedLayout(1, 3, 32, "bfloat16", False)
    assert layouts["mla"] == PublishedLayout(1, 3, 32, "bfloat16", False)
    assert layouts["silent"] is None
    registration = facts.registration("silent")
    assert registration is not None and registration.single_plane
    assert (registration.world_size, registration.block_size) == (2, 128)
    assert facts.registration("nobody") is None


def test_a_published_layout_comes_first():
    other = {"model_name": "gpu", "world_size": 1, "block_size": 16, "use_mla": False}
    with serving(config=CONFIG, status=status(published("gpu"), unpublished=(other,))) as url:
        registration = server_facts(url).registration("gpu")
    assert registration is not None and registration.layout is not None


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ({}, "no LMCache server answers at"),
        ({"config": CONFIG}, "no LMCache server answers at"),
        ({"config": {"other": 1}, "status": {}}, "does not answer as an LMCache 0.5 server does"),
        ({"config": CONFIG, "status": {"cache_context_meta": {"1": {}}}}, "KeyError"),
    ],
)
def test_what_is_no_server(documents: dict[str, Any], says: str):
    with serving(**documents) as url, pytest.raises(KVError, match=says):
        server_facts(url)


def opening(found: Any, config: Any = CONFIG, **options: Any) -> str:
    with serving(config=config, status=found) as url, pytest.raises(KVError) as caught:
        lmcache_mp.connect("tcp://127.0.0.1:1", url, "model", **options).open()
    return str(caught.value)


def test_a_model_that_does_not_fit_is_refused():
    assert "registered: 'a', 'b' (with vLLM" in opening(status(published("a"), published("b")))
    assert "registered: none" in opening(status())
    assert "tensor parallelism" in opening(status(published("model", world_size=2)))
    blocks = published("model", group={"tokens_per_block": 48})
    assert "chunks of 256 tokens are no multiple of the engine's blocks of 48" in opening(
        status(blocks)
    )


def test_a_server_that_leaves_no_transfer_to_its_clients_is_refused():
    driving = {"mp": {**CONFIG["mp"], "supported_transfer_mode": "lmcache_driven"}}
    said = opening(status(published("model")), driving)
    assert "--supported-transfer-mode auto" in said


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(config=CONFIG, status=status()) as url:
        assert server_facts(url).chunk_size == 256


def test_a_port_that_speaks_something_else_is_no_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(KVError, match="no LMCache server answers"):
            server_facts(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_server_without_queries():
    here = status(published("model"))
    assert "--enable transfer_query" in opening(here, kind="query")
    enabled = {"mp": {**CONFIG["mp"], "enable": ["transfer_query"]}}
    assert "LMCache's patch of vLLM" in opening(here, enabled, kind="query")


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache is here")
def test_without_lmcache():
    with (
        serving(config=CONFIG, status=status(published("model"))) as url,
        pytest.raises(MissingExtraError, match=r"pip install 'lmcache_mp\[lmcache\]'"),
    ):
        lmcache_mp.connect("tcp://127.0.0.1:1", url, "model").open()


def test_a_recipe_opens_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        context = lmcache_mp.connect("tcp://127.0.0.1:1", url, "model", kind="query", device="cuda")
        copy = pickle.loads(pickle.dumps(context))
        assert (copy.kind, copy.device, copy.model_name) == ("query", "cuda", "model")
        assert repr(copy) == "LMCacheContext('tcp://127.0.0.1:1', 'model##query')"
        create_request([copy, lmcache_mp.connect("u", url, "m")], CountingEngine(), [1])
        context.close()
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("", "http://h", "m"), {}, "url must be a non-empty string"),
        (("tcp://h:1", "h:2", "m"), {}, "http_url must start with http://"),
        (("tcp://h:1", "http://h", ""), {}, "model_name must be"),
        (("tcp://h:1", "http://h", "m", 0), {}, "timeout must be above 0"),
        (("tcp://h:1", "http://h", "m"), {"kind": "keys"}, "kind must be one of 'kv', 'query'"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        lmcache_mp.connect(*arguments, **options)


BASE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"rope_theta": 1e4}, (4, 8, 64, False, Rope(64, 1e4))),
        ({"num_key_value_heads": 2, "head_dim": 128}, (4, 2, 128, False, None)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            (4, 8, 64, False, Rope(64, 5e5)),
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, (4, 8, 64, False, None)),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            (4, 8, 64, False, Rope(64, 1e4, rotary_dim=32)),
        ),
        ({"kv_lora_rank": 512}, (4, 8, 64, True, None)),
    ],
)
def test_model_configs(tmp_path: Path, config: dict[str, Any], shape: tuple[Any, ...]):
    for document in (BASE | config, {"text_config": BASE | config}):
        (tmp_path / "config.json").write_text(json.dumps(document))
        found = read_model_config(str(tmp_path))
        assert found is not None
        assert (found.layers, found.kv_heads, found.head_dim, found.latent, found.rope) == shape


def test_a_rope_that_is_not_known(tmp_path: Path):
    model = str(tmp_path)
    with pytest.raises(KVError, match=r"connect\(..., rope=...\)"):
        lmcache_mp.connect("u", "http://h", model).rope  # noqa: B018  # reading it is the test
    rope = Rope(64, 1e4)
    assert lmcache_mp.connect("u", "http://h", model, rope=rope).rope == rope
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rope_theta": 7.0}))
    assert lmcache_mp.connect("u", "http://h", model).rope == Rope(64, 7.0)
