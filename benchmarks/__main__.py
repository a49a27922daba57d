"""All benchmarks, or those named, each in a process of its own.

python benchmarks [--quick] [--only edits_bound,start] [options of the benchmarks]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent

BENCHMARKS = (
    "edits_bound",
    "edits_parallel",
    "dispatch",
    "start",
    "aggregation",
    "closures",
)

#: Exit code of a benchmark that can't run here; it has said why.
CANNOT = 77


def main() -> int:
    """Run them; 1 if one found a ratio far under its mark, or broke."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help=f"some of {','.join(BENCHMARKS)}")
    known, rest = parser.parse_known_args()
    names = [name for name in known.only.split(",") if name] or BENCHMARKS
    begin, bad, absent = time.perf_counter(), [], []
    for name in names:
        script = HERE / f"{name}.py"
        print(f"--- {name}", flush=True)
        code = subprocess.run([sys.executable, str(script), *rest], check=False).returncode
        if code == CANNOT:
            absent.append(name)
        elif code:
            bad.append(f"{name} (exit code {code})")
    seconds = time.perf_counter() - begin
    print(f"make bench: {len(names) - len(bad) - len(absent)} of {len(names)} benchmarks", end="")
    print(f" in {seconds:.0f} s", end="")
    print(f"; not here: {', '.join(absent)}" if absent else "", end="")
    print(f"; failed: {', '.join(bad)}" if bad else "; no ratio is under half of its mark")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
