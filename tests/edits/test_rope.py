"""Keys moved to new positions equal keys computed there."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.edits.rope import Rope, rerotate, rotate
from lmcache_mp.errors import UsageError

ROPE = Rope(head_dim=8, theta=100.0)


def keys_at(positions: list[int], raw: np.ndarray, rope: Rope) -> np.ndarray:
    """Raw keys [L, T, D] with the embedding of ``positions``, by the formula, pair by pair."""
    layers, tokens, width = raw.shape
    heads = raw.reshape(layers, tokens, -1, rope.head_dim).astype(np.float64)
    out = np.empty_like(heads)
    half = rope.head_dim // 2
    for i in range(half):
        angle = np.asarray(positions) * rope.theta ** (-2 * i / rope.head_dim)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = heads[..., i], heads[..., i + half]
        out[..., i] = a * c - b * s
        out[..., i + half] = b * c + a * s
    return out.reshape(layers, tokens, width)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.randoms())
def test_moved_keys_equal_keys_computed_at_the_new_positions(
    old: list[int], random: object
) -> None:
    raw = np.random.default_rng(len(old)).standard_normal((2, len(old), 16)).astype(np.float32)
    new = list(range(len(old)))
    moved = rerotate(keys_at(old, raw, ROPE).astype(np.float32), old, new, ROPE)
    np.testing.assert_allclose(moved, keys_at(new, raw, ROPE), atol=2e-5)


def test_a_wrong_base_is_far_off() -> None:
    raw = np.ones((1, 4, 8), np.float32)
    old, new = [90, 200, 310, 420], [0, 1, 2, 3]
    wrong = rerotate(keys_at(old, raw, ROPE).astype(np.float32), old, new, Rope(8, 10_000.0))
    assert np.abs(wrong - keys_at(new, raw, ROPE)).max() > 0.5


def test_the_input_and_its_dtype_are_kept() -> None:
    keys = np.random.default_rng(0).standard_normal((3, 700, 16)).astype(np.float16)
    keys.flags.writeable = False
    before = keys.copy()
    moved = rerotate(keys, np.arange(700) * 2, np.arange(700), ROPE)
    assert moved.dtype == np.float16 and moved.shape == keys.shape
    np.testing.assert_array_equal(keys, before)
    same = rerotate(keys, np.arange(700), np.arange(700), ROPE)
    np.testing.assert_array_equal(same, keys)


def test_rotating_back_and_forth_returns_to_the_start() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    cos, sin = ROPE.tables(np.arange(5))
    np.testing.assert_allclose(rotate(rotate(x, cos, sin), cos, -sin), x, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "old", "new"),
    [((2, 3), [0, 1], [0, 1]), ((1, 2, 9), [0, 1], [0, 1]), ((1, 2, 8), [0], [0, 1])],
)
def test_shapes_that_do_not_fit_are_refused(
    shape: tuple[int, ...], old: list[int], new: list[int]
) -> None:
    with pytest.raises(UsageError):
        rerotate(np.zeros(shape, np.float32), old, new, ROPE)


@pytest.mark.parametrize(
    "fields",
    [
        (7, 10.0),
        (0, 10.0),
        (8, 0.0),
        (8, -1.0),
        (8, 10.0, 3),
        (8, 10.0, 10),
        (8, 10.0, None, False, (1.0,)),
    ],
)
def test_an_impossible_rope_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError):
        Rope(*fields)


@pytest.mark.parametrize("rope", [ROPE, Rope(8, 1e4, 4, True), Rope(4, 1e4, frequencies=(1, 0.1))])
def test_its_repr_can_be_pasted_and_it_pickles(rope: Rope) -> None:
    assert eval(repr(rope)) == rope == pickle.loads(pickle.dumps(rope))
    assert hash(rope) == hash(pickle.loads(pickle.dumps(rope)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 8])
def test_pairs_and_the_part_that_turns(interleaved: bool, width: int) -> None:
    """One key of ones at position 3, moved to 1: by the formula, pair by pair."""
    rope = Rope(8, 100.0, width, interleaved)
    keys = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 16)
    moved = rerotate(keys, [3], [1], rope).reshape(2, 8)
    for head, row in zip(keys.reshape(2, 8), moved, strict=True):
        expected = head.astype(np.float64)
        for i in range(width // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
            angle = -2 * 100.0 ** (-2 * i / width)
            c, s = np.cos(angle), np.sin(angle)
            expected[a], expected[b] = head[a] * c - head[b] * s, head[b] * c + head[a] * s
        np.testing.assert_allclose(row, expected, rtol=1e-5)
        np.testing.assert_array_equal(row[width:], head[width:])
