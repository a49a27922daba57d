"""What a forkserver loads once for all workers, and what it does when its parent is gone."""

from __future__ import annotations

import atexit
import time

import lmcache_mp.pool.worker  # noqa: F401 - loaded here, shared by the workers that are forked
from lmcache_mp.kv import tempdir
from lmcache_mp.pool.files import raise_limit

#: Seconds for the workers to end: the kernel has told them already.
_PATIENCE = 2.0


def sweep_when_all_are_gone() -> None:
    """Remove the temporary stores of a parent that was killed, once no worker holds them."""
    deadline = time.monotonic() + _PATIENCE
    while tempdir.sweep() and time.monotonic() < deadline:
        time.sleep(0.05)


raise_limit()  # a forkserver holds a pipe to each worker

# Only the forkserver itself runs this: workers leave without atexit handlers.
atexit.register(sweep_when_all_are_gone)
