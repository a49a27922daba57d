"""What a running LMCache server says of itself over HTTP; needs no LMCache in this process."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_mp.errors import KVError

#: What our own registrations end with, so that nobody takes them for an engine's.
OWN_SUFFIX = "##lmcache_mp"
#: What LMCache appends to a model's name for its query cache.
QUERY_SUFFIX = "##query"

_POOL_PREFIX = "lmcache_l1_pool_"
_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
#: vLLM's CPU build: a block of a head holds K, then V, in one plane.
_FUSED_FORMAT = "NL_X_NB_NH_BS_CS"


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """A registered layout, as far as the server publishes it.

    KV is ``[planes, layers, T, width]`` of ``dtype`` (torch's name); ``fused`` says that K and V of
    a block are packed in one plane.
    """

    planes: int
    layers: int
    width: int
    dtype: str
    fused: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """A model whose KV the server keeps. ``layout`` is None where the server does not say.

    ``single_plane`` is known where ``layout`` is not: K and V are in one plane (MLA, or fused).
    """

    model_name: str
    world_size: int
    block_size: int
    kv_readers: int
    layout: PublishedLayout | None
    single_plane: bool


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """``shm_segment`` is the name of the shared memory in /dev/shm, empty without one.

    ``drives_transfers`` says that the server leaves none to its clients, which ours are.
    """

    chunk_size: int
    shm_segment: str
    enabled: tuple[str, ...]
    used_bytes: int
    total_bytes: int
    registrations: tuple[Registration, ...]
    drives_transfers: bool

    @property
    def models(self) -> list[str]:
        """Names of the models whose KV an engine has registered, without query caches."""
        names = dict.fromkeys(it.model_name for it in self.registrations)
        return [name for name in names if not name.endswith(QUERY_SUFFIX)]

    def registration(self, model_name: str) -> Registration | None:
        """The registration of a model; one with a published layout comes first."""
        found = [it for it in self.registrations if it.model_name == model_name]
        return min(found, key=lambda it: it.layout is None, default=None)


#: What a question fails with: the latter two where a port speaks something else than HTTP and JSON.
Failed = (OSError, ValueError, http.client.HTTPException)

# Without the proxy that the environment may name: servers of a batch are in its own network.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(request: str | urllib.request.Request, timeout: float) -> bytes:
    """What a server answers to a GET; one of :data:`Failed`, also for a status that is not 200."""
    with _direct.open(request, timeout=timeout) as response:
        answer: bytes = response.read()
        return answer


def get_json(url: str, timeout: float) -> Any:  # whatever JSON a server sends
    """The JSON behind a URL, or one of :data:`Failed`."""
    return json.loads(get(url, timeout))


def server_facts(http_url: str, timeout: float = 10.0) -> ServerFacts:
    """Ask the server at ``http_url``. KVError: it is down, starting, or no LMCache server."""
    base = http_url.rstrip("/")
    try:
        config = get_json(f"{base}/config", timeout)
        status = get_json(f"{base}/status", timeout)
    except Failed as error:
        reason = getattr(error, "reason", error)
        raise KVError(
            f"no LMCache server answers at {base}: {reason} (http_url is the address given to "
            "`lmcache server` by --http-host and --http-port)"
        ) from error
    try:
        return _facts(config, status)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KVError(
            f"{base} does not answer as an LMCache 0.5 server does: {type(error).__name__}: {error}"
        ) from error


def _facts(config: Mapping[str, Any], status: Mapping[str, Any]) -> ServerFacts:
    server = config["mp"]
    shm_name = str(server.get("shm_name") or "").lstrip("/")
    if shm_name and not shm_name.startswith(_POOL_PREFIX):
        shm_name = _POOL_PREFIX + shm_name
    memory = status.get("storage_manager", {}).get("l1_manager", {})
    registrations = [
        *(_published(entry) for entry in status.get("cache_context_meta", {}).values()),
        *(_unpublished(entry) for entry in status.get("non_cuda_context_meta", {}).values()),
    ]
    return ServerFacts(
        chunk_size=int(server["chunk_size"]),
        shm_segment=shm_name,
        enabled=tuple(server.get("enable") or ()),
        used_bytes=int(memory.get("memory_used_bytes", 0)),
        total_bytes=int(memory.get("memory_total_bytes", 0)),
        registrations=tuple(it for it in registrations if not it.model_name.endswith(OWN_SUFFIX)),
        drives_transfers=server.get("supported_transfer_mode") == "lmcache_driven",
    )


def _published(entry: Mapping[str, Any]) -> Registration:
    layout = entry.get("kv_cache_layout") or {}
    groups = layout.get("kernel_groups") or []
    group = groups[0] if len(groups) == 1 else {}  # a hybrid model has several: not supported
    return Registration(
        model_name=str(entry["model_name"]),
        world_size=int(entry.get("world_size", 1)),
        block_size=int(group.get("tokens_per_block", 0)),
        kv_readers=int(entry.get("num_kv_readers", 1)),
        layout=_layout(layout, group, str(entry["model_name"])) if group else None,
        single_plane=bool(group.get("is_mla")),
    )


def _layout(
    layout: Mapping[str, Any], group: Mapping[str, Any], model_name: str
) -> PublishedLayout | None:
    dtype = str(group["dtype"]).removeprefix("torch.")
    layers, size = int(layout["num_layers"]), _ITEM_SIZES.get(dtype)
    if size is None:
        return None
    planes = 1 if group.get("is_mla") or model_name.endswith(QUERY_SUFFIX) else 2
    width = int(layout["cache_size_per_token"]) // (planes * layers * size)
    return PublishedLayout(planes, layers, width, dtype, group["engine_kv_format"] == _FUSED_FORMAT)


def _unpublished(entry: Mapping[str, Any]) -> Registration:
    return Registration(
        model_name=str(entry["model_name"]),
        world_size=int(entry.get("world_size", 1)),
        block_size=int(entry.get("block_size", 0)),
        kv_readers=1,
        layout=None,
        single_plane=bool(entry.get("use_mla")),
    )
