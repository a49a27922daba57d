"""Chunk keys and salts: equal everywhere, different whenever anything differs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.errors import UsageError
from lmcache_mp.kv.context import check_salt, chunk_keys, edit_salt

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(token_lists, st.integers(1, 7))
def test_a_key_for_each_whole_chunk(tokens, chunk_size):
    keys = chunk_keys(tokens, chunk_size, model="m")
    assert len(keys) == len(tokens) // chunk_size
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)


@given(token_lists, token_lists, st.integers(1, 7))
def test_keys_are_shared_exactly_as_far_as_the_tokens_are(left, right, chunk_size):
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    keys = [chunk_keys(tokens, chunk_size, model="m") for tokens in (left, right)]
    pairs = zip(*keys, strict=False)
    equal = [a == b for a, b in pairs]
    assert equal == [index < shared // chunk_size for index in range(len(equal))]


def test_model_salt_and_chunk_size_change_every_key():
    tokens = list(range(8))
    variants = [
        chunk_keys(tokens, 4, model="m"),
        chunk_keys(tokens, 4, model="n"),
        chunk_keys(tokens, 4, model="m", cache_salt="s"),
        chunk_keys(tokens, 4, model="ms"),  # model and salt must not run into each other
        chunk_keys(tokens, 2, model="m"),
    ]
    keys = [key for variant in variants for key in variant]
    assert len(set(keys)) == len(keys)


def test_keys_do_not_depend_on_the_type_of_the_sequence():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    keys = chunk_keys(tokens, 4, model="m")
    for sequence in (tuple(tokens), np.array(tokens), np.array(tokens, np.int16)[::1]):
        assert chunk_keys(sequence, 4, model="m") == keys


def test_keys_are_equal_in_another_process():
    program = (
        "from lmcache_mp.kv.context import chunk_keys; print(*chunk_keys(range(8), 4, model='m'))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == chunk_keys(range(8), 4, model="m"), output.stderr


@pytest.mark.parametrize("salt", ["", "tenant-1", "x" * 128, "ü.~:"])
def test_good_salts_are_returned(salt):
    assert check_salt(salt) == salt


@pytest.mark.parametrize("salt", ["x" * 129, "a@b", "a/b", "a\\b", "a\0b", None, 3, b"bytes"])
def test_bad_salts_are_refused(salt):
    with pytest.raises(UsageError):
        check_salt(salt)


salts = st.text(max_size=5)


@given(st.lists(st.tuples(salts, salts, salts, st.integers(0, 3), salts), unique=True, max_size=9))
def test_edit_salts_are_valid_and_distinct(parts):
    made = [edit_salt(*part) for part in parts]
    assert len(set(made)) == len(parts)
    assert all(check_salt(salt) and len(salt) == 32 for salt in made)


def test_the_parts_of_an_edit_salt_do_not_run_into_each_other():
    assert edit_salt("ab", "c", "k", 1, "1") != edit_salt("a", "bc", "k", 1, "1")
