"""Every cell of the fault matrix that has a meaning."""

from __future__ import annotations

import pytest

from tests.faults.cells import Cell, all_cells, run_cell


@pytest.mark.parametrize(
    "cell", [cell for cell in all_cells() if cell.reason_not_applicable is None], ids=str
)
def test_cell(cell: Cell) -> None:
    assert run_cell(cell) == []
