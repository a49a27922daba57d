"""What one phase measured, as it comes from the workers: the input of a report (no pandas here)."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.errors import RemoteError, StreamFailure
from lmcache_mp.records import COMPLETED, Events

PHASES = ("prefill", "decode", "modify")

#: A value of an edit's info, and of a report.
Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class PhaseData:
    """One phase over a batch. Every sequence has one entry a stream, in the order of ``add``.

    ``phase``: "prefill", "decode" or "modify".
    ``duration``: wall clock of the phase, seconds.
    ``records``: rows of ``records.GENERATE`` or ``records.MODIFY``; a pass that never began is a
    failed row with ``attempt`` 0.
    ``events``: the ragged events of a prefill or decode; None for a modify.
    ``texts``: each stream's whole output by the end of the phase; may be left empty.
    ``infos``: the flat dict that each edit returned, or None; may be left empty.
    ``failures``: by stream id, those of this phase.
    ``setup_s``: seconds spent starting workers, not part of ``duration``.
    ``started_at``: wall clock at the start of the phase, seconds since the epoch.
    ``run``, ``round``: the batch's name, and which of its rounds this is.
    """

    phase: str
    duration: float
    stream_ids: Sequence[str]
    custom_ids: Sequence[str | None]
    records: NDArray[np.void]
    events: Events | None = None
    texts: Sequence[str] = ()
    infos: Sequence[Mapping[str, Scalar] | None] = ()
    failures: Mapping[str, StreamFailure] = field(default_factory=dict)
    setup_s: float = 0.0
    started_at: float = math.nan
    run: str | None = None
    round: int = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r} is none of {', '.join(PHASES)}")
        lengths = {
            "stream_ids": len(self.stream_ids),
            "custom_ids": len(self.custom_ids),
            "records": len(self.records),
        }
        if self.events is not None:
            lengths["events"] = len(self.events.offsets) - 1
        if len(self.texts):
            lengths["texts"] = len(self.texts)
        if len(self.infos):
            lengths["infos"] = len(self.infos)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a phase's parts differ in their count of streams: {lengths}")

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Which passes completed: bool [streams]."""
        completed: NDArray[np.bool_] = self.records["status"] == COMPLETED
        return completed

    @property
    def began(self) -> NDArray[np.bool_]:
        """Which passes were begun at all: bool [streams]."""
        began: NDArray[np.bool_] = self.completed | (self.records["attempt"] > 0)
        return began

    def timeline(self) -> Events:
        """The events, with none for every stream where the phase has none."""
        return Events.empty(len(self.records)) if self.events is None else self.events

    def portable(self) -> PhaseData:
        """The same, sure to pickle: errors that can't be rebuilt give way to a RemoteError."""
        return replace(self, failures={key: _portable(it) for key, it in self.failures.items()})


def _portable(failure: StreamFailure) -> StreamFailure:
    try:
        pickle.loads(pickle.dumps(failure.exception))
    except Exception:  # whatever a user's __reduce__ or __init__ raises
        stand_in = RemoteError(
            failure.error_message,
            type_name=failure.error_type,
            remote_traceback=failure.traceback,
        )
        return replace(failure, exception=stand_in)
    return failure
