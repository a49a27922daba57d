"""Ctrl-C, SIGTERM and SIGKILL of the parent, the forkserver's death, and closing: nothing stays."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import UsageError
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CountingEngine, TokenKV, pid_is_alive
from tests.pool.programs import LIMIT, eventually, program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

METHODS = ["forkserver", "spawn"]


def all_gone(pids: list[int]) -> bool:
    return not any(map(pid_is_alive, pids))


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_ctrl_c_is_one_interrupt_that_keeps_what_was_finished(
    method: str, tmp_path: Path
) -> None:
    text = f"""
    batch = LMCacheBatchedStream(1, start_method={method!r})
    ids = fill(batch, Waits(3, 4), 6)
    try:
        batch.prefill({{}}, max_concurrency=2)
    except KeyboardInterrupt:
        say("interrupted", *sorted(ids.index(key) for key in batch.perf_metrics))
    (folder / "go").touch()
    frame = batch.decode({{}}, max_concurrency=2).to_frame()
    say(*frame["status"])
    say(*(stream.decoded_tokens() for stream in batch.streams.values()))
    batch.close()
    """
    with program(tmp_path, text) as run:
        # Two at a time: both of these begin only when the three before them are finished.
        assert eventually(lambda: all((tmp_path / f"begun-{i}").exists() for i in (3, 4)))
        run.interrupt()
        assert run.line() == "interrupted 0 1 2"
        assert run.line() == " ".join(["completed"] * 6)
        assert run.line() == "2 2 2 1 1 1"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_ctrl_c_while_contexts_open_leaves_nothing(tmp_path: Path) -> None:
    text = """
    class Slow(TokenKV):
        def open(self):
            (folder / "opening").touch()
            wait_for("go")
    batch = LMCacheBatchedStream(1)
    batch.add(create_request(Slow(str(folder)), CountingEngine(), [1] * 9))
    try:
        batch.start()
    except KeyboardInterrupt:
        say("interrupted")
    (folder / "go").touch()
    say(*batch.decode({"max_tokens": 2}).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        assert eventually((tmp_path / "opening").exists)
        run.interrupt()
        assert run.line() == "interrupted"
        assert run.line() == "completed"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_ctrl_c_ends_an_edit_that_does_not_return(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(2)
    fill(batch, CountingEngine(), 4)
    batch.prefill({})
    before = {key: stream.tokens for key, stream in batch.streams.items()}
    def loop(kv, tokens):
        (folder / f"looping-{tokens[0]}").touch()
        while True:
            pass
    try:
        batch.modify(loop)
    except KeyboardInterrupt:
        say("interrupted")
    say({key: stream.tokens for key, stream in batch.streams.items()} == before)
    say(*batch.modify(lambda kv, tokens: (kv[:, :, :CHUNK], tokens[:CHUNK])).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        assert eventually(lambda: len(list(tmp_path.glob("looping-*"))) == 2)
        run.interrupt()
        assert run.line() == "interrupted"
        assert run.line() == "True"
        assert run.line() == " ".join(["completed"] * 4)
        assert run.end() == 0
        assert run.stderr == ""


def test_a_second_ctrl_c_while_passes_are_being_stopped_kills_the_workers(tmp_path: Path) -> None:
    text = """
    import lmcache_mp.pool.pool
    lmcache_mp.pool.pool.CANCEL_GRACE = 3600.0
    class Stubborn:
        '''An answer that hears of the cancel and goes on.'''
        def __iter__(self):
            return self
        def __next__(self):
            (folder / "begun").touch()
            wait_for("never")
        def cancel(self):
            (folder / "cancelled").touch()
    batch = LMCacheBatchedStream(1)
    fill(batch, lambda prompt, params, salt: Stubborn(), 1)
    batch.start()
    say(*batch.worker_pids)
    try:
        batch.prefill({})
    except KeyboardInterrupt:
        say("interrupted")
    say(*batch.worker_pids)
    say(batch.start() > 0)
    """
    with program(tmp_path, text) as run:
        workers = run.pids()
        assert eventually((tmp_path / "begun").exists)
        run.interrupt()
        assert eventually((tmp_path / "cancelled").exists)
        assert not all_gone(workers)
        run.interrupt()
        assert run.line() == "interrupted"
        assert run.line() == ""
        assert all_gone(workers)
        assert run.line() == "True"
        assert run.end() == 0
        assert run.stderr == ""


def test_an_uncaught_ctrl_c_ends_the_program_like_any_other(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(2)
    fill(batch, Waits(0, 1), 2)
    batch.prefill({})
    """
    with program(tmp_path, text) as run:
        assert eventually(lambda: all((tmp_path / f"begun-{i}").exists() for i in (0, 1)))
        run.interrupt()
        assert run.end() == -signal.SIGINT
        assert run.stderr.count("Traceback") == 1
        assert run.stderr.rstrip().endswith("KeyboardInterrupt")
        assert eventually(lambda: run.left() == [])


@pytest.mark.parametrize("method", METHODS)
def test_what_an_edit_starts_can_be_interrupted(method: str, tmp_path: Path) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import signal
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        child.send_signal(signal.SIGINT)
        return kv, tokens, {"code": child.wait()}

    with LMCacheBatchedStream(1, start_method=method) as batch:
        batch.add(create_request(TokenKV(str(tmp_path)), CountingEngine(), [1] * 9))
        batch.prefill({})
        assert list(batch.modify(edit).to_frame()["code"]) == [-signal.SIGINT]


# --- the parent is killed -------------------------------------------------------------------------

BUSY = """
def in_python(kv, tokens):
    (folder / f"busy-{tokens[0]}").touch()
    while True:
        pass

def in_c(kv, tokens):
    (folder / f"busy-{tokens[0]}").touch()
    ctypes.PyDLL(None).sleep(3600)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("doing", ["idle", "in_python", "in_c", "in_engine"])
def test_a_killed_parent_leaves_no_worker(method: str, doing: str, tmp_path: Path) -> None:
    text = f"""
{BUSY}
batch = LMCacheBatchedStream(2, start_method={method!r})
fill(batch, CountingEngine() if {doing!r} != "in_engine" else Waits(0, 1), 2)
batch.start()
say(*batch.worker_pids)
if {doing!r} in ("in_python", "in_c"):
    batch.prefill({{}})
    batch.modify({doing})
elif {doing!r} == "in_engine":
    batch.prefill({{}})
wait_for("never")
"""
    with program(tmp_path, text) as run:
        workers = run.pids()
        if doing in ("in_python", "in_c"):
            assert eventually(lambda: len(list(tmp_path.glob("busy-*"))) == 2)
        elif doing == "in_engine":
            assert eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        assert all(map(pid_is_alive, workers))
        run.process.kill()
        assert eventually(lambda: all_gone(workers), 20.0)
        assert eventually(lambda: run.left() == [])


@pytest.mark.parametrize("method", METHODS)
def test_a_terminated_parent_leaves_no_process(method: str, tmp_path: Path) -> None:
    text = f"""
    batch = LMCacheBatchedStream(2, start_method={method!r})
    fill(batch, Waits(0, 1), 2)
    batch.start()
    say(*batch.worker_pids)
    batch.prefill({{}})
    """
    with program(tmp_path, text) as run:
        workers = run.pids()
        assert eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        run.process.terminate()
        assert run.end() == -signal.SIGTERM
        assert eventually(lambda: all_gone(workers), 20.0)
        assert eventually(lambda: run.left() == [])
        assert run.stderr == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_the_parent_forked_keeps_no_worker_alive(method: str, tmp_path: Path) -> None:
    text = f"""
    batch = LMCacheBatchedStream(2, start_method={method!r})
    fill(batch, CountingEngine(), 2)
    batch.prefill({{}})
    child = os.fork()
    if not child:
        wait_for("never")
    say(*batch.worker_pids)
    say(child)
    wait_for("never")
    """
    with program(tmp_path, text) as run:
        workers, (child,) = run.pids(), run.pids()
        run.process.kill()
        assert eventually(lambda: all_gone(workers), 20.0)
        assert pid_is_alive(child)


@pytest.mark.parametrize("method", METHODS)
def test_a_thread_that_made_the_batch_may_end_before_the_parent_does(
    method: str, tmp_path: Path
) -> None:
    text = f"""
    made = []
    def make():
        batch = LMCacheBatchedStream(2, start_method={method!r})
        fill(batch, CountingEngine(), 2)
        batch.prefill({{}})
        made.append(batch)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [batch] = made
    say(*batch.worker_pids)
    say(*batch.decode({{"max_tokens": 2}}).to_frame()["status"])
    say(*batch.worker_pids)
    wait_for("never")
    """
    with program(tmp_path, text) as run:
        workers = run.pids()
        assert run.line() == "completed completed"
        assert run.pids() == workers
        run.process.kill()
        assert eventually(lambda: all_gone(workers), 20.0)


LOCAL = """
from lmcache_mp import connect_local
context = connect_local("random:0")
batch = LMCacheBatchedStream(2, start_method={method!r})
for i in range(2):
    batch.add(create_request(context, context.post_completion, [i + 1] * 40))
batch.prefill({{}})
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_parents_temporary_store_is_removed(
    method: str, tmp_path: Path, short_folder: Path
) -> None:
    text = LOCAL.format(method=method)
    with program(tmp_path, text + "say()\nwait_for('never')\n", temporary=short_folder) as run:
        run.line()
        assert len(list(short_folder.glob("lmcache_mp-*"))) == 1
        run.process.kill()
        if method == "forkserver":
            assert eventually(lambda: not list(short_folder.glob("lmcache_mp-*")))
        assert eventually(lambda: run.left() == [])
    closing = "batch.close()\ncontext.close()\n"
    with program(tmp_path, text + closing, temporary=short_folder) as run:
        assert run.end() == 0
        assert run.stderr == ""
    assert list(short_folder.glob("lmcache_mp-*")) == []


def test_a_temporary_directory_with_too_long_a_name_is_refused_by_name(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    text = """
    batch = LMCacheBatchedStream(1)
    fill(batch, CountingEngine(), 1)
    try:
        batch.prefill({})
    except UsageError as error:
        say(error)
    with LMCacheBatchedStream(1, start_method="spawn") as other:
        fill(other, CountingEngine(), 1)
        say(*other.prefill({}).to_frame()["status"])
    """
    with program(tmp_path, text, temporary=long) as run:
        message = run.line()
        assert str(long) in message and "TMPDIR" in message
        assert run.line() == "completed"
        assert run.end() == 0
        assert run.stderr == ""


# --- the forkserver is killed ---------------------------------------------------------------------


def test_a_killed_forkserver_takes_no_worker_with_it(tmp_path: Path) -> None:
    text = """
    from multiprocess.forkserver import _forkserver
    batch = LMCacheBatchedStream(2, start_method="forkserver", retries=1)
    fill(batch, Waits(0, 1), 4)
    batch.start()
    workers = batch.worker_pids
    def kill():
        wait_for("begun-0"), wait_for("begun-1")
        os.kill(_forkserver._forkserver_pid, signal.SIGKILL)
        os.waitid(os.P_PID, _forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
        (folder / "go").touch()
    thread = threading.Thread(target=kill)
    thread.start()
    metrics = batch.prefill({})
    thread.join()
    say(*metrics.to_frame()["status"])
    say(batch.worker_pids == workers, *metrics.to_frame()["attempt"])
    os.kill(workers[0], signal.SIGKILL)
    say(*batch.decode({}).to_frame()["status"])
    say(batch.worker_pids[1] == workers[1], batch.worker_pids[0] != workers[0])
    with LMCacheBatchedStream(1, start_method="forkserver") as other:
        fill(other, CountingEngine(), 1)
        say(*other.prefill({}).to_frame()["status"])
    batch.close()
    """
    with program(tmp_path, text) as run:
        assert run.line() == " ".join(["completed"] * 4)
        assert run.line() == "True 1 1 1 1"
        assert run.line() == " ".join(["completed"] * 4)
        assert run.line() == "True True"
        assert run.line() == "completed"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


# --- closing --------------------------------------------------------------------------------------


class Stuck:
    """Notes that a pass has begun, and never ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        (self.folder / f"begun-{prompt[0]}").touch()
        threading.Event().wait()
        yield TokenEvent(1)


def test_close_during_a_phase_in_another_thread_ends_both(tmp_path: Path) -> None:
    batch = LMCacheBatchedStream(2)
    for i in range(2):
        batch.add(create_request(TokenKV(str(tmp_path)), Stuck(tmp_path), [i] * 9))
    errors: list[BaseException] = []

    def phase() -> None:
        try:
            batch.prefill({})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=phase, daemon=True)
    thread.start()
    assert eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    pids = batch.worker_pids
    batch.close()
    assert all_gone(pids)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert isinstance(errors[0], UsageError) and "closed" in str(errors[0])
    batch.close()


def test_close_from_many_threads_at_once(tmp_path: Path) -> None:
    batch = LMCacheBatchedStream(2)
    for i in range(2):
        batch.add(create_request(TokenKV(str(tmp_path)), CountingEngine(), [i] * 9))
    batch.prefill({})
    pids = batch.worker_pids
    threads = [threading.Thread(target=batch.close, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    assert all_gone(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_close_after_a_worker_died_or_was_stopped(how: signal.Signals, tmp_path: Path) -> None:
    batch = LMCacheBatchedStream(2)
    for i in range(2):
        batch.add(create_request(TokenKV(str(tmp_path)), CountingEngine(), [i] * 9))
    batch.prefill({})
    pids = batch.worker_pids
    os.kill(pids[0], how)
    batch.close()
    batch.close()
    assert all_gone(pids)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_is_never_closed_ends_with_the_program(method: str, tmp_path: Path) -> None:
    text = f"""
    batch = LMCacheBatchedStream(2, start_method={method!r})
    fill(batch, CountingEngine(), 2)
    say(*batch.prefill({{}}).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        assert run.line() == "completed completed"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_a_program_ends_although_a_phase_hangs_in_a_daemon_thread(tmp_path: Path) -> None:
    text = """
    threading.excepthook = lambda args: None
    batch = LMCacheBatchedStream(2)
    fill(batch, Waits(0, 1), 2)
    threading.Thread(target=batch.prefill, args=({},), daemon=True).start()
    wait_for("begun-0"), wait_for("begun-1")
    """
    with program(tmp_path, text) as run:
        assert run.end() == 0
        assert eventually(lambda: run.left() == [])
        assert run.stderr == ""


# --- processes that can't use a batch -------------------------------------------------------------


def test_a_forked_child_is_told_that_the_batch_is_its_parents(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(1)
    fill(batch, CountingEngine(), 2)
    batch.prefill({})
    child = os.fork()
    if not child:
        for call in (batch.start, lambda: batch.decode({}), lambda: batch.modify(print)):
            try:
                call()
            except UsageError as error:
                say(error)
        batch.close()
        sys.exit(7)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(*batch.decode({}).to_frame()["status"])
    """
    with program(tmp_path, text) as run:
        for _ in range(3):
            line = run.line()
            assert "belongs to process" in line and str(run.process.pid) in line
        assert run.line() == "7"
        assert run.line() == "completed completed"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_a_forked_child_may_make_a_batch_of_its_own(tmp_path: Path) -> None:
    text = """
    batch = LMCacheBatchedStream(1)
    fill(batch, CountingEngine(), 2)
    batch.prefill({})
    child = os.fork()
    mine = LMCacheBatchedStream(1)
    fill(mine, CountingEngine(), 2)
    say(*mine.prefill({}).to_frame()["status"])
    mine.close()
    if not child:
        sys.exit(7)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    with program(tmp_path, text) as run:
        assert [run.line(), run.line()] == ["completed completed"] * 2
        assert run.line() == "7"
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])


def test_a_daemonic_process_is_told_that_it_can_have_no_workers(tmp_path: Path) -> None:
    text = """
    import multiprocess
    def run():
        batch = LMCacheBatchedStream(1)
        fill(batch, CountingEngine(), 2)
        try:
            batch.prefill({})
        except UsageError as error:
            say(error)
    child = multiprocess.get_context("fork").Process(target=run, daemon=True)
    child.start()
    child.join()
    say(child.exitcode)
    """
    with program(tmp_path, text) as run:
        assert "daemon" in run.line()
        assert run.line() == "0"
        assert run.end() == 0
        assert run.stderr == ""
