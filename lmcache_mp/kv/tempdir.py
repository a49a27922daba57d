"""Temporary directories that processes share: the last one to let go of a directory removes it.

Every process that uses a directory holds a shared ``flock`` on one file in it. The kernel
drops the lock however a process ends, so a lock that can be taken exclusively says that nobody is
left. On a platform without ``fcntl`` only the process that made a directory removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module's name stands for "no locks here"

_PREFIX = "lmcache_mp-"
#: A name of its own: what merely looks like such a directory must not be taken for one.
_LOCK = ".lmcache_mp-holders"


class Hold:
    """This process' hold on a shared directory; use :meth:`make` or :meth:`join`."""

    def __init__(self, path: Path, fd: int | None, *, maker: bool) -> None:
        self.path = path
        self._fd = fd
        self._maker = maker
        _HOLDS.add(self)

    @classmethod
    def make(cls) -> Hold:
        """Make a directory (mode 0700) and hold it; first remove those that nobody holds."""
        sweep()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it gets its name, so no sweep can find the lock free in between.
        fd, unnamed = tempfile.mkstemp(dir=path)
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_SH)
        os.rename(unnamed, path / _LOCK)
        return cls(path, fd, maker=True)

    @classmethod
    def join(cls, path: Path) -> Hold:
        """Hold a directory that another process made. FileNotFoundError: it is gone."""
        fd = os.open(path / _LOCK, os.O_RDWR)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_SH)
            os.stat(path / _LOCK)  # it may have been removed while we waited for the lock
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, maker=False)

    def release(self) -> None:
        """Let go, and remove the directory if no other process holds it. Idempotent."""
        if self._forget() and (fcntl is not None or self._maker):
            _remove_if_free(self.path)

    def _forget(self) -> bool:
        """Close the lock file; False if that was done before."""
        fd, self._fd = self._fd, None
        if fd is None:
            return False
        os.close(fd)  # and no LOCK_UN: it would also unlock the processes that share the fd
        return True


_HOLDS: weakref.WeakSet[Hold] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process shares its parent's locks: it must neither keep nor act on them."""
    for hold in list(_HOLDS):
        hold._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def sweep() -> int:
    """Remove this user's directories whose holders were all killed; returns how many are held."""
    if fcntl is None:
        return 0
    held = 0
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                _remove_if_free(path)
                held += path.exists()
    return held


def _remove_if_free(path: Path) -> None:
    try:
        if fcntl is None:
            shutil.rmtree(path, ignore_errors=True)
            return
        with exclusive(path / _LOCK, flags=os.O_RDWR, wait=False):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # held by somebody, or gone already


@contextlib.contextmanager
def exclusive(
    path: str | Path, *, flags: int = os.O_RDWR | os.O_CREAT, wait: bool = True
) -> Iterator[int]:
    """Open ``path`` and keep everybody else (processes, threads) from doing so; yields the fd.

    ``wait=False`` raises BlockingIOError if it is locked. Without ``fcntl`` nothing is kept out.
    """
    fd = os.open(path, flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield fd
    finally:
        os.close(fd)
