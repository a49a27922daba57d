"""Many requests, by LMCache's second generation of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lmcache_mp import batch as ours
from lmcache_mp.engines.engine import SamplingParams
from lmcache_mp.errors import LMCacheBatchedStreamError
from lmcache_mp.metrics import Metrics
from lmcache_mp.sdk.context import ModifyFnType
from lmcache_mp.sdk.request import LMCacheRequestStream, over_kinds
from lmcache_mp.stream import StreamPerfMetrics

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError"]


class LMCacheBatchedStream:
    """Requests that run together, in worker processes.

    ``options`` are those of :class:`lmcache_mp.batch.LMCacheBatchedStream`, which ``batch`` is.
    """

    def __init__(self, **options: Any) -> None:
        self.batch = ours.LMCacheBatchedStream(**options)
        self.request_streams: dict[str, LMCacheRequestStream] = {}

    @property
    def perf_metrics(self) -> Mapping[str, StreamPerfMetrics]:
        """The latest generate of each stream, by id."""
        return self.batch.perf_metrics

    def add(self, request_stream: LMCacheRequestStream) -> None:
        """Add a request made by ``create_request``. LMCacheBatchedStreamError: it is there."""
        self.batch.add(request_stream.stream)
        self.request_streams[request_stream.request_stream_id] = request_stream

    def get_request_stream(self, stream_id: str) -> LMCacheRequestStream:
        """The request of an id. LMCacheBatchedStreamError: there is none."""
        self.batch.get_stream(stream_id)
        return self.request_streams[stream_id]

    def run_request_streams(
        self, sampling_params: SamplingParams, stream_ids: Iterable[str] | None = None
    ) -> float:
        """One generate of every selected stream; returns wall clock seconds."""
        return self.batch.run_streams(sampling_params, stream_ids)

    def modify_request_streams(
        self,
        fn: ModifyFnType,
        stream_ids: Iterable[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
    ) -> float:
        """Edit the KV of every selected stream; returns wall clock seconds."""
        return self.batch.modify_stream(over_kinds(fn), stream_ids, timeout, poll_interval)

    def get_perf_metrics(
        self,
        duration: float,
        fmt: str,
        width: int,
        mode: str,
        stream_ids: Iterable[str] | None = None,
    ) -> Metrics:
        """A report over the latest generate; ``mode`` is "prefill" or "decode"."""
        if mode not in ("prefill", "decode"):
            raise LMCacheBatchedStreamError(f"mode must be 'prefill' or 'decode', not {mode!r}")
        return _relabelled(self.batch.get_perf_metrics(duration, fmt, width, mode, stream_ids))

    def prefill(
        self,
        sampling_params: SamplingParams,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Iterable[str] | None = None,
    ) -> Metrics:
        """Run every selected stream's prompt for one token."""
        return _relabelled(self.batch.prefill(sampling_params, fmt, width, stream_ids))

    def modify(
        self,
        fn: ModifyFnType,
        fmt: str = "terminal",
        width: int = 80,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        stream_ids: Iterable[str] | None = None,
    ) -> Metrics:
        """Edit the KV of every selected stream by ``fn({kind: array}, tokens)``."""
        return self.batch.modify(
            over_kinds(fn), fmt, width, stream_ids, timeout=timeout, poll_interval=poll_interval
        )

    def decode(
        self,
        sampling_params: SamplingParams,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Iterable[str] | None = None,
    ) -> Metrics:
        """Generate on from what is stored."""
        return _relabelled(self.batch.decode(sampling_params, fmt, width, stream_ids))

    def close(self) -> None:
        """End the workers. Idempotent; also done when the batch is collected, and at exit."""
        self.batch.close()

    def __enter__(self) -> LMCacheBatchedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _relabelled(metrics: Metrics) -> Metrics:
    """The report with the second generation's name for the count of streams."""
    entries = metrics["config"].entries
    entries[:] = [
        ("num_request_streams", "Number of Request Streams", value)
        if key == "num_streams"
        else (key, label, value)
        for key, label, value in entries
    ]
    return metrics
