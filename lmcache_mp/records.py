"""What a pass measured: numpy records that workers send as raw bytes (no pandas here).

A *pass* is one stream's part of a phase. It is described by one structured row (:data:`GENERATE`
or :data:`MODIFY`) and, for a generate, by two ragged arrays over its events: ``times`` (float64
seconds since the engine was called) and ``counts`` (int32 tokens that the event carried). Events
without tokens are not recorded.

``start_time`` is wall-clock seconds since the epoch, made from one anchor per process and the
monotonic clock, so rows of several processes and hosts can be laid on one axis.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Changes whenever a dtype below does; a worker says which one it speaks.
VERSION = 2

COMPLETED = 0
FAILED = 1

#: An integer column's "not known" (``cached_tokens``, ``reported_tokens``, ``kv_used``).
UNKNOWN = -1

_COMMON: list[tuple[str, str]] = [
    ("stream", "<i4"),  # position of the stream in its batch
    ("status", "i1"),  # COMPLETED or FAILED
    ("attempt", "<i4"),  # 1 for the first try
    (
        "worker",
        "<i4",
    ),  # index of the worker, -1 when the pass ran in the calling process
    ("pid", "<i4"),
    ("start_time", "<f8"),  # wall clock, seconds since the epoch
    ("duration", "<f8"),  # seconds from the start of the pass to its end
]

#: One row for a generate pass. ``kv_used`` is 1, 0 or UNKNOWN; ``finish_reason`` is ASCII.
GENERATE = np.dtype(
    [
        *_COMMON,
        ("input_tokens", "<i4"),
        ("cached_tokens", "<i4"),  # what the engine reports, else UNKNOWN
        ("output_tokens", "<i4"),
        ("reported_tokens", "<i4"),  # the engine's own count of them, else UNKNOWN
        ("kv_used", "i1"),
        ("finish_reason", "S16"),
    ]
)

#: One row for an edit. Token counts are 0 and seconds NaN where a failed pass did not get so far.
MODIFY = np.dtype(
    [
        *_COMMON,
        ("tokens_before", "<i4"),
        ("tokens_after", "<i4"),
        ("stored_tokens", "<i4"),
        ("recomputed_tokens", "<i4"),
        ("retrieve_s", "<f8"),
        ("fn_s", "<f8"),
        ("store_s", "<f8"),
    ]
)

_CODES = {"i1": "b", "i4": "i", "f8": "d", "S16": "16s"}


def _packer(dtype: np.dtype[np.void]) -> struct.Struct:
    """Packs a row of ``dtype``: several times as fast as numpy does one at a time."""
    return struct.Struct("<" + "".join(_CODES[field.str[1:]] for field in _fields(dtype)))


def _fields(dtype: np.dtype[np.void]) -> list[np.dtype[np.generic]]:
    return [dtype[name] for name in dtype.names or ()]


#: The bytes of a row, from its values in the order of the dtype.
pack_generate = _packer(GENERATE).pack
pack_modify = _packer(MODIFY).pack

#: Wall clock minus monotonic clock of this process, taken once.
_ANCHOR = time.time() - time.perf_counter()


def wall_clock(perf_counter: float) -> float:
    """The wall-clock time (seconds since the epoch) of a ``time.perf_counter()`` reading."""
    return _ANCHOR + perf_counter


@dataclass(frozen=True, slots=True)
class Events:
    """The events of many passes, ragged: pass ``i`` owns ``[offsets[i], offsets[i + 1])``.

    ``times``: float64 [E], seconds since the pass' engine call; ``counts``: int32 [E], tokens;
    ``offsets``: int64 [passes + 1].
    """

    times: NDArray[np.float64]
    counts: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def empty(cls, passes: int = 0) -> Events:
        """``passes`` passes without an event."""
        return cls(
            np.empty(0, np.float64),
            np.empty(0, np.int32),
            np.zeros(passes + 1, np.int64),
        )

    @classmethod
    def join(cls, parts: Iterable[tuple[bytes, bytes]]) -> Events:
        """Concatenate the raw (times, counts) bytes of passes, in order, with one copy each."""
        pairs = list(parts)
        sizes = np.fromiter((len(counts) // 4 for _, counts in pairs), np.int64, len(pairs))
        return cls(
            np.frombuffer(b"".join(times for times, _ in pairs), np.float64),
            np.frombuffer(b"".join(counts for _, counts in pairs), np.int32),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )


def join_rows(rows: Iterable[bytes], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Concatenate raw rows of ``dtype`` (GENERATE or MODIFY) into one array."""
    return np.frombuffer(b"".join(rows), dtype)
