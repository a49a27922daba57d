"""The fault matrix: what is done, at which stage, in which kind of worker, reported how.

After loky's taxonomy of crashes. Each cell is one batch in which one stream, or one worker's start,
is harmed once. It is right when the harmed stream has the right error, every stream that was not
in flight beside it has its result, repeating the failed ones and going on gives what an undisturbed
run gives, and no process is left.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lmcache_mp.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_mp.errors import StreamFailure, WorkerDied
from lmcache_mp.metrics import Metrics
from lmcache_mp.stream import create_request
from tests.faults.saboteur import VICTIM, HarmedEngine, Saboteur, context, make_edit
from tests.helpers import pid_is_alive

FAULTS = (
    "sigkill",
    "sigsegv",
    "sigterm",
    "exit3",
    "raise",
    "bad_result",
    "bad_exception",
    "two_args",
    "loop",
    "sigstop",
)
STAGES = ("start", "prefill", "modify", "decode", "sending")
METHODS = ("forkserver", "spawn")
MODES = ("raise", "collect")

#: Cells without a meaning, and why.
NOT_APPLICABLE = {
    ("bad_result", "start"): "opening has no result",
    ("bad_result", "sending"): "a result is bytes, numbers and text by then",
}

#: Generous: a healthy pass takes milliseconds, and must not be overdue on a busy machine.
TIMEOUT = 2.0
HANGS = ("loop", "sigstop")

STREAMS = 6

_TYPES = {
    "raise": ("ValueError",),
    "bad_result": ("TypeError", "KVError"),
    "bad_exception": ("HoldsLock",),
    "two_args": ("TwoArguments",),
    "loop": ("StreamTimeout",),
    "sigstop": ("StreamTimeout",),
}
_EXIT_CODES = {"sigkill": -9, "sigsegv": -11, "sigterm": -15, "exit3": 3}


@dataclass(frozen=True)
class Cell:
    """One place in the matrix."""

    fault: str
    stage: str
    method: str
    mode: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.stage}-{self.method}-{self.mode}"

    @property
    def reason_not_applicable(self) -> str | None:
        """Why the cell has no meaning, if it has none."""
        return NOT_APPLICABLE.get((self.fault, self.stage))


def all_cells() -> Iterator[Cell]:
    """Every combination."""
    for method in METHODS:
        for stage in STAGES:
            for fault in FAULTS:
                for mode in MODES:
                    yield Cell(fault, stage, method, mode)


def run_cell(cell: Cell) -> list[str]:
    """Run a cell; returns what was not right."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = _Run(cell, Path(folder) / "undisturbed", harmed=False)
        disturbed = _Run(cell, Path(folder) / "disturbed", harmed=True)
        problems = disturbed.problems
        if undisturbed.problems:
            problems.append(f"the undisturbed run failed: {undisturbed.problems}")
        if not problems and disturbed.tokens != undisturbed.tokens:
            problems.append(f"tokens {disturbed.tokens} instead of {undisturbed.tokens}")
        return problems


class _Run:
    """Three phases, in which failed streams are repeated, and what came of them."""

    def __init__(self, cell: Cell, folder: Path, *, harmed: bool) -> None:
        folder.mkdir()
        self.cell, self.harmed = cell, harmed
        self.problems: list[str] = []
        self.saboteur = Saboteur(cell.fault, cell.stage if harmed else "never", str(folder))
        timeout = TIMEOUT if harmed and cell.fault in HANGS else None
        batch = LMCacheBatchedStream(
            2, start_method=cell.method, on_error=cell.mode, timeout=timeout
        )
        with contextlib.closing(batch):
            engine, kv = HarmedEngine(self.saboteur), context(folder)
            self.ids = [
                batch.add(create_request(kv, engine, [token] * 9)) for token in range(STREAMS)
            ]
            self._go_through(batch)
            pids = batch.worker_pids
            self.tokens = [stream.tokens for stream in batch.streams.values()]
        self._check(not any(map(pid_is_alive, pids)), "a worker is left")

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def _go_through(self, batch: LMCacheBatchedStream) -> None:
        if self.cell.stage == "start" and self.harmed:
            self._start(batch)
        edit = make_edit(self.saboteur)
        for phase in ("prefill", "modify", "decode"):
            failed: list[str] = []
            for attempt in (1, 2):
                metrics, failures = self._run_phase(batch, phase, edit, failed or None)
                here = self.harmed and attempt == 1 and self._strikes_in(phase)
                if here:
                    self._check_failures(metrics, failures, phase)
                else:
                    self._check(not len(metrics.failures), f"{phase} {attempt}: {metrics.failures}")
                failed = list(metrics.failures.index)
                if not failed:
                    break

    def _strikes_in(self, phase: str) -> bool:
        return self.cell.stage == phase or (self.cell.stage == "sending" and phase == "modify")

    def _start(self, batch: LMCacheBatchedStream) -> None:
        """A death or a hang while starting is made good; what opening raises is told."""
        survivable = self.cell.fault in (*_EXIT_CODES, *HANGS)
        try:
            batch.start()
        except LMCacheBatchedStreamError as error:
            self._check(not survivable, f"start: {error!r}")
            cause = error.__cause__
            name = getattr(cause, "type_name", "") or type(cause).__name__
            self._check(name in _TYPES.get(self.cell.fault, ()), f"start raised {cause!r}")
        else:
            self._check(survivable, "start said nothing of an open() that raised")

    def _run_phase(
        self, batch: LMCacheBatchedStream, phase: str, edit: object, only: list[str] | None
    ) -> tuple[Metrics, dict[str, StreamFailure]]:
        try:
            if phase == "prefill":
                return batch.prefill({}, stream_ids=only), {}
            if phase == "modify":
                return batch.modify(edit, stream_ids=only), {}  # type: ignore[arg-type]  # callable
            return batch.decode({"max_tokens": 3}, stream_ids=only), {}
        except LMCacheBatchedStreamError as error:
            self._check(self.cell.mode == "raise", f"{phase} raised although it collects")
            if error.metrics is None:
                raise
            return error.metrics, error.failures

    def _check_failures(
        self, metrics: Metrics, failures: dict[str, StreamFailure], phase: str
    ) -> None:
        victim, frame = self.ids[VICTIM], metrics.to_frame()
        table = metrics.failures
        self._check(list(frame.index) == self.ids, f"{phase}: not one row a stream")
        self._check(victim in table.index, f"{phase}: the harmed stream did not fail")
        if victim not in table.index:
            return
        worker = frame.at[victim, "worker_id"]
        beside = set(frame.index[frame["worker_id"] == worker]) if phase != "modify" else {victim}
        strangers = set(table.index) - beside
        self._check(not strangers, f"{phase}: streams failed that were not in flight: {strangers}")
        self._check_error(table.loc[victim], phase)
        if self.cell.mode == "raise":
            self._check(set(failures) == set(table.index), "failures and metrics differ")
            self._check_exception(failures[victim])

    def _check_error(self, row: pd.Series, phase: str) -> None:
        expected = ("WorkerDied",) if self.cell.fault in _EXIT_CODES else _TYPES[self.cell.fault]
        if self.cell.stage == "sending" and self.cell.fault in ("raise", "bad_exception"):
            expected = ("BadReduce",)
        self._check(row["error_type"] in expected, f"{row['error_type']}: {row['error_message']}")
        if self.cell.fault in _EXIT_CODES:
            code, message = _EXIT_CODES[self.cell.fault], row["error_message"]
            self._check(row["exit_code"] == code, f"exit code {row['exit_code']}")
            self._check(phase in message and self.ids[VICTIM] in message, message)
            if self.cell.fault == "sigkill":
                self._check("killed, possibly out of memory" in message, message)
            if self.cell.fault == "sigsegv":
                report = str(row["traceback"])
                self._check("Segmentation fault" in report, f"crash report {report!r}")

    def _check_exception(self, failure: StreamFailure) -> None:
        error, fault = failure.exception, self.cell.fault
        if fault in _EXIT_CODES:
            died = isinstance(error, WorkerDied) and error.pid == failure.worker_pid
            self._check(died, f"{error!r} of {failure.worker_pid}")
        elif fault == "raise" and self.cell.stage != "sending":
            self._check(type(error) is ValueError, f"{error!r}")
            self._check("strike" in str(error.__cause__), "the cause does not show where")
        elif fault in ("bad_exception", "two_args", "raise"):
            self._check(type(error).__name__ == "RemoteError", f"{error!r}")
            self._check("strike" in failure.traceback, "the remote traceback is missing")
