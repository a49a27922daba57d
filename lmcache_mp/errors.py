"""The error tree: all that is raised on purpose is an LMCacheMPError, which is a RuntimeError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_mp.metrics import Metrics
    from lmcache_mp.metrics.run import Run


class LMCacheMPError(RuntimeError):
    """Base of every error that lmcache_mp raises on purpose."""


class LMCacheStreamError(LMCacheMPError):
    """One request failed."""


class EngineError(LMCacheStreamError):
    """The engine refused a request, broke off, or sent an error."""


class KVError(LMCacheStreamError):
    """KV is missing, incomplete, mis-shaped, was not stored, or was not used."""


class StreamTimeout(LMCacheStreamError, TimeoutError):
    """A stream's pass took longer than the batch's ``timeout``."""


class UsageError(LMCacheMPError, ValueError):
    """A wrong call, found before anything was sent: nothing has changed."""


class MissingExtraError(LMCacheMPError, ImportError):
    """An optional dependency is not installed; the message holds the pip line that adds it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra {extra!r}: pip install 'lmcache_mp[{extra}]'")


class WorkerDied(LMCacheMPError):
    """A worker process ended while streams were in flight on it.

    ``pid`` is the process, ``exit_code`` its exit code (negative for a signal, None if unknown),
    ``phase`` the phase it was in, ``stream_ids`` the stream that was lost, and ``crash_report``
    faulthandler's output for a crash in C.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int | None = None,
        exit_code: int | None = None,
        phase: str | None = None,
        stream_ids: tuple[str, ...] = (),
        crash_report: str = "",
    ) -> None:
        super().__init__(message)
        self.crash_report = crash_report
        self.pid = pid
        self.exit_code = exit_code
        self.phase = phase
        self.stream_ids = stream_ids


class RemoteError(LMCacheMPError):
    """Stands for an exception of a worker that can't be rebuilt in this process.

    ``type_name`` is the original type's name and ``remote_traceback`` its formatted traceback.
    """

    def __init__(self, message: str, *, type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """Why one stream's pass failed.

    ``exit_code`` is the worker's: negative for a signal, None while the worker lives.
    """

    stream_id: str
    phase: str
    exception: BaseException
    error_type: str
    error_message: str
    traceback: str = ""
    worker_pid: int | None = None
    exit_code: int | None = None


class LMCacheBatchedStreamError(LMCacheMPError):
    """A phase failed for some streams.

    ``failures`` maps stream ids to what happened; ``metrics`` is the report over the streams that
    did complete, ``run`` that of a whole run. ``__cause__`` is the first failure's error.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[str, StreamFailure] | None = None,
        metrics: Metrics | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(message)
        self.failures: dict[str, StreamFailure] = dict(failures or {})
        self.metrics = metrics
        self.run = run


class StreamIdError(UsageError, LMCacheBatchedStreamError):
    """Unknown or duplicate stream ids; also a batch error, since LMCache's users catch that one."""
