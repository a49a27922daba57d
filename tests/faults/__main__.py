"""Run the whole fault matrix and print it: ``python -m tests.faults``."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.faults.cells import (
    FAULTS,
    METHODS,
    MODES,
    NOT_APPLICABLE,
    STAGES,
    Cell,
    all_cells,
    run_cell,
)


def _run(cell: Cell) -> list[str] | None:
    if cell.reason_not_applicable is not None:
        return None
    try:
        return run_cell(cell)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def main() -> int:
    """Print a mark a cell, the reasons, and a line that counts."""
    cells = list(all_cells())
    with ThreadPoolExecutor(2) as threads:  # batches in threads do not disturb each other
        results = dict(zip(cells, threads.map(_run, cells), strict=True))
    for method in METHODS:
        heads = [f"{stage}/{mode}" for stage in STAGES for mode in MODES]
        print(f"\n{method:14}" + "".join(f"{head:>17}" for head in heads))
        for fault in FAULTS:
            marks = []
            for stage in STAGES:
                for mode in MODES:
                    problems = results[Cell(fault, stage, method, mode)]
                    marks.append("n/a" if problems is None else "FAIL" if problems else "ok")
            print(f"{fault:14}" + "".join(f"{mark:>17}" for mark in marks))
    print()
    for (fault, stage), reason in NOT_APPLICABLE.items():
        print(f"n/a: {fault} at {stage}: {reason}")
    failed = {cell: problems for cell, problems in results.items() if problems}
    for cell, problems in failed.items():
        print(f"FAIL {cell}: {'; '.join(problems)}")
    meant = sum(problems is not None for problems in results.values())
    print(f"faults: {meant - len(failed)} of {meant} cells right, {len(cells) - meant} n/a")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
