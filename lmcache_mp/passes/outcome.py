"""How a pass ended, and who ran it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from lmcache_mp import records
from lmcache_mp.passes.state import Edited, Generated


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass ended: its record, and a change to commit or the error that prevented one.

    ``row`` are the bytes of one GENERATE or MODIFY row, ``times`` and ``counts`` of its events.
    ``warning`` is something the user should hear although the pass succeeded.
    """

    row: bytes
    change: Generated | Edited | None
    error: BaseException | None = None
    times: bytes = b""
    counts: bytes = b""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class PassLabel:
    """Who runs a pass: goes into its record, its salt, its random numbers and its messages."""

    stream_id: str
    stream: int = 0
    attempt: int = 1
    worker: int = -1
    nonce: str = ""
    key: str = ""
    custom_id: str | None = None
    seed: int = 0
    round: int = 0

    def row_head(
        self, failed: bool, start: float, end: float, retried: int = 0
    ) -> tuple[int | float, ...]:
        """The columns that all records share (see records.py)."""
        status = records.FAILED if failed else records.COMPLETED
        wall = records.wall_clock(start)
        attempt = self.attempt + retried
        return self.stream, status, attempt, self.worker, os.getpid(), wall, end - start

    def failed_row(self, dtype: np.dtype[np.void], pid: int) -> bytes:
        """The record of a pass that measured nothing: it could not begin, or its worker died."""
        row = np.zeros(1, dtype)
        for name in dtype.names or ():
            if dtype[name].kind == "f":
                row[name] = np.nan
        if dtype is records.GENERATE:
            row["cached_tokens"] = row["reported_tokens"] = row["kv_used"] = records.UNKNOWN
        row["stream"], row["status"], row["attempt"] = self.stream, records.FAILED, self.attempt
        row["worker"], row["pid"] = self.worker, pid
        return row.tobytes()
