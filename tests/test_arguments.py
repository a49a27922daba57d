"""Arguments of a batch's calls: what is refused before anything is sent."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.arguments import (
    check_choice,
    check_count,
    check_environment,
    check_sampling_params,
    check_seconds,
    plain,
    select_ids,
)
from lmcache_mp.errors import LMCacheBatchedStreamError, StreamIdError, UsageError

KNOWN = {"a": 1, "b": 2, "c": 3}


def test_none_selects_all_and_nothing_selects_nothing() -> None:
    assert select_ids(None, KNOWN) == ["a", "b", "c"]
    assert select_ids([], KNOWN) == []


@given(st.lists(st.sampled_from(sorted(KNOWN)), unique=True))
def test_any_iterable_selects_in_the_order_of_add(chosen: list[str]) -> None:
    expected = [stream_id for stream_id in KNOWN if stream_id in chosen]
    for ids in (chosen, tuple(chosen), set(chosen), dict.fromkeys(chosen), iter(chosen)):
        assert select_ids(ids, KNOWN) == expected
    assert select_ids(np.array(chosen, str), KNOWN) == expected


@pytest.mark.parametrize("ids", ["a", b"a", 3, "abc"])
def test_a_bare_id_is_no_selection(ids: Any) -> None:
    with pytest.raises(UsageError, match="iterable of stream ids"):
        select_ids(ids, KNOWN)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "x"], "unknown stream id 'x'"),
        (["a", "b", "a"], "duplicate stream id 'a'"),
        ([0], "unknown stream id 0"),
        ([["a"]], "unknown stream id"),
        ([None], "unknown stream id None"),
    ],
)
def test_unknown_and_duplicate_ids(ids: Any, message: str) -> None:
    with pytest.raises(StreamIdError, match=message) as caught:
        select_ids(ids, KNOWN)
    assert isinstance(caught.value, LMCacheBatchedStreamError), "LMCache's users catch that one"
    assert isinstance(caught.value, ValueError)


def test_sampling_params_are_copied() -> None:
    params = {"max_tokens": 5, "temperature": 0.0, "stop": ["x"]}
    checked = check_sampling_params(params, "sampling_params")
    assert checked == params and checked is not params
    assert check_sampling_params({"max_tokens": None}, "x") == {"max_tokens": None}


@pytest.mark.parametrize(
    "params",
    [None, 5, "max_tokens=5", [("max_tokens", 5)], {5: "max_tokens"}]
    + [{"max_tokens": limit} for limit in (0, -1, 1.0, "5", True)],
)
def test_sampling_params_that_are_refused(params: Any) -> None:
    with pytest.raises(UsageError, match="decode's parameters"):
        check_sampling_params(params, "decode's parameters")


def test_counts() -> None:
    assert check_count(1, "workers") == 1
    for value in (0, -1):
        with pytest.raises(UsageError, match=f"workers must be at least 1, not {value}"):
            check_count(value, "workers")
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(UsageError, match="workers must be a whole number"):
            check_count(wrong, "workers")


def test_seconds() -> None:
    assert check_seconds(0, "timeout") == 0.0
    assert check_seconds(1.5, "timeout", positive=True) == 1.5
    for value in (-1, -0.5, float("nan")):
        with pytest.raises(UsageError, match="timeout must be at least 0"):
            check_seconds(value, "timeout")
    for value in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="timeout must be above 0"):
            check_seconds(value, "timeout", positive=True)
    for wrong in (True, "1", None):
        with pytest.raises(UsageError, match="timeout must be a number of seconds"):
            check_seconds(wrong, "timeout")


def test_choices() -> None:
    assert check_choice("raise", ("raise", "collect"), "on_error") == "raise"
    for wrong in ("ignore", None, ["raise"]):
        with pytest.raises(UsageError, match="on_error must be one of 'raise', 'collect'"):
            check_choice(wrong, ("raise", "collect"), "on_error")


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Level.HIGH, 3),
        (Name("x"), "x"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        ({Name("a"): [np.int8(1), (Level.HIGH,)]}, {"a": [1, (3,)]}),
        (None, None),
        (True, True),
    ],
)
def test_plain_values_have_no_class_of_their_own(value: Any, expected: Any) -> None:
    result = plain(value)
    assert result == expected
    assert pickle.dumps(result) == pickle.dumps(expected)


def test_what_has_no_plain_form_stays() -> None:
    thing = object()
    assert plain(thing) is thing
    assert plain([thing]) == [thing]


def test_an_environment_is_copied() -> None:
    env = {"A": "x"}
    assert check_environment(env) == env
    assert check_environment(env) is not env
