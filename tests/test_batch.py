"""A batch over real worker processes: phases, selection, concurrency, and what is refused."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmcache_mp.batch as lmc_batch
import lmcache_mp.stream as lmc_stream
from lmcache_mp.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_mp.errors import KVError, UsageError
from tests.helpers import CHUNK, CountingEngine, Rendezvous, TokenKV, pid_is_alive

GREEDY = {"temperature": 0}


@pytest.fixture
def context(tmp_path: Path) -> TokenKV:
    return TokenKV(str(tmp_path))


@pytest.fixture
def batch() -> Iterator[LMCacheBatchedStream]:
    with LMCacheBatchedStream(2) as made:
        yield made


def fill(batch: LMCacheBatchedStream, context: TokenKV, count: int, **engine: Any) -> list[str]:
    """``count`` streams of different prompts of 9 tokens: two chunks and one token."""
    return [
        batch.add(
            lmc_stream.create_request(context, CountingEngine(**engine), [i + 1] * 9),
            custom_id=f"row-{i}",
        )
        for i in range(count)
    ]


def halve(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
    return kv[:, :, ::2], tokens[::2], {"kept": len(tokens[::2])}


def test_three_phases_leave_streams_reports_and_frames(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 5)
    prefill = batch.prefill({"temperature": 1.0, "max_tokens": 99})
    modify = batch.modify(halve)
    decode = batch.decode({"max_tokens": 3})
    frame = decode.to_frame()
    assert list(frame.index) == ids
    assert list(frame["custom_id"]) == [f"row-{i}" for i in range(5)]
    assert list(frame["output_tokens"]) == [3] * 5
    assert list(prefill.to_frame()["output_tokens"]) == [1] * 5
    assert list(modify.to_frame()["tokens_before"]) == [8] * 5
    assert list(modify.to_frame()["stored_tokens"]) == [4] * 5
    assert list(modify.to_frame()["kept"]) == [4] * 5
    stream = batch.get_stream(ids[1])
    # 9 * 2 = 18 comes out of the prefill; the edit keeps 4 of 8 tokens, and the 9th and 18 follow.
    assert stream.tokens == [2, 2, 2, 2, 2, 18, 28, 29, 30]
    assert stream.output_tokens() == [18, 28, 29, 30]
    assert stream.output_text() == frame.at[ids[1], "output_text"] == "18 28 29 30 "
    assert stream.decoded_tokens() == 4
    assert list(frame["input_tokens"]) == [6] * 5
    assert decode.to_dict()["metrics"]["results"]["output_tokens"] == 15
    assert batch.perf_metrics[ids[0]].output_tokens == 3


def test_the_object_given_to_add_is_kept_up_to_date(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    stream = lmc_stream.create_request(context, CountingEngine(), [1] * 9)
    stream_id = batch.add(stream)
    batch.prefill(GREEDY)
    assert batch.get_stream(stream_id) is stream is batch.streams[stream_id]
    assert stream.output_tokens() == [9]
    assert stream.retrieve_kv().shape == (2, 1, 8, 1)
    for call in (
        lambda: stream.generate({"max_tokens": 1}),
        lambda: stream.modify_kv(halve),
        lambda: stream.update_kv(np.zeros((2, 1, 8, 1), np.float32), [1] * 8),
    ):
        with pytest.raises(UsageError, match="batch"):
            call()


def test_several_rounds_of_modify_and_decode(batch: LMCacheBatchedStream, context: TokenKV) -> None:
    ids = fill(batch, context, 3)
    batch.prefill(GREEDY)
    for _ in range(2):
        batch.modify(lambda kv, tokens: (kv[:, :, :CHUNK], tokens[:CHUNK]))
        batch.decode({"max_tokens": 2})
    stream = batch.get_stream(ids[0])
    # The second edit sees the first one's chunk; what came after it is computed again.
    assert stream.tokens[:CHUNK] == [1] * CHUNK
    assert stream.decoded_tokens() == 5
    assert stream.tokens == [1, 1, 1, 1, 1, 9, *stream.output_tokens()[1:]]


def test_run_streams_and_modify_stream_return_seconds(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 3)
    assert batch.run_streams({"max_tokens": 2}) > 0
    assert batch.modify_stream(halve, ids[:1]) > 0
    assert batch.run_streams({"max_tokens": 2}, []) == 0.0
    report = batch.get_perf_metrics(1.0, "json", 80, "decode", ids[:2])
    assert report.to_dict()["metrics"]["config"]["num_streams"] == 2
    assert report.to_dict()["metrics"]["results"]["output_tput"] == 4


def test_a_report_over_streams_that_have_not_run(context: TokenKV) -> None:
    batch = LMCacheBatchedStream(1)
    fill(batch, context, 2)
    report = batch.get_perf_metrics(0.0, "terminal", 80, "prefill")
    assert report.to_dict()["metrics"]["config"]["num_streams"] == 2


def test_selected_streams_run_and_are_counted(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 4)
    metrics = batch.decode({"max_tokens": 2}, stream_ids=(ids[i] for i in (3, 1)))
    assert metrics.to_dict()["metrics"]["config"]["num_streams"] == 2
    assert list(metrics.to_frame().index) == [ids[1], ids[3]]  # in the order of add
    assert batch.get_stream(ids[0]).decoded_tokens() == 0
    nothing = batch.decode({"max_tokens": 2}, stream_ids=[])
    assert nothing.to_dict()["metrics"]["config"]["num_streams"] == 0


def test_a_streams_own_parameters_win_except_over_a_prefills_one_token(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    stream = lmc_stream.create_request(context, CountingEngine(), [1] * 9)
    batch.add(stream, sampling_params={"max_tokens": 4})
    assert batch.prefill(GREEDY).to_frame()["output_tokens"].iloc[0] == 1
    assert batch.decode({"max_tokens": 2}).to_frame()["output_tokens"].iloc[0] == 4


class EndsAtOnce:
    def __call__(
        self, prompt: list[int], params: dict[str, Any], salt: str
    ) -> Iterator[lmc_stream.TokenEvent]:
        yield lmc_stream.TokenEvent(5, "x", "stop" if prompt[0] == 1 else "length")


def test_done_streams_run_again_unless_skipped(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = [
        batch.add(lmc_stream.create_request(context, EndsAtOnce(), [first] * 9)) for first in (1, 2)
    ]
    batch.decode({"max_tokens": 3})
    assert [batch.get_stream(i).is_done() for i in ids] == [True, False]
    assert len(batch.decode({"max_tokens": 3}).to_frame()) == 2
    skipped = batch.decode({"max_tokens": 3}, skip_done=True)
    assert list(skipped.to_frame().index) == ids[1:]
    batch.modify(halve)
    assert not batch.get_stream(ids[0]).is_done()  # an edit clears it


@pytest.mark.parametrize(("streams", "limit"), [(50, 50), (17, 17)])
def test_all_streams_within_the_limit_are_in_flight_at_once(
    streams: int, limit: int, tmp_path: Path
) -> None:
    """The engine ends no pass before it has seen all of them at once."""
    engine = Rendezvous(str(tmp_path), streams)
    with LMCacheBatchedStream(8) as batch:
        for i in range(streams):
            batch.add(lmc_stream.create_request(TokenKV(str(tmp_path)), engine, [i, i]))
        frame = batch.prefill(GREEDY, max_concurrency=limit).to_frame()
    assert (frame["status"] == "completed").all()
    assert frame["worker_pid"].nunique() == 8


class Gate:
    """Notes in files how many passes are open; each waits for a second one that never comes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(
        self, prompt: list[int], params: dict[str, Any], salt: str
    ) -> Iterator[lmc_stream.TokenEvent]:
        mine = Path(self.folder) / f"open-{prompt[0]}"
        mine.touch()
        others = len(list(Path(self.folder).glob("open-*")))
        mine.unlink()
        yield lmc_stream.TokenEvent(others)


def test_a_limit_of_one_runs_one_stream_at_a_time(tmp_path: Path) -> None:
    with LMCacheBatchedStream(2) as batch:
        for i in range(12):
            batch.add(
                lmc_stream.create_request(TokenKV(str(tmp_path)), Gate(str(tmp_path)), [i] * 5)
            )
        batch.prefill(GREEDY, max_concurrency=1)
        assert {stream.output_tokens()[0] for stream in batch.streams.values()} == {1}


def test_edits_run_one_at_a_time_in_a_worker(context: TokenKV) -> None:
    with LMCacheBatchedStream(2) as batch:
        fill(batch, context, 12)

        def edit(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
            import threading

            open_now = getattr(threading, "open_edits", 0) + 1
            threading.open_edits = open_now  # type: ignore[attr-defined]  # a global of the process
            sum(range(100_000))
            threading.open_edits -= 1  # type: ignore[attr-defined]  # a global of the process
            main = threading.current_thread() is threading.main_thread()
            return kv, tokens, {"open": open_now, "main": main}

        frame = batch.modify(edit).to_frame()
    assert set(frame["open"]) == {1} and set(frame["main"]) == {True}
    assert frame["worker_pid"].nunique() == 2


def test_streams_added_later_get_workers_too(context: TokenKV) -> None:
    with LMCacheBatchedStream() as batch:
        fill(batch, context, 1)
        batch.prefill(GREEDY)
        first = batch.worker_pids
        assert len(first) == 1
        for i in range(4):
            batch.add(lmc_stream.create_request(context, CountingEngine(), [50 + i] * 9))
        batch.decode({"max_tokens": 2})
        assert batch.worker_pids[:1] == first
        assert len(batch.worker_pids) == min(5, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods(method: str, context: TokenKV) -> None:
    with LMCacheBatchedStream(1, start_method=method) as batch:
        fill(batch, context, 2)
        assert batch.start() > 0
        assert len(batch.worker_pids) == 1
        assert batch.prefill(GREEDY).to_frame()["status"].eq("completed").all()


def test_an_engine_that_never_waits_runs_without_threads(context: TokenKV) -> None:
    with LMCacheBatchedStream(2) as batch:
        ids = fill(batch, context, 6, blocking=False)
        batch.prefill(GREEDY)
        assert batch.get_stream(ids[2]).output_tokens() == [27]


def test_environment_of_today_and_of_the_batch_reaches_workers(
    context: TokenKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LMCacheBatchedStream(1) as earlier:  # the forkserver is running from here on
        fill(earlier, context, 1)
        earlier.start()
    monkeypatch.setenv("LMCACHE_MP_TEST_TODAY", "now")
    with LMCacheBatchedStream(1, env={"LMCACHE_MP_TEST_ENV": "set"}) as batch:
        fill(batch, context, 1)

        def tell(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
            names = ("LMCACHE_MP_TEST_TODAY", "LMCACHE_MP_TEST_ENV", "OPENBLAS_NUM_THREADS")
            return kv, tokens, {name: os.environ.get(name) for name in names}

        frame = batch.modify(tell).to_frame()
    assert frame["LMCACHE_MP_TEST_TODAY"].iloc[0] == "now"
    assert frame["LMCACHE_MP_TEST_ENV"].iloc[0] == "set"
    assert frame["OPENBLAS_NUM_THREADS"].iloc[0] == "1"


# --- failures -------------------------------------------------------------------------------------


def break_odd(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    if tokens[0] % 2:
        raise KeyError(f"odd {tokens[0]}")
    return kv[:, :, ::2], tokens[::2]


def test_raise_comes_after_every_stream_has_ended_with_all_failures_and_the_rest(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 6)
    batch.prefill(GREEDY)
    before = {key: stream.tokens for key, stream in batch.streams.items()}
    with pytest.raises(LMCacheBatchedStreamError, match="3 of 6 streams failed") as caught:
        batch.modify(break_odd)
    error = caught.value
    assert set(error.failures) == {ids[0], ids[2], ids[4]}
    failure = error.failures[ids[0]]
    assert isinstance(failure.exception, KeyError) and error.__cause__ is failure.exception
    assert (failure.phase, failure.error_type) == ("modify", "KeyError")
    assert "break_odd" in failure.traceback and __file__ in failure.traceback
    assert failure.worker_pid in batch.worker_pids and failure.exit_code is None
    assert error.metrics is not None
    assert list(error.metrics.to_frame()["status"]) == ["failed", "completed"] * 3
    for key in error.failures:
        assert batch.get_stream(key).tokens == before[key]
    # What failed is as it was, and can be repeated.
    assert (
        batch.modify(halve, stream_ids=list(error.failures))
        .to_frame()["status"]
        .eq("completed")
        .all()
    )
    assert batch.decode({"max_tokens": 2}).to_frame()["status"].eq("completed").all()


def test_collect_returns_the_failures_in_the_metrics(context: TokenKV) -> None:
    with LMCacheBatchedStream(2, on_error="collect") as batch:
        ids = fill(batch, context, 4)
        batch.prefill(GREEDY)
        metrics = batch.modify(break_odd)
    assert list(metrics.failures.index) == [ids[0], ids[2]]
    assert metrics.to_dict()["metrics"]["results"]["failed"] == 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda kv, tokens: kv, "must return"),
        (lambda kv, tokens: (kv, tokens[:-1]), "8 tokens with 7"),
        (lambda kv, tokens: (kv[:, :, :2], tokens[:2]), f"whole chunks of {CHUNK}"),
        (lambda kv, tokens: (kv[:1], tokens), "shape"),
        (lambda kv, tokens: (kv.astype("f8"), tokens), "float64"),
    ],
)
def test_a_wrong_edit_is_a_kv_error_that_says_what_is_wrong(
    edit: Any, message: str, batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 2)
    batch.prefill(GREEDY)
    with pytest.raises(LMCacheBatchedStreamError) as caught:
        batch.modify(edit)
    assert isinstance(caught.value.__cause__, KVError)
    assert message in caught.value.failures[ids[0]].error_message


class FailsToOpen:
    chunk_size = CHUNK

    def open(self) -> None:
        raise ConnectionError("no server at 127.0.0.1:1")

    def lookup(self, tokens: Any, cache_salt: str = "") -> int:
        self.open()
        return 0

    retrieve = store = lookup

    def close(self) -> None:
        pass


def test_a_context_that_does_not_open_is_reported_by_start() -> None:
    with LMCacheBatchedStream(1) as batch:
        batch.add(lmc_stream.create_request(FailsToOpen(), CountingEngine(), [1] * 9))
        with pytest.raises(LMCacheBatchedStreamError, match="no server"):
            batch.start()


# --- what is refused before anything is sent ------------------------------------------------------


def test_unknown_and_duplicate_ids_are_refused_before_any_work(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 2)
    for wrong in (["nobody"], [ids[0], ids[0]]):
        for call in (
            lambda w=wrong: batch.prefill(GREEDY, stream_ids=w),
            lambda w=wrong: batch.modify(halve, stream_ids=w),
            lambda w=wrong: batch.run_streams(GREEDY, w),
            lambda w=wrong: batch.get_perf_metrics(1.0, "json", 80, "decode", w),
        ):
            with pytest.raises(LMCacheBatchedStreamError) as caught:
                call()
            assert isinstance(caught.value, UsageError)
    with pytest.raises(UsageError, match="iterable"):
        batch.prefill(GREEDY, stream_ids=ids[0])
    assert batch.worker_pids == []


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.prefill(GREEDY, fmt="xml"),
        lambda b: b.decode({"max_tokens": 2}, width=19),
        lambda b: b.get_perf_metrics(1.0, "json", 80, "modify"),
        lambda b: b.decode({"max_tokens": 0}),
        lambda b: b.decode({"max_tokens": 1.5}),
        lambda b: b.decode("greedy"),
        lambda b: b.decode({"max_tokens": 1}, max_concurrency=0),
        lambda b: b.modify("drop"),
        lambda b: b.modify(halve, timeout=-1),
        lambda b: b.modify(halve, poll_interval=0),
        lambda b: b.get_stream("nobody"),
        lambda b: b.add("a prompt"),
        lambda b: LMCacheBatchedStream(0),
        lambda b: LMCacheBatchedStream(on_error="ignore"),
        lambda b: LMCacheBatchedStream(start_method="fork"),
        lambda b: LMCacheBatchedStream(start_method="thread"),
        lambda b: LMCacheBatchedStream(start_method="forkserver", compute_threads=2),
    ],
)
def test_a_wrong_call_is_a_usage_error_and_starts_nothing(call: Any, context: TokenKV) -> None:
    batch = LMCacheBatchedStream(2)
    fill(batch, context, 2)
    with pytest.raises(UsageError) as caught:
        call(batch)
    assert isinstance(caught.value, ValueError) and str(caught.value)
    assert batch.worker_pids == []


def test_what_does_not_pickle_is_refused_by_name(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    ids = fill(batch, context, 2)
    guard = threading.Lock()

    def locked(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        with guard:
            return kv, tokens

    with pytest.raises(UsageError, match=r"locked .*guard.*max_concurrency"):
        batch.modify(locked)
    engine = CountingEngine()
    object.__setattr__(engine, "socket", multiprocessing.Semaphore())
    with pytest.raises(UsageError, match="socket"):
        batch.add(lmc_stream.create_request(context, engine, [1] * 9))
    assert list(batch.streams) == ids


def test_add_refuses_a_stream_or_a_custom_id_twice(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    stream = lmc_stream.create_request(context, CountingEngine(), [1] * 9)
    batch.add(stream, custom_id="a")
    with pytest.raises(LMCacheBatchedStreamError, match="already"):
        batch.add(stream)
    other = lmc_stream.create_request(context, CountingEngine(), [1] * 9)
    with pytest.raises(UsageError, match="taken"):
        batch.add(other, custom_id="a")
    with pytest.raises(UsageError, match="max_tokens"):
        batch.add(other, sampling_params={"max_tokens": 0})
    batch.add(other)


# --- the end --------------------------------------------------------------------------------------


def test_close_is_idempotent_and_ends_the_workers(context: TokenKV) -> None:
    batch = LMCacheBatchedStream(2)
    batch.close()
    batch = LMCacheBatchedStream(2)
    fill(batch, context, 2)
    batch.prefill(GREEDY)
    pids = batch.worker_pids
    batch.close()
    batch.close()
    assert batch.worker_pids == []
    assert not any(pid_is_alive(pid) for pid in pids)
    with pytest.raises(UsageError, match="closed"):
        batch.prefill(GREEDY)


def test_a_collected_batch_leaves_no_worker(context: TokenKV) -> None:
    batch = LMCacheBatchedStream(2)
    fill(batch, context, 2)
    batch.prefill(GREEDY)
    pids = batch.worker_pids
    del batch
    gc.collect()
    assert not any(pid_is_alive(pid) for pid in pids)


def test_names_of_both_modules() -> None:
    assert lmc_batch.LMCacheBatchedStream is LMCacheBatchedStream
    assert issubclass(lmc_stream.LMCacheStreamError, RuntimeError)


class _NeverWaits:
    """Says that it never waits, and does for one prompt."""

    blocking = False

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        if prompt[0] == 2:
            threading.Event().wait()
        return CountingEngine()(prompt, params, salt)


def test_passes_behind_a_hanging_one_of_an_engine_that_never_waits_run_elsewhere(
    context: TokenKV,
) -> None:
    with LMCacheBatchedStream(1, on_error="collect", timeout=0.5) as batch:
        for i in range(5):
            batch.add(lmc_stream.create_request(context, _NeverWaits(), [i] * 9))
        metrics = batch.prefill(GREEDY)
    assert list(metrics.failures["error_type"]) == ["StreamTimeout"]
    assert list(metrics.to_frame()["status"]) == ["completed"] * 2 + ["failed"] + ["completed"] * 2


def test_a_worker_whose_connection_ends_before_it_does_is_said_to_have_died_as_it_did(
    batch: LMCacheBatchedStream, context: TokenKV
) -> None:
    def die_slowly(kv: Any, tokens: list[int]) -> Any:
        os.closerange(3, 1024)
        time.sleep(0.2)  # as a process of many threads and much memory does
        os._exit(3)

    fill(batch, context, 1)
    batch.prefill(GREEDY)
    with pytest.raises(LMCacheBatchedStreamError, match="exit code 3"):
        batch.modify(die_slowly)


def test_workers_that_die_at_the_same_time_are_each_said_to_have_died_as_they_did(
    context: TokenKV,
) -> None:
    def die(kv: Any, tokens: list[int]) -> Any:
        logging.getLogger().error("dying")
        os._exit(tokens[0])

    class WaitsForTheEnd(logging.Handler):
        """Holds up the parent until both workers have ended."""

        def emit(self, record: logging.LogRecord) -> None:
            deadline = time.monotonic() + 60
            while any(map(pid_is_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.01)

    handler = WaitsForTheEnd()
    with LMCacheBatchedStream(2, on_error="collect") as batch:
        fill(batch, context, 2)
        batch.prefill(GREEDY)
        pids = batch.worker_pids
        logging.getLogger().addHandler(handler)
        try:
            failures = batch.modify(die).failures
        finally:
            logging.getLogger().removeHandler(handler)
    assert list(failures["exit_code"]) == [1, 2]
    assert list(failures["worker_pid"]) == pids
