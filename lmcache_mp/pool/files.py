"""The files a process has open: the standard ones, and how many there may and will be."""

from __future__ import annotations

import contextlib
import os

from lmcache_mp.errors import UsageError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module's name stands for "no such limit"

#: Enough open files for any number of streams; some systems' hard limit costs memory.
_MOST_FILES = 1 << 20

#: What the parent holds of a worker: its queues, lifeline, crash file, pidfd, and multiprocess'
#: two pipes.
_FILES_A_WORKER = 6

#: What starting a worker takes for a moment, and the user's own code may open meanwhile.
_SPARE_FILES = 32


def fill_standard_files() -> None:
    """Open what is closed of the files 0, 1 and 2, as a daemon's may be.

    A pipe that took one of these numbers would be a child's standard input or output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)


def raise_limit() -> None:
    """As many open files as the system allows: each stream of a remote engine holds a socket."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_room(workers: int) -> None:
    """See that this process can hold so many more workers: raises its soft limit if it must.

    No further than that, as programs that call select(2) rely on small file descriptors. A hard
    limit in the way is a UsageError that names the number needed.
    """
    if resource is None or not workers:
        return
    try:
        now = len(os.listdir("/dev/fd"))
    except OSError:  # the system does not tell: a start that fails will
        return
    needed = now + workers * _FILES_A_WORKER + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{workers} more workers need {needed} open files in this process, and its hard limit "
            f"is {hard}: raise it (ulimit -Hn {needed}) or take fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
