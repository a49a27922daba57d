"""What batches take and give back: files, threads, processes; and that they leave each other be."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import UsageError
from lmcache_mp.pool.files import make_room
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CHUNK, CountingEngine, TokenKV
from tests.pool.programs import (
    LIMIT,
    LITTLE_SHM,
    eventually,
    processes_of_session,
    program,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

METHODS = ["forkserver", "spawn"]


def fill(batch: LMCacheBatchedStream, folder: Path, count: int) -> list[str]:
    context = TokenKV(str(folder))
    return [
        batch.add(create_request(context, CountingEngine(), [i + 1] * 9), custom_id=f"row-{i}")
        for i in range(count)
    ]


def halve(kv: Any, tokens: list[int]) -> Any:
    return kv[:, :, :CHUNK], tokens[:CHUNK]


# --- cycles ---------------------------------------------------------------------------------------


def in_use(folder: Path) -> dict[str, int]:
    """What this program has open, runs, and keeps in files."""
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(processes_of_session(os.getsid(0))),
        # Of no meaning where other programs use the same one.
        "shared memory": len(os.listdir("/dev/shm")) if LITTLE_SHM else 0,
        "temporary": sum(len(names) + len(kept) for _, names, kept in os.walk(folder)),
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "cycles", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_cycles_of_open_run_close_leave_nothing(method: str, cycles: int, tmp_path: Path) -> None:
    text = f"""
    from tests.pool.test_resources import halve, in_use
    from lmcache_mp import connect_local
    folder = Path(os.environ["TMPDIR"])
    def cycle(how):
        context = connect_local("random:0")
        batch = LMCacheBatchedStream(2, start_method={method!r}, on_error="collect")
        for i in range(3):
            batch.add(create_request(context, context.post_completion, [i + 1] * 40))
        batch.prefill({{}})
        batch.modify(lambda kv, tokens: (kv[:, :, :16], tokens[:16]))
        if how == 1:  # a worker dies on the way
            os.kill(batch.worker_pids[0], signal.SIGKILL)
        batch.decode({{"max_tokens": 2}})
        if how != 2:  # else it is only collected
            batch.close()
        context.close()
    for number in range(3):  # what is loaded and started once
        cycle(number)
    before = in_use(folder)
    for number in range({cycles}):
        cycle(number % 3)
    after = in_use(folder)
    say({{name: (before[name], after[name]) for name in before if after[name] != before[name]}})
    """
    with program(tmp_path, text, before=LITTLE_SHM) as run:
        assert run.line() == "{}"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_failed_starts_leave_nothing(tmp_path: Path) -> None:
    text = """
    from tests.pool.test_resources import in_use
    class Dies(TokenKV):
        def open(self):
            os._exit(3)
    def cycle():
        with LMCacheBatchedStream(2, max_restarts=1) as batch:
            batch.add(create_request(Dies(str(folder)), CountingEngine(), [1] * 9))
            try:
                batch.start()
            except WorkerDied as error:
                return error.exit_code
    say(cycle())
    before = in_use(folder)
    for _ in range(4):
        cycle()
    say(in_use(folder) == before)
    """
    with program(tmp_path, text) as run:
        assert run.line() == "3"
        assert run.line() == "True"
        assert run.end() == 0
        assert run.stderr == ""


# --- open files -----------------------------------------------------------------------------------

#: Runs a command under a soft and a hard limit of open files.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execvp(sys.argv[3], sys.argv[3:])
"""


def under_limits(soft: int, hard: int) -> list[str]:
    return [sys.executable, "-c", LIMITED, str(soft), str(hard)]


@pytest.mark.parametrize("method", METHODS)
def test_1500_streams_that_each_hold_a_file_run_under_a_soft_limit_of_1024(
    method: str, tmp_path: Path
) -> None:
    text = f"""
    class Holds:
        '''Opens a file, and lets no pass end before all of them have one.'''
        def open(self):
            self.barrier = threading.Barrier(1500)
        def __call__(self, prompt, params, salt):
            with open("/dev/null"):
                self.barrier.wait(100)
                yield TokenEvent(1)
    import resource
    batch = LMCacheBatchedStream(1, start_method={method!r})
    engine, context = Holds(), TokenKV(str(folder))
    for i in range(1500):
        batch.add(create_request(context, engine, [i] * 5))
    say(batch.prefill({{}}).to_frame()["status"].eq("completed").sum())
    say(*resource.getrlimit(resource.RLIMIT_NOFILE))
    batch.close()
    """
    with program(tmp_path, text, under_limits(1024, 4096)) as run:
        assert run.line() == "1500"
        assert run.line() == "1024 4096"  # the parent needed no more
        assert run.end() == 0
        assert run.stderr == ""


@pytest.mark.parametrize("method", METHODS)
def test_the_parents_soft_limit_is_raised_when_its_workers_need_it(
    method: str, tmp_path: Path
) -> None:
    text = f"""
    import resource
    batch = LMCacheBatchedStream(12, start_method={method!r})
    fill(batch, CountingEngine(), 12)
    say(batch.prefill({{}}).to_frame()["worker_pid"].nunique())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    say(60 < soft < 250, hard)
    batch.close()
    """
    with program(tmp_path, text, under_limits(60, 4096)) as run:
        assert run.line() == "12"
        assert run.line() == "True 4096"
        assert run.end() == 0
        assert run.stderr == ""


def test_workers_that_the_hard_limit_forbids_are_refused_with_the_number_needed(
    tmp_path: Path,
) -> None:
    text = """
    batch = LMCacheBatchedStream(1000)
    fill(batch, CountingEngine(), 1000)
    try:
        batch.prefill({})
    except UsageError as error:
        say(error)
    say(batch.worker_pids)
    small = LMCacheBatchedStream(2)
    fill(small, CountingEngine(), 2)
    say(*small.prefill({}).to_frame()["status"])
    """
    with program(tmp_path, text, under_limits(60, 300)) as run:
        message = run.line()
        assert "1000 more workers need 60" in message and "hard limit is 300" in message
        assert run.line() == "[]"
        assert run.line() == "completed completed"
        assert run.end() == 0
        assert run.stderr == ""


def test_room_for_no_workers_changes_nothing() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    make_room(0)
    make_room(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(UsageError, match="fewer workers"):
        make_room(1 << 40)


# --- what workers may do, and what they have ------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_workers_may_start_processes(method: str, tmp_path: Path) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import subprocess

        import multiprocess

        out = subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout
        info = {"echo": out.strip()}
        for name in ("fork", "spawn", "forkserver"):
            with multiprocess.get_context(name).Pool(1) as pool:
                info[name] = pool.apply(sum, (tokens,))
        return kv, tokens, info

    with LMCacheBatchedStream(1, start_method=method) as batch:
        fill(batch, tmp_path, 1)
        batch.prefill({})
        frame = batch.modify(edit).to_frame()
        assert frame[["echo", "fork", "spawn", "forkserver"]].iloc[0].tolist() == ["hello", 8, 8, 8]
        assert batch.decode({"max_tokens": 2}).to_frame()["status"].tolist() == ["completed"]


@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_a_worker_leaves_behind_does_not_delay_the_notice_of_its_death(
    method: str, tmp_path: Path
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import os

        child = os.fork()
        if not child:
            os.closerange(0, 3)
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            os._exit(0)
        return kv, tokens, {"child": child}

    with LMCacheBatchedStream(1, start_method=method, retries=1) as batch:
        fill(batch, tmp_path, 2)
        batch.prefill({})
        batch.modify(edit)
        [pid] = batch.worker_pids
        os.kill(pid, 9)
        assert set(batch.decode({"max_tokens": 2}).to_frame()["status"]) == {"completed"}
        assert batch.worker_pids != [pid]
        (tmp_path / "go").touch()


def numbers(kv: Any, tokens: list[int]) -> Any:
    import random

    import numpy as np

    return kv, tokens, {"random": random.random(), "numpy": float(np.random.random())}


@pytest.mark.parametrize("method", METHODS)
def test_global_random_streams_differ_between_workers_and_repeat_with_the_seed(
    method: str, tmp_path: Path
) -> None:
    def draw(seed: int) -> dict[str, tuple[float, float]]:
        with LMCacheBatchedStream(2, start_method=method, seed=seed) as batch:
            fill(batch, tmp_path, 2)
            batch.prefill({})
            frame = batch.modify(numbers).to_frame()
            assert frame["worker_pid"].nunique() == 2
        return dict(
            zip(frame["custom_id"], zip(frame["random"], frame["numpy"], strict=True), strict=True)
        )

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again
    drawn = [number for values in (first, other) for pair in values.values() for number in pair]
    assert len(set(drawn)) == 8


def environment(kv: Any, tokens: list[int]) -> Any:
    import os

    return kv, tokens, {name: os.environ.get(name) for name in NAMES}


NAMES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TODAY", "MINE")


@pytest.mark.parametrize(("method", "threads"), [("forkserver", 1), ("spawn", 1), ("spawn", 3)])
def test_workers_have_the_environment_of_today_with_threads_limited(
    method: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for today in ("monday", "tuesday"):  # the forkserver has been running since monday
        monkeypatch.setenv("TODAY", today)
        with LMCacheBatchedStream(
            1, start_method=method, compute_threads=threads, env={"MINE": "set"}
        ) as batch:
            fill(batch, tmp_path, 1)
            batch.prefill({})
            row = batch.modify(environment).to_frame().iloc[0]
        assert [row[name] for name in NAMES] == [str(threads)] * 3 + [today, "set"]
    assert os.environ["OMP_NUM_THREADS"] == "7"


def blas_threads(kv: Any, tokens: list[int]) -> Any:
    """As many threads as the process has after a product that a BLAS would share out."""
    import os

    import numpy as np

    before = len(os.listdir("/proc/self/task"))
    a = np.ones((600, 600), np.float32)
    a @ a
    return kv, tokens, {"more": len(os.listdir("/proc/self/task")) - before, "all": before}


@pytest.mark.parametrize("method", METHODS)
def test_a_workers_blas_starts_no_threads(method: str, tmp_path: Path) -> None:
    with LMCacheBatchedStream(1, start_method=method) as batch:
        fill(batch, tmp_path, 1)
        batch.prefill({})
        row = batch.modify(blas_threads).to_frame().iloc[0]
    assert row["more"] == 0
    assert row["all"] <= 4  # the main thread, that of commands, and those that passes had


# --- several batches ------------------------------------------------------------------------------


def three_phases(folder: Path, workers: int = 2) -> list[list[int]]:
    with LMCacheBatchedStream(workers) as batch:
        fill(batch, folder, 5)
        batch.prefill({})
        batch.modify(halve)
        batch.decode({"max_tokens": 3})
        return [stream.tokens for stream in batch.streams.values()]


def test_two_batches_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    expected = three_phases(tmp_path)
    with LMCacheBatchedStream(2) as one, LMCacheBatchedStream(2) as two:
        for batch in (one, two):
            fill(batch, tmp_path, 5)
            batch.prefill({})
        assert not set(one.worker_pids) & set(two.worker_pids)
        one.modify(halve)
        os.kill(one.worker_pids[0], 9)
        two.modify(halve)
        two.decode({"max_tokens": 3})
        one.close()
        assert [stream.tokens for stream in two.streams.values()] == expected
        two.decode({"max_tokens": 3})


def test_batches_in_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
    expected = three_phases(tmp_path)
    results: list[list[list[int]]] = []
    in_threads([lambda f=folder: results.append(three_phases(f)) for folder in folders])
    assert results == [expected] * 4


def in_threads(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)


class WaitsForGo:
    """Notes that a pass has begun, and ends it once the file "go" is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Any:
        (self.folder / "begun").touch()
        assert eventually((self.folder / "go").exists)
        yield TokenEvent(1)


def test_a_phase_during_a_phase_of_another_thread_is_refused_and_harmless(tmp_path: Path) -> None:
    with LMCacheBatchedStream(1) as batch:
        request = create_request(TokenKV(str(tmp_path)), WaitsForGo(tmp_path), [1] * 9)
        batch.add(request)
        frames: list[Any] = []
        thread = threading.Thread(target=lambda: frames.append(batch.prefill({}).to_frame()))
        thread.start()
        assert eventually((tmp_path / "begun").exists)
        for call in (lambda: batch.decode({}), lambda: batch.modify(halve), batch.start):
            with pytest.raises(UsageError, match="another phase"):
                call()
        (tmp_path / "go").touch()
        thread.join(LIMIT)
        assert list(frames[0]["status"]) == ["completed"]
        assert batch.decode({}).to_frame()["status"].tolist() == ["completed"]


# --- little shared memory -------------------------------------------------------------------------


@pytest.mark.skipif(not LITTLE_SHM, reason="this user may not mount a /dev/shm of its own")
def test_big_kv_and_a_big_function_do_with_1_mb_of_shared_memory(tmp_path: Path) -> None:
    """Containers often have next to none; nothing is put into it, however large."""
    text = """
    import numpy as np
    from lmcache_mp import connect_local
    context, captured = connect_local("random:0"), np.ones(4 << 20)
    def look(kv, tokens):
        return kv, tokens, {"shm": ",".join(os.listdir("/dev/shm")), "sum": captured.sum()}
    with LMCacheBatchedStream(2) as batch:
        for i in range(2):
            batch.add(create_request(context, context.post_completion, [i + 1] * 2000))
        batch.prefill({})
        frame = batch.modify(look).to_frame()
    say(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
    say(frame["shm"].tolist(), frame["sum"].tolist())
    """
    with program(tmp_path, text, before=LITTLE_SHM) as run:
        assert run.line() == str(1 << 20)
        assert run.line() == f"['', ''] {[float(4 << 20)] * 2}"
        assert run.end() == 0
