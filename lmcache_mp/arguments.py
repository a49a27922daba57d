"""Arguments of a batch's calls, checked in the parent before anything is sent."""

from __future__ import annotations

import numbers
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
    return {str.__str__(key): plain(value) for key, value in params.items()}


def plain(value: object) -> object:
    """``value`` without classes that another process may not know, where it has a plain form.

    Enums and other subclasses of scalars, and numpy's and torch's scalars, become Python's own;
    lists, tuples and dicts are searched. Whatever else there is stays as it is.
    """
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_count(value: object, name: str, *, least: int = 1) -> int:
    """``value`` as a whole number of at least ``least``, or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} must be at least {least}, not {value}")
    return int(value)


def check_seconds(value: object, name: str, *, positive: bool = False) -> float:
    """``value`` as seconds (above 0 if ``positive``, else at least 0), or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} must be a number of seconds, not {value!r}")
    seconds = float(value)
    if not (seconds > 0 if positive else seconds >= 0):
        raise UsageError(f"{name} must be {'above' if positive else 'at least'} 0, not {value}")
    return seconds


def check_choice(value: object, choices: tuple[str, ...], name: str) -> str:
    """``value`` if it is one of ``choices``, or a UsageError that names them."""
    for choice in choices:
        if value == choice:
            return choice
    raise UsageError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_environment(env: object) -> dict[str, str]:
    """A copy of environment variables by name, or a UsageError for what no system can take."""
    if not isinstance(env, Mapping):
        raise UsageError(f"env must be a dict of strings by name, not {env!r}")
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"env must be a dict of strings by name, and has {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"env has {name!r}: {value!r}, which is no environment variable")
    return dict(env)
