"""``lmcache-mp doctor``: what it says of servers that answer, or do not, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.cli import main
from lmcache_mp.doctor import Targets
from lmcache_mp.errors import UsageError
from lmcache_mp.probes import Address, wait_until_up

ROOT = Path(__file__).parents[1]
PATH, SERVED = "/models/tiny", "tiny-chat"
#: Of ZMTP 3: what a ZeroMQ socket says before anything else.
GREETING = b"\xff" + bytes(8) + b"\x7f"
IDS = {"token_ids": [7]}
CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}

# --- servers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(documents: dict[str, Any], port: int = 0) -> Iterator[str]:
    """The URL of a server: a document for a path is JSON, bytes, a status, or asked for one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = documents.get(self.path, 404)
            if callable(found):
                found = found(self.headers)
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(found if isinstance(found, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def greeting_with(words: bytes) -> Iterator[int]:
    """A port whose every connection gets ``words``, and then no more; it hears the client out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(ConnectionError):
                        connection.sendall(words)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):  # closing on unread data would be a reset
                            pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and is nobody else's meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def completion(choice: dict[str, Any] = IDS, usage: dict[str, Any] = CACHED) -> bytes:
    """The events of one token, as vLLM sends them."""
    events = [
        {"choices": [{"index": 0, "text": " x", "finish_reason": "length", **choice}]},
        {"choices": [], "usage": {"completion_tokens": 1, **usage}},
    ]
    lines = [*map(json.dumps, events), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def model(name: str, root: str, parent: str | None = None) -> dict[str, Any]:
    return {"id": name, "root": root, "parent": parent, "max_model_len": 4096}


def vllm(*models: dict[str, Any], tokens: object = None, **more: Any) -> dict[str, Any]:
    return {
        "/health": b"",
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": list(models) or [model(SERVED, PATH)]},
        "/v1/completions": tokens or completion(),
        **more,
    }


def registration(name: str = PATH, block: int = 16, **more: Any) -> dict[str, Any]:
    return {"model_name": name, "world_size": 1, "block_size": block, "use_mla": False, **more}


def lmcache(*registrations: dict[str, Any], config: Any = None, **more: Any) -> dict[str, Any]:
    server = {"chunk_size": 256, "shm_name": "", "enable": [], "supported_transfer_mode": "auto"}
    memory = {"memory_used_bytes": 1 << 29, "memory_total_bytes": 1 << 31}
    return {
        "/healthcheck": {"status": "healthy"},
        "/config": {"mp": server | (config or {})},
        "/status": {
            "cache_context_meta": {},
            "non_cuda_context_meta": dict(enumerate(registrations or [registration()])),
            "storage_manager": {"l1_manager": memory},
        },
        **more,
    }


# --- asking ---------------------------------------------------------------------------------------


class Report:
    """What ``lmcache-mp doctor ... --json`` says."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.findings: list[dict[str, str]] = json.loads(text)
        for it in self.findings:
            assert it["state"] in ("ok", "warning", "fails")
            assert it["state"] == "ok" or it["advice"], f"nothing to do about {it}"
        assert status == any(it["state"] == "fails" for it in self.findings)

    def __getitem__(self, name: str) -> dict[str, str]:
        """The finding of "area/check"."""
        found = [it for it in self.findings if f"{it['area']}/{it['check']}" == name]
        assert len(found) == 1, [f"{it['area']}/{it['check']}" for it in self.findings]
        return found[0]

    @property
    def failing(self) -> set[str]:
        return {f"{it['area']}/{it['check']}" for it in self.findings if it["state"] == "fails"}


class Doctor:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Report:
        status = main(["doctor", *arguments, "--json"])
        return Report(status, self._capsys.readouterr().out)

    def printed(self, *arguments: str) -> tuple[int, str]:
        status = main(["doctor", *arguments])
        return status, self._capsys.readouterr().out


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a release of the package lmcache the installed one, or, with None, none."""

    def at(version: str | None) -> None:
        if version is None:
            there = [it for it in sys.path if not list(Path(it or ".").glob("lmcache-*.dist-info"))]
        else:  # the first one found is the installed one
            info = tmp_path / version / f"lmcache-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: lmcache\nVersion: {version}\n")
            there = [str(info.parent), *sys.path]
        monkeypatch.setattr(sys, "path", there)

    return at


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], install: Any, monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    install("0.5.6")
    return Doctor(capsys)


@pytest.fixture
def segment() -> Iterator[str]:
    """A file in /dev/shm, as LMCache's server names its own."""
    path = Path("/dev/shm") / f"lmcache_l1_pool_{uuid.uuid4().hex}"
    if not path.parent.is_dir():
        pytest.skip("this system has no /dev/shm")
    path.touch()
    yield path.name
    path.unlink()


# --- all well -------------------------------------------------------------------------------------


def test_all_is_well(doctor: Doctor, segment: str) -> None:
    server = lmcache(config={"shm_name": segment})
    with serving(vllm()) as engine, serving(server) as http, greeting_with(GREETING) as port:
        servers = ("--engine", engine, "--lmcache", f"tcp://127.0.0.1:{port}")
        report = doctor(*servers, "--lmcache-http", http + "/", "--model", PATH)
        status, text = doctor.printed(*servers, "--lmcache-http", http)
    assert (report.status, status) == (0, 0)
    assert {it["state"] for it in report.findings} == {"ok"}
    assert "vLLM 0.32.0" in report["engine/reachable"]["text"]
    assert "4096 tokens" in report["engine/models"]["text"]
    assert report["lmcache/chunks"]["text"].startswith("256 tokens, a multiple")
    assert report["lmcache/transport"]["text"] == "shared memory"
    assert report["lmcache/memory"]["text"] == "0.5 of 2.0 GiB used"
    assert report["names/for KV"]["text"] == f"connect(url, http_url, {PATH!r})"
    assert report["names/for tokens"]["text"] == f"openai_engine(base_url, {SERVED!r})"
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and all(line == line.rstrip() for line in lines)
    assert [line for line in lines if line and line[0] != " "] == [
        "engine",
        "lmcache",
        "names",
        "machine",
    ]
    checks = [line for line in lines if line.startswith("  ok ")]
    assert len(checks) == len(report.findings)
    assert len({re.match(r"  ok +\S+( \S+)* {2,}", line).end() for line in checks}) == 1


def test_this_machine_alone(doctor: Doctor, install: Any) -> None:
    install(None)
    report = doctor()
    assert {it["area"] for it in report.findings} == {"machine"}
    assert "machine/lmcache" not in {f"{it['area']}/{it['check']}" for it in report.findings}
    assert report["machine/Python"]["text"] == ".".join(map(str, sys.version_info[:3]))
    assert int(report["machine/usable cores"]["text"]) >= 1


def test_only_what_is_asked_for(doctor: Doctor) -> None:
    with serving(vllm()) as engine:
        assert {it["area"] for it in doctor("--engine", engine).findings} == {
            "engine",
            "names",
            "machine",
        }
    with greeting_with(GREETING) as port:
        report = doctor("--lmcache", f"tcp://127.0.0.1:{port}")
    assert {it["area"] for it in report.findings} == {"lmcache", "machine"}


@pytest.mark.parametrize("ending", ["/", "/v1", "/v1/", "/v1/completions"])
def test_an_engines_url_may_be_that_of_openai_engine(doctor: Doctor, ending: str) -> None:
    with serving(vllm()) as engine:
        assert doctor("--engine", engine + ending).status == 0


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "lmcache_mp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


# --- servers that are not there -------------------------------------------------------------------


def test_nobody_listens(doctor: Doctor) -> None:
    with closed_port() as a, closed_port() as b, closed_port() as c:
        http = ("--engine", f"http://127.0.0.1:{a}", "--lmcache-http", f"http://127.0.0.1:{b}")
        report = doctor(*http, "--lmcache", f"tcp://127.0.0.1:{c}")
    assert report.failing == {"engine/reachable", "lmcache/reachable", "lmcache/message port"}
    assert "Connection refused" in report["engine/reachable"]["text"]
    assert "--port" in report["engine/reachable"]["advice"]


def test_servers_that_are_starting(doctor: Doctor) -> None:
    down = {"/health": 503, "/healthcheck": 503}
    with serving(down) as url:
        report = doctor("--engine", url, "--lmcache-http", url)
    assert report.failing == {"engine/reachable", "lmcache/reachable"}
    for name in report.failing:
        assert "answers 503" in report[name]["text"] and "--wait" in report[name]["advice"]


def test_wrong_servers(doctor: Doctor) -> None:
    with serving(vllm()) as engine, serving(lmcache()) as http:
        report = doctor("--engine", http, "--lmcache-http", engine)
    assert report.failing == {"engine/reachable", "lmcache/reachable"}
    assert "answers 404" in report["engine/reachable"]["text"]


def test_ports_that_are_mistaken_for_each_other(doctor: Doctor) -> None:
    with greeting_with(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web, greeting_with(GREETING) as port:
        http = (
            "--engine",
            f"http://127.0.0.1:{port}",
            "--lmcache-http",
            f"http://127.0.0.1:{port}",
        )
        report = doctor(*http, "--lmcache", f"tcp://127.0.0.1:{web}")
    assert report.failing == {"engine/reachable", "lmcache/reachable", "lmcache/message port"}


@pytest.mark.parametrize(
    "documents",
    [lmcache() | {"/config": {}}, lmcache() | {"/status": b"<p>"}, lmcache() | {"/config": 500}],
)
def test_a_server_that_is_not_lmcache(doctor: Doctor, documents: dict[str, Any]) -> None:
    with serving(documents) as http:
        assert doctor("--lmcache-http", http).failing == {"lmcache/reachable"}


# --- waiting --------------------------------------------------------------------------------------


def test_waiting_for_a_server_that_starts_later() -> None:
    """The server starts when the waiting is announced, so that it was not there at first."""
    said: list[str] = []
    with contextlib.ExitStack() as started, socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]

        def start(line: str) -> None:
            said.append(line)
            holder.close()
            started.enter_context(serving(vllm(), port))

        address = Address("engine", f"http://127.0.0.1:{port}")
        wait_until_up([address], 60, start)
        address.ask()
    assert len(said) == 1 and address.url in said[0] and "60 s" in said[0]


def test_waiting_until_starting_servers_are_up(
    doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"/health": [503, 502], "/healthcheck": [503]}

    def starting(path: str) -> Any:
        return lambda _headers: answers[path].pop(0) if answers[path] else {}

    engine = vllm() | {"/health": starting("/health")}
    server = lmcache() | {"/healthcheck": starting("/healthcheck")}
    with serving(engine) as url, serving(server) as http:
        status = main(["doctor", "--engine", url, "--lmcache-http", http, "--wait", "60"])
    told = capsys.readouterr()
    assert status == 0, told.out
    assert told.err == f"waiting up to 60 s for {url}, {http}\n"


def test_waiting_is_over(doctor: Doctor) -> None:
    with closed_port() as port:
        report = doctor("--lmcache", f"tcp://127.0.0.1:{port}", "--wait", "0.1")
    assert report.failing == {"lmcache/message port"}


def test_nothing_to_wait_for() -> None:
    """Neither for what is up, nor for what time won't change: a test that waited would hang."""
    said: list[str] = []
    with serving(lmcache() | {"/health": 404}) as url, greeting_with(b"?") as port:
        odd = Address("engine", f"http://127.0.0.1:{port}")
        wait_until_up([Address("engine", url), Address("http", url), odd], 3600, said.append)
    assert said == []


# --- the engine -----------------------------------------------------------------------------------


def test_no_token_ids(doctor: Doctor) -> None:
    with serving(vllm(tokens=completion(choice={}))) as engine:
        report = doctor("--engine", engine)
    assert report.failing == {"engine/token ids"}
    assert "--return-tokens-as-token-ids" in report["engine/token ids"]["advice"]


def test_token_ids_of_an_older_engine(doctor: Doctor) -> None:
    tokens = completion(choice={"logprobs": {"tokens": ["token_id:7"]}})
    with serving(vllm(tokens=tokens)) as engine:
        report = doctor("--engine", engine)
    assert report["engine/token ids"]["state"] == "ok"


def test_cached_tokens_are_not_reported(doctor: Doctor) -> None:
    with serving(vllm(tokens=completion(usage={}))) as engine:
        report = doctor("--engine", engine)
    assert report.status == 0
    assert report["engine/cached tokens"]["state"] == "warning"
    assert "--enable-prompt-tokens-details" in report["engine/cached tokens"]["advice"]


def test_an_engine_that_can_not_generate(doctor: Doctor) -> None:
    with serving(vllm(tokens=500)) as engine:
        report = doctor("--engine", engine)
    assert report.failing == {"engine/token ids"}
    assert "answered 500" in report["engine/token ids"]["text"]


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [3]}, [], b"<p>", 500])
def test_models_that_can_not_be_read(doctor: Doctor, models: Any) -> None:
    with serving({**vllm(), "/v1/models": models}) as engine:
        assert doctor("--engine", engine).failing == {"engine/models"}


def test_a_server_without_a_version(doctor: Doctor) -> None:
    with serving({**vllm(), "/version": 404}) as engine:
        report = doctor("--engine", engine)
    assert report["engine/reachable"]["state"] == "warning" and report.status == 0


def test_a_key_is_sent_and_not_shown(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    open_models = vllm()["/v1/models"]

    def guarded(headers: Any) -> Any:
        return open_models if headers["Authorization"] == "Bearer s3cret" else 401

    with serving({**vllm(), "/v1/models": guarded}) as engine:
        report = doctor("--engine", engine)
        assert report.failing == {"engine/models"}
        assert "OPENAI_API_KEY" in report["engine/models"]["advice"]
        monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
        report = doctor("--engine", engine)
    assert report.status == 0
    assert "s3cret" not in json.dumps(report.findings)


def test_an_engine_is_asked_without_a_proxy() -> None:
    """As openai_engine asks it. A process of its own, as the environment is read at the start."""
    kept = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    with closed_port() as nobody, serving(vllm()) as engine:
        env = {**kept, "http_proxy": f"http://127.0.0.1:{nobody}"}
        command = [sys.executable, "-m", "lmcache_mp", "doctor", "--engine", engine]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60
        )
    assert done.returncode == 0, done.stdout


def test_what_a_server_sends_does_not_steer_the_terminal(doctor: Doctor) -> None:
    with serving({**vllm(), "/version": {"version": "1\x1b[2J\n2"}}) as engine:
        _, text = doctor.printed("--engine", engine)
    assert "\x1b" not in text and "vLLM 1 [2J 2" in text


def test_a_long_name_is_printed_whole(doctor: Doctor) -> None:
    path = "/models/" + "-".join(["tiny"] * 30)
    with serving(vllm(model(SERVED, path))) as engine, serving(lmcache(registration(path))) as http:
        _, text = doctor.printed("--engine", engine, "--lmcache-http", http)
    assert text.count(path) == 2


# --- the LMCache server ---------------------------------------------------------------------------


def test_no_registration(doctor: Doctor) -> None:
    """The advice is a line for a shell, folded or not, with the address that was asked."""
    server = lmcache(registration(f"{PATH}##lmcache_mp"))
    with serving(server) as http, greeting_with(GREETING) as port:
        arguments = ("--lmcache", f"tcp://127.0.0.1:{port}", "--lmcache-http", http)
        report = doctor(*arguments)
        _, text = doctor.printed(*arguments)
    assert report.failing == {"lmcache/models"}
    printed = re.search(r"--kv-transfer-config\s+'[^']*'", text)
    assert printed is not None
    for line in (report["lmcache/models"]["advice"].removeprefix("start vLLM with "), printed[0]):
        flag, config = shlex.split(line)
        assert flag == "--kv-transfer-config"
        assert json.loads(config)["kv_connector_extra_config"] == {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        }


def test_pickle_is_slow(doctor: Doctor) -> None:
    with serving(lmcache()) as http:
        report = doctor("--lmcache-http", http)
    assert report.status == 0
    assert report["lmcache/transport"]["state"] == "warning"
    assert "--shm-name" in report["lmcache/transport"]["advice"]


def test_shared_memory_of_another_machine(doctor: Doctor) -> None:
    with serving(lmcache(config={"shm_name": uuid.uuid4().hex})) as http:
        report = doctor("--lmcache-http", http)
    assert report["lmcache/transport"]["state"] == "warning"
    assert "is not here" in report["lmcache/transport"]["text"]


def test_a_short_name_of_shared_memory(doctor: Doctor, segment: str) -> None:
    name = segment.removeprefix("lmcache_l1_pool_")
    with serving(lmcache(config={"shm_name": name})) as http:
        assert doctor("--lmcache-http", http)["lmcache/transport"]["state"] == "ok"


def test_chunks_that_are_no_multiple_of_blocks(doctor: Doctor) -> None:
    server = lmcache(registration(block=96), registration("other", block=128))
    with serving(server) as http:
        report = doctor("--lmcache-http", http)
        other = doctor("--lmcache-http", http, "--model", "other")
    assert report.failing == {"lmcache/chunks"}
    assert "256" in report["lmcache/chunks"]["text"] and "96" in report["lmcache/chunks"]["text"]
    assert other.failing == set(), "the model that is asked for has other blocks"


def test_kv_in_parts(doctor: Doctor) -> None:
    parts = registration(world_size=2)
    with serving(lmcache(parts)) as http, serving(lmcache(parts | {"use_mla": True})) as latent:
        assert doctor("--lmcache-http", http).failing == {"lmcache/parallelism"}
        assert doctor("--lmcache-http", latent).failing == set()


def test_a_server_that_only_drives_transfers_itself(doctor: Doctor) -> None:
    config = {"supported_transfer_mode": "lmcache_driven"}
    with serving(lmcache(config=config)) as http:
        report = doctor("--lmcache-http", http)
    assert report.failing == {"lmcache/transfers"}
    assert "--supported-transfer-mode auto" in report["lmcache/transfers"]["advice"]


@pytest.mark.parametrize(
    ("enabled", "more", "says"),
    [
        ([], (), "--enable transfer_query"),
        (["transfer_query"], (), "LMCache's patch of vLLM"),
        (["transfer_query"], (registration(f"{PATH}##query"),), None),
    ],
)
def test_the_query_cache_is_information(
    doctor: Doctor, enabled: list[str], more: tuple[Any, ...], says: str | None
) -> None:
    with serving(lmcache(registration(), *more, config={"enable": enabled})) as http:
        report = doctor("--lmcache-http", http)
    finding = report["lmcache/query cache"]
    assert (report.status, finding["state"]) == (0, "ok")
    if says is None:
        assert PATH in finding["text"] and not finding["advice"]
    else:
        assert says in finding["advice"]


# --- names ----------------------------------------------------------------------------------------


def test_a_model_that_is_not_registered(doctor: Doctor) -> None:
    with serving(lmcache(registration(), registration("other"))) as http:
        report = doctor("--lmcache-http", http, "--model", "nobody")
    assert report.failing == {"names/--model"}
    for name in (PATH, "other"):
        assert repr(name) in report["names/--model"]["text"]


def test_the_served_name_in_place_of_the_path(doctor: Doctor) -> None:
    server = lmcache(registration(), registration("other"))
    models = (model("first", "other"), model(SERVED, PATH))
    with serving(vllm(*models)) as engine, serving(server) as http:
        report = doctor("--engine", engine, "--lmcache-http", http, "--model", SERVED)
    assert report.failing == {"names/--model"}
    advice = report["names/--model"]["advice"]
    assert repr(PATH) in advice and "other" not in advice


def test_an_engine_of_another_lmcache(doctor: Doctor) -> None:
    with serving(vllm(model("else", "/else"))) as engine, serving(lmcache()) as http:
        report = doctor("--engine", engine, "--lmcache-http", http)
    assert report.failing == {"names/match"}
    assert "'/else'" in report["names/match"]["text"] and PATH in report["names/match"]["text"]


def test_of_many_models_those_that_both_have(doctor: Doctor) -> None:
    server = lmcache(registration(), registration("gone"))
    models = (model("alias", PATH), model(SERVED, PATH))
    with serving(vllm(*models)) as engine, serving(server) as http:
        report = doctor("--engine", engine, "--lmcache-http", http)
    texts = [it["text"] for it in report.findings if it["area"] == "names"]
    assert texts == [
        f"connect(url, http_url, {PATH!r})",
        "openai_engine(base_url, 'alias')",
        f"openai_engine(base_url, {SERVED!r})",
    ]


def test_a_lora_adapter_is_no_name_to_use(doctor: Doctor) -> None:
    models = (model("lora", "/adapter", parent=SERVED), model(SERVED, PATH))
    with serving(vllm(*models)) as engine:
        report = doctor("--engine", engine)
    assert "lora" not in json.dumps(report.findings)


# --- this machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "state"),
    [(None, "fails"), ("0.5.2", "warning"), ("0.5.6", "ok"), ("0.5.6+cpu", "ok")],
)
def test_the_package(
    capsys: pytest.CaptureFixture[str], install: Any, version: str | None, state: str
) -> None:
    install(version)
    doctor = Doctor(capsys)
    with greeting_with(GREETING) as port:
        report = doctor("--lmcache", f"tcp://127.0.0.1:{port}")
    assert report["machine/lmcache"]["state"] == state
    if state != "ok":
        assert report["machine/lmcache"]["advice"] == "pip install 'lmcache_mp[lmcache]'"


def test_few_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine's hard limit is under 4096 already")
    command = f"{shlex.quote(sys.executable)} -m lmcache_mp doctor"
    for limit, state in ((1000, "warning"), (4096, "ok")):
        script = f"ulimit -n {limit} && {command} --json"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        finding = Report(done.returncode, done.stdout)["machine/open files"]
        assert finding["state"] == state and str(limit) in finding["text"]


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--engine", "ftp://host"],
        ["doctor", "--engine", "host:8000"],
        ["doctor", "--lmcache", "127.0.0.1:5555"],
        ["doctor", "--lmcache", "tcp://127.0.0.1"],
        ["doctor", "--lmcache-http", "tcp://127.0.0.1:8080"],
        ["doctor", "--model", "x"],
        ["doctor", "--wait", "-1"],
        ["doctor", "--wait", "nan"],
        ["doctor", "--wait", "soon"],
        ["doctor", "more"],
        ["nothing"],
        [],
    ],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lmcache_mp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lmcache-mp" in done.stderr and "error: " in done.stderr
    assert "Traceback" not in done.stderr


@given(st.text() | st.from_regex(r"tcp://.*", fullmatch=True))
def test_any_text_is_a_message_url_or_refused(url: str) -> None:
    with contextlib.suppress(UsageError):
        (address,) = Targets(lmcache=url).addresses
        assert re.fullmatch(r"tcp://[^/?#@]+:\d+", address.url)


@given(st.from_regex(r"[a-z][a-z0-9.-]{0,20}|\[::1\]", fullmatch=True), st.integers(1, 65535))
def test_a_message_url_of_a_host_and_port(host: str, port: int) -> None:
    url = f"tcp://{host}:{port}"
    assert Targets(lmcache=url).addresses == [Address("lmcache", url)]
