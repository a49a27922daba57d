"""Every metric on timelines computed by hand, and against a plain loop over streams."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.errors import UsageError
from lmcache_mp.metrics import Metrics
from tests.metrics.phases import (
    BROKEN,
    CHUNKED,
    NEVER,
    NONE,
    ONE,
    THREE,
    Edit,
    Pass,
    generate_phase,
    modify_phase,
)

approx = pytest.approx


def column(name, *passes, **more):
    return Metrics.from_phase(generate_phase(*passes, **more)).to_frame()[name].tolist()


def results(*passes, **more):
    return Metrics.from_phase(generate_phase(*passes, **more)).to_dict()["metrics"]["results"]


def summary(*passes, **more):
    return Metrics.from_phase(generate_phase(*passes, **more)).summary()


def test_ttft_is_the_time_of_the_first_event():
    assert column("ttft", THREE, CHUNKED, ONE, NONE) == approx(
        [0.1, 0.2, 0.1, math.nan], nan_ok=True
    )


def test_tpot_is_over_the_tokens_after_the_first():
    # (0.16 - 0.1) / 2; (0.5 - 0.2) / 4: tokens are counted, not events.
    expected = [0.03, 0.075, math.nan, math.nan]
    assert column("tpot", THREE, CHUNKED, ONE, NONE) == approx(expected, nan_ok=True)


def test_tpot_counts_the_tokens_of_the_first_event():
    assert column("tpot", Pass(((0.1, 2), (0.4, 2)))) == approx([0.1])


def test_e2el_is_the_duration_of_the_pass():
    assert column("e2el", THREE, NONE) == approx([0.2, 0.2])


def test_dispatch_delay_is_the_wait_for_a_slot():
    delayed = replace(THREE, delay=0.5)
    assert column("dispatch_delay", delayed, THREE) == approx([0.5, 0.0], abs=1e-6)
    assert column("scheduled_latency", delayed) == approx([0.7], abs=1e-6)


def test_clocks_that_disagree_make_no_negative_delay():
    assert column("dispatch_delay", replace(THREE, delay=-1e-3)) == [0.0]


def test_an_unknown_start_of_the_phase_leaves_the_delay_undefined():
    values = column("scheduled_latency", THREE, started_at=math.nan)
    assert values == approx([math.nan], nan_ok=True)


def test_icl_is_the_gap_between_events():
    row = summary(THREE, CHUNKED, ONE, NONE).loc["icl"]
    assert row["count"] == 4
    assert row["mean"] == approx((0.02 + 0.04 + 0.1 + 0.2) / 4)


def test_itl_spreads_a_gap_over_the_tokens_that_end_it():
    row = summary(CHUNKED).loc["itl"]
    assert row["count"] == 4  # 0.1 / 3 three times, and 0.2
    assert row["mean"] == approx(0.3 / 4)
    assert row["min"] == approx(0.1 / 3)
    assert row["p50"] == approx(0.1 / 3)
    assert row["max"] == approx(0.2)


def test_itl_is_icl_where_each_event_has_one_token():
    frame = summary(THREE)
    assert frame.loc["itl"].tolist() == frame.loc["icl"].tolist()


def test_itl_is_pooled_over_tokens_and_tpot_over_streams():
    slow = Pass(((0.1, 1), (1.1, 1)))
    frame = summary(THREE, slow)
    assert frame.loc["itl", "mean"] == approx((0.02 + 0.04 + 1.0) / 3)
    assert frame.loc["tpot", "mean"] == approx((0.03 + 1.0) / 2)


def test_std_is_of_the_population():
    frame = summary(ONE, replace(ONE, events=((0.3, 1),)))
    assert frame.loc["ttft", "std"] == approx(0.1)


def test_percentiles_are_interpolated():
    passes = [Pass(((float(second), 1),)) for second in (1, 2, 3, 4)]
    frame = Metrics.from_phase(generate_phase(*passes)).summary(percentiles=(0, 50, 99.9, 100))
    assert list(frame.columns) == [
        *("count", "mean", "std", "min", "p0", "p50", "p99.9", "p100", "max")
    ]
    assert frame.loc["ttft", ["p0", "p50", "p99.9", "p100"]].tolist() == approx([1, 2.5, 3.997, 4])


@pytest.mark.parametrize("percentile", [-1, 100.5, math.nan])
def test_a_percentile_out_of_range_is_refused(percentile):
    with pytest.raises(UsageError, match="between 0 and 100"):
        Metrics.from_phase(generate_phase(ONE)).summary(percentiles=(50, percentile))


def test_sums_and_rates():
    got = results(THREE, CHUNKED, ONE, NONE, duration=2.0)
    assert got["output_tokens"] == got["total_output_tokens"] == 9
    assert got["total_input_tokens"] == 40
    assert got["output_tput"] == got["output_throughput"] == approx(4.5)
    assert got["request_throughput"] == approx(2.0)
    assert (got["completed"], got["failed"]) == (4, 0)


def test_prefill_has_the_rate_of_its_input():
    got = results(THREE, ONE, phase="prefill", duration=4.0)
    assert (got["input_tokens"], got["input_tput"]) == (20, 5.0)


def test_decode_rate_is_of_a_stream_and_without_its_first_token():
    assert results(THREE)["decode_rate"] == approx(2 / 0.06)
    assert results(THREE, CHUNKED)["decode_rate"] == approx(6 / 0.36)


@pytest.mark.parametrize("passes", [(ONE,), (NONE,), (BROKEN,), (), (Pass(((0.1, 3),)),)])
def test_decode_rate_needs_time_between_tokens(passes):
    assert results(*passes)["decode_rate"] is None


def test_sums_do_not_wrap():
    huge = replace(NONE, prompt=2**31 - 1)
    assert results(huge, huge)["total_input_tokens"] == 2**32 - 2


def test_failed_streams_are_in_no_aggregate():
    alone, mixed = summary(THREE), summary(THREE, BROKEN, NEVER)
    assert mixed.drop(columns="count").equals(alone.drop(columns="count"))
    assert mixed["count"].tolist() == alone["count"].tolist()
    got = results(THREE, BROKEN, NEVER)
    assert (got["completed"], got["failed"], got["output_tokens"]) == (1, 2, 3)


@pytest.mark.parametrize("passes", [(), (BROKEN, BROKEN), (NONE,), (NEVER,)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_nothing_defines_is_missing(passes, phase):
    metrics = Metrics.from_phase(generate_phase(*passes, phase=phase, duration=0.0))
    data = metrics.to_dict()["metrics"]
    assert all(value is None for key, value in data["latency"].items() if "e2el" not in key)
    assert data["results"]["request_throughput"] is None
    frame = metrics.summary()
    assert frame.loc["ttft", "count"] == 0
    assert frame.loc["ttft"].drop("count").isna().all()


def test_an_edit_by_hand():
    frame = Metrics.from_phase(modify_phase(Edit(before=64, after=40, stored=32))).to_frame()
    row = frame.iloc[0]
    assert row["compression_ratio"] == approx(1 - 40 / 64)
    counts = row[["tokens_before", "tokens_after", "stored_tokens", "recomputed_tokens"]]
    assert counts.tolist() == [64, 40, 32, 8]
    assert row[["retrieve_s", "fn_s", "store_s"]].tolist() == [0.1, 0.2, 0.4]


def test_edits_together():
    data = modify_phase(
        Edit(), Edit(after=64, stored=64, seconds=(0.3, 0.2, 0.4)), Edit(failed=True)
    )
    metrics = Metrics.from_phase(data)
    frame, got = metrics.summary(), metrics.to_dict()["metrics"]
    assert frame.loc["compression_ratio", "mean"] == approx((0.375 + 0) / 2)
    assert frame.loc["retrieve_s", ["count", "mean", "std"]].tolist() == approx([2, 0.2, 0.1])
    assert got["latency"]["mean_retrieve_ms"] == approx(200)
    assert got["latency"]["p50_store_ms"] == approx(400)
    assert (got["results"]["total_tokens_before"], got["results"]["total_tokens_after"]) == (
        128,
        104,
    )


def test_a_failed_edit_has_no_result():
    row = Metrics.from_phase(modify_phase(Edit(failed=True))).to_frame().iloc[0]
    assert row["tokens_before"] == 64
    assert row.drop("tokens_before").loc["tokens_after":].isna().all()


def test_latency_keys_are_in_milliseconds():
    latency = Metrics.from_phase(generate_phase(THREE)).to_dict()["metrics"]["latency"]
    stats = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    assert list(latency) == [
        f"{stat}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for stat in stats
    ]
    assert latency["mean_ttft_ms"] == latency["median_ttft_ms"] == approx(100)
    assert latency["p50_itl_ms"] == approx(30)
    assert latency["std_itl_ms"] == approx(10)


events = st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 4)), max_size=6)
passes = st.builds(
    lambda gaps, tail, failed: Pass(
        tuple(zip(np.cumsum([gap for gap, _ in gaps]).tolist(), [k for _, k in gaps], strict=True)),
        duration=sum(gap for gap, _ in gaps) + tail,
        failed=failed,
    ),
    events,
    st.floats(0, 1),
    st.booleans(),
)


@given(st.lists(passes, max_size=7))
def test_vectorised_equals_a_loop_over_streams(batch):
    values = {name: [] for name in ("ttft", "tpot", "e2el", "icl", "itl")}
    for it in batch:
        if it.failed:
            continue
        values["e2el"].append(it.duration)
        if not it.events:
            continue
        tokens = sum(k for _, k in it.events)
        values["ttft"].append(it.events[0][0])
        if tokens > 1:
            values["tpot"].append((it.events[-1][0] - it.events[0][0]) / (tokens - 1))
        for (before, _), (after, k) in zip(it.events, it.events[1:], strict=False):
            values["icl"].append(after - before)
            values["itl"] += [(after - before) / k] * k
    frame = Metrics.from_phase(generate_phase(*batch)).summary()
    for name, expected in values.items():
        row = frame.loc[name]
        assert row["count"] == len(expected)
        if not expected:
            assert row.drop("count").isna().all()
            continue
        wanted = [np.mean(expected), np.std(expected), min(expected), max(expected)]
        assert row[["mean", "std", "min", "max"]].tolist() == approx(wanted, rel=1e-9, abs=1e-12)
        percentiles = np.percentile(expected, [50, 90, 95, 99]).tolist()
        assert row[["p50", "p90", "p95", "p99"]].tolist() == approx(percentiles, rel=1e-9)
