"""Starting worker processes, noticing their end, and the lifeline that ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import multiprocess
from multiprocess import forkserver
from multiprocess.connection import Connection

from lmcache_mp.errors import UsageError
from lmcache_mp.pool.entry import WorkerInheritance, worker_main
from lmcache_mp.pool.files import fill_standard_files
from lmcache_mp.pool.queues import ParentEnd

START_METHODS = ("forkserver", "spawn")
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_starting = threading.RLock()


def choose_start_method(start_method: str | None, compute_threads: int) -> str:
    """The start method to use, or a UsageError.

    A forkserver has loaded numpy with one thread; workers with more must load it for themselves.
    """
    known = [name for name in START_METHODS if name in multiprocess.get_all_start_methods()]
    if start_method is None:
        return "forkserver" if "forkserver" in known and compute_threads == 1 else "spawn"
    if start_method == "fork":
        raise UsageError(
            "start_method 'fork' is unsafe beside threads: use 'forkserver' or 'spawn'"
        )
    if start_method not in known:
        raise UsageError(f"start_method {start_method!r} is unknown here; there are {known}")
    if start_method == "forkserver" and compute_threads != 1:
        raise UsageError(
            "compute_threads above 1 needs start_method 'spawn': a forkserver's workers share a "
            "numpy that was loaded with one thread"
        )
    return start_method


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every worker of a pool is started with."""

    start_method: str
    compute_threads: int = 1
    env: Mapping[str, str] | None = None
    hide_gpus: bool = True
    seed: int = 0

    def environment(self) -> dict[str, str]:
        """The worker's whole environment: the parent's of today, thread limits, then ``env``."""
        variables = dict(os.environ)
        variables.update(_thread_limits(self.compute_threads))
        if self.hide_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        variables.update(self.env or {})
        return variables


def _thread_limits(threads: int) -> dict[str, str]:
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


class Lifeline:
    """A pipe whose closing ends a worker: the parent holds the write end as long as it lives.

    Every worker has its own: whom the kernel tells of a hang-up belongs to the open file, so of
    workers that shared one only the last would be told.
    """

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.reader = Connection(reader, writable=False)
        _close_in_forked_children(self)

    def close(self) -> None:
        """Let go; a worker that still holds the other end is ended."""
        self.reader.close()
        if self._writer >= 0:
            os.close(self._writer)
        self._writer = -1


class WorkerProcess:
    """A worker as its parent sees it: a process, its exit, and the parent's end of its queues."""

    def __init__(self, settings: WorkerSettings, index: int) -> None:
        if multiprocess.current_process().daemon:
            raise UsageError(
                "a daemonic process, such as one of a multiprocess.Pool, can't have workers: use "
                "the batch in a process that is started with daemon=False"
            )
        fill_standard_files()
        context = multiprocess.get_context(settings.start_method)
        self._crash_file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
        crash = Connection(os.dup(self._crash_file.fileno()), readable=False)
        mine, theirs = socket.socketpair()
        child_end = Connection(theirs.detach())
        self._lifeline = Lifeline()  # the last, as it does not close itself when one of them fails
        inherited = WorkerInheritance(
            index, settings.environment(), settings.seed, logging.getLogger().level
        )
        arguments = (child_end, self._lifeline.reader, crash, inherited)
        self._process = context.Process(
            target=worker_main, args=arguments, name=f"lmcache_mp-worker-{index}", daemon=False
        )
        try:
            with _starting, _hidden_main(), _interrupts_blocked():
                if settings.start_method == "forkserver":
                    _ensure_forkserver(context)
                self._process.start()
        except BaseException:
            for mine_alone in (mine, self._lifeline, self._crash_file):
                mine_alone.close()
            raise
        finally:
            for end in (child_end, self._lifeline.reader, crash):
                end.close()
        self.index = index
        self.pid: int = self._process.pid
        self.queues = ParentEnd(mine)
        self.talks = True
        self._pidfd = _open_pidfd(self.pid)
        _close_in_forked_children(self.queues)
        _workers.add(self)

    @property
    def exit_fd(self) -> int:
        """Readable once the process has ended.

        A pidfd where there is one: a process' sentinel fires early when the forkserver is killed,
        and late when the worker has left children of its own behind.
        """
        return self._pidfd if self._pidfd is not None else self._process.sentinel

    def exit_code(self) -> int | None:
        """The exit code of the ended process, negative for a signal; None if it can't be known."""
        self._process.join(1.0)
        code: int | None = self._process.exitcode
        return code

    def crash_report(self) -> str:
        """What faulthandler wrote when C code crashed in the process."""
        self._crash_file.seek(0)
        return self._crash_file.read().decode("utf-8", "replace").strip()

    def exchange(self) -> list[bytes]:
        """Write and read what the socket has room and data for."""
        self.queues.flush()
        if not self.talks:
            return []
        frames, closed = self.queues.receive()
        self.talks = not closed
        return frames

    def disown(self) -> None:
        """In a forked child, which would join the process at exit and can't."""
        multiprocess.process._children.discard(self._process)

    def kill(self) -> None:
        """End the process now."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Whether the process has ended, waiting at most ``timeout`` seconds for it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.exit_fd, selectors.EVENT_READ)
            return bool(selector.select(timeout))

    def dispose(self) -> None:
        """Release what the parent holds of an ended process."""
        self.queues.close()
        self._lifeline.close()
        self._crash_file.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._process.join(1.0)
        with contextlib.suppress(ValueError):  # still running, as far as multiprocess can tell
            self._process.close()


def end_all(workers: list[WorkerProcess], grace: float) -> list[bytes]:
    """Wait for workers that were told to close; kill what is left after ``grace`` seconds.

    Returns the frames that they sent meanwhile.
    """
    deadline = time.monotonic() + grace
    frames: list[bytes] = []
    left = list(workers)
    while left and time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            for worker in left:
                selector.register(worker.exit_fd, selectors.EVENT_READ)
                events = selectors.EVENT_READ if worker.talks else 0
                events |= selectors.EVENT_WRITE if worker.queues.waiting else 0
                if events:
                    selector.register(worker.queues, events)
            selector.select(max(0.0, deadline - time.monotonic()))
        for worker in left:
            frames += worker.exchange()
        left = [worker for worker in left if not worker.has_ended()]
    for worker in left:
        worker.kill()
    for worker in workers:
        worker.has_ended(1.0)
        frames += worker.exchange()
        worker.dispose()
    return frames


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or the process is gone already: the sentinel tells
        return None


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocess from importing the user's main module into workers.

    Scripts without a main guard, ``python -c``, standard input and notebooks work that way; what
    users define there reaches workers by cloudpickle.
    """
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if main is not None:
        main.__spec__ = None
        if file is not None:
            del main.__file__
    try:
        yield
    finally:
        if main is not None:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Children that start meanwhile hold Ctrl-C back until they can ignore it (see entry.py)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ensure_forkserver(context: multiprocess.context.ForkServerContext) -> None:
    """Start the forkserver, if none runs, with BLAS limited before it loads numpy."""
    limits = _thread_limits(1)
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(limits)
    try:
        context.set_forkserver_preload(["lmcache_mp.pool.preload"])
        forkserver.ensure_running()
    except OSError as error:
        if "path too long" not in str(error):
            raise
        raise UsageError(
            f"the temporary directory {tempfile.gettempdir()} has too long a name for a "
            "forkserver's socket: set TMPDIR to another, or use start_method 'spawn'"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_held: weakref.WeakSet[Lifeline | ParentEnd] = weakref.WeakSet()
_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _close_in_forked_children(held: Lifeline | ParentEnd) -> None:
    """A child that the parent forks must not keep the workers alive after the parent's end."""
    _held.add(held)


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.RLock()  # a thread that is not here any more may have held it
    for held in list(_held):
        held.close()
    for worker in list(_workers):
        worker.disown()
    _forget_forkserver()


def _forget_forkserver() -> None:
    """A forked child can't wait for its parent's forkserver, nor may it keep that alive."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
