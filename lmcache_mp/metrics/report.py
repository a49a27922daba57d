"""Metrics: the report of a phase."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - pandas needs it, and after the main thread it is late
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_mp.errors import UsageError
from lmcache_mp.metrics.aggregate import (
    PERCENTILES,
    Distribution,
    distributions,
    latency_keys,
    totals,
)
from lmcache_mp.metrics.definitions import TOTAL, reported
from lmcache_mp.metrics.formats import (
    FORMATS,
    Block,
    Document,
    Section,
    as_html,
    check_format,
    check_width,
    plain,
    quantity,
)
from lmcache_mp.metrics.phase import PhaseData

if TYPE_CHECKING:
    import pandas as pd

#: LMCache's table: title, and keys by section.
_LAYOUTS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "prefill": (
        "Batched Stream Metrics (prefill)",
        {"config": ("num_streams",), "results": ("duration", "input_tokens", "input_tput")},
    ),
    "decode": (
        "Batched Stream Metrics (decode)",
        {"config": ("num_streams",), "results": ("duration", "output_tokens", "output_tput")},
    ),
    "modify": ("Batched Stream Modify Metrics", {"results": ("duration",)}),
}
_SECTION_LABELS = {"config": "Configuration", "results": "Results"}

#: Keys that ``to_dict`` has after LMCache's.
_GENERATE_RESULTS = (
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "decode_rate",
    "setup_s",
)
_MODIFY_RESULTS = (
    "completed",
    "failed",
    "total_tokens_before",
    "total_tokens_after",
    "request_throughput",
    "setup_s",
)

#: Entries of the printed block.
_GENERATE_ENTRIES = ("completed", "failed", "request_throughput", "decode_rate")
_MODIFY_ENTRIES = ("completed", "failed", "request_throughput")


class Handler(Protocol):
    """Writes a report somewhere else; LMCache's own handlers are such."""

    def emit(self, title: str, sections: list[Section]) -> None:
        """Write the report: its title and its sections, in order."""
        ...


class Metrics:
    """The report of a phase, or one made by hand from sections and entries.

    Numbers are computed when they are first asked for. Pickling leaves the handlers behind.
    """

    def __init__(self, title: str, fmt: str = "terminal", width: int = 80) -> None:
        """An empty report that :meth:`emit` writes as ``fmt``, ``width`` characters wide.

        Raises :class:`~lmcache_mp.errors.UsageError` for an unknown format or a width under 20.
        """
        self.title = title
        self._fmt = check_format(fmt)
        self._width = check_width(width)
        self._sections: dict[str | None, Section] = {}
        self._handlers: list[Handler] = []
        self._phase: PhaseData | None = None

    @classmethod
    def from_phase(cls, data: PhaseData, fmt: str = "terminal", width: int = 80) -> Metrics:
        """The report of a phase, with LMCache's title, sections, keys and labels."""
        title, layout = _LAYOUTS[data.phase]
        report = cls(title, fmt, width)
        report._phase = data
        for key, names in layout.items():
            section = report.add_section(key, _SECTION_LABELS[key])
            for name in names:
                section.add(name, TOTAL[name].label, plain(report._totals[name]))
        return report

    @property
    def phase(self) -> str:
        """ "prefill", "modify" or "decode"; UsageError for a report made by hand."""
        return self._data.phase

    # Sections and entries

    def add_section(self, key: str, label: str) -> Section:
        """A new section, after those there are. A key that is taken is a UsageError."""
        if key in self._sections:
            raise UsageError(f"section {key!r} is there already: use metrics[{key!r}].add(...)")
        section = self._sections[key] = Section(key, label)
        return section

    def __getitem__(self, key: str) -> Section:
        """The section of ``key``, or a KeyError."""
        return self._sections[key]

    def add(self, key: str, label: str, value: object) -> None:
        """Add an entry that belongs to no section: it comes first, and is a key of ``metrics``."""
        if None not in self._sections:
            self._sections = {None: Section(None, None), **self._sections}
        self._sections[None].add(key, label, value)

    # Output

    def add_handler(self, handler: Handler) -> None:
        """Have :meth:`emit` call ``handler.emit(title, sections)`` too, after it has printed."""
        self._handlers.append(handler)

    def emit(self, extras: bool = True) -> None:
        """Write the report to the ``sys.stdout`` of the moment, then to the handlers.

        LMCache's table comes first, then what this library adds; ``extras=False`` leaves that out.
        """
        if sys.stdout is not None:  # a program without a console
            text = FORMATS[self._fmt](self._document(extras), self._width)
            sys.stdout.write(f"{text}\n")
        for handler in self._handlers:
            handler.emit(self.title, list(self._sections.values()))

    def to_dict(self) -> dict[str, Any]:
        """``{"title": ..., "metrics": {section: {key: value}}}``, all of it strict JSON.

        A phase has ``config``, ``results`` (LMCache's keys first) and ``latency``
        (``mean_ttft_ms`` and its like). What is undefined is None.
        """
        return self._to_dict(extras=True)

    def _to_dict(self, extras: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        more = dict(self._extras) if extras else {}
        for section in self._sections.values():
            entries = {key: plain(value) for key, _, value in section.entries}
            if section.key is None:
                metrics.update(entries)
            else:
                ours = more.pop(section.key, {})
                metrics[section.key] = entries | {k: v for k, v in ours.items() if k not in entries}
        for key, ours in more.items():
            metrics.setdefault(key, ours)
        return {"title": self.title, "metrics": metrics}

    def _document(self, extras: bool) -> Document:
        return Document(
            self.title,
            list(self._sections.values()),
            self._block() if extras else None,
            self._to_dict(extras),
        )

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return as_html(self._document(extras=True))

    def __repr__(self) -> str:
        if self._phase is None:
            return f"<Metrics {self.title!r}>"
        counts = self._totals
        return f"<Metrics {self.title!r}: {counts['completed']} ok, {counts['failed']} failed>"

    # Frames

    def to_frame(self) -> pd.DataFrame:
        """A row a stream, in the order of ``add``; index ``stream_id``; times in seconds.

        The columns are ``definitions.metrics(phase)`` and, of a modify, the edits' infos (with
        "info_" before a name that is taken). ``attrs["units"]`` has the units by column.
        """
        # pandas takes a third of a second to import, and a program may never ask for a frame.
        from lmcache_mp.metrics import frames

        return frames.stream_frame(self._data)

    def itl_frame(self) -> pd.DataFrame:
        """A row an event of every stream: when it came, and the gap that it ended.

        Columns: stream_id, event_index, event_tokens, t (seconds since the call), icl (the gap),
        itl (the gap for each of the event's tokens). A modify has no events.
        """
        from lmcache_mp.metrics import frames

        return frames.event_frame(self._data)

    def summary(self, percentiles: Sequence[float] = PERCENTILES) -> pd.DataFrame:
        """A row a metric over the completed streams: count, mean, std, min, p50, ..., max.

        ``std`` is the population's; percentiles (0 to 100) are linearly interpolated. ``itl`` is
        pooled over all tokens. Raises UsageError for a percentile out of range.
        """
        from lmcache_mp.metrics import frames

        wanted = tuple(float(percentile) for percentile in percentiles)
        for percentile in wanted:
            if not 0 <= percentile <= 100:
                raise UsageError(f"percentile {percentile:g} is not between 0 and 100")
        if wanted == PERCENTILES:
            return frames.summary_frame(self._data.phase, self._distributions, wanted)
        return frames.summary_frame(self._data.phase, distributions(self._data, wanted), wanted)

    @property
    def failures(self) -> pd.DataFrame:
        """A row a failed stream, index ``stream_id``: error_type, error_message, exit_code, ..."""
        from lmcache_mp.metrics import frames

        return frames.failure_frame(self._data)

    # What is computed

    @property
    def _data(self) -> PhaseData:
        if self._phase is None:
            raise UsageError(f"report {self.title!r} was made by hand: it has no phase's data")
        return self._phase

    @cached_property
    def _totals(self) -> dict[str, int | float]:
        return totals(self._data)

    @cached_property
    def _distributions(self) -> dict[str, Distribution]:
        return distributions(self._data)

    @property
    def _extras(self) -> Mapping[str, Mapping[str, object]]:
        """Keys that only ``to_dict`` has, by section."""
        if self._phase is None:
            return {}
        data = self._phase
        names = _MODIFY_RESULTS if data.phase == "modify" else _GENERATE_RESULTS
        config = {
            "num_streams": self._totals["num_streams"],
            "phase": data.phase,
            "run": data.run,
            "round": data.round,
        }
        latency = latency_keys(data.phase, self._distributions)
        return {
            "config": config,
            "results": {name: plain(self._totals[name]) for name in names},
            "latency": {name: plain(value) for name, value in latency.items()},
        }

    def _block(self) -> Block | None:
        if self._phase is None:
            return None
        edit = self._phase.phase == "modify"
        rows = []
        for metric in reported(self._phase.phase):
            it = self._distributions[metric.name]
            unit = None if metric.unit == "tokens" else metric.unit  # its label says tokens
            values = (it.mean, it.std, *it.percentiles)
            rows.append((metric.label, [quantity(value, unit) for value in values]))
        return Block(
            "Edits" if edit else "Latency",
            [
                (TOTAL[name].label, quantity(self._totals[name], TOTAL[name].unit))
                for name in (_MODIFY_ENTRIES if edit else _GENERATE_ENTRIES)
            ],
            ["mean", "std", *(f"p{percentile:g}" for percentile in PERCENTILES)],
            rows,
        )

    def __getstate__(self) -> dict[str, object]:
        phase = None if self._phase is None else self._phase.portable()
        return {**self.__dict__, "_handlers": [], "_phase": phase}
