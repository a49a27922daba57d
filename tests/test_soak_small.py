"""A short soak: the program that `make soak` runs, with other seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("seed", [2, 3])
def test_a_short_soak_keeps_every_promise(seed: int) -> None:
    command = [sys.executable, "-m", "tests.soak", "--phases", "20", "--streams", "40"]
    soak = subprocess.run(
        [*command, "--seed", str(seed)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    last = soak.stdout.splitlines()[-1]
    assert last.startswith("make soak: 20 phases") and "BROKEN" not in last
    assert soak.stderr == ""
