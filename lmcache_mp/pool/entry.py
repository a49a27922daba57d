"""The first thing that runs in a worker: environment and lifeline, before numpy is imported."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocess.connection import Connection

#: Linux' fcntl commands that Python's module does not name everywhere: fcntl(2).
_F_SETSIG = 10


def worker_main(
    queues: Connection, lifeline: Connection, index: int, environment: dict[str, str]
) -> None:
    """Run a worker until it is told to close; ``environment`` replaces the inherited one."""
    os.environ.clear()
    os.environ.update(environment)
    hold_lifeline(lifeline)
    # A handler, and not SIG_IGN, as that would be inherited by the user's subprocesses: the parent
    # alone decides what Ctrl-C means.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    from lmcache_mp.pool.worker import Worker

    Worker(socket.socket(fileno=os.dup(queues.fileno())), index).run()


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
