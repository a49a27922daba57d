"""From records to numbers: vectorised over ragged arrays, no loop over streams or events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.metrics.definitions import reported, summarised
from lmcache_mp.metrics.phase import PhaseData
from lmcache_mp.records import UNKNOWN, Events

Floats = NDArray[np.float64]

#: Those of ``summary()`` unless asked for others, and of the report.
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one metric over all its values; NaN where there are none.

    ``std`` is the population's (ddof=0); ``percentiles`` are linearly interpolated.
    """

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: tuple[float, ...]


def describe(values: Floats, percentiles: Sequence[float] = PERCENTILES) -> Distribution:
    """The distribution of ``values`` [n] without its NaNs. Reorders ``values``: give it a copy."""
    missing = np.isnan(values)
    if missing.any():
        values = values[~missing]
    if not values.size:
        nan = math.nan
        return Distribution(0, nan, nan, nan, nan, (nan,) * len(percentiles))
    mean, std = float(values.mean()), float(values.std())
    # One call partitions once for all of them, the ends among them.
    ends = np.percentile(values, [0.0, *percentiles, 100.0], overwrite_input=True).tolist()
    return Distribution(values.size, mean, std, ends[0], ends[-1], tuple(ends[1:-1]))


def first_and_last(events: Events) -> tuple[Floats, Floats]:
    """Times of each pass' first and last event: two float64 [passes], NaN without an event."""
    filled = np.diff(events.offsets) > 0
    first = np.full(filled.size, math.nan)
    last = np.full(filled.size, math.nan)
    first[filled] = events.times[events.offsets[:-1][filled]]
    last[filled] = events.times[events.offsets[1:][filled] - 1]
    return first, last


def gaps(events: Events, selected: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.int32]]:
    """Gaps between the events of the ``selected`` passes, and the tokens that ended each gap."""
    sizes = np.diff(events.offsets)
    ends_gap = np.repeat(selected, sizes)
    ends_gap[events.offsets[:-1][sizes > 0]] = False
    # The very first event ends none: what is left of the mask is as long as the differences.
    return np.diff(events.times)[ends_gap[1:]], events.counts[ends_gap]


def _divide(dividend: Floats, divisor: Floats) -> Floats:
    """Elementwise ratio, NaN where the divisor is not positive (or NaN)."""
    result = np.full(dividend.shape, math.nan)
    np.divide(dividend, divisor, out=result, where=divisor > 0)
    return result


def _known(values: NDArray[np.generic], known: NDArray[np.bool_]) -> Floats:
    return np.where(known, values.astype(np.float64), math.nan)


def stream_values(data: PhaseData) -> dict[str, Floats]:
    """Every quantity that the phase's frame has a column for, by name: float64 [streams] each."""
    rows, began = data.records, data.began
    start_time = _known(rows["start_time"], began)
    duration = _known(rows["duration"], began)
    # Each process has its own wall-clock anchor: tiny negative delays would be its error, no time.
    delay = np.maximum(start_time - data.started_at, 0.0)
    common = {"start_time": start_time, "dispatch_delay": delay}
    if data.phase == "modify":
        return common | _edit_values(data)
    first, last = first_and_last(data.timeline())
    return common | {
        "input_tokens": rows["input_tokens"].astype(np.float64),
        "cached_tokens": _known(rows["cached_tokens"], began & (rows["cached_tokens"] != UNKNOWN)),
        "output_tokens": rows["output_tokens"].astype(np.float64),
        "reported_tokens": _known(
            rows["reported_tokens"], began & (rows["reported_tokens"] != UNKNOWN)
        ),
        "ttft": first,
        "tpot": _divide(last - first, rows["output_tokens"] - 1),
        "e2el": duration,
        "scheduled_latency": delay + duration,
    }


def _edit_values(data: PhaseData) -> dict[str, Floats]:
    rows, completed = data.records, data.completed
    counts = {
        # A failed edit may have been given its tokens; it has no result.
        "tokens_before": _known(rows["tokens_before"], completed | (rows["tokens_before"] > 0)),
        "tokens_after": _known(rows["tokens_after"], completed),
        "stored_tokens": _known(rows["stored_tokens"], completed),
        "recomputed_tokens": _known(rows["recomputed_tokens"], completed),
    }
    seconds = {name: _known(rows[name], data.began) for name in ("retrieve_s", "fn_s", "store_s")}
    ratio = 1.0 - _divide(counts["tokens_after"], counts["tokens_before"])
    return counts | {"compression_ratio": ratio} | seconds


def distributions(
    data: PhaseData, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, Distribution]:
    """The distribution of every summarised metric over the streams that completed, by name.

    ``itl`` is pooled over all tokens that follow a stream's first event, ``icl`` over all gaps.
    """
    values, completed = stream_values(data), data.completed
    result = {
        metric.name: describe(values[metric.name][completed], percentiles)
        for metric in summarised(data.phase)
        if metric.name in values
    }
    if data.phase == "modify":
        return result
    icl, tokens = gaps(data.timeline(), completed)
    one_each = bool((tokens == 1).all())
    itl = icl if one_each else np.repeat(icl / tokens, tokens)
    result["itl"] = describe(itl, percentiles)
    result["icl"] = result["itl"] if one_each else describe(icl, percentiles)
    return result


def totals(data: PhaseData) -> dict[str, int | float]:
    """The phase's values (``definitions.TOTALS``), by name; NaN where undefined."""
    rows, duration = data.records[data.completed], float(data.duration)
    completed = len(rows)
    result: dict[str, int | float] = {
        "num_streams": len(data.records),
        "duration": duration,
        "completed": completed,
        "failed": len(data.records) - completed,
        "request_throughput": _rate(completed, duration),
        "setup_s": float(data.setup_s),
    }
    if data.phase == "modify":
        for name in ("tokens_before", "tokens_after"):
            result[f"total_{name}"] = int(rows[name].sum(dtype=np.int64))
        return result
    given = int(rows["input_tokens"].sum(dtype=np.int64))
    generated = int(rows["output_tokens"].sum(dtype=np.int64))
    return result | {
        "input_tokens": given,
        "input_tput": _rate(given, duration),
        "output_tokens": generated,
        "output_tput": _rate(generated, duration),
        "total_input_tokens": given,
        "total_output_tokens": generated,
        "output_throughput": _rate(generated, duration),
        "decode_rate": _decode_rate(data),
    }


def _decode_rate(data: PhaseData) -> float:
    first, last = first_and_last(data.timeline())
    counted = data.completed & (data.records["output_tokens"] > 1) & ~np.isnan(first)
    tokens = data.records["output_tokens"][counted].sum(dtype=np.int64) - counted.sum()
    return _rate(int(tokens), float((last - first)[counted].sum()))


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.nan


def latency_keys(phase: str, statistics: dict[str, Distribution]) -> dict[str, float]:
    """``mean_ttft_ms`` and its like for every reported latency of ``phase``, in milliseconds.

    The statistics are mean, median, std and the percentiles of ``PERCENTILES``.
    """
    result = {}
    for metric in reported(phase):
        if metric.unit != "s":
            continue
        values = statistics[metric.name]
        name = f"{metric.name.removesuffix('_s')}_ms"
        result[f"mean_{name}"] = values.mean * 1e3
        result[f"median_{name}"] = values.percentiles[PERCENTILES.index(50.0)] * 1e3
        result[f"std_{name}"] = values.std * 1e3
        for percentile, value in zip(PERCENTILES, values.percentiles, strict=True):
            result[f"p{percentile:g}_{name}"] = value * 1e3
    return result
