"""From what passes measured to a report: means and percentiles over streams and over all gaps.

Ours takes the raw bytes that workers send and ends with ``Metrics.to_dict()``. Beside it: the same
numbers in a loop over lists of floats, as LMCache's ``StreamPerfMetrics`` has them, and numpy over
those lists.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

import numpy as np
from pairs import Board, alternate, arguments, seconds

from lmcache_mp import records
from lmcache_mp.metrics.phase import PhaseData
from lmcache_mp.metrics.report import Metrics

PERCENTILES = (50, 90, 95, 99)
Sample = tuple[list[bytes], list[tuple[bytes, bytes]], list[list[float]], list[float]]


def sample(streams: int, gaps: int, seed: int) -> Sample:
    """Rows and events as bytes, and the same times as lists: gaps of each stream, and its TTFT."""
    rng = np.random.default_rng(seed)
    rows, events, lists, firsts = [], [], [], []
    counts = np.ones(gaps + 1, np.int32).tobytes()
    for stream in range(streams):
        times = rng.gamma(4.0, 0.005, gaps + 1).cumsum()
        row = np.zeros(1, records.GENERATE)
        row["stream"], row["attempt"], row["duration"] = stream, 1, times[-1]
        row["input_tokens"], row["output_tokens"] = 64, gaps + 1
        rows.append(row.tobytes())
        events.append((times.tobytes(), counts))
        lists.append(np.diff(times).tolist())
        firsts.append(float(times[0]))
    return rows, events, lists, firsts


def ours(rows: list[bytes], events: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The latencies of the report."""
    ids = [str(index) for index in range(len(rows))]
    data = PhaseData(
        phase="decode",
        duration=1.0,
        stream_ids=ids,
        custom_ids=[None] * len(ids),
        records=records.join_rows(rows, records.GENERATE),
        events=records.Events.join(events),
    )
    latency: dict[str, Any] = Metrics.from_phase(data).to_dict()["metrics"]["latency"]
    return latency


def by_loop(lists: list[list[float]], firsts: list[float]) -> dict[str, float]:
    """Plain Python."""
    pooled: list[float] = []
    tpot, e2el = [], []
    for gaps, first in zip(lists, firsts, strict=True):
        total = 0.0
        for gap in gaps:
            total += gap
            pooled.append(gap)
        tpot.append(total / len(gaps))
        e2el.append(first + total)
    found = {}
    for name, values in (("ttft", firsts), ("tpot", tpot), ("itl", pooled), ("e2el", e2el)):
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered)
        found[f"mean_{name}_ms"] = mean * 1e3
        square = sum((value - mean) ** 2 for value in ordered) / len(ordered)
        found[f"std_{name}_ms"] = math.sqrt(square) * 1e3
        for percent in PERCENTILES:
            place = percent / 100 * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            value = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
            found[f"p{percent}_{name}_ms"] = value * 1e3
    return found


def by_numpy(lists: list[list[float]], firsts: list[float]) -> dict[str, float]:
    """numpy, from the same lists."""
    arrays = [np.array(gaps) for gaps in lists]
    first = np.array(firsts)
    total = np.array([each.sum() for each in arrays])
    tpot = total / np.array([each.size for each in arrays])
    found = {}
    quantities = {"ttft": first, "tpot": tpot, "itl": np.concatenate(arrays), "e2el": first + total}
    for name, values in quantities.items():
        found[f"mean_{name}_ms"] = float(values.mean()) * 1e3
        found[f"std_{name}_ms"] = float(values.std()) * 1e3
        for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
            found[f"p{percent}_{name}_ms"] = float(value) * 1e3
    return found


def main() -> int:
    """Check that all three say the same, and run the pairs."""
    options = arguments(__doc__, {"streams": (10_000, 2_000), "gaps": (256, 256)})
    board = Board("aggregation", "Aggregation", options)
    rows, events, lists, firsts = sample(options.streams, options.gaps, options.seed)
    report, loop = ours(rows, events), by_loop(lists, firsts)
    for name, value in by_numpy(lists, firsts).items():
        for other in (loop[name], report[name]):
            assert math.isclose(value, other, rel_tol=1e-6), (name, value, other)
    runs = {
        "ours": lambda: seconds(lambda: ours(rows, events)),
        "a loop over lists": lambda: seconds(lambda: by_loop(lists, firsts)),
        "numpy over lists": lambda: seconds(lambda: by_numpy(lists, firsts)),
    }
    values = alternate(runs, options.pairs)
    label = f"{options.streams:,} streams of {options.gaps} gaps"
    board.compare(label, values, "s", {"a loop over lists": 10.0})
    each = statistics.median(values["ours"]) / (options.streams * options.gaps) * 1e9
    board.note(f"ours takes {each:.0f} ns a gap")
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
