"""Many requests as one: prefill all, edit all, decode all, report.

Each stream is owned by a worker process; this is the parent's side, which knows streams and
reports. No pipes and no pickles here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmcache_mp import __version__, rounds
from lmcache_mp.arguments import (
    check_choice,
    check_count,
    check_environment,
    check_seconds,
    select_ids,
)
from lmcache_mp.engines.engine import SamplingParams
from lmcache_mp.errors import LMCacheBatchedStreamError
from lmcache_mp.members import Members
from lmcache_mp.metrics.formats import check_format, check_width
from lmcache_mp.metrics.report import Metrics
from lmcache_mp.metrics.run import Run
from lmcache_mp.phases import PerfMetrics, PhaseResult, not_run
from lmcache_mp.pool.failures import unpack
from lmcache_mp.pool.launch import choose_start_method
from lmcache_mp.rounds import Round, check_rounds
from lmcache_mp.runner import Runner, RunnerSettings
from lmcache_mp.stream import LMCacheStream, StreamPerfMetrics

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError"]


class LMCacheBatchedStream:
    """A batch of requests over worker processes, with the methods of LMCache's class of that name.

    ``workers``: processes; None is one a usable core, at most one a stream.
    ``name``: goes into reports as the column ``run``.
    ``seed``: of the random numbers that edits are given.
    ``on_error``: "raise" an error that carries all failures after every stream has ended, or
    "collect" them in the Metrics.
    ``timeout``: seconds that a stream's pass may take once its worker has begun it; None is no
    limit. ``retries``: how often a pass lost with its worker is repeated.
    ``compute_threads``: BLAS and torch threads of a worker.
    ``start_method``: "forkserver" or "spawn"; None is forkserver where there is one.
    ``max_restarts``: how many deaths of workers a phase survives.
    ``env``: variables set in a worker before anything is imported.
    ``on_unused_kv``: "raise" or "warn" when an engine did not use edited KV.

    A wrong argument is a UsageError, and changes nothing.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        name: str | None = None,
        seed: int = 0,
        on_error: str = "raise",
        timeout: float | None = None,
        retries: int = 0,
        compute_threads: int = 1,
        start_method: str | None = None,
        max_restarts: int = 3,
        env: Mapping[str, str] | None = None,
        on_unused_kv: str = "raise",
    ) -> None:
        self._name = name
        self._raise = check_choice(on_error, ("raise", "collect"), "on_error") == "raise"
        threads = check_count(compute_threads, "compute_threads")
        settings = RunnerSettings(
            workers=None if workers is None else check_count(workers, "workers"),
            start_method=choose_start_method(start_method, threads),
            compute_threads=threads,
            env=check_environment(env or {}),
            seed=check_count(seed, "seed", least=0),
            timeout=None if timeout is None else check_seconds(timeout, "timeout", positive=True),
            retries=check_count(retries, "retries", least=0),
            max_restarts=check_count(max_restarts, "max_restarts", least=0),
            warn_unused_kv=check_choice(on_unused_kv, ("raise", "warn"), "on_unused_kv") == "warn",
        )
        self._config = {
            "name": name,
            "workers": settings.workers,
            "seed": settings.seed,
            "timeout": settings.timeout,
            "retries": settings.retries,
            "start_method": settings.start_method,
            "compute_threads": threads,
            "lmcache_mp": __version__,
        }
        self._members = Members()
        self._runner = Runner(self._members, settings)

    # --- streams ----------------------------------------------------------------------------------

    def add(
        self,
        stream: LMCacheStream,
        *,
        custom_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        group: str | None = None,
    ) -> str:
        """Add a stream made by ``create_request``; returns its stream id.

        ``custom_id`` names it in frames and comparisons; ``sampling_params`` are its own, laid over
        those of a phase; streams of one ``group`` stay on one node of a cluster.
        """
        return self._members.add(stream, custom_id, sampling_params, group)

    def get_stream(self, stream_id: str) -> LMCacheStream:
        """The object that was given to ``add``; it is kept up to date."""
        select_ids([stream_id], self._members)
        return self._members[stream_id].stream

    @property
    def streams(self) -> dict[str, LMCacheStream]:
        """All streams by id, in the order of ``add``."""
        return {stream_id: member.stream for stream_id, member in self._members.items()}

    @property
    def perf_metrics(self) -> Mapping[str, StreamPerfMetrics]:
        """The latest successful generate of each stream, by id."""
        return PerfMetrics(self._runner.latest)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._runner.pids

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> float:
        """Start the workers and open contexts and engines in them; returns the seconds it took.

        Phases do this by themselves. What can't be opened raises here; in a phase it is the
        failure of the streams that need it.
        """
        begin = time.perf_counter()
        failures = self._runner.start()
        if failures:
            first = unpack(failures[0])
            raise LMCacheBatchedStreamError(
                f"{len(failures)} contexts or engines did not open in workers; the first: {first}"
            ) from first
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the workers. Idempotent; also done when the batch is collected, and at exit."""
        self._runner.close()

    def __enter__(self) -> LMCacheBatchedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- phases -----------------------------------------------------------------------------------

    def prefill(
        self,
        sampling_params: SamplingParams,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Iterable[str] | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> Metrics:
        """Run every selected stream's prompt for one token; its KV is then in the store.

        ``max_tokens`` is 1 whatever is given. ``max_concurrency`` is one count over the batch;
        None sends everything at once. Raises LMCacheBatchedStreamError when streams failed.
        """
        check_format(fmt)
        check_width(width)
        selected = select_ids(stream_ids, self._members)
        it = rounds.prefill(sampling_params)
        return self._report(self._one(it, selected, max_concurrency), fmt, width)

    def modify(
        self,
        fn: Callable[..., Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Iterable[str] | None = None,
        *,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        max_concurrency: int | None = None,
    ) -> Metrics:
        """Edit every selected stream's KV by ``fn(kv, tokens) -> (new_kv, new_tokens[, info])``.

        ``kv`` is [2, L, T, D], private and writable; ``tokens`` are its T ids. A function with a
        third parameter ``stream`` gets a :class:`~lmcache_mp.edits.view.StreamView`; ready edits
        are in :mod:`lmcache_mp.edits`. ``timeout`` seconds bound the wait for a stream's KV to be
        there. One edit at a time runs in a worker.
        """
        check_format(fmt)
        check_width(width)
        selected = select_ids(stream_ids, self._members)
        it = rounds.modify(fn, timeout=timeout, poll_interval=poll_interval)
        result = self._one(it, selected, max_concurrency)
        return self._report(result, fmt, width)

    def decode(
        self,
        sampling_params: SamplingParams,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Iterable[str] | None = None,
        *,
        max_concurrency: int | None = None,
        skip_done: bool = False,
    ) -> Metrics:
        """Generate on from what is stored; ``skip_done`` leaves out streams that have ended."""
        check_format(fmt)
        check_width(width)
        selected = select_ids(stream_ids, self._members)
        it = rounds.decode(sampling_params)
        if skip_done:
            selected = [key for key in selected if not self._members[key].stream.done]
        return self._report(self._one(it, selected, max_concurrency), fmt, width)

    def run_streams(
        self,
        sampling_params: SamplingParams,
        stream_ids: Iterable[str] | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> float:
        """One generate of every selected stream; returns wall clock seconds, 0.0 for no streams.

        Results are in ``perf_metrics`` and :meth:`get_perf_metrics`.
        """
        selected = select_ids(stream_ids, self._members)
        result = self._one(rounds.decode(sampling_params), selected, max_concurrency)
        if self._raise and result.failures:
            self._report(result)
        return result.duration

    def modify_stream(
        self,
        fn: Callable[..., Any],
        stream_ids: Iterable[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        max_concurrency: int | None = None,
    ) -> float:
        """Edit the selected streams as :meth:`modify` does; returns wall clock seconds."""
        selected = select_ids(stream_ids, self._members)
        it = rounds.modify(fn, timeout=timeout, poll_interval=poll_interval)
        result = self._one(it, selected, max_concurrency)
        if self._raise and result.failures:
            self._report(result)
        return result.duration

    def get_perf_metrics(
        self,
        duration: float,
        fmt: str,
        width: int,
        mode: str,
        stream_ids: Iterable[str] | None = None,
    ) -> Metrics:
        """A report over the selected streams' latest generate; ``mode``: "prefill" or "decode"."""
        check_format(fmt)
        check_width(width)
        mode = check_choice(mode, ("prefill", "decode"), "mode")
        seconds = check_seconds(duration, "duration")
        results = {
            key: self._runner.latest.get(key) or not_run(key, self._members[key].index, mode)
            for key in select_ids(stream_ids, self._members)
        }
        runner = self._runner
        phase = PhaseResult(mode, results, seconds, runner.setup_s, float("nan"), runner.rounds)
        return self._metrics(phase, fmt, width)

    def run(
        self,
        rounds: Iterable[Round],
        *,
        max_concurrency: int | None = 256,
        stream_ids: Iterable[str] | None = None,
    ) -> Run:
        """Take each stream through ``rounds`` at its own pace, without waiting for the others.

        ``rounds`` are made by ``lmcache_mp.rounds``: ``[prefill(...), modify(...), decode(...)]``.
        At most ``max_concurrency`` streams are under way at once. A stream that has ended by
        itself, or failed, is skipped from then on. Raises LMCacheBatchedStreamError when streams
        failed: its ``run`` has the rest.
        """
        course = check_rounds(rounds)
        limit = _check_limit(max_concurrency)
        selected = select_ids(stream_ids, self._members)
        results = self._runner.run(course, selected, limit)
        config = {
            "rounds": [str(it) for it in course],
            "max_concurrency": limit,
            "streams": len(selected),
            **self._config,
        }
        run = Run([self._metrics(result, "terminal", 80) for result in results], config)
        failed = [result for result in results if result.failures]
        if failed and self._raise:
            raise self._error(failed, len(selected), run)
        return run

    # --- running a phase --------------------------------------------------------------------------

    def _one(self, it: Round, selected: list[str], max_concurrency: int | None) -> PhaseResult:
        return self._runner.run([it], selected, _check_limit(max_concurrency))[0]

    def _metrics(self, result: PhaseResult, fmt: str, width: int) -> Metrics:
        custom_ids = [self._members[key].custom_id for key in result.results]
        return Metrics.from_phase(result.data(custom_ids, self._name), fmt, width)

    def _report(self, result: PhaseResult, fmt: str = "terminal", width: int = 80) -> Metrics:
        """The Metrics of a phase; raises if streams failed and the batch is to raise."""
        metrics = self._metrics(result, fmt, width)
        if result.failures and self._raise:
            raise self._error([result], len(result.results), metrics)
        return metrics

    def _error(
        self, failed: Sequence[PhaseResult], streams: int, report: Metrics | Run
    ) -> LMCacheBatchedStreamError:
        """The error that carries all failures; the report is that of the phase, or of the run."""
        failures = {key: it for result in failed for key, it in result.failures.items()}
        first = next(iter(failures.values()))
        phase = "run" if isinstance(report, Run) else failed[0].phase
        error = LMCacheBatchedStreamError(
            f"{phase}: {len(failures)} of {streams} streams failed; "
            f"the first, {first.stream_id}: {first.error_type}: {first.error_message}",
            failures=failures,
            metrics=None if isinstance(report, Run) else report,
            run=report if isinstance(report, Run) else None,
        )
        error.__cause__ = first.exception
        return error


def _check_limit(max_concurrency: int | None) -> int | None:
    return None if max_concurrency is None else check_count(max_concurrency, "max_concurrency")
