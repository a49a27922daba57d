"""Sampling parameters: parsed strictly; tokens are drawn from the distribution they describe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.engines.sampling import Sampler, Sampling
from lmcache_mp.errors import UsageError

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def draw(logits, count=4000, barred=(), **params):
    """How often each token is chosen."""
    sampler = Sampler(Sampling.parse({"seed": 1, **params}), [1, 2, 3])
    chosen = [sampler.choose(logits, barred) for _ in range(count)]
    return np.bincount(chosen, minlength=len(logits)) / count


def test_defaults_are_those_of_openai():
    assert Sampling.parse({}) == Sampling()
    assert Sampling.parse({"max_tokens": None, "seed": None, "stop": None}) == Sampling()
    assert Sampling().temperature == 1.0 and Sampling().max_tokens is None


def test_numbers_of_numpy_and_single_strings_are_taken():
    params = {
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "stop": "end",
        "stop_token_ids": np.array([4, 5]),
        "top_k": -1,
    }
    parsed = Sampling.parse(params)
    assert parsed.max_tokens == 3 and parsed.temperature == 0.5 and parsed.top_k == 0
    assert parsed.stop == ("end",) and parsed.stop_token_ids == {4, 5}


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"min_tokens": -1},
        {"min_tokens": 3, "max_tokens": 2},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "0"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"seed": 0.5},
        {"ignore_eos": 1},
        {"stop": [""]},
        {"stop": ""},
        {"stop": 3},
        {"stop": ["a", None]},
        {"stop_token_ids": 7},
        {"stop_token_ids": ["7"]},
        {"stop_token_ids": [-1]},
        {"n": 2},
        {"repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(params):
    with pytest.raises(UsageError, match=next(iter(params))):
        Sampling.parse(params)


def test_an_unknown_parameter_is_refused_and_the_known_ones_are_named():
    with pytest.raises(UsageError, match=r"'temprature'.*max_tokens.*temperature"):
        Sampling.parse({"temprature": 0})


def test_parameters_without_effect_are_taken():
    harmless = {"return_token_ids": True, "stream_options": {}, "n": 1, "repetition_penalty": 1.0}
    assert Sampling.parse({"temperature": 0, **harmless}) == Sampling.parse({"temperature": 0})


def test_greedy_takes_the_first_of_the_likeliest():
    assert draw(np.array([1, 3, 3, 2], np.float32), 3, temperature=0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_probability(temperature):
    expected = np.exp(LOGITS / temperature)
    np.testing.assert_allclose(
        draw(LOGITS, temperature=temperature), expected / expected.sum(), atol=0.03
    )


def test_a_temperature_close_to_zero_is_greedy():
    assert draw(LOGITS, 20, temperature=1e-310)[1] == 1


def test_top_k_keeps_the_likeliest():
    np.testing.assert_allclose(draw(LOGITS, top_k=2), [0, 4 / 7, 0, 3 / 7, 0], atol=0.03)
    assert (draw(LOGITS, top_k=99) > 0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, [1]), (0.5, [1, 3]), (0.8, [1, 3, 4]), (0.94, [1, 2, 3, 4])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    assert np.flatnonzero(draw(LOGITS, top_p=top_p)).tolist() == kept


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_top_p_never_drops_a_token_of_the_nucleus(values, top_p):
    logits = np.array(values, np.float32)
    weights = np.sort(np.exp(logits.astype(float)))[::-1]
    count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    least = np.log(weights[count - 1])
    sampler = Sampler(Sampling.parse({"seed": 0, "top_p": top_p}), [0])
    assert all(logits[sampler.choose(logits)] >= least - 1e-5 for _ in range(20))


def test_barred_tokens_are_never_chosen_and_logits_are_left_alone():
    before = LOGITS.copy()
    assert draw(LOGITS, 500, barred=[1, 3])[[1, 3]].tolist() == [0, 0]
    assert draw(LOGITS, 3, barred=[1], temperature=0)[3] == 1
    assert (before == LOGITS).all()


def choices(seed, prompt):
    sampler = Sampler(Sampling.parse({"seed": seed}), prompt)
    return [sampler.choose(np.zeros(1000, np.float32)) for _ in range(8)]


def test_a_seed_gives_the_same_choices_for_the_same_prompt():
    assert choices(7, [1, 2]) == choices(7, np.array([1, 2], np.int32))
    assert choices(7, [1, 2]) != choices(8, [1, 2])
    assert choices(7, [1, 2]) != choices(7, [1, 3])
    assert choices(-1, [1]) == choices(-1, [1])


def test_without_a_seed_the_choices_are_random():
    assert choices(None, [1, 2]) != choices(None, [1, 2])
