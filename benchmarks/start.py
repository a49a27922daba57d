"""How long it takes until the first phase has ended, and what an idle worker holds of memory.

Each turn is a new program: it has imported what it needs, then the clock starts; it makes a batch
of a stream a worker, and runs its first phase. The others are pools of as many processes that are
given a task a process. Memory is what the kernel calls PSS: pages that processes share count once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable

from dispatch import one_pass, prompts
from fixtures import OneEvent, our_batch
from pairs import Board, alternate, arguments, available, pss

#: Most seconds to the first phase's end, and most MiB of an idle worker, by workers.
SECONDS = {2: 0.2, 64: 0.8}
MIB = {2: 14.0, 16: 8.0}
TOKENS = 64


def ours(workers: int) -> None:
    """Print the seconds and the bytes of a worker."""
    begin = time.perf_counter()
    with our_batch(OneEvent(), workers, TOKENS, workers) as batch:
        batch.run_streams({"max_tokens": 1})
        took = time.perf_counter() - begin
        print(json.dumps([took, pss(batch.worker_pids) / workers]))


def executor(workers: int) -> None:
    """The standard library's pool."""
    from concurrent.futures import ProcessPoolExecutor

    _timed(
        lambda: ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver")),
        workers,
    )


def loky(workers: int) -> None:
    """loky's pool."""
    from loky import ProcessPoolExecutor

    _timed(lambda: ProcessPoolExecutor(workers), workers)


def mpire(workers: int) -> None:
    """mpire's pool, which forks unless told otherwise."""
    from mpire import WorkerPool

    begin = time.perf_counter()
    with WorkerPool(workers) as pool:
        pool.map(one_pass, [(prompt,) for prompt in prompts(workers, TOKENS)], chunk_size=1)
        print(json.dumps([time.perf_counter() - begin, 0.0]))


def _timed(make: Callable[[], contextlib.AbstractContextManager], workers: int) -> None:  # type: ignore[type-arg]
    begin = time.perf_counter()
    with make() as pool:
        list(pool.map(one_pass, prompts(workers, TOKENS)))  # type: ignore[attr-defined]
        print(json.dumps([time.perf_counter() - begin, 0.0]))


PROGRAMS = {"ours": ours, "concurrent.futures": executor, "loky": loky, "mpire": mpire}


def run(name: str, workers: int, memory: list[float]) -> float:
    """One new program."""
    command = [sys.executable, __file__, "--program", name, str(workers)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    took, size = json.loads(answer)
    memory.append(size / 2**20)
    return float(took)


def main() -> int:
    """Run the pairs."""
    sizes = {"workers": ([1, 2, 16, 64], [1, 2, 16]), "peers_up_to": (16, 2)}
    options = arguments(__doc__, sizes)
    board = Board("start", "Start", options)
    others = ["concurrent.futures", *(name for name in ("loky", "mpire") if available(name, board))]
    for workers in options.workers:
        memory: list[float] = []
        runs = {"ours": lambda n=workers, m=memory: run("ours", n, m)}
        if workers <= options.peers_up_to:
            for name in others:
                runs[name] = lambda n=workers, peer=name: run(peer, n, [])
        values = alternate(runs, options.pairs)
        label = f"{workers} worker{'s' if workers > 1 else ''}"
        board.limit(f"{label}, first phase", values["ours"], "s", SECONDS.get(workers))
        board.limit(f"{label}, PSS of each", memory, "MiB", MIB.get(workers))
        board.compare(label, values, "s")
    return board.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        PROGRAMS[sys.argv[2]](int(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
