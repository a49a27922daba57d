"""What an edit function may return, and what is said of everything else."""

from __future__ import annotations

import enum
import functools
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.errors import KVError
from lmcache_mp.passes.checks import check_edit, describe, expected_kv
from tests.helpers import CHUNK, kv_of

TOKENS = list(range(1, 9))
KV = kv_of(TOKENS)


def my_edit(kv: Any, tokens: list[int]) -> Any:
    return kv, tokens


def check(*result: Any) -> tuple[Any, list[int], Any]:
    kv, tokens, info = check_edit(result, expected_kv(KV), my_edit, CHUNK)
    return kv, tokens.tolist(), info


class Tensor:
    """Like a torch tensor of ids: no sequence, but with ``tolist()``."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        range(1, 9),
        array("q", TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, np.uint16),
        list(np.array(TOKENS)),
        Tensor(TOKENS),
    ],
)
def test_tokens_may_be_any_sequence_of_ints(tokens: Any) -> None:
    kv, ids, info = check(KV, tokens)
    assert kv is KV
    assert ids == TOKENS and set(map(type, ids)) == {int}
    assert info is None


def test_a_list_of_two_values_is_as_good_as_a_tuple() -> None:
    assert check_edit([KV, TOKENS], expected_kv(KV), my_edit, CHUNK)


def test_a_view_and_a_subclass_of_the_array_are_fine() -> None:
    assert check(KV[:, :, ::2], TOKENS[::2])[1] == [1, 3, 5, 7]
    assert check(KV.view(np.memmap), TOKENS)


def test_the_copy_of_a_memory_mapped_array_may_be_a_plain_one(tmp_path: Any) -> None:
    np.save(tmp_path / "kv.npy", KV)
    mapped = np.load(tmp_path / "kv.npy", mmap_mode="c")
    assert check_edit((KV, TOKENS), expected_kv(mapped), my_edit, CHUNK)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "not NoneType"),
        (KV, "not ndarray"),
        ({"kv": KV, "tokens": TOKENS}, "not dict"),
        ((KV,), "not 1 values"),
        ((KV, TOKENS, {}, {}), "not 4 values"),
    ],
)
def test_not_two_or_three_values(result: Any, message: str) -> None:
    with pytest.raises(KVError, match=r"\(kv, tokens\) or \(kv, tokens, info\)") as caught:
        check_edit(result, expected_kv(KV), my_edit, CHUNK)
    assert message in str(caught.value)
    assert "my_edit" in str(caught.value) and __file__ in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("12345678", "sequence of ints"),
        (b"12345678", "sequence of ints"),
        (8, "sequence of ints"),
        (None, "sequence of ints"),
        ((token for token in TOKENS), "sequence of ints"),
        (Tensor(3), "sequence of ints"),
        ([1.0] * 8, "not token ids"),
        (np.ones(8), "not token ids"),
        (np.ones((8, 1), int), "not token ids"),
        (["1"] * 8, "not token ids"),
        ([2**31] * 8, "not token ids"),
        ([True] * 8, "booleans"),
        ([1, 2, 3, 4, 5, 6, 7, False], "booleans"),
        (np.ones(8, bool), "booleans"),
        ([1, 2, 3, 4, 5, 6, 7, -1], "negative token id, -1"),
    ],
)
def test_tokens_that_are_no_ids(tokens: Any, message: str) -> None:
    with pytest.raises(KVError, match=message):
        check(KV, tokens)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (KV.tolist(), "type list, not ndarray"),
        (None, "type NoneType"),
        (KV[0], r"shape \[3, 8, 5\]; expected \[2, 3, T, 5\]"),
        (KV[:1], r"shape \[1, 3, 8, 5\]"),
        (KV[:, :2], r"shape \[2, 2, 8, 5\]"),
        (KV[..., :4], r"shape \[2, 3, 8, 4\]"),
        (KV.swapaxes(1, 2), r"shape \[2, 8, 3, 5\]"),
        (KV[:, :, :7], "7 tokens with 8 token ids"),
        (KV.astype(np.float16), "float16; expected float32"),
        (KV.astype(np.float64), "float64; expected float32"),
    ],
)
def test_kv_that_does_not_fit(kv: Any, message: str) -> None:
    with pytest.raises(KVError, match=message):
        check(kv, TOKENS)


@given(st.integers(0, 8))
def test_at_least_one_chunk_must_be_left(kept: int) -> None:
    kv, tokens = KV[:, :, :kept], TOKENS[:kept]
    if kept >= CHUNK:
        assert check(kv, tokens)[1] == tokens
        return
    with pytest.raises(KVError, match=f"left {kept} tokens, and only whole chunks of {CHUNK}"):
        check(kv, tokens)


# --- info -----------------------------------------------------------------------------------------


class Method(str, enum.Enum):
    RANDOM = "random"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("x", "x"),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(3), 3),
        (Method.RANDOM, "random"),
        (Level.HIGH, 3),
    ],
)
def test_scalars_become_plain(value: Any, plain: Any) -> None:
    info = check(KV, TOKENS, {"x": value})[2]
    assert info == {"x": plain}
    assert type(info["x"]) is type(plain)


def test_keys_become_plain() -> None:
    info = check(KV, TOKENS, {np.str_("x"): 1, Method.RANDOM: 2})[2]
    assert info == {"x": 1, "random": 2}
    assert set(map(type, info)) == {str}
    assert b"Method" not in pickle.dumps(info)


def test_no_info_may_be_said_twice() -> None:
    assert check(KV, TOKENS, None)[2] is None
    assert check(KV, TOKENS, {})[2] == {}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ([1], "info of type list, not a dict"),
        ("text", "info of type str"),
        ({1: 2}, "key 1, which is not a string"),
        ({"x": [1]}, r"info\['x'\] of type list, not a scalar"),
        ({"x": np.ones(1)}, r"info\['x'\] of type ndarray"),
        ({"x": {"y": 1}}, r"info\['x'\] of type dict"),
        ({"x": 1j}, r"info\['x'\] of type complex"),
        ({"x": object()}, r"info\['x'\] of type object"),
        ({"x": np.datetime64("2020-01-01")}, r"info\['x'\] of type date"),
    ],
)
def test_info_that_is_no_flat_dict_of_scalars(info: Any, message: str) -> None:
    with pytest.raises(KVError, match=message):
        check(KV, TOKENS, info)


# --- what was expected, and of whom ---------------------------------------------------------------


@pytest.mark.parametrize("kv", [None, [1, 2], np.float32(1), KV[0], KV.ravel()])
def test_kv_that_is_no_kv(kv: Any) -> None:
    with pytest.raises(KVError, match=r"\[2, L, T, D\]"):
        expected_kv(kv)


class Editor:
    def __call__(self, kv: Any, tokens: list[int]) -> Any:
        return kv, tokens

    def method(self, kv: Any, tokens: list[int]) -> Any:
        return kv, tokens


def test_functions_are_described_by_name_file_and_line() -> None:
    line = my_edit.__code__.co_firstlineno
    assert describe(my_edit) == f"my_edit ({__file__}:{line})"
    assert describe(functools.wraps(my_edit)(lambda *a: my_edit(*a))) == describe(my_edit)
    assert describe(Editor().method).startswith(f"Editor.method ({__file__}:")
    assert describe(Editor()) == "Editor"
    assert describe(functools.partial(my_edit)) == "partial"
