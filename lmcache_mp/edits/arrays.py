"""What edits need of arrays, for numpy and torch alike; torch is never imported from here first."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor: there is none without torch loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def module_of(array: Any) -> Any:
    """numpy or torch: functions of one name in both are called through it."""
    return sys.modules["torch"] if is_torch(array) else np


def as_float32(array: Any) -> Any:
    """The array as float32, itself if it is."""
    return array.float() if is_torch(array) else array.astype(np.float32, copy=False)


def to_numpy(array: Any) -> NDArray[Any]:
    """On the CPU, as numpy: without a copy where that can be. bfloat16 becomes float32."""
    if not is_torch(array):
        return np.asarray(array)
    torch = sys.modules["torch"]
    array = array.detach().cpu()
    numpy: NDArray[Any] = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    return numpy


def like(array: Any, values: NDArray[Any]) -> Any:
    """``values`` as an array of the kind and on the device of ``array``, in their own dtype."""
    if not is_torch(array):
        return values
    return sys.modules["torch"].from_numpy(values).to(array.device)


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """A new contiguous array of the kind, dtype and device of ``array``."""
    if not is_torch(array):
        return np.empty(shape, array.dtype)
    return sys.modules["torch"].empty(shape, dtype=array.dtype, device=array.device)


def tokens_at(rows: Any, index: NDArray[np.int64]) -> Any:
    """Rows ``index`` of [T, D]: a copy."""
    if is_torch(rows):
        return rows.index_select(0, like(rows, index))
    return rows.take(index, axis=0)


def copy_tokens(out: Any, rows: Any, index: NDArray[np.int64]) -> None:
    """Write rows ``index`` of [T, D] to ``out``."""
    if is_torch(rows):
        sys.modules["torch"].index_select(rows, 0, like(rows, index), out=out)
    else:
        # With mode="raise", the default, numpy would take a whole copy first.
        np.take(rows, index, axis=0, out=out, mode="clip")
