"""An edit function with a large array in its closure, sent to many workers.

Ours is the modify phase that brings it to them (the edits do nothing). The floor is one copy of the
array to shared memory and one load in each worker, by hand. Beside them joblib, which maps large
arguments from a file by itself. Memory is the sum of PSS of the program and its workers, watched by
a third process during the phase, less what it was before.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
from fixtures import OneEvent, our_batch
from pairs import Board, alternate, arguments, available, pss, seconds


def closure(megabytes: float, seed: int) -> tuple[Any, Any]:
    """An array, and an edit function that has it in its closure."""
    array = np.random.default_rng(seed).standard_normal(int(megabytes * 1e6) // 8)

    def edit(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        kv[0, 0, 0, 0] = array[0]
        return kv, tokens

    return array, edit


def ours(edit: Any, workers: int, watch: Watch | None = None) -> float:
    """Seconds of the modify phase, one stream a worker."""
    with our_batch(OneEvent(), workers, 64, workers) as batch:
        batch.start()
        if watch is None:
            return batch.modify_stream(edit)
        with watch.over([os.getpid(), *batch.worker_pids]):
            return batch.modify_stream(edit)


class Floor:
    """Bare processes that load a function whose arrays are in a file that they map."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ends, self._processes = [], []
        for _ in range(workers):
            mine, its = context.Pipe()
            process = context.Process(target=_load, args=(its,), daemon=True)
            process.start()
            its.close()
            self._ends.append(mine)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def __call__(self, edit: Any) -> None:
        """Copy once, and have it loaded by each."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = cloudpickle.dumps(edit, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            for view in views:
                file.write(view)
            file.flush()
            for end in self._ends:
                end.send((pickled, file.name, [view.nbytes for view in views]))
            for end in self._ends:
                end.recv()

    def close(self) -> None:
        """End the processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join()


def _load(end: Connection) -> None:
    kv = np.zeros((2, 4, 64, 64), np.float32)
    end.send(True)
    with contextlib.suppress(EOFError):
        while True:
            pickled, name, sizes = end.recv()
            with open(name, "rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            offsets = np.cumsum([0, *sizes])
            parts = [mapped[at : at + size] for at, size in zip(offsets, sizes, strict=False)]
            pickle.loads(pickled, buffers=parts)(kv, [])
            end.send(True)


def touch(array: Any) -> float:
    """What joblib's workers do."""
    return float(array[0])


class Watch:
    """The most memory that processes have had together, while they were watched."""

    def __init__(self) -> None:
        self.extra: list[float] = []

    @contextlib.contextmanager
    def over(self, pids: list[int]) -> Iterator[None]:
        """Watch these processes."""
        before = pss(pids)
        command = [sys.executable, __file__, "--watch", *map(str, pids)]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as watcher:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            yield
            most, _ = watcher.communicate("")
        self.extra.append(float(most) - before)


def watch(pids: list[int]) -> None:
    """Print the most that ``pids`` have had when standard input ends."""
    import selectors

    print("watching", flush=True)
    most = 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not selector.select(0.001):
            most = max(most, pss(pids))
    print(most)


def main() -> int:
    """Run the pairs, then watch the memory of three more phases."""
    options = arguments(__doc__, {"megabytes": (100.0, 50.0), "workers": (8, 4)})
    board = Board("closures", "A large closure", options)
    array, edit = closure(options.megabytes, options.seed)
    with contextlib.ExitStack() as stack:
        floor = Floor(options.workers)
        stack.callback(floor.close)
        runs = {
            "ours": lambda: ours(edit, options.workers),
            "one copy, loads": lambda: seconds(lambda: floor(edit)),
        }
        if available("joblib", board):
            import joblib

            parallel = stack.enter_context(joblib.Parallel(options.workers))
            task = joblib.delayed(touch)
            runs["joblib"] = lambda: seconds(
                lambda: parallel([task(array) for _ in range(options.workers)])
            )
        values = alternate(runs, options.pairs)
    label = f"{options.megabytes:g} MB to {options.workers} workers"
    board.compare(label, values, "s", {"one copy, loads": 1 / 1.5})
    watched = Watch()
    for _ in range(3):
        ours(edit, options.workers, watched)
        time.sleep(0.1)
    copies = [extra / array.nbytes for extra in watched.extra]
    board.limit(f"{label}, peak memory", copies, "copies", 2.0)
    return board.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch([int(pid) for pid in sys.argv[2:]])
        sys.exit(0)
    sys.exit(main())
