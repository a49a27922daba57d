"""Hundreds of phases whose workers die, hang and raise, planned from a seed; each is checked.

A stream that completed must have what an undisturbed run gives; a failure must be one that was
planned, or of a pass in flight on a worker that a plan ended. Nothing may grow in the parent.

    python -m tests.soak [--phases 500] [--streams 200] [--seed 1] [--workers 2]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.metrics import Metrics
from lmcache_mp.stream import create_request
from tests.chaos import (
    CHUNK,
    DEATHS,
    ERRORS,
    EXIT_CODES,
    HANGS,
    ChaoticEdit,
    ChaoticEngine,
    Fault,
    FileKV,
    answer,
    edited,
    plain_kv,
)

#: Seconds after which no phase begins, and after which the program is ended with a traceback.
TIME_IS_UP = 540.0
HARD_LIMIT = 595.0

#: Seconds that a pass may take where hangs are planned. Others take milliseconds.
TIMEOUT = 2.0
MAX_RESTARTS = 4

#: What the parent's memory may vary by: the allocator's arenas, and a phase's own results.
MOST_GROWTH_MIB = 16.0


class Broken(Exception):
    """A promise was not kept."""


def check(holds: bool, what: str) -> None:
    """Raise unless it ``holds``."""
    if not holds:
        raise Broken(what)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Life:
    """The settings of one batch; the soak makes several, one after the other."""

    retries: int
    start_method: str
    timeout: float | None
    blocking: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Life:
        """Any mix of them."""
        return cls(
            rng.choice([0, 1]),
            rng.choice(["forkserver", "forkserver", "forkserver", "spawn"]),
            rng.choice([TIMEOUT, TIMEOUT, None]),
            rng.choice([True, True, False]),
        )


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal from outside to the worker in a place, so many seconds after the phase began."""

    place: int
    signal: signal.Signals
    delay: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What is run, and what goes wrong in it. Streams are ints, which are their first tokens."""

    kind: str
    streams: tuple[int, ...]
    tokens: int = 1
    limit: int | None = None
    faults: dict[int, Fault] = field(default_factory=dict)
    kills: tuple[Kill, ...] = ()
    dies_opening: bool = False

    @classmethod
    def draw(cls, rng: random.Random, life: Life, streams: int, workers: int) -> Phase:
        """A phase with up to three troubles, many exceptions, or a storm that ends it."""
        count = rng.choice([streams, streams, rng.randint(1, streams), rng.randint(1, streams), 0])
        phase = cls(
            rng.choice(["prefill", "modify", "modify", "decode", "run_streams"]),
            tuple(sorted(rng.sample(range(streams), count))),
            rng.randint(1, 4),
            rng.choice([None, None, 1, 3, 16, 100]),
        )
        victims = rng.sample(phase.streams, min(count, 16))
        trouble = rng.random()
        if not victims or trouble < 0.25:
            return phase
        if trouble < 0.40:
            return replace(phase, faults={v: Fault(_any(rng, ERRORS)) for v in victims})
        if trouble < 0.45:
            return replace(phase, faults={v: Fault(_any(rng, DEATHS)) for v in victims})
        return phase._with_troubles(rng, life, victims, workers)

    def _with_troubles(
        self, rng: random.Random, life: Life, victims: list[int], workers: int
    ) -> Phase:
        """Up to three, so that the phase goes on: a death may happen twice where it is retried."""
        faults: dict[int, Fault] = {}
        kills: list[Kill] = []
        dies_opening, budget = False, MAX_RESTARTS
        for victim in victims[: rng.randint(1, 3)]:
            trouble, late = rng.random(), rng.random() < 0.5
            if trouble < 0.30:
                faults[victim] = Fault(_any(rng, ERRORS), late)
            elif trouble < 0.42 and life.timeout is not None and not any(self._hangs(faults)):
                rare = rng.random() < 0.2
                kind = "SIGSTOP" if rare else rng.choice(["sleep", "loop", "lock"])
                faults[victim] = Fault(kind, late)
            elif trouble < 0.75 and budget >= 2:
                budget -= 2
                faults[victim] = Fault(_any(rng, DEATHS), late, once=rng.random() < 0.6)
            elif budget >= 1:
                budget -= 1
                number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
                delay = rng.choice([0.0, rng.uniform(0.0, 0.1)])
                kills.append(Kill(rng.randrange(workers), number, delay))
                dies_opening = budget >= 1 and rng.random() < 0.3
                budget -= dies_opening
        return replace(self, faults=faults, kills=tuple(kills), dies_opening=dies_opening)

    @staticmethod
    def _hangs(faults: dict[int, Fault]) -> Iterator[bool]:
        return (fault.kind in HANGS for fault in faults.values())


def _any(rng: random.Random, kinds: dict[str, object]) -> str:
    return rng.choice(list(kinds))


# --- what an undisturbed run gives ----------------------------------------------------------------


@dataclass(slots=True)
class Expected:
    """A stream as it is when every pass that completed has happened once, and no other has."""

    tokens: list[int]
    suffix: list[int] = field(default_factory=list)
    stored: NDArray[np.float64] = field(default_factory=lambda: plain_kv([]))

    def generate(self, count: int) -> None:
        """A generate has completed."""
        prompt = self.tokens + self.suffix
        self.tokens, self.suffix = prompt + answer(prompt, count), []

    def edit(self) -> float:
        """An edit has completed; returns the sum of the KV that it saw."""
        covered = len(self.tokens) - len(self.tokens) % CHUNK
        kv = plain_kv(self.tokens[:covered])
        kv[:, :, : self.stored.shape[2]] = self.stored
        total = float(kv.sum())
        new_kv, tokens = edited(kv, self.tokens[:covered])
        self.suffix = self.tokens[covered:] + self.suffix
        self.tokens = tokens
        self.stored = new_kv[:, :, : len(tokens) - len(tokens) % CHUNK].copy()
        return total


# --- what is known of deaths ----------------------------------------------------------------------


@dataclass(slots=True)
class Causes:
    """Who was ended or hung, by pid, as far as the plan and the workers' notes tell.

    ``recent`` counts the deaths that a phase may have to bear: its own, and those since the last.
    """

    codes: dict[int, set[int]] = field(default_factory=dict)
    hung: dict[int, set[str]] = field(default_factory=dict)
    recent: int = 0

    def death(self, pid: int, code: int) -> None:
        """The process is going to end, or has ended, with this exit code."""
        self.codes.setdefault(pid, set()).add(code)
        self.recent += 1

    @property
    def gave_up(self) -> bool:
        """Whether there were more deaths than a phase bears."""
        return self.recent > MAX_RESTARTS


class OutsideKills:
    """Signals that threads of the parent send while a phase runs."""

    def __init__(self, kills: tuple[Kill, ...], pids: list[int], causes: Causes) -> None:
        self._threads = []
        for kill in kills:
            pid = pids[kill.place % len(pids)]
            causes.death(pid, -kill.signal)
            process = os.pidfd_open(pid)  # a pid may be another process' by then
            arguments = (process, kill.signal)
            self._threads.append(threading.Timer(kill.delay, self._send, arguments))

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.join()

    @staticmethod
    def _send(process: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)
        os.close(process)


# --- the soak -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds: MiB, open files, threads, and live processes below it."""

    rss: float
    fds: int
    threads: int
    processes: int

    @classmethod
    def now(cls) -> Holdings:
        """Counted after a collection of garbage."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        fds = len(os.listdir("/proc/self/fd"))
        return cls(rss, fds, len(os.listdir("/proc/self/task")), len(descendants(os.getpid())))


def descendants(pid: int) -> set[int]:
    """Processes below ``pid`` that run; zombies do not."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    left = [pid]
    while left:
        below = children.get(left.pop(), [])
        found.update(below)
        left += below
    return found


class Soak:
    """Runs batches one after the other, and counts."""

    def __init__(self, streams: int, workers: int, seed: int, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.growth = 0.0
        self._streams = streams
        self.workers = workers
        self._rng = random.Random(seed)
        self._folder = folder
        self._idle: Holdings | None = None
        self._full: dict[str, Holdings] = {}

    def warm_up(self) -> None:
        """Undisturbed phases under both start methods; from here on nothing may grow."""
        for start_method in ("forkserver", "spawn"):
            life = Life(0, start_method, TIMEOUT, True)
            with self._batch(life) as running:
                everybody = tuple(range(self._streams))
                for kind in ("prefill", "modify", "decode", "run_streams"):
                    running.run(Phase(kind, everybody))
                self._full[start_method] = Holdings.now()
        self._idle = Holdings.now()

    def live(self, phases: int) -> None:
        """One batch's life of so many phases."""
        assert self._idle is not None
        life = Life.draw(self._rng)
        full = self._full[life.start_method]
        with self._batch(life) as running:
            for _ in range(phases):
                phase = Phase.draw(self._rng, life, self._streams, self.workers)
                try:
                    running.run(phase)
                    self._check_flat(Holdings.now(), full)
                except Exception as error:
                    error.add_note(f"in {phase}\nof {life}") if hasattr(error, "add_note") else None
                    raise
        now = Holdings.now()
        self._check_flat(now, self._idle)
        check(now.fds == self._idle.fds, f"{now} after close(), and {self._idle} at first")

    def _check_flat(self, now: Holdings, before: Holdings) -> None:
        assert self._idle is not None
        self.growth = max(self.growth, now.rss - self._idle.rss)
        kept = now.fds <= before.fds and now.threads <= before.threads
        kept &= now.processes <= before.processes
        kept &= now.rss <= self._idle.rss + MOST_GROWTH_MIB
        check(kept, f"{now} after a phase, and {before} at first")

    @contextlib.contextmanager
    def _batch(self, life: Life) -> Iterator[Running]:
        batch = LMCacheBatchedStream(
            self.workers,
            on_error="collect",
            timeout=life.timeout,
            retries=life.retries,
            max_restarts=MAX_RESTARTS,
            start_method=life.start_method,
        )
        with batch:
            yield Running(self, batch, life, self._streams, self._folder)
        self.counts["batches"] += 1


class Running:
    """A batch, and what each of its streams must look like."""

    def __init__(
        self, soak: Soak, batch: LMCacheBatchedStream, life: Life, streams: int, folder: Path
    ) -> None:
        self._soak = soak
        self._batch = batch
        self._life = life
        self._folder = folder
        self._causes = Causes()
        self._pids: set[int] = set()
        context, engine = FileKV(str(folder)), ChaoticEngine(life.blocking)
        self._ids: list[str] = []
        self._expected: list[Expected] = []
        for stream in range(streams):
            prompt = [stream, *range(8 + stream % 5)]
            self._ids.append(batch.add(create_request(context, engine, prompt)))
            self._expected.append(Expected(prompt))

    def run(self, phase: Phase) -> None:
        """Run a phase and check all that it left."""
        notes = self._folder / "notes"
        notes.mkdir()
        self._batch.start()
        carried, self._causes.recent = self._causes.recent, 0
        if phase.dies_opening:
            (self._folder / "die").touch()
        with OutsideKills(phase.kills, self._batch.worker_pids, self._causes):
            metrics = self._call(phase, str(notes))
        struck = self._read_notes(notes)
        self._causes.recent += carried
        if metrics is not None:
            self._check_ends(phase, metrics, struck)
        self._causes.recent = len(phase.kills)  # the next phase may be the one to notice
        for stream, expected in enumerate(self._expected):
            tokens = self._batch.get_stream(self._ids[stream]).tokens
            check(tokens == expected.tokens, f"stream {stream} {tokens} not {expected.tokens}")
        self._count_restarts()
        self._soak.counts["phases"] += 1
        self._soak.counts["passes"] += len(phase.streams)
        shutil.rmtree(notes)

    def _call(self, phase: Phase, notes: str) -> Metrics | None:
        ids = [self._ids[stream] for stream in phase.streams]
        batch, limit = self._batch, phase.limit
        if phase.kind == "modify":
            edit = ChaoticEdit(phase.faults, notes)
            return batch.modify(edit, "json", stream_ids=ids, max_concurrency=limit)
        params = {"max_tokens": phase.tokens, "faults": phase.faults, "notes": notes}
        if phase.kind == "prefill":
            return batch.prefill(params, "json", stream_ids=ids, max_concurrency=limit)
        if phase.kind == "decode":
            return batch.decode(params, "json", stream_ids=ids, max_concurrency=limit)
        duration = batch.run_streams(params, ids, max_concurrency=limit)
        return batch.get_perf_metrics(duration, "json", 80, "decode", ids) if ids else None

    def _count_restarts(self) -> None:
        first = not self._pids
        known = {*self._batch.worker_pids, *self._causes.codes, *self._causes.hung}
        self._soak.counts["restarts"] += len(known - self._pids)
        self._soak.counts["restarts"] -= first * min(self._soak.workers, len(self._expected))
        self._pids |= known

    def _read_notes(self, notes: Path) -> dict[int, list[int]]:
        """Pids in which a stream's fault has struck."""
        struck: dict[int, list[int]] = {}
        for path in notes.iterdir():
            stream, kind = path.name.split("-", 1)
            pids = struck[int(stream)] = [int(line) for line in path.read_text().split()]
            for pid in pids:
                if kind in DEATHS:
                    self._causes.death(pid, EXIT_CODES[kind])
                elif kind in HANGS:
                    self._causes.hung.setdefault(pid, set()).add(kind)
                self._soak.counts[kind] += 1
        for path in self._folder.glob("died-*"):
            self._causes.death(int(path.name.split("-")[1]), 3)
            self._soak.counts["died opening"] += 1
            path.unlink()
        return struck

    def _check_ends(self, phase: Phase, metrics: Metrics, struck: dict[int, list[int]]) -> None:
        """Each selected stream has one end, and it is the right one."""
        frame, failures = metrics.to_frame(), metrics.failures
        ids = [self._ids[stream] for stream in phase.streams]
        check(list(frame.index) == ids, "the frame's rows are not the selected streams")
        failed = set(frame.index[frame["status"] == "failed"])
        check(
            len(failures) == len(failed) and set(failures.index) == failed,
            f"{len(failed)} rows say failed, and there are {len(failures)} failures",
        )
        why = failures.to_dict("index")
        attempts = frame["attempt"].to_dict()
        totals = frame["total"].to_dict() if "total" in frame else {}
        for stream, stream_id in zip(phase.streams, ids, strict=True):
            fault, pids = phase.faults.get(stream), struck.get(stream, [])
            if stream_id in failed:
                failure = why[stream_id]
                ours = self._explains(phase, failure, fault, pids, int(attempts[stream_id]))
                check(ours, f"stream {stream}: {failure}, attempt {attempts[stream_id]}, {pids}")
                self._soak.failed[str(failure["error_type"])] += 1
                continue
            check(self._may_complete(fault, pids), f"stream {stream} completed in spite of {fault}")
            self._soak.counts["completed"] += 1
            if phase.kind == "modify":
                total = self._expected[stream].edit()
                check(totals[stream_id] == total, f"stream {stream}'s KV is not what it was")
            else:
                self._expected[stream].generate(1 if phase.kind == "prefill" else phase.tokens)
        lost = sum(failure["error_type"] == "WorkerDied" for failure in why.values())
        at_once = 1 if phase.kind == "modify" else phase.limit or len(ids)
        bound = len(ids) if self._causes.gave_up else self._causes.recent * at_once
        check(lost <= bound, f"{lost} passes lost by {self._causes.recent} deaths")

    def _explains(
        self,
        phase: Phase,
        failure: dict[str, object],
        fault: Fault | None,
        pids: list[int],
        attempt: int,
    ) -> bool:
        """Whether a stream had to fail so, or may have: it was in flight on a worker that died."""
        kind, causes = failure["error_type"], self._causes
        pid, code = int(str(failure["worker_pid"])), failure["exit_code"]
        if kind == "WorkerDied":
            if causes.gave_up:
                return pid in causes.codes or pid in causes.hung
            # A pass that has struck once and has no second attempt was lost with that process.
            own = self._life.retries or not pids or pids[-1] in causes.hung or pid in pids
            known = code in causes.codes.get(pid, ())
            return bool(own) and known and attempt > self._life.retries
        if kind == "StreamTimeout":
            kinds = causes.hung.get(pid, set())
            # In flight beside a stopped or a looping pass, another may be late as well.
            beside = bool(kinds & {"SIGSTOP", "loop"}) and phase.kind != "modify"
            return bool(kinds) and (beside or pid in pids)
        return fault is not None and kind == fault.kind and bool(pids)

    def _may_complete(self, fault: Fault | None, pids: list[int]) -> bool:
        """Whether a stream may complete: it had no fault, or one that strikes once was repeated."""
        if fault is None:
            return True
        repeated = self._life.retries > 0 or any(pid in self._causes.hung for pid in pids)
        return fault.once and bool(pids) and repeated


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--phases", type=int, default=500)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
    print(f"soak: {options.phases} phases of {options.streams} streams, seed {options.seed}")
    begin = time.monotonic()
    verdict = "every stream had one end, and the right one; nothing grew"
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options.streams, options.workers, options.seed, Path(folder))
        try:
            soak.warm_up()
            soak.counts.clear()
            each = max(5, options.phases // 20)
            while (left := options.phases - soak.counts["phases"]) > 0:
                check(time.monotonic() - begin < TIME_IS_UP, "the time is up")
                soak.live(min(each, left))
                seconds = time.monotonic() - begin
                print(f"{soak.counts['phases']} phases, {seconds:.0f} s", flush=True)
        except Broken as error:
            print("\n".join(getattr(error, "__notes__", [])))
            verdict = f"BROKEN (--seed {options.seed}): {error}"
    report(soak)
    seconds = time.monotonic() - begin
    phases, passes = soak.counts["phases"], soak.counts["passes"]
    print(f"make soak: {phases} phases, {passes} passes, {seconds:.0f} s: {verdict}")
    return int(verdict.startswith("BROKEN"))


def report(soak: Soak) -> None:
    """The counts, a line each."""
    counts = soak.counts
    lines = {
        "batches": counts["batches"],
        "passes": counts["passes"],
        "completed": counts["completed"],
        **{f"failed: {kind}": count for kind, count in sorted(soak.failed.items())},
        **{f"struck: {kind}": counts[kind] for kind in [*DEATHS, *HANGS, *ERRORS]},
        "died opening": counts["died opening"],
        "restarts": counts["restarts"],
        "most growth, MiB": round(soak.growth, 1),
    }
    for name, value in lines.items():
        print(f"{name:28}{value:>10}")


if __name__ == "__main__":
    sys.exit(main())
