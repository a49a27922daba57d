"""Edit functions that hold the interpreter lock: a loop over tokens, as users write them.

Ours, with two workers, beside LMCache's threads, beside one worker, and beside the floor: as many
bare processes that only run the function. Two workers can be at most twice as fast as one. Workers
are up when the clock starts (see start.py for what that takes).
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import cloudpickle
from fixtures import OneEvent, ZeroKV, our_batch, their_batch, their_edit
from pairs import Board, alternate, arguments, available, seconds


def dropper(steps: int) -> Any:
    """An edit that keeps the half of the tokens with the highest score, ``steps`` deep each."""

    def drop_by_score(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        scores = []
        for position, token in enumerate(tokens):
            score = token
            for step in range(steps):
                score = (score * 31 + position + step) % 65_537
            scores.append(score)
        order = sorted(range(len(tokens)), key=scores.__getitem__)
        keep = sorted(order[len(tokens) // 2 :])
        return kv[:, :, keep], [tokens[i] for i in keep]

    return drop_by_score


def ours(workers: int, streams: int, tokens: int, fn: Any) -> float:
    """Seconds of a modify phase of ours."""
    with our_batch(OneEvent(), streams, tokens, workers) as batch:
        batch.start()
        return batch.modify_stream(fn)


def theirs(streams: int, tokens: int, fn: Any) -> float:
    """Seconds of LMCache's."""
    duration: float = their_batch(OneEvent(), streams, tokens).modify_request_streams(
        their_edit(fn)
    )
    return duration


class Floor:
    """Bare processes that run an edit function over their share of the streams, and no more."""

    def __init__(self, workers: int, fn: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pool = ProcessPoolExecutor(workers, mp_context=context)
        self._workers = workers
        self._fn = cloudpickle.dumps(fn)

    def __call__(self, streams: int, tokens: int) -> float:
        """Seconds that all streams take; the processes are up."""
        shares = [list(range(worker, streams, self._workers)) for worker in range(self._workers)]
        return seconds(
            lambda: list(self._pool.map(_share, [(self._fn, s, tokens) for s in shares]))
        )

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def _share(task: tuple[bytes, list[int], int]) -> None:
    fn, context = cloudpickle.loads(task[0]), ZeroKV()
    for stream in task[1]:
        prompt = [stream + 1] * task[2]
        fn(context.retrieve(prompt), prompt)


def main() -> int:
    """Run the pairs."""
    sizes = {
        "streams": ([16, 64], [16]),
        "tokens": (1024, 512),
        "steps": (600, 600),
        "workers": (2, 2),
    }
    options = arguments(__doc__, sizes)
    board = Board("edits_bound", "Edits bound to the interpreter", options)
    fn, tokens = dropper(options.steps), options.tokens
    floor = Floor(options.workers, fn)
    peer = available("lmcache.sdk.batch", board)
    for streams in options.streams:
        runs = {
            "ours": lambda n=streams: ours(options.workers, n, tokens, fn),
            "one worker of ours": lambda n=streams: ours(1, n, tokens, fn),
            "bare processes": lambda n=streams: floor(n, tokens),
        }
        if peer:
            runs["LMCache's threads"] = lambda n=streams: theirs(n, tokens, fn)
        marks = {"one worker of ours": 1.8, "LMCache's threads": 1.8}
        board.compare(f"{streams} streams", alternate(runs, options.pairs), "s", marks)
    floor.close()
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
