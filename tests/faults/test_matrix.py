"""Every cell of the fault matrix that has a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.cells import Cell, all_cells, run_cell


def parameters() -> Iterator[Any]:
    """A quarter of the cells at once; all of them, as a table: make faults."""
    for cell in all_cells():
        if cell.reason_not_applicable is None:
            usual = cell.method == "forkserver" and cell.mode == "raise"
            yield pytest.param(cell, id=str(cell), marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize("cell", list(parameters()))
def test_cell(cell: Cell) -> None:
    assert run_cell(cell) == []
