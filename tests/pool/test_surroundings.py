"""Programs in odd surroundings: moved folders, closed files, signals, users' odd objects."""

from __future__ import annotations

import enum
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import EngineError, UsageError
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CHUNK, CountingEngine, TokenKV
from tests.pool.programs import eventually, program

METHODS = ["forkserver", "spawn"]


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[LMCacheBatchedStream]:
    """Three streams and two workers, after a prefill."""
    with LMCacheBatchedStream(2, on_error="collect") as made:
        fill(made, tmp_path)
        made.prefill({})
        yield made


def fill(batch: LMCacheBatchedStream, folder: Path, count: int = 3, engine: Any = None) -> None:
    for i in range(count):
        stream = create_request(TokenKV(str(folder)), engine or CountingEngine(), [i + 1] * 9)
        batch.add(stream, custom_id=f"row-{i}")


def statuses(metrics: Any) -> list[str]:
    return list(metrics.to_frame()["status"])


# --- where workers work ---------------------------------------------------------------------------


def test_workers_follow_the_working_directory_and_the_path_of_their_parent(
    batch: LMCacheBatchedStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import made_later  # type: ignore[import-not-found]  # by this test

        return kv, tokens, {"folder": os.getcwd(), "value": made_later.VALUE}

    folder = tmp_path / "later"
    folder.mkdir()
    (folder / "made_later.py").write_text("VALUE = 7")
    assert statuses(batch.modify(edit)) == ["failed"] * 3
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    frame = batch.modify(edit).to_frame()
    assert frame["folder"].tolist() == [str(folder)] * 3
    assert frame["value"].tolist() == [7] * 3


def test_a_removed_working_directory_is_named_before_anything_starts(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(1)
    fill(batch, CountingEngine(), 2)
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        batch.prefill({})
    except UsageError as error:
        say(error)
    os.chdir(folder)
    say(*batch.prefill({}).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        assert "was removed" in run.line()
        assert run.line() == "completed completed"
        assert run.end() == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_program_without_standard_files_runs(method: str, tmp_path: Path) -> None:
    text = f"""
    for number in (0, 1, 2):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None
    batch = LMCacheBatchedStream(2, start_method={method!r})
    fill(batch, CountingEngine(), 4)
    metrics = batch.prefill({{}})
    metrics.emit()
    (folder / "result").write_text(" ".join(metrics.to_frame()["status"]))
    """
    with program(tmp_path, text) as run:
        assert run.end() == 0
        assert (tmp_path / "result").read_text() == " ".join(["completed"] * 4)


def test_a_default_timeout_of_sockets_is_not_the_workers(tmp_path: Path) -> None:
    text = """
    import socket
    class Preset(TokenKV):
        def open(self):
            socket.setdefaulttimeout(0.05)
    socket.setdefaulttimeout(0.05)
    batch = LMCacheBatchedStream(1, start_method="spawn")
    batch.add(create_request(Preset(str(folder)), Waits(1), [1] * 9))
    threading.Timer(0.5, (folder / "go").touch).start()
    say(*batch.prefill({}).to_frame()["status"])
    say(*batch.decode({}).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        assert run.line() == "completed"
        assert run.line() == "completed"
        assert run.end() == 0


def test_a_start_that_the_system_refuses_counts_as_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LMCacheBatchedStream(1, max_restarts=1) as batch:
        fill(batch, tmp_path)

        def refuse() -> Any:
            raise OSError(28, "no space left")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(RuntimeError, match=r"could not be started .*no space left"):
            batch.prefill({})
        monkeypatch.undo()
        assert statuses(batch.prefill({})) == ["completed"] * 3


def test_phases_in_a_thread_that_outlives_the_main_thread(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(1)
    fill(batch, CountingEngine(), 2)
    batch.start()
    def work():
        threading.main_thread().join()
        say(*batch.prefill({}).to_frame()["status"])
    threading.Thread(target=work).start()
    """
    with program(tmp_path, text) as run:
        assert run.line() == "completed completed"
        assert run.end() == 0
        assert run.stderr == ""


# --- signals and closing --------------------------------------------------------------------------


def test_a_handler_that_raises_breaks_a_phase_off_and_nothing_else(tmp_path: Path) -> None:
    text = """
    def stop(number, frame):
        raise SystemExit("told to stop")
    signal.signal(signal.SIGTERM, stop)
    batch = LMCacheBatchedStream(1)
    fill(batch, Waits(2), 3)
    try:
        batch.prefill({}, max_concurrency=1)
    except SystemExit as error:
        say(error)
    say(signal.getsignal(signal.SIGTERM) is stop)
    (folder / "go").touch()
    say(*batch.prefill({}).to_frame()["status"])
    batch.close()
    """
    with program(tmp_path, text) as run:
        assert eventually((tmp_path / "begun-2").exists)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.line() == "told to stop"
        assert run.line() == "True"
        assert run.line() == "completed completed completed"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


class _Closes(logging.Handler):
    """Closes a batch when it hears of something, and then lets edits go on."""

    def __init__(self, batch: LMCacheBatchedStream, go: str) -> None:
        super().__init__()
        self.batch = batch
        self.go = go

    def emit(self, record: logging.LogRecord) -> None:
        self.batch.close()
        Path(self.go).touch()


def test_close_from_inside_a_phase_ends_the_phase_and_the_workers(
    batch: LMCacheBatchedStream, tmp_path: Path
) -> None:
    go = str(tmp_path / "go")

    def edit(kv: Any, tokens: list[int]) -> Any:
        logging.getLogger("mine").warning("heard")
        while not os.path.exists(go):
            time.sleep(0.01)
        return kv, tokens

    logger = logging.getLogger("mine")
    handler = _Closes(batch, go)
    logger.addHandler(handler)
    try:
        with pytest.raises(UsageError, match="closed"):
            batch.modify(edit)
    finally:
        logger.removeHandler(handler)
    assert batch.worker_pids == []


def test_a_child_that_an_edit_forks_answers_for_nobody(
    batch: LMCacheBatchedStream, tmp_path: Path
) -> None:
    marker = str(tmp_path / "child")

    def edit(kv: Any, tokens: list[int]) -> Any:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return kv, tokens
        print("from the child")  # not over the worker's connection
        Path(marker).touch()
        raise SystemExit(0)  # what the worker does with it is the child's alone

    frame = batch.modify(edit, timeout=20.0).to_frame()
    assert Path(marker).exists()
    assert frame["status"].tolist() == ["completed"] * 3
    assert statuses(batch.decode({"max_tokens": 2})) == ["completed"] * 3


# --- what users hand over -------------------------------------------------------------------------


class Mode(str, enum.Enum):
    GREEDY = "greedy"


def test_sampling_params_may_be_numpys_and_enums(tmp_path: Path) -> None:
    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        kinds = {name: type(value).__name__ for name, value in params.items()}
        yield TokenEvent(1, repr(kinds))

    with LMCacheBatchedStream(np.int64(1)) as batch:
        fill(batch, tmp_path, 1, engine)
        params = {"mode": Mode.GREEDY, "seed": np.int64(3), "stop": [np.str_("x")]}
        batch.decode({**params, "max_tokens": np.int32(4)}, max_concurrency=np.int16(2))
        seen = eval(batch.streams[next(iter(batch.streams))].output_text())
    assert seen == {"mode": "str", "seed": "int", "stop": "list", "max_tokens": "int"}


class OnlyHere:
    """Pickles, and can't be loaded in a worker."""

    def __reduce__(self) -> Any:
        return _load_in, (os.getpid(),)


def _load_in(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise RuntimeError("not in a worker")
    return OnlyHere()


def test_sampling_params_that_do_not_load_fail_their_own_stream(tmp_path: Path) -> None:
    with LMCacheBatchedStream(1, on_error="collect") as batch:
        fill(batch, tmp_path)
        odd = create_request(TokenKV(str(tmp_path)), CountingEngine(), [9] * 9)
        batch.add(odd, sampling_params={"extra": OnlyHere()})
        metrics = batch.prefill({})
        assert statuses(metrics) == ["completed"] * 3 + ["failed"]
        assert "not in a worker" in metrics.failures["error_message"].iloc[0]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"A": 1}, "'A': 1"),
        ({"": "x"}, "no environment variable"),
        ({"A=B": "x"}, "no environment variable"),
        ({"A": "\0"}, "no environment variable"),
        ([("A", "x")], "dict of strings"),
    ],
)
def test_an_environment_that_no_system_takes_is_refused(env: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LMCacheBatchedStream(1, env=env)


def test_a_stream_belongs_to_one_batch(tmp_path: Path) -> None:
    stream = create_request(TokenKV(str(tmp_path)), CountingEngine(), [1] * 9)
    with LMCacheBatchedStream(1) as first, LMCacheBatchedStream(1) as second:
        stream_id = first.add(stream)
        with pytest.raises(UsageError, match="another batch"):
            second.add(stream)
        assert second.streams == {}
        assert statuses(first.prefill({})) == ["completed"]
        assert list(first.streams) == [stream_id]


class Bounded(CountingEngine):
    max_in_flight = "many"


def test_a_bound_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with LMCacheBatchedStream(1) as batch:
        fill(batch, tmp_path, engine=Bounded())
        with pytest.raises(UsageError, match="max_in_flight of a Bounded"):
            batch.prefill({})


class Forgetful(TokenKV):
    """Loses what edits stored."""

    def lookup(self, tokens: Any, cache_salt: str = "") -> int:
        return 0 if len(cache_salt) == 32 else super().lookup(tokens, cache_salt)


def test_doubts_about_many_streams_are_one_warning(tmp_path: Path) -> None:
    with LMCacheBatchedStream(1, on_unused_kv="warn") as batch:
        for i in range(4):
            batch.add(create_request(Forgetful(str(tmp_path)), CountingEngine(), [i + 1] * 9))
        batch.prefill({})
        batch.modify(lambda kv, tokens: (kv[:, :, :CHUNK], tokens[:CHUNK]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch.decode({"max_tokens": 1})
    texts = [str(it.message) for it in caught if "streams, the first" in str(it.message)]
    assert len(texts) == 1 and texts[0].startswith("4 streams")


NO_EVENTS: list[Any] = [TokenEvent(cast(int, "x")), TokenEvent(1 << 40), object(), (1, "x")]


@pytest.mark.parametrize("event", NO_EVENTS)
def test_an_event_that_is_none_fails_its_stream_by_name(event: Any, tmp_path: Path) -> None:
    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        yield event

    with LMCacheBatchedStream(1, on_error="collect") as batch:
        fill(batch, tmp_path, 1, engine)
        failure = batch.prefill({}).failures.iloc[0]
        assert failure["error_type"] == EngineError.__name__
        assert "which is no event" in failure["error_message"]
        assert statuses(batch.prefill({})) == ["failed"]


# --- output ---------------------------------------------------------------------------------------


def test_a_progress_bars_carriage_returns_leave_the_last_state(
    batch: LMCacheBatchedStream, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        for percent in range(101):
            print(f"\r{percent} %", end="", flush=True)
        print()
        print("one\rtwo")
        return kv, tokens

    batch.modify(edit)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == sorted(f"[row-{i}] {text}" for i in range(3) for text in ("100 %", "two"))


class Raises(io.StringIO):
    def write(self, text: str) -> int:
        raise LookupError("a broken display")


class RaisingHandler(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise LookupError("a broken handler")


def test_what_displays_and_handlers_raise_never_reaches_a_phase(
    batch: LMCacheBatchedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("seen anyway")
        logging.getLogger("broken").warning("logged")
        return kv, tokens

    instead = io.StringIO()
    handler = RaisingHandler()
    logging.getLogger("broken").addHandler(handler)
    monkeypatch.setattr(sys, "stdout", Raises())
    monkeypatch.setattr(sys, "stderr", instead)
    monkeypatch.setattr(sys, "__stderr__", instead)
    try:
        assert statuses(batch.modify(edit)) == ["completed"] * 3
    finally:
        logging.getLogger("broken").removeHandler(handler)
    assert instead.getvalue().count("seen anyway") == 3
    assert "a broken handler" in instead.getvalue()


def test_threads_of_the_main_program_may_run_phases(tmp_path: Path) -> None:
    results: list[list[str]] = []

    def work() -> None:
        with LMCacheBatchedStream(1) as batch:
            fill(batch, tmp_path)
            results.append(statuses(batch.prefill({})))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [["completed"] * 3]
