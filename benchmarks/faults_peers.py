"""The same faults through local pools, ours among them: what each does, measured.

Eight tasks go through a pool of two workers; the third one is faulty. A cell says how the faulty
task's error tells it (named; only that a worker died; misnamed), whether the other seven results
were kept, and whether the pool runs eight more tasks afterwards. Every cell runs in a process of
its own, which is ended after a limit: then it hung, at the stage that is said. The endless loop
gets two seconds by each pool's own means, which for an executor is only how long a result is waited
for.

    python benchmarks/faults_peers.py [--limit 20] [--pools ours,loky]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

WORKERS = 2
TASKS = 8
FAULTY = 2
TIMEOUT = 2.0

#: Seconds that processes have to end after the one that made the pool.
LINGER = 2.0


# --- faults ---------------------------------------------------------------------------------------


class TwoArguments(Exception):
    """Pickles, and can't be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class HoldsLock(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("planned")
        self.lock = threading.Lock()


def _signal_oneself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60.0)


def _raise(make: Callable[[], BaseException]) -> NoReturn:
    raise make()


def _loop() -> None:
    while True:
        pass


@dataclass(frozen=True, slots=True)
class Fault:
    """A thing that goes wrong, and what the faulty task's error must say for it to be named."""

    label: str
    strike: Callable[[], object]
    named: str


FAULTS = {
    "sigkill": Fault("SIGKILL", partial(_signal_oneself, signal.SIGKILL), r"SIGKILL|-9\b"),
    "sigsegv": Fault("SIGSEGV", partial(_signal_oneself, signal.SIGSEGV), r"SIGSEGV|-11\b"),
    "exit": Fault("os._exit(3)", partial(os._exit, 3), r"exit ?code 3|EXIT\(3\)"),
    "raise": Fault(
        "raising", partial(_raise, partial(ValueError, "planned")), "ValueError: planned"
    ),
    "result": Fault(
        "unpicklable result", threading.Lock, r"pickle .*lock|\['value'\] of type lock"
    ),
    "lock": Fault("unpicklable exception", partial(_raise, HoldsLock), "HoldsLock: planned"),
    "arguments": Fault(
        "exception of 2 arguments",
        partial(_raise, partial(TwoArguments, "planned", "twice")),
        "TwoArguments: planned twice",
    ),
    "loop": Fault("endless loop, timeout", _loop, "Timeout"),
}

#: Says that a worker has died, and not how.
DIED = "died|terminated|crashed"


def task(number: int, fault: str) -> Any:
    """A task of a few milliseconds; one of them is faulty."""
    time.sleep(0.02)
    return FAULTS[fault].strike() if number == FAULTY else number * number


# --- pools ----------------------------------------------------------------------------------------

#: What a task gave: its value or its error.
Ends = list[Any]
Run = Callable[[str, range], Ends]


def _results(futures: list[Any], get: Callable[[Any], Any]) -> Ends:
    ends: Ends = []
    for future in futures:
        try:
            ends.append(get(future))
        except BaseException as error:  # whatever a pool raises is what is measured
            ends.append(error)
    return ends


def _submit(executor: Any, fault: str, numbers: range) -> Ends:
    futures = []
    for number in numbers:
        try:
            futures.append(executor.submit(task, number, fault))
        except BaseException as error:  # a pool that takes no more
            return [error] * len(numbers)
    limit = TIMEOUT if fault == "loop" else None
    return _results(futures, lambda future: future.result(timeout=limit))


@contextlib.contextmanager
def concurrent_futures() -> Iterator[Run]:
    """One executor, kept."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(WORKERS) as executor:
        yield partial(_submit, executor)


@contextlib.contextmanager
def loky() -> Iterator[Run]:
    """The reusable executor, which is asked for anew each time, as its documentation says."""
    from loky import get_reusable_executor

    yield lambda fault, numbers: _submit(get_reusable_executor(WORKERS), fault, numbers)


@contextlib.contextmanager
def joblib() -> Iterator[Run]:
    """Its default backend; a generator, so that results before an error are kept."""
    from joblib import Parallel, delayed

    def run(fault: str, numbers: range) -> Ends:
        limit = TIMEOUT if fault == "loop" else None
        parallel = Parallel(n_jobs=WORKERS, timeout=limit, return_as="generator_unordered")
        ends: Ends = [None] * len(numbers)
        try:
            for value in parallel(delayed(task)(number, fault) for number in numbers):
                if isinstance(value, int):
                    ends[numbers.index(int(value**0.5))] = value
        except BaseException as error:  # whatever a pool raises is what is measured
            ends[FAULTY if FAULTY in numbers else 0] = error
        return ends

    yield run


@contextlib.contextmanager
def mpire() -> Iterator[Run]:
    """One pool; tasks of their own, so that one's error is not all tasks' error."""
    from mpire import WorkerPool

    with WorkerPool(WORKERS) as pool:

        def run(fault: str, numbers: range) -> Ends:
            limit = TIMEOUT if fault == "loop" else None
            futures = [
                pool.apply_async(task, (number, fault), task_timeout=limit) for number in numbers
            ]
            return _results(futures, lambda future: future.get())

        yield run


@contextlib.contextmanager
def executorlib() -> Iterator[Run]:
    """Workers that are kept, and may be restarted."""
    from executorlib import SingleNodeExecutor

    with SingleNodeExecutor(WORKERS, block_allocation=True, restart_limit=3) as executor:
        yield partial(_submit, executor)


@dataclass(frozen=True)
class _ZeroKV:
    chunk_size: int = 1

    def lookup(self, tokens: list[int], cache_salt: str = "") -> int:
        return len(tokens)

    def retrieve(self, tokens: list[int], cache_salt: str = "") -> Any:
        import numpy as np

        return np.zeros((2, 1, len(tokens), 1), np.float32)

    def store(self, kv: Any, tokens: list[int], cache_salt: str = "") -> bool:
        return True

    def close(self) -> None:
        pass


def _no_engine(prompt: list[int], params: dict[str, Any], cache_salt: str) -> Iterator[Any]:
    yield from ()


@contextlib.contextmanager
def ours() -> Iterator[Run]:
    """A batch, kept; a task is a stream's edit."""
    from lmcache_mp.batch import LMCacheBatchedStream
    from lmcache_mp.stream import create_request

    with LMCacheBatchedStream(WORKERS, on_error="collect", timeout=TIMEOUT) as batch:
        context = _ZeroKV()
        ids = [batch.add(create_request(context, _no_engine, [n])) for n in range(2 * TASKS)]

        def run(fault: str, numbers: range) -> Ends:
            def edit(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
                return kv, tokens, {"value": task(tokens[0], fault)}

            metrics = batch.modify(edit, stream_ids=[ids[number] for number in numbers])
            frame = metrics.to_frame()
            failures = metrics.failures
            errors = failures["error_type"] + ": " + failures["error_message"]
            return [
                RuntimeError(errors[key]) if key in errors.index else int(frame.at[key, "value"])
                for key in (ids[number] for number in numbers)
            ]

        yield run


POOLS: dict[str, Callable[[], contextlib.AbstractContextManager[Run]]] = {
    "concurrent.futures": concurrent_futures,
    "loky": loky,
    "joblib": joblib,
    "mpire": mpire,
    "executorlib": executorlib,
    "ours": ours,
}


# --- one cell, in a process of its own ------------------------------------------------------------


def measure(pool: str, fault: str) -> None:
    """Print what happened as it becomes known, a JSON object a line."""
    with POOLS[pool]() as run:
        ends = run(fault, range(TASKS))
        error = ends.pop(FAULTY)
        kept = sum(end == n * n for n, end in zip(_others(range(TASKS)), ends, strict=True))
        _tell(error=_text(error).splitlines()[0], told=_how_well(error, fault), kept=kept)
        more = range(TASKS, 2 * TASKS)
        after = zip(more, run(fault, more), strict=True)
        _tell(after=sum(end == n * n for n, end in after))


def _how_well(error: object, fault: str) -> str:
    """How well the error, with its chain of causes, says what happened."""
    text = _text(error)
    if re.search(FAULTS[fault].named, text, re.IGNORECASE):
        return "named"
    return "death told" if re.search(DIED, text, re.IGNORECASE) else "misnamed"


def _text(error: object) -> str:
    if not isinstance(error, BaseException):
        return f"no error but {error!r}"
    causes = "" if error.__cause__ is None else f"\n{_text(error.__cause__)}"
    return f"{type(error).__name__}: {error}{causes}"


def _others(numbers: range) -> list[int]:
    return [number for number in numbers if number != FAULTY]


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """What happened to one pool under one fault."""

    text: str
    right: bool
    error: str


def cell(pool: str, fault: str, limit: float) -> Cell:
    """Measure one cell in a new session; whatever is left of it is ended."""
    command = [sys.executable, __file__, "--pools", pool, "--cell", fault]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as noise:
        process = subprocess.Popen(command, stdout=out, stderr=noise, start_new_session=True)
        try:
            process.wait(limit)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        left = [] if hung else _lingering(process.pid)
        for pid in {process.pid, *_session(process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        noise.seek(0)
        return _judge(out.read(), noise.read(), hung, left)


def _judge(out: str, noise: str, hung: bool, left: list[str]) -> Cell:
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            facts.update(json.loads(line))
    if "told" not in facts:
        last = (noise.strip().splitlines() or [""])[-1]
        return Cell("hang" if hung else "program dies", False, last)
    words = [facts["told"]]
    words.append("rest kept" if facts["kept"] == TASKS - 1 else f"{facts['kept']} of 7 kept")
    if "after" in facts:
        uses = {TASKS: "usable", 0: "pool dead"}
        words.append(uses.get(facts["after"], f"{facts['after']} of {TASKS} after"))
        words += ["hangs at its end"] if hung else []
    else:
        words.append("then hangs" if hung else "then dies")
    words += [f"leaves {', '.join(left)}"] if left else []
    return Cell(", ".join(words), words == ["named", "rest kept", "usable"], facts["error"])


def _session(leader: int) -> list[int]:
    """Processes of a session that run; its leader's id is the session's."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(name))
    return found


def _lingering(leader: int) -> list[str]:
    """The commands of what is left of a session that has had time to end."""
    deadline = time.monotonic() + LINGER
    while (left := _session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    commands = []
    for pid in left:
        with contextlib.suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip())
    return commands


def installed(pools: list[str]) -> list[str]:
    """The pools that can be imported; says which can't."""
    there = []
    for pool in pools:
        name = "lmcache_mp" if pool == "ours" else pool
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{pool} is left out: {error}")
            continue
        there.append(pool)
        if "." not in name:
            print(f"{pool}: {name} {metadata.version(name)}")
    return there


def main() -> int:
    """Print the table; 0 unless one of our own cells is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds until a cell has hung")
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pools = options.pools.split(",")
    if options.cell:
        measure(pools[0], options.cell)
        return 0
    pools = installed(pools)
    cells: dict[tuple[str, str], Cell] = {}
    for fault in FAULTS:
        for pool in pools:
            cells[fault, pool] = cell(pool, fault, options.limit)
            found = cells[fault, pool]
            print(f"{FAULTS[fault].label} | {pool} | {found.text} | {found.error[:200]!r}")
    widths = {
        pool: max(len(pool), *(len(cells[fault, pool].text) for fault in FAULTS)) for pool in pools
    }
    first = max(len(fault.label) for fault in FAULTS.values())
    print("\n" + "  ".join(["".ljust(first), *(pool.ljust(widths[pool]) for pool in pools)]))
    for name, fault in FAULTS.items():
        row = [cells[name, pool].text.ljust(widths[pool]) for pool in pools]
        print("  ".join([fault.label.ljust(first), *row]).rstrip())
    right = {pool: sum(cells[fault, pool].right for fault in FAULTS) for pool in pools}
    counts = ", ".join(f"{pool} {right[pool]}" for pool in pools)
    print(f"\nmake faults-peers: right cells of {len(FAULTS)}: {counts}")
    return int(right.get("ours", len(FAULTS)) < len(FAULTS))


if __name__ == "__main__":
    sys.exit(main())
