"""A run: the reports of its rounds, and a table with a row a stream over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmcache_mp.metrics.report import Metrics

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """What ``LMCacheBatchedStream.run`` returns.

    ``metrics`` has a report for each round, over the streams that came to it; ``config`` says how
    the batch was run, in plain values; ``names`` are those of the rounds: the phase's, with a
    number from 1 where there are several of it.
    """

    def __init__(self, metrics: Sequence[Metrics], config: Mapping[str, Any]) -> None:
        self.metrics = list(metrics)
        self.config = dict(config)

    def __len__(self) -> int:
        return len(self.metrics)

    def __iter__(self) -> Iterator[Metrics]:
        return iter(self.metrics)

    def __repr__(self) -> str:
        return f"<Run of {len(self.metrics)} rounds: {', '.join(self.names)}>"

    def emit(self, extras: bool = True) -> None:
        """Write the report of each round, in order."""
        for metrics in self.metrics:
            metrics.emit(extras)

    @cached_property
    def names(self) -> list[str]:
        """What each round's columns in ``rows`` begin with."""
        phases = [metrics.phase for metrics in self.metrics]
        counts = Counter(phases)
        seen: Counter[str] = Counter()
        names = []
        for phase in phases:
            seen[phase] += 1
            names.append(f"{phase}{seen[phase]}" if counts[phase] > 1 else phase)
        return names

    @cached_property
    def rows(self) -> pd.DataFrame:
        """A row a stream, index ``stream_id``, in the order of ``add``.

        Columns: custom_id, status ("failed" if any pass failed), error_type and error_message of
        the pass that failed, output_text and finish_reason of the last generate, then the columns
        of each round's frame as ``<round>.<column>``, missing where a stream did not come to it.
        """
        # pandas takes a third of a second to import, and a program may never ask for the table.
        from lmcache_mp.metrics import frames

        return frames.run_frame(self.names, [metrics.to_frame() for metrics in self.metrics])

    @property
    def failures(self) -> pd.DataFrame:
        """A row a failed stream, index ``stream_id``: phase, error_type, error_message, ..."""
        from lmcache_mp.metrics import frames

        return frames.concatenated([metrics.failures for metrics in self.metrics])
