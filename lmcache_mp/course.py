"""The way of a batch's streams through rounds: where each is, and how its passes ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_mp import records
from lmcache_mp.members import Members
from lmcache_mp.phases import PassResult, PhaseResult, result_of, row_dtype
from lmcache_mp.pool.messages import Adopted, Done, Work
from lmcache_mp.pool.slot import Lost


@dataclass(frozen=True, slots=True)
class Leg:
    """One round as workers run it."""

    phase: str
    work: Work


class Course:
    """What :class:`~lmcache_mp.pool.pool.Pool` asks of a phase, for the streams of a batch.

    A stream whose pass failed, or that has ended by itself, goes no further. ``latest`` is where
    each stream's latest generate is noted, by id. ``doubts`` is what passes that succeeded had to
    say.
    """

    def __init__(
        self, legs: Sequence[Leg], members: Members, latest: dict[str, PassResult]
    ) -> None:
        self.doubts: list[str] = []
        self._legs = legs
        self._members = members
        self._latest = latest
        self._at: dict[int, int] = {}
        self._results: list[dict[str, PassResult]] = [{} for _ in legs]

    def work(self, stream: int) -> Work:
        """What the stream's present pass is."""
        return self._legs[self._at.get(stream, 0)].work

    def phase(self, stream: int) -> str:
        """The name of the stream's present round."""
        return self._legs[self._at.get(stream, 0)].phase

    def adopted(self, stream: int) -> Adopted:
        """The stream as its worker needs it."""
        return self._members.adopted(stream)

    def end(self, end: Done | Lost) -> bool:
        """Keep what came of a pass; whether another one follows."""
        index = self._at.get(end.stream, 0)
        phase = self._legs[index].phase
        stream_id = self._members.names[end.stream]
        stream = self._members[stream_id].stream
        if isinstance(end, Done):
            if end.warning:
                self.doubts.append(f"{stream_id}: {end.warning}")
            if end.change is not None:
                stream.commit(end.change)
        result = result_of(end, stream_id, phase, stream.output_text())
        self._results[index][stream_id] = result
        if phase != "modify":  # at once: an interrupt must not lose what has ended
            self._latest[stream_id] = result
        follows = result.failure is None and not stream.done and index + 1 < len(self._legs)
        if follows:
            self._at[end.stream] = index + 1
        return follows

    def results(
        self, selected: Sequence[str], setup_s: float, started: float, round_number: int
    ) -> list[PhaseResult]:
        """The rounds, each with the streams that came to it, in the order of ``selected``.

        ``started`` is when they began, by perf_counter. One round lasted until now; of several,
        each lasted from its first pass' beginning to its last one's end.
        """
        duration = time.perf_counter() - started if selected else 0.0
        wall = records.wall_clock(started)
        found = []
        for index, (leg, results) in enumerate(zip(self._legs, self._results, strict=True)):
            ordered = {key: results[key] for key in selected if key in results}
            begin, lasted = wall, duration
            if len(self._legs) > 1:
                begin, lasted = _span(ordered, leg.phase)
            number = round_number + index
            found.append(PhaseResult(leg.phase, ordered, lasted, setup_s, begin, number))
        return found


def _span(results: dict[str, PassResult], phase: str) -> tuple[float, float]:
    """When the passes of a round began, and for how many seconds they went on."""
    rows = records.join_rows((it.row for it in results.values()), row_dtype(phase))
    began = rows[rows["start_time"] > 0]
    if not len(began):
        return float("nan"), 0.0
    first = float(began["start_time"].min())
    return first, float((began["start_time"] + began["duration"]).max()) - first
