"""Frames: rows, columns, dtypes that never change, and what a failure leaves."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lmcache_mp.metrics import Metrics, PhaseData
from lmcache_mp.metrics.definitions import metrics as definitions_of
from tests.metrics.phases import (
    BROKEN,
    CHUNKED,
    NEVER,
    NONE,
    ONE,
    STARTED_AT,
    THREE,
    Edit,
    failure,
    generate_phase,
    modify_phase,
)

GENERATE_COLUMNS = [
    *("run", "phase", "round", "custom_id", "status", "error_type", "error_message"),
    *("worker_id", "worker_pid", "attempt", "start_time", "dispatch_delay"),
    *("input_tokens", "cached_tokens", "output_tokens", "reported_tokens", "finish_reason"),
    *("ttft", "tpot", "e2el", "scheduled_latency", "kv_used", "output_text"),
]
MODIFY_COLUMNS = [
    *GENERATE_COLUMNS[:12],
    *("tokens_before", "tokens_after", "stored_tokens", "recomputed_tokens"),
    *("compression_ratio", "retrieve_s", "fn_s", "store_s"),
]

GENERATE_PHASES = {
    "all completed": generate_phase(
        replace(THREE, cached=4, kv_used=1, custom_id="c"), texts=["out"], run="r"
    ),
    "some failed": generate_phase(THREE, BROKEN, texts=["out", ""]),
    "all failed": generate_phase(BROKEN, NEVER, phase="prefill"),
    "no streams": generate_phase(),
}
MODIFY_PHASES = {
    "all completed": modify_phase(Edit()),
    "some failed": modify_phase(Edit(), Edit(failed=True)),
    "all failed": modify_phase(Edit(failed=True), Edit(failed=True, attempt=0)),
    "no streams": modify_phase(),
}


def frame_of(data: PhaseData) -> pd.DataFrame:
    return Metrics.from_phase(data).to_frame()


def test_a_row_a_stream_in_the_order_of_add():
    data = generate_phase(
        replace(THREE, cached=4, kv_used=1, custom_id="mine"),
        replace(BROKEN, kv_used=0, finish_reason=b""),
        texts=["the text", "th"],
        run="baseline",
        round=2,
    )
    frame = frame_of(data)
    assert frame.index.tolist() == ["s0", "s1"]
    assert frame.index.name == "stream_id"
    assert list(frame.columns) == GENERATE_COLUMNS
    first, second = frame.loc["s0"], frame.loc["s1"]
    assert first[["run", "phase", "round", "custom_id"]].tolist() == [
        *("baseline", "decode", 2, "mine")
    ]
    assert first[["status", "finish_reason", "output_text"]].tolist() == [
        *("completed", "stop", "the text")
    ]
    assert first[["error_type", "error_message"]].isna().all()
    assert (first["cached_tokens"], first["output_tokens"], first["kv_used"]) == (4, 3, True)
    assert first["start_time"] == STARTED_AT
    assert second[["status", "error_type", "error_message"]].tolist() == [
        *("failed", "EngineError", "it broke")
    ]
    assert (second["worker_id"], second["worker_pid"], second["attempt"]) == (1, 4242, 1)
    assert not second["kv_used"]
    assert pd.isna(second["cached_tokens"])
    assert pd.isna(second["custom_id"])
    assert pd.isna(second["finish_reason"])
    # What arrived before it broke is kept.
    assert (second["ttft"], second["output_tokens"], second["output_text"]) == (0.1, 2, "th")


def test_a_pass_that_never_began_has_no_times_and_no_worker():
    row = frame_of(generate_phase(NEVER)).iloc[0]
    missing = ["worker_id", "worker_pid", "start_time", "dispatch_delay", "ttft", "e2el"]
    assert row[[*missing, "scheduled_latency", "cached_tokens", "kv_used"]].isna().all()
    assert row["attempt"] == 0


def test_an_engine_that_does_not_report_leaves_kv_used_null():
    assert frame_of(generate_phase(THREE))["kv_used"].isna().all()


@pytest.mark.parametrize("phases", [GENERATE_PHASES, MODIFY_PHASES], ids=["generate", "modify"])
def test_dtypes_are_the_same_whatever_happened(phases):
    dtypes = [frame_of(data).dtypes for data in phases.values()]
    assert all(it.equals(dtypes[0]) for it in dtypes)
    assert isinstance(dtypes[0]["error_type"], pd.StringDtype)
    assert dtypes[0]["error_type"].na_value is pd.NA


def test_what_may_be_missing_has_a_nullable_dtype():
    dtypes = frame_of(generate_phase(THREE)).dtypes.astype(str)
    assert dtypes[["cached_tokens", "kv_used"]].tolist() == ["Int64", "boolean"]
    assert dtypes[["input_tokens", "output_tokens", "ttft"]].tolist() == [
        *("int64", "int64", "float64")
    ]
    assert set(frame_of(modify_phase(Edit())).dtypes.astype(str)["tokens_before":]) == {
        *("Int64", "float64")
    }


@pytest.mark.parametrize("phases", [GENERATE_PHASES, MODIFY_PHASES], ids=["generate", "modify"])
def test_frames_concatenate_and_keep_their_dtypes(phases):
    frames = [frame_of(data) for data in phases.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = pd.concat(frames)
    assert together.dtypes.equals(frames[0].dtypes)
    assert len(together) == sum(map(len, frames))


def test_columns_of_a_modify_end_with_its_infos():
    infos = [{"kept": 3, "score": 0.5, "method": "snap", "ok": True}, None, {"late": 1}]
    frame = frame_of(modify_phase(*(Edit(info=info) for info in infos)))
    assert list(frame.columns) == [*MODIFY_COLUMNS, "kept", "score", "method", "ok", "late"]
    assert frame["kept"].tolist() == [3, pd.NA, pd.NA]
    dtypes = {name: str(dtype).split("[")[0] for name, dtype in frame.dtypes.items()}
    assert [dtypes[name] for name in ("kept", "score", "method", "ok", "late")] == [
        *("Int64", "float64", "string", "boolean", "Int64")
    ]


def test_infos_of_mixed_kinds():
    infos = [
        {"n": np.int64(1), "x": 1, "any": "a", "huge": 2**70, "void": None},
        {"n": np.int32(2), "x": 1.5, "any": 2, "huge": 1, "void": None},
    ]
    frame = frame_of(modify_phase(*(Edit(info=info) for info in infos)))
    assert frame["n"].tolist() == [1, 2]
    assert frame["x"].tolist() == [1.0, 1.5]
    assert frame["any"].tolist() == ["a", 2]
    assert frame["huge"].tolist() == [2**70, 1]
    assert frame["void"].isna().all()


def test_an_info_never_overwrites_a_column():
    frame = frame_of(modify_phase(Edit(info={"status": "fine"})))
    assert frame["status"].tolist() == ["completed"]
    assert frame["info_status"].tolist() == ["fine"]


def test_infos_whose_names_would_meet_are_kept_apart():
    info = {"status": "fine", "info_status": "finer"}
    frame = frame_of(modify_phase(Edit(info=info), Edit(info=dict(reversed(info.items())))))
    mine = [name for name in frame.columns if "fine" in str(frame[name].iloc[0])]
    assert len(mine) == 2 and len(set(frame.columns)) == len(frame.columns)
    assert set(frame[mine].iloc[0]) == set(frame[mine].iloc[1]) == {"fine", "finer"}


def test_units():
    units = frame_of(generate_phase(THREE)).attrs["units"]
    assert units["ttft"] == "s"
    assert units["output_tokens"] == "tokens"
    assert "status" not in units
    assert set(units) <= set(GENERATE_COLUMNS)
    assert Metrics.from_phase(generate_phase(THREE)).summary().attrs["units"]["itl"] == "s"


@pytest.mark.parametrize("phase", ["prefill", "decode", "modify"])
def test_every_metric_has_a_label_and_a_formula(phase):
    names = [it.name for it in definitions_of(phase)]
    assert len(set(names)) == len(names)
    assert all(it.label and it.formula for it in definitions_of(phase))


def test_itl_frame_has_a_row_an_event():
    data = generate_phase(CHUNKED, NONE, ONE, BROKEN)
    frame = Metrics.from_phase(data).itl_frame()
    assert list(frame.columns) == ["stream_id", "event_index", "event_tokens", "t", "icl", "itl"]
    assert frame["stream_id"].tolist() == ["s0"] * 3 + ["s2"] + ["s3"] * 2
    assert frame["event_index"].tolist() == [0, 1, 2, 0, 0, 1]
    assert frame["event_tokens"].tolist() == [1, 3, 1, 1, 1, 1]
    assert frame["t"].tolist() == [0.2, 0.3, 0.5, 0.1, 0.1, 5.0]
    nan = float("nan")
    expected = [nan, 0.1, 0.2, nan, nan, 4.9]
    assert frame["icl"].tolist() == pytest.approx(expected, nan_ok=True)
    expected[1] = 0.1 / 3
    assert frame["itl"].tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("data", [generate_phase(), generate_phase(NONE), modify_phase(Edit())])
def test_itl_frame_without_events(data):
    empty, full = (Metrics.from_phase(it).itl_frame() for it in (data, generate_phase(THREE)))
    assert len(empty) == 0
    assert empty.dtypes.equals(full.dtypes)


def test_failures_in_the_order_of_add():
    data = generate_phase(BROKEN, THREE, BROKEN)
    died = replace(failure("s2", "decode", "killed"), exit_code=-9, traceback="Traceback ...")
    data = replace(data, failures={"s2": died, "s0": data.failures["s0"]})
    frame = Metrics.from_phase(data).failures
    assert frame.index.tolist() == ["s0", "s2"]
    assert frame["error_message"].tolist() == ["it broke", "killed"]
    assert frame["exit_code"].tolist() == [pd.NA, -9]
    assert frame["worker_pid"].tolist() == [4242, 4242]
    none = Metrics.from_phase(generate_phase(THREE)).failures
    assert len(none) == 0
    assert none.dtypes.equals(frame.dtypes)


def test_a_frame_is_the_callers_to_change():
    metrics = Metrics.from_phase(generate_phase(THREE))
    frame, events = metrics.to_frame(), metrics.itl_frame()
    frame["ttft"] = 99.0
    frame.loc["s0", "e2el"] = 99.0
    events.loc[0, "t"] = 99.0
    events.loc[0, "event_tokens"] = 99
    assert metrics.to_frame()[["ttft", "e2el"]].iloc[0].tolist() == [0.1, 0.2]
    assert metrics.itl_frame().loc[0, ["t", "event_tokens"]].tolist() == [0.1, 1]
