"""DataFrames of a phase. The only module of the report that imports pandas; imported on first use.

Dtypes are explicit throughout, so a column keeps its dtype whether it is full, empty or all missing
and frames of several phases concatenate without surprises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray

from lmcache_mp.metrics import definitions
from lmcache_mp.metrics.aggregate import Distribution, stream_values
from lmcache_mp.metrics.definitions import Definition
from lmcache_mp.metrics.phase import PhaseData, Scalar
from lmcache_mp.records import UNKNOWN

#: What becomes a column.
Values = Sequence[object] | NDArray[np.generic] | ExtensionArray


def stream_frame(data: PhaseData) -> pd.DataFrame:
    """A row a stream, index ``stream_id``: columns of ``definitions.metrics``, then infos."""
    metrics = definitions.metrics(data.phase)
    table = _table({**stream_values(data), **_facts(data)}, metrics)
    for name, info in _infos(data.infos).items():
        while name in table:
            name = f"info_{name}"
        table[name] = _inferred(info)
    frame: pd.DataFrame = pd.DataFrame(table, index=_index(data.stream_ids))
    frame.attrs["units"] = definitions.units(it for it in metrics if it.dtype)
    return frame


def event_frame(data: PhaseData) -> pd.DataFrame:
    """A row an event, of failed streams too: columns of ``definitions.EVENTS``."""
    events = data.timeline()
    sizes = np.diff(events.offsets)
    # The index of an event less that of its stream's first.
    index = np.arange(events.times.size) - np.repeat(events.offsets[:-1], sizes)
    icl = np.diff(events.times, prepend=np.nan)
    icl[index == 0] = np.nan
    values: dict[str, Values] = {
        "stream_id": _index(data.stream_ids).array.repeat(sizes),
        "event_index": index,
        "event_tokens": events.counts,
        "t": events.times,
        "icl": icl,
        "itl": icl / events.counts,
    }
    frame: pd.DataFrame = pd.DataFrame(_table(values, definitions.EVENTS))
    frame.attrs["units"] = definitions.units(definitions.EVENTS)
    return frame


def summary_frame(
    phase: str, statistics: Mapping[str, Distribution], percentiles: Sequence[float]
) -> pd.DataFrame:
    """A row a metric of ``phase``: count, mean, std (ddof=0), min, the percentiles and max."""
    metrics = definitions.summarised(phase)
    rows = [statistics[metric.name] for metric in metrics]
    table = {
        "count": np.array([row.count for row in rows], np.int64),
        "mean": np.array([row.mean for row in rows], np.float64),
        "std": np.array([row.std for row in rows], np.float64),
        "min": np.array([row.min for row in rows], np.float64),
        **{
            f"p{percentile:g}": np.array([row.percentiles[i] for row in rows], np.float64)
            for i, percentile in enumerate(percentiles)
        },
        "max": np.array([row.max for row in rows], np.float64),
    }
    index = pd.Index([metric.name for metric in metrics], dtype="string", name="metric")
    frame: pd.DataFrame = pd.DataFrame(table, index=index)
    frame.attrs["units"] = definitions.units(metrics)
    return frame


def failure_frame(data: PhaseData) -> pd.DataFrame:
    """A row a failed stream, index ``stream_id``; columns of ``definitions.FAILURES``."""
    failures = [data.failures[key] for key in data.stream_ids if key in data.failures]
    values: dict[str, Values] = {
        it.name: [getattr(failure, it.name) for failure in failures] for it in definitions.FAILURES
    }
    index = _index([failure.stream_id for failure in failures])
    frame: pd.DataFrame = pd.DataFrame(_table(values, definitions.FAILURES), index=index)
    return frame


def _table(
    values: Mapping[str, Values], columns: Iterable[Definition]
) -> dict[str, ExtensionArray]:
    """The columns, in their order and with their dtypes; those without one are left out."""
    return {it.name: _array(values[it.name], it.dtype) for it in columns if it.dtype is not None}


def _array(values: Values, dtype: str) -> ExtensionArray:
    array: ExtensionArray = pd.array(values, dtype=dtype)  # type: ignore[call-overload]  # a dtype by name
    return array


def _index(stream_ids: Sequence[str]) -> pd.Index[str]:
    index: pd.Index[str] = pd.Index(list(stream_ids), dtype="string", name="stream_id")
    return index


def _facts(data: PhaseData) -> dict[str, Values]:
    """Every column that is not a quantity, before it has its dtype."""
    rows, count = data.records, len(data.records)
    failures = [data.failures.get(stream_id) for stream_id in data.stream_ids]
    nothing: list[str | None] = [None] * count
    facts: dict[str, Values] = {
        "run": [data.run] * count,
        "phase": [data.phase] * count,
        "round": np.full(count, data.round),
        "custom_id": list(data.custom_ids),
        "status": np.where(data.completed, "completed", "failed").astype(object),
        "error_type": [failure and failure.error_type for failure in failures],
        "error_message": [failure and failure.error_message for failure in failures],
        "worker_id": _masked(rows["worker"], data.began),
        "worker_pid": _masked(rows["pid"], data.began),
        "attempt": rows["attempt"],
    }
    if data.phase == "modify":
        return facts
    reasons = rows["finish_reason"].tolist()
    generated: dict[str, Values] = {
        "finish_reason": [reason.decode("ascii", "replace") or None for reason in reasons],
        "kv_used": _masked(rows["kv_used"] == 1, data.began & (rows["kv_used"] != UNKNOWN)),
        "output_text": list(data.texts) if len(data.texts) else nothing,
    }
    return facts | generated


def _masked(values: NDArray[np.generic], known: NDArray[np.bool_]) -> NDArray[np.object_]:
    masked = values.astype(object)
    masked[~known] = None
    return masked


def _infos(infos: Sequence[Mapping[str, Scalar] | None]) -> dict[str, list[Scalar]]:
    """Columns of the infos' union of keys, in the order they first come."""
    names = dict.fromkeys(name for info in infos if info for name in info)
    return {name: [info.get(name) if info else None for info in infos] for name in names}


def _inferred(infos: Sequence[Scalar]) -> ExtensionArray:
    """The nullable array of what the values are, all being bools, ints, numbers or strings."""
    values = [value.item() if isinstance(value, np.generic) else value for value in infos]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        dtype = "boolean"
    elif kinds == {int} and _fit_int64(values):
        dtype = "Int64"
    elif kinds and kinds <= {int, float}:
        dtype = "float64"
    elif kinds <= {str}:
        dtype = "string"
    else:
        dtype = "object"
    return _array(values, dtype)


def _fit_int64(values: Sequence[object]) -> bool:
    return all(abs(value) < 2**63 for value in values if isinstance(value, int))


#: Columns of a run's table that are not a round's own.
_OF_THE_RUN = ("run", "phase", "round", "custom_id", "status", "error_type", "error_message")
_LAST = ("output_text", "finish_reason")


def run_frame(names: Sequence[str], rounds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """A row a stream over the frames of several rounds, the first of which has every stream."""
    first = rounds[0]
    head = first[["custom_id", "status", "error_type", "error_message"]].copy()
    for name in _LAST:
        head[name] = pd.Series(pd.NA, first.index, dtype="string")
    for frame in rounds:
        failed = frame.index[frame["status"] == "failed"]
        for name in ("status", "error_type", "error_message"):
            head.loc[failed, name] = frame.loc[failed, name]
        for name in _LAST:
            if name in frame:
                head.loc[frame.index, name] = frame[name]
    parts = [
        frame.drop(columns=[*_OF_THE_RUN, "output_text"], errors="ignore")
        .reindex(first.index)
        .add_prefix(f"{name}.")
        for name, frame in zip(names, rounds, strict=True)
    ]
    table: pd.DataFrame = pd.concat([head, *parts], axis=1)
    return table


def concatenated(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of all frames, which have the same columns."""
    together: pd.DataFrame = pd.concat(list(frames))
    return together
