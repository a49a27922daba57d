"""Arguments of a batch's calls, checked in the parent before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lmcache_mp.errors import StreamIdError, UsageError


def select_ids(stream_ids: Iterable[str] | None, known: Mapping[str, object]) -> list[str]:
    """The selected stream ids in the order of ``known``; None selects all.

    A bare string is a UsageError; unknown and duplicate ids are a StreamIdError.
    """
    if stream_ids is None:
        return list(known)
    if isinstance(stream_ids, str | bytes) or not isinstance(stream_ids, Iterable):
        raise UsageError(
            f"stream_ids must be an iterable of stream ids, not {stream_ids!r}: for one stream "
            "pass [stream_id]"
        )
    selected: set[str] = set()
    for stream_id in stream_ids:
        if not isinstance(stream_id, str) or stream_id not in known:
            raise StreamIdError(f"unknown stream id {stream_id!r}: add() returns the ids")
        if stream_id in selected:
            raise StreamIdError(f"duplicate stream id {stream_id!r}")
        selected.add(stream_id)
    return [stream_id for stream_id in known if stream_id in selected]


def check_sampling_params(params: object, where: str) -> dict[str, Any]:
    """A copy of ``params``, or a UsageError: not a mapping, or ``max_tokens`` below 1."""
    if not isinstance(params, Mapping):
        raise UsageError(f"{where} must be a dict of sampling parameters, not {params!r}")
    for key in params:
        if not isinstance(key, str):
            raise UsageError(f"{where} has the key {key!r}, which is not a string")
    limit = params.get("max_tokens")
    if limit is not None:
        check_count(limit, f"max_tokens in {where}")
    return dict(params)


def check_count(value: object, name: str, *, least: int = 1) -> int:
    """``value`` as a whole number of at least ``least``, or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} must be at least {least}, not {value}")
    return value


def check_seconds(value: object, name: str, *, positive: bool = False) -> float:
    """``value`` as seconds (above 0 if ``positive``, else at least 0), or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number of seconds, not {value!r}")
    if not (value > 0 if positive else value >= 0):
        raise UsageError(f"{name} must be {'above' if positive else 'at least'} 0, not {value}")
    return float(value)


def check_choice(value: object, choices: tuple[str, ...], name: str) -> str:
    """``value`` if it is one of ``choices``, or a UsageError that names them."""
    for choice in choices:
        if value == choice:
            return choice
    raise UsageError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
