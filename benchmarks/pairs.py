"""Ours and its peers in turns, and what came of it: ratios, a summary line, results.json.

A figure is a ratio of two measurements of one run: ours and the peer's alternate (A B A B), so that
a machine that others use too, and whose speed changes, hits both. Every ratio is written so that
more is better for us: their time over ours, our rate over theirs.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = "ours"

#: What every benchmark runs with: one thread of BLAS in ours and theirs, and quiet peers.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

#: A ratio under this part of its mark makes the command fail: it is no noise.
FAILS_UNDER = 0.5

Times = dict[str, list[float]]


def arguments(doc: str, sizes: Mapping[str, tuple[Any, Any]], pairs: int = 7) -> argparse.Namespace:
    """The command's options: ``sizes`` are (usual, with --quick) by name; lists take several."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and three pairs")
    parser.add_argument("--pairs", type=int, help=f"turns of ours and theirs (usually {pairs})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    for name, (usual, quick) in sizes.items():
        several = isinstance(usual, list)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(usual[0] if several else usual),
            nargs="+" if several else None,
            help=f"usually {usual}; with --quick {quick}",
        )
    options = parser.parse_args()
    for name, (usual, quick) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.pairs is None:
        options.pairs = 3 if options.quick else pairs
    if not ENVIRONMENT.items() <= os.environ.items():  # once more, as libraries read it on import
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    return options


def alternate(
    runs: Mapping[str, Callable[[], float]], pairs: int, warm: bool = True
) -> dict[str, list[float]]:
    """What each of ``runs`` returned, in ``pairs`` turns; a turn before them is not counted."""
    values: Times = {name: [] for name in runs}
    for turn in range(pairs + warm):
        for name, run in runs.items():
            gc.collect()
            value = run()
            if turn >= warm:
                values[name].append(value)
    return values


def seconds(run: Callable[[], object]) -> float:
    """Wall clock of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """CPU time that this process and ``pids`` have used (clock_getcpuclockid(3) makes the ids)."""
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def pss(pids: Sequence[int]) -> float:
    """Bytes of memory of processes; what several share counts once (proc(5), smaps_rollup)."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return total * 1024.0


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: ``ratio`` is the median over pairs, ``least`` and ``most`` its spread.

    For a limit ``theirs`` is empty, and the ratio is the limit over our median.
    """

    label: str
    peer: str
    unit: str
    ours: list[float]
    theirs: list[float]
    ratio: float
    least: float
    most: float
    mark: float | None

    @property
    def verdict(self) -> str:
        """How it stands to its mark."""
        if self.mark is None:
            return ""
        return "holds" if self.ratio >= self.mark else "misses"

    def line(self) -> str:
        """One line for the terminal."""
        ours = f"{quantity(statistics.median(self.ours))} {self.unit}"
        if not self.theirs:
            limit = "" if self.mark is None else f"; {self.peer}: {self.verdict}"
            return f"{self.label:<34} {ours}{limit}"
        theirs = f"{quantity(statistics.median(self.theirs))} {self.unit}"
        mark = "" if self.mark is None else f"; mark {self.mark:.2f}x: {self.verdict}"
        return (
            f"{self.label:<34} {ours} and {self.peer} {theirs}: {self.ratio:.2f}x "
            f"({self.least:.2f} to {self.most:.2f}{mark})"
        )


def quantity(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(slots=True)
class Board:
    """Collects what a benchmark has measured, prints it, and keeps it in results.json."""

    name: str
    title: str
    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(
        self,
        label: str,
        values: Mapping[str, Sequence[float]],
        unit: str,
        marks: Mapping[str, float] | float | None = None,
        more_is_better: bool = False,
    ) -> None:
        """Ours against each of the others in ``values``; ``marks`` are one for all or by name."""
        ours = list(values[OURS])
        for peer, measured in values.items():
            if peer == OURS:
                continue
            theirs = list(measured)
            pairs = zip(ours, theirs, strict=True)
            ratios = [a / b if more_is_better else b / a for a, b in pairs]
            mark = marks.get(peer) if isinstance(marks, Mapping) else marks
            middle = statistics.median(ratios)
            self._add(Row(label, peer, unit, ours, theirs, middle, min(ratios), max(ratios), mark))

    def limit(self, label: str, ours: Sequence[float], unit: str, most: float | None) -> None:
        """Ours alone, with the most that it may be: it does not make the command fail."""
        values = list(ours)
        middle = statistics.median(values)
        ratio = most / middle if most is not None else float("nan")
        name = "" if most is None else f"at most {most:g} {unit}"
        bound = None if most is None else 1.0
        self._add(Row(label, name, unit, values, [], ratio, ratio, ratio, bound))

    def note(self, text: str) -> None:
        """Something that a reader of the figures has to know: a peer that is missing, say."""
        self.notes.append(text)
        print(f"  note: {text}", flush=True)

    def finish(self) -> int:
        """Print the summary line, append to results.json; 1 if a ratio is far under its mark."""
        entry = {
            "benchmark": self.name,
            "title": self.title,
            "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "arguments": {
                key: value
                for key, value in vars(self.options).items()
                if not isinstance(value, Path)
            },
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }
        append(self.options.results, entry)
        judged = [row for row in self.rows if row.mark is not None]
        missed = [row for row in judged if row.verdict == "misses"]
        failed = [row for row in judged if row.theirs and row.ratio < FAILS_UNDER * (row.mark or 0)]
        misses = "; ".join(_brief(row) for row in missed)
        summary = f"{len(judged) - len(missed)} of {len(judged)} marks hold"
        if misses:
            summary += f"; misses: {misses}"
        if failed:
            summary += f"; far under: {'; '.join(_brief(row) for row in failed)}"
        print(f"bench {self.name}: {summary}", flush=True)
        return 1 if failed else 0

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.line()}", flush=True)


def _brief(row: Row) -> str:
    if not row.theirs:
        return f"{row.label} {quantity(statistics.median(row.ours))} {row.unit} ({row.peer})"
    return f"{row.label} {row.ratio:.2f}x {row.peer} (mark {row.mark:.2f}x)"


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry to the list in ``path``; whole or not at all, whoever else does so."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = json.loads(path.read_text()) if path.exists() else []
        fresh = path.with_suffix(".new")
        lines = ",\n".join(json.dumps(each) for each in [*entries, entry])
        fresh.write_text(f"[\n{lines}\n]\n")
        os.replace(fresh, path)


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else ""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "commit": commit,
        "load": [round(each, 2) for each in os.getloadavg()],
    }


def available(module: str, board: Board) -> bool:
    """Whether a peer can be imported; the board notes it if not."""
    try:
        __import__(module)
    except ImportError as error:
        board.note(f"{module} is left out: {error}")
        return False
    return True
