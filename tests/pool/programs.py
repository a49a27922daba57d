"""Whole programs that use batches, each in a session of its own, to be interrupted and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Seconds after which a test says that something hangs.
LIMIT = 30.0

#: Put before a program, it gives it a /dev/shm of its own, of 1 MB; empty where that is forbidden.
LITTLE_SHM: tuple[str, ...] = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
    "sh",
)
try:
    subprocess.run([*LITTLE_SHM, "true"], check=True, capture_output=True, timeout=LIMIT)
except (OSError, subprocess.SubprocessError):
    LITTLE_SHM = ()

#: What every program begins with; its working folder is ``folder``.
PRELUDE = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.errors import *
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CHUNK, CountingEngine, TokenKV

folder = Path(sys.argv[1])

def say(*words):
    print(*words, flush=True)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

class Waits:
    '''Notes that a pass has begun; one of the tokens in ``stuck`` waits for the file "go".'''
    def __init__(self, *stuck):
        self.stuck = stuck
    def __call__(self, prompt, params, salt):
        (folder / f"begun-{prompt[0]}").touch()
        if prompt[0] in self.stuck:
            wait_for("go")
        yield TokenEvent(prompt[0], "x")

def fill(batch, engine, count):
    '''Streams of tokens 0, 1, ..., each shorter than the one before, so they begin in order.'''
    context = TokenKV(str(folder))
    return [batch.add(create_request(context, engine, [i] * (4 * CHUNK + 2 * count - i)),
                      custom_id=f"row-{i}")
            for i in range(count)]
"""


class Program:
    """A running program; its standard error is kept in a file."""

    def __init__(self, folder: Path, text: str, before: Sequence[str], temporary: Path) -> None:
        script = folder / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(text))
        self._errors = folder / "stderr"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*before, sys.executable, str(script), str(folder)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended: {self.stderr}"
        return line.rstrip("\n")

    def pids(self) -> list[int]:
        """The next line as numbers."""
        return [int(word) for word in self.line().split()]

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(LIMIT)

    def left(self) -> list[int]:
        """Processes of its session that run, itself included."""
        return processes_of_session(self.process.pid)


@contextlib.contextmanager
def program(
    folder: Path, text: str, before: Sequence[str] = (), temporary: Path | None = None
) -> Iterator[Program]:
    """Start a program; what is left of it in the end is killed.

    ``before`` is a command that starts it; ``temporary`` is where its temporary files are. That has
    a short name here, as those of sockets are limited.
    """
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as short:
        yield from _run(Program(folder, text, before, temporary or Path(short)))


def _run(started: Program) -> Iterator[Program]:
    try:
        yield started
    finally:
        for pid in started.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.process.wait()
        if started.process.stdout is not None:
            started.process.stdout.close()


def processes_of_session(session: int) -> list[int]:
    """Pids of the processes of a session that run (a zombie does not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def eventually(condition: Callable[[], bool], limit: float = LIMIT) -> bool:
    """Whether the condition becomes true before ``limit`` seconds are over."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
