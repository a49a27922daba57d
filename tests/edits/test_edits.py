"""Every ready edit through the same tests; then what each is for."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmcache_mp.edits
from lmcache_mp.edits import (
    ByHeads,
    Rope,
    Selection,
    StreamView,
    chunk_drop,
    compose,
    gather,
    identity,
    keydiff,
    knorm,
    lagkv,
    quantize,
    random_drop,
    rerotate,
    rkv,
    sink_recent,
    snapkv,
    tova,
)
from lmcache_mp.errors import UsageError
from tests.edits.kinds import CHUNK, EDITS, HEAD_DIM, ROPE, SELECTIONS, SHAPES, kv_of, run, view_of

NAMES = {name: getattr(lmcache_mp.edits, name) for name in lmcache_mp.edits.__all__}

every_edit = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
every_selection = pytest.mark.parametrize("make", SELECTIONS.values(), ids=SELECTIONS)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


# --- every edit -----------------------------------------------------------------------------------


@every_edit
@every_shape
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shape_dtype_order_and_the_input_as_it_was(
    edit: Any, shape: tuple[int, int, int], dtype: str
) -> None:
    kv = kv_of(shape, dtype)
    before = kv.copy()
    kv.flags.writeable = False
    new_kv, tokens, info = run(edit, kv, shape)
    np.testing.assert_array_equal(kv, before)
    assert type(tokens) is list and tokens == sorted(set(tokens))
    assert all(type(token) is int for token in tokens)
    assert type(new_kv) is np.ndarray and new_kv.dtype == dtype and new_kv.flags.c_contiguous
    assert new_kv.shape == (2, shape[0], len(tokens), shape[2] * HEAD_DIM)
    assert np.isfinite(new_kv).all()
    assert all(isinstance(value, int | float) for value in info.values())


@every_edit
def test_the_same_again(edit: Any) -> None:
    shape = SHAPES["plain"]
    first, second = (run(edit, kv_of(shape), shape) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1:] == second[1:]


@every_edit
def test_it_pickles_and_its_repr_can_be_pasted(edit: Any) -> None:
    assert pickle.loads(pickle.dumps(edit)) == edit == eval(repr(edit), {}, NAMES)
    assert hash(edit) == hash(pickle.loads(pickle.dumps(edit)))
    with pytest.raises((AttributeError, TypeError)):
        edit.something = 1


@every_edit
def test_it_says_what_it_is_where_it_comes_from_and_with_what_shapes(edit: Any) -> None:
    text = type(edit).__doc__
    assert text
    if type(edit) not in (identity, compose, random_drop):
        assert "https://arxiv.org/abs/" in text
    assert "[2, L, " in text or type(edit) is compose


# --- every selection ------------------------------------------------------------------------------


@every_selection
@every_shape
def test_what_is_kept_is_what_was_there(make: Any, shape: tuple[int, int, int]) -> None:
    kv = kv_of(shape)
    new_kv, tokens, info = run(make(0.5), kv, shape)
    index = np.array(tokens) - 1000
    assert info == {"kept": len(tokens), "dropped": shape[1] - len(tokens)}
    np.testing.assert_array_equal(new_kv[1], kv[1][:, index])
    moved = rerotate(kv[0][:, index], index, np.arange(len(index)), ROPE)
    np.testing.assert_array_equal(new_kv[0], moved)
    unmoved, same, _ = run(make(0.5, rerotate=False), kv, shape)
    assert same == tokens
    np.testing.assert_array_equal(unmoved, kv[:, :, index])


@every_selection
@pytest.mark.parametrize("keep", [0.01, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_counts_and_protected_tokens(make: Any, keep: float) -> None:
    shape = SHAPES["plain"]
    total = shape[1]
    edit = make(keep, sinks=3, recent=5)
    _, tokens, _ = run(edit, kv_of(shape), shape)
    assert len(tokens) == max(1, math.floor(Fraction(str(keep)) * total))
    first = min(3, len(tokens))
    assert tokens[:first] == [1000, 1001, 1002][:first]
    last = min(5, len(tokens) - first)
    assert tokens[len(tokens) - last :] == list(range(1000 + total - last, 1000 + total))
    ratio = make(compression_ratio=float(1 - Fraction(str(keep))), sinks=3, recent=5)
    count = make(keep_tokens=len(tokens), sinks=3, recent=5)
    for other in (ratio, count):
        assert run(other, kv_of(shape), shape)[1] == tokens


@every_selection
def test_whole_chunks(make: Any) -> None:
    shape = SHAPES["plain"]
    for keep, kept in ((0.01, 16), (0.5, 112), (1.0, 208)):
        assert len(run(make(keep, align="chunk"), kv_of(shape), shape)[1]) == kept


@every_selection
def test_keeping_all_changes_nothing(make: Any) -> None:
    shape = SHAPES["plain"]
    kv = kv_of(shape)
    for edit in (make(1), make(1.0), make(keep_tokens=10_000), make(compression_ratio=0)):
        new_kv, tokens, info = run(edit, kv, shape)
        np.testing.assert_array_equal(new_kv, kv)
        assert len(tokens) == shape[1] and info["dropped"] == 0


@every_selection
def test_what_it_needs_is_less_if_it_is_given(make: Any) -> None:
    asks = {"queries"} & make(0.5).needs
    heads = {"head_dim"} if isinstance(make(0.5), ByHeads) else set()
    assert make(0.5).needs == asks | heads | {"rope"}
    assert make(0.5, rerotate=False).needs == asks | heads
    assert make(0.5, rope=ROPE).needs == asks
    if heads:
        assert make(0.5, rerotate=False, head_dim=16).needs == asks


@every_selection
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one of keep=0.5"),
        ({"keep": 0.5, "keep_tokens": 3}, "one of keep=0.5"),
        ({"keep": 0}, "above 0"),
        ({"keep": 1.01}, "at most 1"),
        ({"keep": float("nan")}, "must be a number"),
        ({"keep": "half"}, "must be a number"),
        ({"keep": True}, "must be a number"),
        ({"compression_ratio": 1.0}, "above 0"),
        ({"keep_tokens": 0}, "at least 1"),
        ({"keep": 0.5, "sinks": -1}, "at least 0"),
        ({"keep": 0.5, "align": "page"}, "one of 'none', 'chunk'"),
        ({"keep": 0.5, "rope": 1e4}, "must be a Rope"),
    ],
)
def test_wrong_arguments(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(**options)


@given(st.integers(1, 20_000), st.decimals("0.0001", "1", places=4))
def test_counts_are_exact(tokens: int, share: Any) -> None:
    kept = max(1, math.floor(Fraction(share) * tokens))
    assert sink_recent(float(share)).count(tokens) == kept
    assert sink_recent(share).count(tokens) == kept
    if share < 1:
        assert sink_recent(compression_ratio=float(1 - share)).count(tokens) == kept
    chunks = sink_recent(float(share), align="chunk").count(tokens, 256)
    assert chunks == tokens or (chunks % 256 == 0 and 0 <= chunks - kept < 256)


def test_the_rounding_trap() -> None:
    assert sink_recent(compression_ratio=0.9).count(1000) == 100
    assert sink_recent(compression_ratio=0.9).count(10) == 1
    assert sink_recent(np.float32(0.5)).count(1000) == 500


def test_without_a_stream() -> None:
    kv, tokens = kv_of(SHAPES["plain"]), list(range(208))
    new_kv, kept, _ = sink_recent(0.5, rope=ROPE)(kv, tokens)
    assert len(kept) == new_kv.shape[2] == 104
    with pytest.raises(RuntimeError, match=r"rope=Rope.from_config.*rerotate=False"):
        sink_recent(0.5)(kv, tokens)
    with pytest.raises(UsageError, match="needs a stream"):
        sink_recent(0.5, align="chunk", rope=ROPE)(kv, tokens)
    with pytest.raises(UsageError, match="207 token ids"):
        sink_recent(0.5, rope=ROPE)(kv, tokens[1:])
    with pytest.raises(UsageError, match="heads of 24"):
        sink_recent(0.5, rope=Rope(24, 1e4))(kv, tokens)


# --- each -----------------------------------------------------------------------------------------


def test_sink_recent_keeps_both_ends() -> None:
    _, tokens, _ = run(sink_recent(keep_tokens=10, sinks=4), kv_of((1, 50, 1)), (1, 50, 1))
    assert [token - 1000 for token in tokens] == [0, 1, 2, 3, 44, 45, 46, 47, 48, 49]


def test_random_draws_differ_by_stream_and_follow_its_generator() -> None:
    kv, tokens = kv_of((1, 200, 1)), list(range(200))
    drop = random_drop(0.5, rerotate=False)
    views = [StreamView(rng=np.random.default_rng(seed)) for seed in (0, 0, 1)]
    kept = [drop(kv, tokens, view)[1] for view in views]
    assert kept[0] == kept[1] != kept[2]


def test_chunks_stay_whole_but_for_one() -> None:
    shape = (1, 320, 1)
    for seed in range(5):
        view = StreamView(rng=np.random.default_rng(seed), chunk_size=16)
        edit = chunk_drop(keep_tokens=100, rerotate=False, sinks=0, recent=0)
        _, kept, _ = edit(kv_of(shape), list(range(320)), view)
        sizes = np.bincount(np.array(kept) // 16, minlength=20)
        assert sorted(sizes[sizes > 0]) == [4, 16, 16, 16, 16, 16, 16]
    edit = chunk_drop(keep_tokens=64, size=32, rerotate=False, sinks=0, recent=0)
    _, kept, _ = edit(kv_of(shape), list(range(320)), view)
    assert sorted(np.bincount(np.array(kept) // 32, minlength=10))[-2:] == [32, 32]


def planted(tokens: int, special: list[int], key: Any) -> Any:
    """KV of small noise around one key, with ``key`` at the special positions."""
    kv = kv_of((2, tokens, 1)) * 0.01 + 1
    kv[0][:, special] = key
    return kv


SPECIAL = [7, 30, 31, 55]


def kept_of(edit: Selection, kv: Any, **view: Any) -> list[int]:
    return edit(kv, list(range(kv.shape[2])), StreamView(rope=ROPE, **view))[1]


def test_knorm_keeps_short_keys() -> None:
    edit = knorm(keep_tokens=4, sinks=0, recent=0)
    assert kept_of(edit, planted(80, SPECIAL, 0.1)) == SPECIAL


def test_keydiff_keeps_keys_unlike_the_rest_whatever_their_length() -> None:
    other = np.where(np.arange(HEAD_DIM) % 2, 3.0, -3.0)
    edit = keydiff(keep_tokens=4, sinks=0, recent=0)
    assert kept_of(edit, planted(80, SPECIAL, other)) == SPECIAL


def test_lagkv_keeps_what_spreads_more_than_the_next_partition_tells() -> None:
    kv = planted(4 * 32, [90], np.where(np.arange(HEAD_DIM) % 2, 5.0, -5.0))
    kept = kept_of(lagkv(keep_tokens=32 + 3, lag=32, sinks=0, recent=0), kv)
    assert 90 in kept and kept[-32:] == list(range(96, 128))


def test_lagkv_of_a_short_prompt_keeps_the_latest() -> None:
    kept = kept_of(lagkv(keep_tokens=10, sinks=2, recent=0), kv_of((2, 100, 1)))
    assert kept == [0, 1, *range(92, 100)]


def asked_for(special: list[int], tokens: int, window: int) -> tuple[Any, dict[str, Any]]:
    """KV whose special keys alone answer to the queries of the last ``window`` tokens."""
    kv = kv_of((2, tokens, 1)) * 0.01
    kv[0][:, special] = 3.0
    queries = np.ones((2, window, 2 * HEAD_DIM), np.float32)
    return kv, {"queries": (queries, np.arange(tokens - window, tokens))}


def test_tova_keeps_what_the_last_query_attends_to() -> None:
    kv, view = asked_for(SPECIAL, 80, 4)
    assert kept_of(tova(keep_tokens=5, sinks=0, recent=0), kv, **view) == [*SPECIAL, 79]


def test_snapkv_keeps_neighbourhoods_and_the_window() -> None:
    kv, view = asked_for([30], 80, 4)
    edit = snapkv(keep_tokens=9, sinks=0, recent=0, window_size=4)
    assert kept_of(edit, kv, **view) == [28, 29, 30, 31, 32, 76, 77, 78, 79]
    alone = snapkv(keep_tokens=5, sinks=0, recent=0, window_size=4, kernel_size=1)
    assert kept_of(alone, kv, **view) == [30, 76, 77, 78, 79]


def test_queries_see_no_token_after_their_own() -> None:
    """The key that all would attend to is the last: only the last of the queries may."""
    kv = kv_of((1, 40, 1)) * 0.01
    kv[0][:, 39] = 50.0
    queries = np.ones((1, 4, HEAD_DIM), np.float32)
    view = StreamView(rope=ROPE, queries=(queries, np.arange(34, 38)))
    scores = snapkv(0.5, window_size=4).scores(kv, view)
    assert scores[38:].sum() == 0 and scores[:34].sum() > 0
    assert np.isfinite(scores).all()


def test_rkv_keeps_the_latest_of_equal_keys() -> None:
    kv = kv_of((2, 60, 1), seed=5)
    kv[0][:, [5, 20, 40]] = kv[0][:, [5]]
    queries = np.zeros((2, 4, HEAD_DIM), np.float32)  # attention says nothing
    view = StreamView(rope=ROPE, queries=(queries, np.arange(56, 60)))
    scores = rkv(0.5, window_size=4, threshold=0.9, mix=0).scores(kv, view)
    assert scores[5] < scores[40] and scores[20] < scores[40]
    similar = np.sort(scores[:56])
    assert scores[5] < similar[28], "the others count as said twice"


def test_queries_that_do_not_fit_are_refused() -> None:
    kv, view = asked_for([3], 40, 4)
    view["queries"] = view["queries"][0][:1], view["queries"][1]
    with pytest.raises(UsageError, match="do not fit"):
        kept_of(tova(0.5), kv, **view)


def test_identity_hands_back_what_it_got() -> None:
    kv, tokens = kv_of(SHAPES["plain"]), list(range(208))
    once = identity()(kv, tokens)
    assert once[0] is kv and once[1] is tokens and identity()(*once)[0] is kv


@pytest.mark.parametrize(("bits", "most"), [(8, 0.005), (4, 0.09)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_quantize_says_how_much_is_lost(bits: int, most: float, dtype: str) -> None:
    kv = kv_of(SHAPES["plain"], dtype)
    new_kv, _, info = quantize(bits, group=HEAD_DIM)(kv, list(range(208)))
    for plane, name in ((0, "key_error"), (1, "value_error")):
        old, new = kv[plane].astype(np.float64), new_kv[plane].astype(np.float64)
        lost = np.linalg.norm(new - old) / np.linalg.norm(old)
        assert info[name] == pytest.approx(lost, rel=0.02) and most / 5 < lost < most
    groups = new_kv.astype(np.float32).reshape(-1, HEAD_DIM)
    assert max(len(np.unique(row)) for row in groups) <= 2**bits
    again = quantize(bits, group=HEAD_DIM)(new_kv, list(range(208)))[2]
    assert again["key_error"] < info["key_error"] / 3


def test_quantize_of_equal_numbers_and_wrong_arguments() -> None:
    kv = np.full((2, 1, 4, 16), 3.0, np.float32)
    new_kv, _, info = quantize(4, group=16)(kv, [1, 2, 3, 4])
    np.testing.assert_array_equal(new_kv, kv)
    assert info == {"key_error": 0, "value_error": 0}
    with pytest.raises(UsageError, match="8 or 4"):
        quantize(16)
    with pytest.raises(UsageError, match="groups of 64"):
        quantize()(kv, [1, 2, 3, 4])


def test_composed_edits_are_one_after_the_other() -> None:
    shape, kv = SHAPES["plain"], kv_of(SHAPES["plain"])
    both = compose(knorm(0.5), quantize(4, group=HEAD_DIM))
    new_kv, tokens, info = run(both, kv, shape)
    first = run(knorm(0.5), kv, shape)
    second = run(quantize(4, group=HEAD_DIM), first[0], shape)
    np.testing.assert_array_equal(new_kv, second[0])
    assert tokens == first[1] and info == first[2] | second[2]
    assert both.needs == knorm(0.5).needs
    twice = compose(sink_recent(0.5), compose(random_drop(0.5)), lambda kv, tokens: (kv, tokens))
    info = run(twice, kv, shape)[2]
    assert info == {"0_kept": 104, "0_dropped": 104, "1_kept": 52, "1_dropped": 52}


def test_two_drops_in_a_row_turn_keys_as_one_would() -> None:
    shape, kv = SHAPES["plain"], kv_of(SHAPES["plain"])
    new_kv, tokens, _ = run(compose(random_drop(0.5), sink_recent(0.5)), kv, shape)
    expected = gather(kv, np.array(tokens) - 1000, ROPE)
    np.testing.assert_allclose(new_kv, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ((sink_recent(0.5), tova(0.5)), "needs queries"),
        ((sink_recent(0.5, rerotate=False), compose(knorm(0.5))), "left behind"),
        ((3,), "edit functions"),
    ],
)
def test_what_can_not_be_composed(edits: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compose(*edits)


def test_an_own_selection_in_five_lines() -> None:
    class every_other(Selection):
        """Prefers even positions."""

        def scores(self, kv: Any, stream: StreamView) -> Any:
            return np.arange(kv.shape[2]) % 2 == 0

    _, tokens, _ = run(every_other(0.5, sinks=0, recent=0), kv_of(SHAPES["plain"]), SHAPES["plain"])
    assert tokens == list(range(1000, 1208, 2))
    assert view_of(SHAPES["plain"]).chunk_size == CHUNK


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.oracle
@every_edit
@every_shape
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_does_the_same(edit: Any, shape: tuple[int, int, int], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(kv_of(shape)).to(getattr(torch, dtype))
    before = tensor.clone()
    new_kv, tokens, info = run(edit, tensor, shape, torch.from_numpy)
    assert torch.equal(tensor, before) and new_kv.dtype == tensor.dtype and new_kv.is_contiguous()
    expected, their_tokens, their_info = run(edit, tensor.float().numpy(), shape)
    assert tokens == their_tokens and info == pytest.approx(their_info, rel=0.05)
    if dtype != "float32" and isinstance(edit, compose):
        return  # each of them rounds, so a level may be another one
    rounded = torch.from_numpy(np.ascontiguousarray(expected)).to(tensor.dtype)
    within = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-6}[dtype]
    torch.testing.assert_close(new_kv, rounded, rtol=within, atol=within)
