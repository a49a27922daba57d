"""Weights are dequantised once, whatever processes, paths, tears and full disks there are."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmcache_mp.engines import gguf_file  # noqa: F401 - imported while sys.path is whole
from lmcache_mp.engines.weights import open_config, open_tokenizer_material, open_weights
from lmcache_mp.errors import LMCacheMPError
from tests.engines.tiny_gguf import (
    LAYERS,
    VOCAB,
    random_tensors,
    weight_files,
    write,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of the test and of its subprocesses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lmcache_mp"


def run(code: str, *arguments: object) -> str:
    """What a Python process prints for ``code``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WITHOUT_GGUF = """
import sys
sys.modules["gguf"] = None  # importing it fails
from lmcache_mp.engines.weights import open_config, open_tokenizer_material, open_weights
weights = open_weights(sys.argv[1])
assert open_config(sys.argv[1]) == weights.config
print(float(weights.layers[1].down.sum()), len(open_tokenizer_material(sys.argv[1]).tokens))
"""


def test_the_second_time_the_cache_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    weights = open_weights(path)
    assert run(WITHOUT_GGUF, path) == f"{float(weights.layers[1].down.sum())} {VOCAB}"


def test_the_same_content_at_two_paths_shares_one_cache(tmp_path: Path, cache: Path) -> None:
    first = write(tmp_path / "a.gguf")
    second = Path(shutil.copy(first, tmp_path / "b.gguf"))
    link = tmp_path / "c.gguf"
    link.symlink_to(first)
    assert open_config(first) == open_config(second) == open_config(link)
    assert len(weight_files(cache)) == 1


@pytest.mark.parametrize("keep_mtime", [False, True])
def test_a_changed_file_at_the_same_path_gets_another_cache(
    tmp_path: Path, cache: Path, keep_mtime: bool
) -> None:
    path = write(tmp_path / "a.gguf", random_tensors(0))
    before, status = open_weights(path), path.stat()
    write(path, random_tensors(1))
    if keep_mtime:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = open_weights(path)
    assert before.config.name != after.config.name
    assert not np.array_equal(before.embedding, after.embedding)
    assert len(weight_files(cache)) == 2


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("suffix", [".f32", ".json", ".tokenizer.json"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_torn_cache_is_built_again(
    tmp_path: Path, cache: Path, suffix: str, damage: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "a.gguf")
    embedding = np.array(open_weights(path).embedding)
    material = open_tokenizer_material(path)
    damage(weight_files(cache)[0].with_suffix(suffix))
    assert np.array_equal(open_weights(path).embedding, embedding)
    assert open_tokenizer_material(path) == material


@pytest.mark.parametrize("text", ["", "0" * 31])
def test_a_torn_note_of_the_contents_hash_is_not_believed(
    tmp_path: Path, cache: Path, text: str
) -> None:
    path = write(tmp_path / "a.gguf")
    config = open_config(path)
    (note,) = cache.glob("*.hash")
    note.write_text(text)
    assert open_config(path) == config
    assert len(weight_files(cache)) == 1


def test_what_a_killed_builder_left_is_removed(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.gguf")
    open_config(path)
    (weights,) = weight_files(cache)
    whole = {file.name for file in cache.iterdir()}
    weights.unlink()
    (cache / f"{weights.stem}.{'0123456789abcdef' * 2}").write_bytes(b"half")
    open_config(path)
    assert {file.name for file in cache.iterdir()} == whole


TOGETHER = """
import sys
from lmcache_mp.engines.weights import open_weights
print("ready", flush=True)
sys.stdin.readline()
print(float(open_weights(sys.argv[1]).embedding.sum()), "gguf" in sys.modules)
"""


def test_of_two_processes_at_once_one_builds(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.gguf")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    total = float(open_weights(path).embedding.sum())
    assert [float(answer[0]) for answer in answers] == [total, total]
    assert sorted(answer[1] for answer in answers) == ["False", "True"]  # who read the GGUF
    suffixes = sorted("".join(file.suffixes) for file in cache.iterdir())
    assert suffixes == [".f32", ".hash", ".json", ".lock", ".tokenizer.json"]


def test_a_cache_directory_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf")
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LMCacheMPError, match=r"could not be cached in .*XDG_CACHE_HOME"):
        open_config(path)


def test_a_disk_without_room_is_told_before_work_begins(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(LMCacheMPError, match="0 MiB are free; set XDG_CACHE_HOME to a directory"):
        open_config(path)
    assert not weight_files(cache)


WITH_LITTLE_ROOM = f"""
import resource, sys
from lmcache_mp.engines.weights import open_weights
from lmcache_mp.errors import LMCacheMPError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, {resource.RLIM_INFINITY}))
try:
    open_weights(sys.argv[1])
except LMCacheMPError as error:
    print(error)
"""


def test_a_write_that_fails_midway_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.gguf")
    assert "could not be cached" in run(WITH_LITTLE_ROOM, path)
    suffixes = sorted(file.suffix for file in cache.iterdir())
    assert suffixes == [".hash", ".lock"]
    assert open_weights(path).config.layers == LAYERS
