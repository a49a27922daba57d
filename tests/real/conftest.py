"""The servers of the tests marked ``real``: started once, when the first test needs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import servers


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("lmcache", "vllm", "torch"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make test-real")
    return Path(os.environ.get("LMCACHE_MP_REAL_LOGS") or tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def cache(logs: Path) -> Iterator[servers.CacheServer]:
    with servers.cache_server(logs, more=("--enable", "transfer_query")) as server:
        yield server


@pytest.fixture(scope="session")
def engine(cache: servers.CacheServer, logs: Path) -> Iterator[servers.Engine]:
    folder = os.environ.get("LMCACHE_MP_REAL_MODEL") or str(logs / "model")
    with servers.engine(servers.make_model(Path(folder)), cache, logs) as running:
        yield running
