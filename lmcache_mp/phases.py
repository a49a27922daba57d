"""What the passes of a phase left in the parent: by stream, and as the input of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_mp import records
from lmcache_mp.errors import RemoteError, StreamFailure
from lmcache_mp.metrics.phase import PhaseData
from lmcache_mp.passes.outcome import PassLabel
from lmcache_mp.passes.state import Edited, Scalar
from lmcache_mp.pool.failures import unpack
from lmcache_mp.pool.messages import Done
from lmcache_mp.pool.slot import Lost
from lmcache_mp.stream import StreamPerfMetrics


@dataclass(frozen=True, slots=True)
class PassResult:
    """How a stream's pass ended: its raw record, and an edit's info or the failure.

    ``text`` is the stream's whole output by then.
    """

    row: bytes
    times: bytes = b""
    counts: bytes = b""
    text: str = ""
    info: Mapping[str, Scalar] | None = None
    failure: StreamFailure | None = None


def row_dtype(phase: str) -> np.dtype[np.void]:
    """The dtype of a phase's records."""
    return records.MODIFY if phase == "modify" else records.GENERATE


def result_of(end: Done | Lost, stream_id: str, phase: str, text: str) -> PassResult:
    """A pass' end, as a worker reported it or as its worker's death left it.

    ``text`` is the stream's whole output by now.
    """
    if isinstance(end, Lost):
        label = PassLabel(stream_id, end.stream, end.attempt, end.worker)
        row = label.failed_row(row_dtype(phase), end.pid or 0)
        failure = StreamFailure(
            stream_id,
            phase,
            end.error,
            type(end.error).__name__,
            str(end.error),
            getattr(end.error, "crash_report", ""),
            end.pid,
            getattr(end.error, "exit_code", None),
        )
        return PassResult(row, text=text, failure=failure)
    if end.failure is not None:
        error = unpack(end.failure)
        pid = int(np.frombuffer(end.row, row_dtype(phase))["pid"][0])
        failure = StreamFailure(
            stream_id,
            phase,
            error,
            end.failure.type_name,
            end.failure.message,
            end.failure.traceback,
            pid,
        )
        return PassResult(end.row, end.times, end.counts, text, failure=failure)
    info = end.change.info if isinstance(end.change, Edited) else None
    return PassResult(end.row, end.times, end.counts, text, info)


def not_run(stream_id: str, index: int, phase: str) -> PassResult:
    """The result of a stream that has had no pass yet: a failed row of attempt 0."""
    row = PassLabel(stream_id, index, attempt=0).failed_row(row_dtype(phase), 0)
    message = f"stream {stream_id} has not run yet"
    error = RemoteError(message)
    return PassResult(row, failure=StreamFailure(stream_id, phase, error, "NotRun", message))


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What a phase left: results by stream id in the order of ``add``, and its clock in seconds."""

    phase: str
    results: Mapping[str, PassResult]
    duration: float
    setup_s: float
    started_at: float
    round: int

    @property
    def failures(self) -> dict[str, StreamFailure]:
        """The failures by stream id."""
        return {key: result.failure for key, result in self.results.items() if result.failure}

    def data(self, custom_ids: Sequence[str | None], run: str | None) -> PhaseData:
        """All of it as arrays, for a report."""
        results = list(self.results.values())
        generated = self.phase != "modify"
        return PhaseData(
            phase=self.phase,
            duration=self.duration,
            stream_ids=list(self.results),
            custom_ids=custom_ids,
            records=records.join_rows((r.row for r in results), row_dtype(self.phase)),
            events=records.Events.join((r.times, r.counts) for r in results) if generated else None,
            texts=[r.text for r in results] if generated else (),
            infos=() if generated else [r.info for r in results],
            failures=self.failures,
            setup_s=self.setup_s,
            started_at=self.started_at,
            run=run,
            round=self.round,
        )


class PerfMetrics(Mapping[str, StreamPerfMetrics]):
    """Each stream's latest generate, by stream id; values are made when they are asked for."""

    def __init__(self, results: Mapping[str, PassResult]) -> None:
        self._results = results

    def __getitem__(self, stream_id: str) -> StreamPerfMetrics:
        result = self._results[stream_id]
        if result.failure is not None:
            raise KeyError(stream_id)
        return StreamPerfMetrics.from_outcome(result.row, result.times)

    def __iter__(self) -> Iterator[str]:
        return (key for key, result in self._results.items() if result.failure is None)

    def __len__(self) -> int:
        return sum(result.failure is None for result in self._results.values())
