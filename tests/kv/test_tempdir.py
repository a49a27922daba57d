"""Temporary directories: removed by the last to let go, swept when all of them were killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmcache_mp.kv.tempdir import Hold, sweep


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_last_to_let_go_removes_a_temporary_directory(temporary):
    maker = Hold.make()
    assert maker.path.parent == temporary and maker.path.name.startswith("lmcache_mp-")
    assert stat.S_IMODE(maker.path.stat().st_mode) == 0o700
    worker = Hold.join(maker.path)
    worker.release()
    assert maker.path.exists()
    worker = Hold.join(maker.path)
    maker.release()
    maker.release()
    assert maker.path.exists()
    worker.release()
    assert not maker.path.exists()
    with pytest.raises(FileNotFoundError):
        Hold.join(maker.path)


def test_a_directory_left_by_a_killed_process_is_swept(temporary):
    program = (
        "from lmcache_mp.kv.tempdir import Hold\n"
        "hold = Hold.make(); print(hold.path, flush=True); input()"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
    path = Path(process.stdout.readline().strip())
    other = temporary / "lmcache_mp-without-a-lock"
    other.mkdir()
    sweep()
    assert path.exists()  # held
    process.send_signal(signal.SIGKILL)
    process.communicate()
    sweep()
    assert not path.exists()
    assert other.exists()  # not known to be free


def forked(child_does):
    """Fork; the child runs a function and lives on until the returned one is called."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            child_does()
            os.write(ready[1], b"1")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"1"

    def end():
        os.write(go[1], b"1")
        os.waitpid(child, 0)
        for fd in (ready[0], *go):
            os.close(fd)

    return end


def test_a_directory_of_the_users_that_looks_alike_is_left_alone(temporary):
    mine = temporary / "lmcache_mp-results"
    mine.mkdir()
    (mine / "lock").touch()
    (mine / "rows.jsonl").touch()
    sweep()
    assert (mine / "rows.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_remove_its_parents_directory(temporary):
    maker = Hold.make()
    end = forked(maker.release)
    assert maker.path.exists()
    end()
    assert maker.path.exists()
    maker.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_its_parents_directory(temporary):
    maker = Hold.make()
    end = forked(lambda: None)
    maker.release()
    assert not maker.path.exists()
    end()
