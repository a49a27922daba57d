"""Programs without a main guard: a file, standard input, -c, -m, and a notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import lmcache_mp
import lmcache_mp.batch as lmc_batch
import lmcache_mp.stream as lmc_stream

ctx = lmcache_mp.connect_local("random:0")

def drop_tokens(kv, tokens):
    keep = range(0, len(tokens), 2)
    return kv[:, :, keep], [tokens[i] for i in keep]

batch = lmc_batch.LMCacheBatchedStream(2)
for text in ["A river begins as a thread of water. " * 3, "The lamp is lit at dusk. " * 4]:
    batch.add(lmc_stream.create_request(ctx, ctx.post_completion, ctx.encode(text)))

batch.prefill({"temperature": 0}).emit()
batch.modify(drop_tokens).emit()
results = batch.decode({"max_tokens": 8, "temperature": 0})
results.emit()
data, frame = results.to_dict(), results.to_frame()
print("generated", frame["output_tokens"].tolist(), frame["cached_tokens"].tolist())
"""


def run(arguments: list[str], folder: Path, text: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("script")
    (folder / "program.py").write_text(PROGRAM)
    return run(["program.py"], folder)


def tables(text: str) -> list[str]:
    """Labels of the tables and the counts that must not differ between runs."""
    kept = []
    for line in text.splitlines():
        if re.match(r"^(Number|Total (In|Out)put Tokens|generated|Completed|Failed|[-=])", line):
            kept.append(line)
        else:
            kept.append(line.split("  ")[0])
    return kept


def test_a_file_prints_three_tables(from_file: str) -> None:
    assert from_file.count("Batched Stream") == 3
    assert "generated [8, 8]" in from_file


def test_standard_input(from_file: str, tmp_path: Path) -> None:
    assert tables(run(["-"], tmp_path, PROGRAM)) == tables(from_file)


def test_dash_c(from_file: str, tmp_path: Path) -> None:
    assert tables(run(["-c", PROGRAM], tmp_path)) == tables(from_file)


def test_dash_m(from_file: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert tables(run(["-m", "program"], tmp_path)) == tables(from_file)


def test_spawn(from_file: str, tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "LMCacheBatchedStream(2)", "LMCacheBatchedStream(2, start_method='spawn')"
    )
    assert tables(run(["-"], tmp_path, program)) == tables(from_file)


def test_a_notebook(from_file: str, tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    cells = PROGRAM.strip().split("\n\n")
    notebook = {
        "cells": [
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{i}",
                "metadata": {},
                "outputs": [],
                "source": cell,
            }
            for i, cell in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path / "program.ipynb"
    path.write_text(json.dumps(notebook))
    run_it = [
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "--output",
        "out.ipynb",
        str(path),
    ]
    done = subprocess.run(
        [sys.executable, *run_it], capture_output=True, text=True, cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        output["text"]
        for cell in json.loads((tmp_path / "out.ipynb").read_text())["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    text = "".join("".join(output) for output in outputs)
    assert tables(text) == tables(from_file)
