"""What it costs to have a worker do one thing: a generate of one token, by an engine without work.

Ours is ``run_streams({"max_tokens": 1})`` over streams with prompts of 64 tokens, in a batch whose
workers are up: the first such phase, which sends the prompts, and the next one. The others are
pools of as many processes, also up, that are given each prompt and return what the pass measured,
one task at a time and in chunks. The floor is a bare pipe to each process, with a message a stream.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from fixtures import OneEvent, our_batch, their_batch
from pairs import Board, alternate, arguments, available, seconds

#: Most microseconds a stream that ours may take, by streams.
GENERATE = {1_000: 25.0, 10_000: 25.0}
PREFILL = {1_000: 50.0, 10_000: 30.0}

Result = tuple[float, float, list[int], str]


def one_pass(prompt: list[int]) -> Result:
    """What a pass measures, as short as it can be written."""
    begin, first, ids, text = time.perf_counter(), 0.0, [], ""
    for event in OneEvent()(prompt, {"max_tokens": 1}, ""):
        first = first or time.perf_counter() - begin
        ids.append(event.token_id)
        text += event.text
    return time.perf_counter() - begin, first, ids, text


def prompts(streams: int, tokens: int) -> list[list[int]]:
    """Different ones, as ours."""
    return [[index + 1] * tokens for index in range(streams)]


# --- ours -----------------------------------------------------------------------------------------


def first_phase(streams: int, tokens: int, workers: int) -> float:
    """Seconds of the first phase, in which streams are given to workers."""
    with our_batch(OneEvent(), streams, tokens, workers) as batch:
        batch.start()
        return batch.run_streams({"max_tokens": 1})


def later_phase(streams: int, tokens: int, workers: int) -> float:
    """Seconds of a phase after it."""
    with our_batch(OneEvent(), streams, tokens, workers) as batch:
        batch.run_streams({"max_tokens": 1})
        return batch.run_streams({"max_tokens": 1})


def prefill(streams: int, tokens: int, workers: int) -> float:
    """Seconds of a prefill with its report printed."""
    with our_batch(OneEvent(), streams, tokens, workers) as batch:
        batch.start()
        with contextlib.redirect_stdout(io.StringIO()):
            return seconds(lambda: batch.prefill({}).emit())


# --- theirs ---------------------------------------------------------------------------------------


class BarePipes:
    """Two ends of a pipe a process: a list of prompts goes in, and a message a stream comes out."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ends, self._processes = [], []
        for _ in range(workers):
            mine, its = context.Pipe()
            process = context.Process(target=_answer, args=(its,), daemon=True)
            process.start()
            its.close()
            self._ends.append(mine)
            self._processes.append(process)

    def __call__(self, work: list[list[int]]) -> list[Result]:
        """The results, in the order that they come."""
        for index, end in enumerate(self._ends):
            end.send_bytes(pickle.dumps(work[index :: len(self._ends)], 5))
        results: list[Result] = []
        while len(results) < len(work):
            for end in wait(self._ends):
                assert isinstance(end, Connection)
                while end.poll(0):
                    results.append(pickle.loads(end.recv_bytes()))
        return results

    def close(self) -> None:
        """End the processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join()


def _answer(end: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            for prompt in pickle.loads(end.recv_bytes()):
                end.send_bytes(pickle.dumps(one_pass(prompt), 5))


Peer = Callable[[list[list[int]]], object]


def peers(board: Board, workers: int, stack: contextlib.ExitStack) -> dict[str, Peer]:
    """The pools that are installed, up and ready, by name."""
    found: dict[str, Peer] = {}
    pipes = BarePipes(workers)
    stack.callback(pipes.close)
    found["bare pipes"] = pipes

    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("forkserver")
    executor = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context))
    _both_ways(found, "concurrent.futures", executor, workers)
    if available("loky", board):
        import loky

        reusable = loky.get_reusable_executor(max_workers=workers, timeout=600)
        stack.callback(reusable.shutdown)
        _both_ways(found, "loky", reusable, workers)
    if available("joblib", board):
        import joblib

        for label, size in (("joblib", 1), ("joblib, auto-batched", "auto")):
            parallel = stack.enter_context(joblib.Parallel(workers, batch_size=size))
            task = joblib.delayed(one_pass)
            found[label] = lambda work, p=parallel, t=task: p(t(prompt) for prompt in work)
    if available("mpire", board):
        import mpire

        pool = stack.enter_context(
            mpire.WorkerPool(workers, start_method="forkserver", keep_alive=True)
        )
        found["mpire"] = lambda work: pool.map(one_pass, [(each,) for each in work], chunk_size=1)
        found["mpire, chunked"] = lambda work: pool.map(one_pass, [(each,) for each in work])
    return found


def _both_ways(found: dict[str, Peer], name: str, executor: Any, workers: int) -> None:
    """One task at a time, and four chunks a worker."""
    found[name] = lambda work: list(executor.map(one_pass, work))

    def chunked(work: list[list[int]]) -> object:
        size = max(1, len(work) // (4 * workers))
        return list(executor.map(one_pass, work, chunksize=size))

    found[f"{name}, chunked"] = chunked


def theirs_in_threads(streams: int, tokens: int) -> float:
    """Seconds of LMCache's own batch."""
    duration: float = their_batch(OneEvent(), streams, tokens).run_request_streams(
        {"max_tokens": 1}
    )
    return duration


def main() -> int:
    """Run the pairs."""
    sizes = {"streams": ([10, 100, 1_000, 10_000], [10, 1_000]), "tokens": (64, 64)}
    options = arguments(__doc__, {**sizes, "workers": (2, 2)})
    board = Board("dispatch", "Dispatch", options)
    tokens, workers = options.tokens, options.workers
    with contextlib.ExitStack() as stack:
        pools = peers(board, workers, stack)
        lmcache = available("lmcache.sdk.batch", board)
        for streams in options.streams:
            work = prompts(streams, tokens)
            runs: dict[str, Callable[[], float]] = {
                "ours": lambda n=streams: first_phase(n, tokens, workers),
                "ours, a later phase": lambda n=streams: later_phase(n, tokens, workers),
                "ours, prefill and report": lambda n=streams: prefill(n, tokens, workers),
            }
            for name, peer in pools.items():
                runs[name] = lambda run=peer, w=work: seconds(lambda: run(w))
            if lmcache:
                runs["LMCache's threads"] = lambda n=streams: theirs_in_threads(n, tokens)
            values = alternate(runs, options.pairs)
            each = {
                name: [value / streams * 1e6 for value in column] for name, column in values.items()
            }
            report(board, streams, each)
    return board.finish()


def report(board: Board, streams: int, each: dict[str, list[float]]) -> None:
    """Rows of microseconds a stream."""
    label = f"{streams:,} streams"
    later, printed = each.pop("ours, a later phase"), each.pop("ours, prefill and report")
    marks = dict.fromkeys(each, 1.0) | {"bare pipes": None, "LMCache's threads": None}
    board.limit(f"{label}, first phase", each["ours"], "us", GENERATE.get(streams))
    board.limit(f"{label}, later phase", later, "us", GENERATE.get(streams))
    board.limit(f"{label}, prefill and report", printed, "us", PREFILL.get(streams))
    board.compare(label, each, "us", marks)


if __name__ == "__main__":
    sys.exit(main())
