"""Records: raw bytes of many passes become one array, and the layout stays what VERSION says."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp import records
from lmcache_mp.records import GENERATE, MODIFY, Events, join_rows

timelines = st.lists(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 2**31 - 1)), max_size=5), max_size=8
)


def as_bytes(timeline):
    times, counts = [t for t, _ in timeline], [k for _, k in timeline]
    return np.array(times, "<f8").tobytes(), np.array(counts, "<i4").tobytes()


@given(timelines)
def test_events_of_every_pass_are_found_again(passes):
    events = Events.join(as_bytes(timeline) for timeline in passes)
    assert len(events.offsets) == len(passes) + 1
    for i, timeline in enumerate(passes):
        mine = slice(events.offsets[i], events.offsets[i + 1])
        assert list(zip(events.times[mine], events.counts[mine], strict=True)) == timeline


def test_events_of_no_pass():
    assert Events.join([]).offsets.tolist() == [0]


def test_passes_without_events():
    events = Events.empty(3)
    assert events.offsets.tolist() == [0, 0, 0, 0]
    assert len(events.times) == len(events.counts) == 0


@pytest.mark.parametrize("dtype", [GENERATE, MODIFY], ids=["generate", "modify"])
def test_rows_join_in_order(dtype):
    rows = np.zeros(3, dtype)
    rows["stream"] = [4, 2, 9]
    rows["start_time"] = [1.5, np.nan, 1e9 + 1e-6]
    joined = join_rows((row.tobytes() for row in rows), dtype)
    assert joined.dtype == dtype
    assert joined.tobytes() == rows.tobytes()
    assert joined["stream"].tolist() == [4, 2, 9]
    assert len(join_rows([], dtype)) == 0


def test_a_part_of_a_row_is_refused():
    with pytest.raises(ValueError, match="multiple"):
        join_rows([np.zeros(1, GENERATE).tobytes()[:-1]], GENERATE)


def test_the_layout_is_the_one_of_the_version():
    """A change here needs another VERSION: the two ends of a pipe may be of different releases."""
    common = "stream:<i4 status:|i1 attempt:<i4 worker:<i4 pid:<i4 start_time:<f8 duration:<f8"
    layouts = {
        dtype.itemsize: " ".join(f"{name}:{dtype[name].str}" for name in dtype.names or ())
        for dtype in (GENERATE, MODIFY)
    }
    assert records.VERSION == 2
    assert layouts == {
        66: f"{common} input_tokens:<i4 cached_tokens:<i4 output_tokens:<i4"
        " reported_tokens:<i4 kv_used:|i1"
        " finish_reason:|S16",
        73: f"{common} tokens_before:<i4 tokens_after:<i4 stored_tokens:<i4 recomputed_tokens:<i4"
        " retrieve_s:<f8 fn_s:<f8 store_s:<f8",
    }


def test_wall_clock_follows_the_monotonic_clock():
    before, reading, after = time.time(), time.perf_counter(), time.time()
    # Half a second allows for a clock that is being slewed since the anchor was taken.
    assert before - 0.5 <= records.wall_clock(reading) <= after + 0.5
    passed = records.wall_clock(reading + 2.5) - records.wall_clock(reading)
    assert passed == pytest.approx(2.5, abs=1e-6)


def test_a_worker_can_record_without_pandas():
    code = "import sys, lmcache_mp.records; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
