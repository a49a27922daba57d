"""What an edit function returned, checked before anything is stored."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache_mp.arguments import plain
from lmcache_mp.errors import KVError
from lmcache_mp.passes.state import Scalar


@dataclass(frozen=True, slots=True)
class ExpectedKV:
    """What an edit's KV must look like, noted before the function can change it in place."""

    kind: type
    shape: tuple[int, ...]
    dtype: object


def expected_kv(kv: Any) -> ExpectedKV:
    """The type, shape [2, L, T, D] and dtype of the KV given to an edit function."""
    kind = np.ndarray if isinstance(kv, np.ndarray) else type(kv)  # a memmap's copy is an ndarray
    shape = tuple(getattr(kv, "shape", ()))
    if len(shape) != 4:
        got = f"of shape {list(shape)}" if shape else f"a {kind.__name__}"
        raise KVError(f"KV must be an array [2, L, T, D], and this is {got}")
    return ExpectedKV(kind, shape, kv.dtype)


def describe(fn: Callable[..., Any]) -> str:
    """A function's name, file and line, as far as they are known."""
    target = inspect.unwrap(fn)
    name = getattr(target, "__qualname__", type(target).__qualname__)
    code = getattr(target, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def check_edit(
    result: Any, expected: ExpectedKV, fn: Callable[..., Any], chunk_size: int
) -> tuple[Any, array[int], dict[str, Scalar] | None]:
    """The (kv, tokens, info) that ``fn`` returned, or a KVError that says what is wrong with it."""
    where = describe(fn)
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise KVError(f"{where} must return (kv, tokens) or (kv, tokens, info), not {got}")
    kv, tokens = result[0], _check_tokens(result[1], where)
    _check_kv(kv, expected, len(tokens), where)
    if len(tokens) < chunk_size:
        raise KVError(
            f"{where} left {len(tokens)} tokens, and only whole chunks of {chunk_size} can be "
            "stored: keep at least one chunk, or open the context with a smaller chunk_size"
        )
    return kv, tokens, _check_info(result[2], where) if len(result) == 3 else None


def _check_tokens(tokens: Any, where: str) -> array[int]:
    if hasattr(tokens, "tolist"):  # numpy arrays, torch tensors, arrays of another width
        tokens = tokens.tolist()
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise KVError(f"{where} must return its tokens as a sequence of ints")
    ids = array("i")
    try:
        ids.extend(tokens)
    except (TypeError, OverflowError) as error:
        raise KVError(f"{where} returned tokens that are not token ids: {error}") from None
    if bool in map(type, tokens):
        raise KVError(f"{where} returned booleans as tokens: return the ids that a mask selects")
    if ids and min(ids) < 0:
        raise KVError(f"{where} returned a negative token id, {min(ids)}")
    return ids


def _check_kv(kv: Any, expected: ExpectedKV, tokens: int, where: str) -> None:
    if not issubclass(type(kv), expected.kind):
        raise KVError(
            f"{where} returned KV of type {type(kv).__name__}, not {expected.kind.__name__}"
        )
    shape = tuple(kv.shape)
    planes, layers, _, width = expected.shape
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (planes, layers, width):
        raise KVError(
            f"{where} returned KV of shape {list(shape)}; expected [{planes}, {layers}, T, {width}]"
        )
    if shape[2] != tokens:
        raise KVError(f"{where} returned KV of {shape[2]} tokens with {tokens} token ids")
    if kv.dtype != expected.dtype:
        raise KVError(f"{where} returned KV of {kv.dtype}; expected {expected.dtype}")


def _check_info(info: Any, where: str) -> dict[str, Scalar] | None:
    if info is None:
        return None
    if not isinstance(info, Mapping):
        raise KVError(f"{where} returned info of type {type(info).__name__}, not a dict")
    return {_check_key(key, where): _scalar(key, value, where) for key, value in info.items()}


def _check_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise KVError(f"{where} returned info with the key {key!r}, which is not a string")
    return str.__str__(key)


def _scalar(key: str, value: Any, where: str) -> Scalar:
    scalar = plain(value)
    if scalar is None or isinstance(scalar, bool | int | float | str):
        return scalar
    raise KVError(f"{where} returned info[{key!r}] of type {type(value).__name__}, not a scalar")
