"""The first thing that runs in a worker: environment and lifeline, before numpy is imported."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_mp.pool.files import raise_limit

if TYPE_CHECKING:
    from multiprocess.connection import Connection

#: Linux' fcntl commands that Python's module does not name everywhere: fcntl(2).
_F_SETSIG = 10


@dataclass(frozen=True)
class WorkerInheritance:
    """What a worker takes over from its parent when it starts."""

    index: int
    environment: dict[str, str]
    seed: int
    log_level: int


def worker_main(
    queues: Connection, lifeline: Connection, crash: Connection, inherited: WorkerInheritance
) -> None:
    """Run a worker until it is told to close; its environment replaces the one it started with."""
    # A handler, and not SIG_IGN, as that would be inherited by the user's subprocesses: the parent
    # alone decides what Ctrl-C means. It was held back while the process started.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(inherited.environment)
    hold_lifeline(lifeline)
    faulthandler.enable(file=crash.fileno())
    raise_limit()
    from lmcache_mp.pool.process import seed_random_streams
    from lmcache_mp.pool.worker import Worker

    seed_random_streams(inherited.seed, inherited.index)
    sock = socket.socket(fileno=os.dup(queues.fileno()))
    queues.close()
    Worker(sock, inherited.index, inherited.log_level).run()


def hold_lifeline(lifeline: Connection) -> None:
    """End this process when the parent lets go of ``lifeline``, by dying or on purpose.

    On Linux the kernel sends SIGKILL, which also ends a process inside C code that holds the
    interpreter lock; elsewhere a thread waits.
    """
    fd = lifeline.fileno()
    if sys.platform == "linux":
        import fcntl  # not on every platform

        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        poller = select.poll()
        poller.register(fd, 0)  # a hang-up is always reported: the parent may be gone already
        if poller.poll(0):
            os._exit(1)
        _held.append(lifeline)
    else:
        threading.Thread(target=_exit_at_end_of, args=(lifeline,), daemon=True).start()


def _exit_at_end_of(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


#: Keeps the lifeline's file descriptor open for the life of the process.
_held: list[Connection] = []
