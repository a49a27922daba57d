"""Phases made by hand, through the same bytes that workers send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmcache_mp.errors import EngineError, StreamFailure
from lmcache_mp.metrics import PhaseData
from lmcache_mp.records import COMPLETED, FAILED, GENERATE, MODIFY, Events, join_rows

STARTED_AT = 1_700_000_000.0


@dataclass(frozen=True)
class Pass:
    """A generate pass: its events as (time, tokens), and when it ended."""

    events: tuple[tuple[float, int], ...] = ()
    duration: float = 0.2
    failed: bool = False
    delay: float = 0.0
    attempt: int = 1
    prompt: int = 10
    cached: int = -1
    kv_used: int = -1
    finish_reason: bytes = b"stop"
    custom_id: str | None = None


@dataclass(frozen=True)
class Edit:
    before: int = 64
    after: int = 40
    stored: int = 32
    seconds: tuple[float, float, float] = (0.1, 0.2, 0.4)
    failed: bool = False
    attempt: int = 1
    info: dict | None = None


def failure(stream_id: str, phase: str, message: str = "it broke") -> StreamFailure:
    return StreamFailure(
        stream_id, phase, EngineError(message), "EngineError", message, worker_pid=4242
    )


def _common(row: np.ndarray, index: int, it: Pass | Edit) -> None:
    row["stream"] = index
    row["status"] = FAILED if it.failed else COMPLETED
    row["attempt"] = it.attempt
    row["worker"], row["pid"] = index % 2, 4242


def generate_phase(
    *passes: Pass, phase: str = "decode", duration: float = 2.0, **more
) -> PhaseData:
    rows = np.zeros(len(passes), GENERATE)
    for index, (row, it) in enumerate(zip(rows, passes, strict=True)):
        _common(row, index, it)
        row["start_time"] = STARTED_AT + it.delay
        row["duration"] = it.duration
        row["input_tokens"], row["cached_tokens"] = it.prompt, it.cached
        row["output_tokens"] = sum(tokens for _, tokens in it.events)
        row["reported_tokens"] = row["output_tokens"]
        row["kv_used"], row["finish_reason"] = it.kv_used, it.finish_reason
    events = Events.join(
        (
            np.array([time for time, _ in it.events], "<f8").tobytes(),
            np.array([tokens for _, tokens in it.events], "<i4").tobytes(),
        )
        for it in passes
    )
    ids = [f"s{index}" for index in range(len(passes))]
    given = {
        "started_at": STARTED_AT,
        "failures": {
            key: failure(key, phase) for key, it in zip(ids, passes, strict=True) if it.failed
        },
        **more,
    }
    return PhaseData(
        phase,
        duration,
        ids,
        [it.custom_id for it in passes],
        join_rows([row.tobytes() for row in rows], GENERATE),
        events,
        **given,
    )


def modify_phase(*edits: Edit, duration: float = 2.0, **more) -> PhaseData:
    rows = np.zeros(len(edits), MODIFY)
    for index, (row, it) in enumerate(zip(rows, edits, strict=True)):
        _common(row, index, it)
        row["start_time"] = STARTED_AT
        row["tokens_before"] = it.before
        if it.failed:
            row["retrieve_s"] = row["fn_s"] = row["store_s"] = math.nan
            continue
        row["tokens_after"], row["stored_tokens"] = it.after, it.stored
        row["recomputed_tokens"] = it.after - it.stored
        row["retrieve_s"], row["fn_s"], row["store_s"] = it.seconds
    ids = [f"s{index}" for index in range(len(edits))]
    given = {
        "started_at": STARTED_AT,
        "failures": {
            key: failure(key, "modify") for key, it in zip(ids, edits, strict=True) if it.failed
        },
        "infos": [it.info for it in edits],
        **more,
    }
    return PhaseData("modify", duration, ids, [None] * len(edits), rows, **given)


#: Tokens at 0.1, 0.12 and 0.16 seconds.
THREE = Pass(((0.1, 1), (0.12, 1), (0.16, 1)))
#: Five tokens in three events.
CHUNKED = Pass(((0.2, 1), (0.3, 3), (0.5, 1)), duration=0.6)
ONE = Pass(((0.1, 1),))
NONE = Pass(())
BROKEN = Pass(((0.1, 1), (5.0, 1)), duration=9.0, failed=True)
NEVER = Pass((), duration=0.0, failed=True, attempt=0, delay=-STARTED_AT)
