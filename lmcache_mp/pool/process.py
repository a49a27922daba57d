"""What concerns a worker's process as a whole: where it works, its luck, and how it breaks off."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import traceback
from collections.abc import Iterator, Sequence

import numpy as np


def seed_random_streams(seed: int, index: int) -> None:
    """Give the worker global random streams of its own: forked workers would all have the same."""
    sequence = np.random.SeedSequence([seed, index])
    first, second = (int(word) for word in sequence.generate_state(2))
    random.seed(first)
    np.random.seed(second)


def enter(folder: str | None, path: Sequence[str]) -> None:
    """Work in ``folder``, if there is one, and find modules on ``path``."""
    if folder is not None:
        with contextlib.suppress(OSError):  # removed meanwhile
            os.chdir(folder)
    sys.path[:] = path
    importlib.invalidate_caches()


@contextlib.contextmanager
def fatal_errors() -> Iterator[None]:
    """A thread that breaks off ends the process: its parent is told, and nobody waits for it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode())
        os._exit(1)
