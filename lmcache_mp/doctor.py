"""Whether a run would work with these servers, on this machine: findings, and what to do.

Looks only: all that it makes a server compute is one token.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lmcache_mp.engines.http_stream import Endpoint
from lmcache_mp.errors import EngineError, KVError, MissingExtraError, UsageError
from lmcache_mp.kv.lmcache_server import (
    QUERY_SUFFIX,
    Failed,
    Registration,
    ServerFacts,
    server_facts,
)
from lmcache_mp.pool.cores import usable_cores
from lmcache_mp.probes import (
    KEY_ENV,
    TIMEOUT,
    Address,
    check_message_url,
    get,
    greeting,
    speaks_zeromq,
    why,
)

State = Literal["ok", "warning", "fails"]

#: The release of LMCache that this one was tested with.
TESTED_LMCACHE = "0.5.6"
#: Seconds that the one token may take: the engine may be busy with others.
_TOKEN_TIMEOUT = 60.0
_SHM = Path("/dev/shm")
_FEW_FILES = 4096
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; ``advice`` is what to do, never empty where ``state`` is not ok."""

    area: str
    check: str
    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """What to look at; None is left out. UsageError: an address that can't be one."""

    engine: str | None = None
    lmcache: str | None = None
    lmcache_http: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for url in (self.engine, self.lmcache_http):
            if url is not None:
                Endpoint.parse(url, "")
        if self.lmcache is not None:
            check_message_url("--lmcache", self.lmcache)
        if self.model is not None and self.lmcache_http is None:
            raise UsageError("--model is looked up in the LMCache server: add --lmcache-http URL")

    @property
    def addresses(self) -> list[Address]:
        """The servers; an engine's URL without the /v1 that openai_engine takes as well."""
        engine = (self.engine or "").rstrip("/").removesuffix("/completions").removesuffix("/v1")
        found = [
            Address("engine", engine.rstrip("/")),
            Address("lmcache", self.lmcache or ""),
            Address("http", (self.lmcache_http or "").rstrip("/")),
        ]
        return [it for it in found if it.url]


class Served(NamedTuple):
    """A model of the engine: the name to ask it for, and the path that it was loaded from."""

    name: str
    root: str


def examine(targets: Targets) -> list[Finding]:
    """Check all that ``targets`` names, and this machine."""
    findings: list[Finding] = []
    served: list[Served] = []
    facts: ServerFacts | None = None
    for address in targets.addresses:
        if address.kind == "engine":
            findings += _engine(address, served)
        elif address.kind == "lmcache":
            findings.append(_message_port(address.url))
        else:
            reached, facts = _reach_server(address)
            findings.append(reached)
            if facts is not None:
                findings += _server(facts, address.url, targets)
    findings += _names(served, facts, targets.model)
    if targets.lmcache is not None or targets.lmcache_http is not None:
        findings.append(_package())
    return [*findings, *_machine()]


def would_fail(findings: Sequence[Finding]) -> bool:
    """Whether a run would."""
    return any(finding.state == "fails" for finding in findings)


# --- the engine


def _engine(address: Address, served: list[Served]) -> Iterator[Finding]:
    """Findings about a vLLM; adds the models that it serves to ``served``."""
    base = address.url
    try:
        address.ask()
    except Failed as error:
        start = "start vLLM, or correct --engine (vLLM's --host and --port)"
        yield Finding("engine", "reachable", "fails", *why(base, error, start))
        return
    yield _engine_version(base)
    models = _models(base, served)
    yield models
    if models.state == "ok":
        yield from _one_token(base, served[0].name)


def _engine_version(base: str) -> Finding:
    try:
        version = str(json.loads(get(f"{base}/version"))["version"])
    except (*Failed, LookupError, TypeError):
        text = f"{base}, which does not tell vLLM's version"
        return Finding("engine", "reachable", "warning", text, "LMCache needs a vLLM server")
    return Finding("engine", "reachable", "ok", f"{base}, vLLM {version}")


def _models(base: str, served: list[Served]) -> Finding:
    try:
        models = json.loads(get(f"{base}/v1/models"))["data"]
        # A LoRA adapter has a parent, and a path of its own that LMCache never sees.
        found = [it for it in models if not it.get("parent")] or models
        served += [Served(str(it["id"]), str(it.get("root") or it["id"])) for it in found]
        longest = found[0].get("max_model_len")
    except urllib.error.HTTPError as error:
        text, advice = why(f"{base}/v1/models", error, "correct --engine")
        if error.code == 401:
            advice = f"set {KEY_ENV} to vLLM's --api-key, here and where your program runs"
        return Finding("engine", "models", "fails", text, advice)
    except (*Failed, LookupError, TypeError, AttributeError) as error:
        text = f"/v1/models does not answer as vLLM's does: {type(error).__name__}: {error}"
        return Finding("engine", "models", "fails", text, "correct --engine")
    limit = "" if longest is None else f", at most {longest} tokens"
    roots = ", ".join(f"{it.name!r} from {it.root!r}" for it in served)
    return Finding("engine", "models", "ok", f"{roots}{limit}")


def _one_token(base: str, model: str) -> Iterator[Finding]:
    """Whether token ids come, and the count of cached tokens: from one completion of a token."""
    try:
        from lmcache_mp.engines.completions_api import NoTokenIds
        from lmcache_mp.engines.openai import openai_engine
    except MissingExtraError as error:
        text, _, pip = str(error).partition(": ")
        yield Finding("engine", "token ids", "fails", text, pip)
        return
    engine = openai_engine(
        base, model, connect_timeout=TIMEOUT, first_token_timeout=_TOKEN_TIMEOUT, retries=0
    )
    try:
        events = list(engine([1, 2, 3], {"max_tokens": 1, "temperature": 0}, ""))
    except NoTokenIds:
        advice = "start vLLM with --return-tokens-as-token-ids, or use a newer one"
        yield Finding("engine", "token ids", "fails", "the engine sends text alone", advice)
        return
    except EngineError as error:
        yield Finding("engine", "token ids", "fails", str(error), "see the log of vLLM")
        return
    finally:
        engine.close()
    older = " (in logprobs: it does not know return_token_ids)" if engine.ids_in_logprobs else ""
    yield Finding("engine", "token ids", "ok", f"sent{older}")
    if any(event.cached_tokens is not None for event in events):
        yield Finding("engine", "cached tokens", "ok", "reported")
    else:
        text = "not reported: a decode can't tell whether edited KV was used"
        yield Finding("engine", "cached tokens", "warning", text, engine.cached_tokens_hint)


# --- the LMCache server


def _message_port(url: str) -> Finding:
    advice = "start `lmcache server`, or correct --lmcache (the server's --host and --port)"
    try:
        came = greeting(url)
    except OSError as error:
        return Finding("lmcache", "message port", "fails", *why(url, error, advice))
    if not speaks_zeromq(came):
        text = f"{url} accepts connections, and is not where LMCache takes its messages"
        return Finding("lmcache", "message port", "fails", text, advice)
    return Finding("lmcache", "message port", "ok", url)


def _reach_server(address: Address) -> tuple[Finding, ServerFacts | None]:
    try:
        address.ask()
        facts = server_facts(address.url, TIMEOUT)
    except KVError as error:
        text, advice = str(error), "is this the server of lmcache 0.5? see its log"
    except Failed as error:
        start = "start `lmcache server`, or correct --lmcache-http (--http-host, --http-port)"
        text, advice = why(address.url, error, start)
    else:
        return Finding("lmcache", "reachable", "ok", address.url), facts
    return Finding("lmcache", "reachable", "fails", text, advice), None


def _server(facts: ServerFacts, base: str, targets: Targets) -> Iterator[Finding]:
    if facts.drives_transfers:
        text = "the server only drives transfers itself (lmcache_driven)"
        advice = "start `lmcache server` with --supported-transfer-mode auto"
        yield Finding("lmcache", "transfers", "fails", text, advice)
    yield from _chunks(facts, targets.model)
    yield _transport(facts)
    used, total = facts.used_bytes / _GIB, facts.total_bytes / _GIB
    yield Finding("lmcache", "memory", "ok", f"{used:.1f} of {total:.1f} GiB used")
    if not facts.models:
        text = "no engine has registered a model"
        advice = f"start vLLM with --kv-transfer-config {_connector(targets.lmcache)}"
        yield Finding("lmcache", "models", "fails", text, advice)
    yield _queries(facts, targets.model)


def _chunks(facts: ServerFacts, model: str | None) -> Iterator[Finding]:
    """The size of a chunk, and what of a registration does not go with ours."""
    size, registrations = facts.chunk_size, _selected(facts, model)
    blocks = sorted({it.block_size for it in registrations if it.block_size})
    wrong = [block for block in blocks if size % block]
    if wrong:
        text = f"{size} tokens, no multiple of the engine's blocks of {_quoted(wrong)}"
        advice = "start `lmcache server` with another --chunk-size"
        yield Finding("lmcache", "chunks", "fails", text, advice)
    else:
        of_blocks = f", a multiple of the engine's blocks of {_quoted(blocks)}" if blocks else ""
        yield Finding("lmcache", "chunks", "ok", f"{size} tokens{of_blocks}")
    for it in registrations:
        if it.world_size > 1 and not it.single_plane:
            text = f"{it.model_name!r} has its KV in parts, on {it.world_size} GPUs"
            advice = "start vLLM with --tensor-parallel-size 1"
            yield Finding("lmcache", "parallelism", "fails", text, advice)


def _transport(facts: ServerFacts) -> Finding:
    if not facts.shm_segment:
        text = "pickle: about ten times slower than shared memory"
        advice = "start `lmcache server` with --shm-name NAME, on this machine"
        return Finding("lmcache", "transport", "warning", text, advice)
    segment = _SHM / facts.shm_segment
    if os.access(segment, os.R_OK | os.W_OK):
        return Finding("lmcache", "transport", "ok", "shared memory")
    if segment.exists():
        text = f"pickle, about ten times slower: {segment} is another user's"
        return Finding("lmcache", "transport", "warning", text, "run as the server's user")
    text = f"pickle, about ten times slower: {segment} is not here"
    advice = (
        "run on the server's machine (in containers: share /dev/shm by --ipc); if it is this one, "
        "/dev/shm has less room than --l1-size-gb"
    )
    return Finding("lmcache", "transport", "warning", text, advice)


def _connector(url: str | None) -> str:
    """What makes vLLM use the server, for a shell. Its spaces let a terminal fold it."""
    host, port = (url or "tcp://HOST:PORT").rsplit(":", 1)
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": host,
            "lmcache.mp.port": int(port) if port.isdecimal() else port,
        },
    }
    return f"'{json.dumps(config)}'"


def _queries(facts: ServerFacts, model: str | None) -> Finding:
    """Only edits that look at queries need them, so their absence is no failure."""
    names = facts.models if model is None else [model]
    there = [name for name in names if facts.registration(name + QUERY_SUFFIX) is not None]
    if there:
        return Finding("lmcache", "query cache", "ok", f"registered for {_quoted(there)}")
    if "transfer_query" in facts.enabled:
        text, advice = "enabled, none registered", "queries need LMCache's patch of vLLM"
    else:
        text = "not enabled"
        advice = "queries need `lmcache server` with --enable transfer_query"
    return Finding("lmcache", "query cache", "ok", text, advice)


def _selected(facts: ServerFacts, model: str | None) -> list[Registration]:
    names = facts.models if model is None else [model]
    found = [facts.registration(name) for name in names]
    return [it for it in found if it is not None]


# --- names, the package, the machine


def _names(
    served: Sequence[Served], facts: ServerFacts | None, model: str | None
) -> Iterator[Finding]:
    """Which name to use where: LMCache knows a model by its path, vLLM by what it serves it as."""
    models = [] if facts is None else facts.models
    if models:
        registered = f"registered: {_quoted(models)}"
        if model is not None and model not in models:
            roots = [it.root for it in served if it.name == model and it.root in models]
            advice = f"pass {_quoted(roots or models)}: LMCache knows a model by vLLM's path of it"
            text = f"{model!r} is not registered; {registered}"
            yield Finding("names", "--model", "fails", text, advice)
            return
        models = models if model is None else [model]
        serving = [it for it in served if it.root in models]
        if served and not serving:
            roots = list(dict.fromkeys(it.root for it in served))
            text = f"the engine runs {_quoted(roots)}, LMCache has {_quoted(models)}"
            advice = "use the engine that is connected to this LMCache server"
            yield Finding("names", "match", "fails", text, advice)
            return
        served, models = serving, list(dict.fromkeys(it.root for it in serving)) or models
    for name in models:
        yield Finding("names", "for KV", "ok", f"connect(url, http_url, {name!r})")
    for name in dict.fromkeys(it.name for it in served):
        yield Finding("names", "for tokens", "ok", f"openai_engine(base_url, {name!r})")


def _package() -> Finding:
    pip = "pip install 'lmcache_mp[lmcache]'"
    try:
        version = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return Finding("machine", "lmcache", "fails", "the package is not installed", pip)
    if version.partition("+")[0] != TESTED_LMCACHE:
        text = f"{version}, tested was {TESTED_LMCACHE}"
        return Finding("machine", "lmcache", "warning", text, pip)
    return Finding("machine", "lmcache", "ok", version)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "Python", "ok", platform.python_version())
    yield Finding("machine", "usable cores", "ok", str(usable_cores()))
    if _SHM.is_dir():
        room = shutil.disk_usage(_SHM)
        text = f"{room.total / _GIB:.1f} GiB, {room.free / _GIB:.1f} GiB free"
        yield Finding("machine", str(_SHM), "ok", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)}, may be raised to {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        text += ": each stream in flight holds a socket"
        advice = f"as root: ulimit -Hn {_FEW_FILES} (in Docker: --ulimit nofile={_FEW_FILES})"
        yield Finding("machine", "open files", "warning", text, advice)
    else:
        yield Finding("machine", "open files", "ok", text)


def _limit(files: int) -> str:
    return "any number" if files == resource.RLIM_INFINITY else str(files)


def _quoted(values: Sequence[object]) -> str:
    return ", ".join(map(repr, values))
