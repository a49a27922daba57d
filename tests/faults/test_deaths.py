"""What the matrix has no room for: deaths between phases, retries, limits, bystanders."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_mp.errors import StreamTimeout, WorkerDied
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CountingEngine, TokenKV, pid_is_alive

GREEDY = {"temperature": 0}


def halve(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def fill(batch: LMCacheBatchedStream, folder: Path, engine: Any, streams: int = 6) -> list[str]:
    """Streams whose prompts are 9 times their position."""
    kv = TokenKV(str(folder))
    return [batch.add(create_request(kv, engine, [token] * 9)) for token in range(streams)]


def outputs(batch: LMCacheBatchedStream) -> list[list[int]]:
    return [stream.output_tokens() for stream in batch.streams.values()]


def kill_and_wait(pid: int) -> None:
    """Until all of its threads are gone: the process may look dead while one is still ending."""
    exit_fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([exit_fd], [], [], 30)
    os.close(exit_fd)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_that_dies_idle_costs_nothing(method: str, tmp_path: Path) -> None:
    with LMCacheBatchedStream(2, start_method=method) as batch:
        fill(batch, tmp_path, CountingEngine())
        batch.prefill(GREEDY)
        batch.modify(halve)
        first, second = batch.worker_pids
        kill_and_wait(first)
        frame = batch.decode({"max_tokens": 2}).to_frame()
        assert frame["status"].eq("completed").all()
        assert frame["attempt"].eq(1).all()
        assert second in batch.worker_pids and first not in batch.worker_pids
        # The new worker knows its streams as they were: prompts halved, and what followed.
        assert list(frame["input_tokens"]) == [6] * 6


@dataclass(frozen=True)
class DiesUntil:
    """Kills its worker in the pass of one stream until it has done so ``times`` times."""

    folder: str
    victim: int
    times: int

    def __call__(
        self, prompt: list[int], params: dict[str, Any], salt: str
    ) -> Iterator[TokenEvent]:
        if prompt[0] == self.victim:
            for i in range(self.times):
                try:
                    (Path(self.folder) / f"died-{i}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        yield from CountingEngine()(prompt, params, salt)


def test_retries_repeat_a_lost_pass_and_count_the_attempt(tmp_path: Path) -> None:
    with LMCacheBatchedStream(2, retries=1) as batch:
        ids = fill(batch, tmp_path, DiesUntil(str(tmp_path), 3, 1))
        frame = batch.prefill(GREEDY).to_frame()
        assert frame["status"].eq("completed").all()
        assert frame.at[ids[3], "attempt"] == 2
        assert outputs(batch) == [[9 * token] for token in range(6)]


def test_retries_end(tmp_path: Path) -> None:
    with LMCacheBatchedStream(2, retries=1, on_error="collect") as batch:
        ids = fill(batch, tmp_path, DiesUntil(str(tmp_path), 3, 2))
        metrics = batch.prefill(GREEDY)
        assert ids[3] in metrics.failures.index
        assert metrics.to_frame().at[ids[3], "attempt"] == 2


def test_workers_that_always_die_fail_what_is_unfinished_instead_of_looping(tmp_path: Path) -> None:
    def die(kv: Any, tokens: list[int]) -> Any:
        os._exit(7)

    with LMCacheBatchedStream(2, max_restarts=2) as batch:
        ids = fill(batch, tmp_path, CountingEngine(), streams=12)
        batch.prefill(GREEDY)
        with pytest.raises(LMCacheBatchedStreamError) as caught:
            batch.modify(die)
        assert set(caught.value.failures) == set(ids)
        for failure in caught.value.failures.values():
            assert isinstance(failure.exception, WorkerDied) and failure.exit_code == 7
        # And the batch is not lost.
        assert batch.modify(halve).to_frame()["status"].eq("completed").all()


@dataclass(frozen=True)
class CannotStart:
    """An engine whose opening ends the process."""

    def open(self) -> None:
        os._exit(9)

    def __call__(
        self, prompt: list[int], params: dict[str, Any], salt: str
    ) -> Iterator[TokenEvent]:
        yield TokenEvent(1)


def test_workers_that_never_start_fail_every_stream(tmp_path: Path) -> None:
    with LMCacheBatchedStream(2, max_restarts=1) as batch:
        ids = fill(batch, tmp_path, CannotStart())
        with pytest.raises(WorkerDied, match="exit code 9"):
            batch.start()
        with pytest.raises(LMCacheBatchedStreamError) as caught:
            batch.prefill(GREEDY)
        assert set(caught.value.failures) == set(ids)
        pids = batch.worker_pids
    assert not any(map(pid_is_alive, pids))


def test_in_a_modify_only_the_edit_that_ran_is_lost(tmp_path: Path) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        if tokens[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return halve(kv, tokens)

    with LMCacheBatchedStream(1, on_error="collect") as batch:
        ids = fill(batch, tmp_path, CountingEngine(), streams=8)
        batch.prefill(GREEDY)
        old = batch.worker_pids
        metrics = batch.modify(edit)
        assert list(metrics.failures.index) == [ids[1]]
        assert metrics.to_frame().loc[ids[2] :, "worker_pid"].isin(batch.worker_pids).all()
        assert batch.worker_pids != old


def test_running_out_of_memory_is_a_failure_like_any_other(tmp_path: Path) -> None:
    def hungry(kv: Any, tokens: list[int]) -> Any:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, hard))
        try:
            return bytearray(64 << 30), tokens
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    with LMCacheBatchedStream(1) as batch:
        ids = fill(batch, tmp_path, CountingEngine(), streams=2)
        batch.prefill(GREEDY)
        with pytest.raises(LMCacheBatchedStreamError) as caught:
            batch.modify(hungry, stream_ids=ids[:1])
        assert isinstance(caught.value.failures[ids[0]].exception, MemoryError)
        assert batch.modify(halve).to_frame()["status"].eq("completed").all()


@dataclass(frozen=True)
class WaitsFor:
    """One stream's pass never ends; the others wait until it is overdue for certain."""

    folder: str
    victim: int

    def __call__(
        self, prompt: list[int], params: dict[str, Any], salt: str
    ) -> Iterator[TokenEvent]:
        yield TokenEvent(1)
        while prompt[0] == self.victim and not (Path(self.folder) / "end").exists():
            time.sleep(0.01)
        yield from CountingEngine()(prompt, {"max_tokens": 2}, salt)


def test_a_generate_over_time_fails_alone_and_its_worker_is_replaced(tmp_path: Path) -> None:
    with LMCacheBatchedStream(1, timeout=2.0, on_error="collect") as batch:
        ids = fill(batch, tmp_path, WaitsFor(str(tmp_path), 2), streams=4)
        batch.start()
        old = batch.worker_pids
        metrics = batch.decode({"max_tokens": 3})
        assert list(metrics.failures.index) == [ids[2]]
        assert metrics.failures.at[ids[2], "error_type"] == StreamTimeout.__name__
        assert batch.get_stream(ids[2]).output_tokens() == []
        (tmp_path / "end").touch()
        again = batch.decode({"max_tokens": 3}, stream_ids=[ids[2]])
        assert again.to_frame()["status"].eq("completed").all()
        assert batch.worker_pids != old


def test_a_stopped_workers_other_passes_are_repeated(tmp_path: Path) -> None:
    """An edit stops its worker; the edit that had not begun there runs, none the worse."""

    def edit(kv: Any, tokens: list[int]) -> Any:
        if tokens[0] == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return halve(kv, tokens)

    with LMCacheBatchedStream(1, timeout=2.0, on_error="collect") as batch:
        ids = fill(batch, tmp_path, CountingEngine(), streams=4)
        batch.prefill(GREEDY)
        metrics = batch.modify(edit)
        assert list(metrics.failures.index) == [ids[1]]
        assert metrics.failures.at[ids[1], "error_type"] == StreamTimeout.__name__
        assert (
            batch.decode({"max_tokens": 2}, stream_ids=[ids[0], *ids[2:]])
            .to_frame()["status"]
            .eq("completed")
            .all()
        )
