"""Many requests as one: prefill all, edit all, decode all, report.

Each stream is owned by a worker process; this is the parent's side, which knows streams and
reports. No pipes and no pickles here.
"""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lmcache_mp import records
from lmcache_mp.arguments import (
    check_choice,
    check_count,
    check_sampling_params,
    check_seconds,
    select_ids,
)
from lmcache_mp.engines.engine import PostCompletion, SamplingParams
from lmcache_mp.errors import (
    LMCacheBatchedStreamError,
    StreamIdError,
    UsageError,
    WorkerDied,
)
from lmcache_mp.metrics.formats import check_format, check_width
from lmcache_mp.metrics.report import Metrics
from lmcache_mp.phases import PassResult, PerfMetrics, PhaseResult, not_run, result_of
from lmcache_mp.pool.cores import usable_cores
from lmcache_mp.pool.failures import unpack
from lmcache_mp.pool.launch import WorkerSettings, choose_start_method
from lmcache_mp.pool.messages import Adopted, Done, Failure, Generate, Modify
from lmcache_mp.pool.objects import UserObjects
from lmcache_mp.pool.pool import Lost, Pool
from lmcache_mp.pool.state import Plan
from lmcache_mp.stream import LMCacheStream, StreamPerfMetrics

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError"]

#: Edits that a worker has at once: one that runs, and one whose KV is being fetched.
_EDITS_A_WORKER = 2


@dataclass(frozen=True, slots=True)
class _Member:
    """A stream of the batch, and what ``add`` was told about it."""

    index: int
    stream: LMCacheStream
    custom_id: str | None
    sampling_params: dict[str, Any] | None
    group: str | None
    engine: int
    contexts: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the stream in salts and seeds: stable between runs of the same program."""
        return f"id:{self.custom_id}" if self.custom_id is not None else f"position:{self.index}"


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
        self._workers = None if workers is None else check_count(workers, "workers")
        self._name = name
        self._seed = seed
        self._raise = check_choice(on_error, ("raise", "collect"), "on_error") == "raise"
        self._timeout = (
            None if timeout is None else check_seconds(timeout, "timeout", positive=True)
        )
        self._retries = check_count(retries + 1, "retries + 1") - 1
        self._compute_threads = check_count(compute_threads, "compute_threads")
        self._start_method = choose_start_method(start_method, self._compute_threads)
        self._max_restarts = check_count(max_restarts + 1, "max_restarts + 1") - 1
        self._env = dict(env or {})
        self._warn_unused = check_choice(on_unused_kv, ("raise", "warn"), "on_unused_kv") == "warn"
        self._members: dict[str, _Member] = {}
        self._order: list[str] = []
        self._labels: list[str] = []
        self._custom_ids: set[str] = set()
        self._objects = UserObjects()
        self._nonce = uuid.uuid4().hex
        self._pool: Pool | None = None
        self._finalizer: weakref.finalize[[], LMCacheBatchedStream] | None = None
        self._generated: dict[str, PassResult] = {}
        self._rounds = 0
        self._setup_s = 0.0

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
        if not isinstance(stream, LMCacheStream):
            raise UsageError(f"add() takes what create_request returns, not {stream!r}")
        stream_id = stream.stream_id()
        if stream_id in self._members:
            raise StreamIdError(f"stream {stream_id!r} is in the batch already")
        if custom_id is not None and not isinstance(custom_id, str):
            raise UsageError(f"custom_id must be a string, not {custom_id!r}")
        if custom_id is not None and custom_id in self._custom_ids:
            raise UsageError(f"custom_id {custom_id!r} is taken by another stream of the batch")
        own = None
        if sampling_params is not None:
            own = check_sampling_params(sampling_params, "the stream's sampling_params")
        engine = self._objects.add_permanent(stream.post_completion, "engine")
        contexts = tuple(self._objects.add_permanent(c, "context") for c in stream.contexts)
        stream.join_batch()
        self._members[stream_id] = _Member(
            len(self._order), stream, custom_id, own, group, engine, contexts
        )
        self._order.append(stream_id)
        self._labels.append(custom_id if custom_id is not None else stream_id)
        if custom_id is not None:
            self._custom_ids.add(custom_id)
        return stream_id

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
        return PerfMetrics(self._generated)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.pids if self._pool is not None else []

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> float:
        """Start the workers and open contexts and engines in them; returns the seconds it took.

        Phases do this by themselves. What can't be opened raises here; in a phase it is the
        failure of the streams that need it.
        """
        begin = time.perf_counter()
        failures = self._start()
        if failures:
            first = unpack(failures[0])
            raise LMCacheBatchedStreamError(
                f"{len(failures)} contexts or engines did not open in workers; the first: {first}"
            ) from first
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the workers. Idempotent; also done when the batch is collected, and at exit."""
        if self._finalizer is not None:
            self._finalizer()

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
        params = check_sampling_params(sampling_params, "sampling_params")
        return self._report(
            self._generate("prefill", params, {"max_tokens": 1}, selected, max_concurrency),
            fmt,
            width,
        )

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

        ``kv`` is [2, L, T, D], private and writable; ``tokens`` are its T ids. ``timeout`` seconds
        bound the wait for a stream's KV to be there. One edit at a time runs in a worker.
        """
        check_format(fmt)
        check_width(width)
        selected = select_ids(stream_ids, self._members)
        result = self._modify(fn, selected, timeout, poll_interval, max_concurrency)
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
        params = check_sampling_params(sampling_params, "sampling_params")
        if skip_done:
            selected = [key for key in selected if not self._members[key].stream.done]
        return self._report(
            self._generate("decode", params, {}, selected, max_concurrency), fmt, width
        )

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
        params = check_sampling_params(sampling_params, "sampling_params")
        result = self._generate("decode", params, {}, selected, max_concurrency)
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
        result = self._modify(fn, selected, timeout, poll_interval, max_concurrency)
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
            key: self._generated.get(key) or not_run(key, self._members[key].index, mode)
            for key in select_ids(stream_ids, self._members)
        }
        phase = PhaseResult(mode, results, seconds, self._setup_s, float("nan"), self._rounds)
        custom_ids = [self._members[key].custom_id for key in results]
        return Metrics.from_phase(phase.data(custom_ids, self._name), fmt, width)

    # --- running a phase --------------------------------------------------------------------------

    def _generate(
        self,
        phase: str,
        params: dict[str, Any],
        forced: dict[str, Any],
        selected: list[str],
        max_concurrency: int | None,
    ) -> PhaseResult:
        limit = None if max_concurrency is None else check_count(max_concurrency, "max_concurrency")
        engines = self._check_with_engines(selected, params, forced)
        bounds = [
            bound for e in engines if (bound := getattr(e, "max_in_flight", None)) is not None
        ]
        plan = self._plan(selected, limit, min(bounds, default=None))
        work = Generate(params, forced, self._warn_unused)
        result = self._run_phase(phase, work, plan, (), selected)
        self._generated.update(result.results)
        return result

    def _check_with_engines(
        self, selected: list[str], params: dict[str, Any], forced: dict[str, Any]
    ) -> list[PostCompletion]:
        """Let the selected streams' engines refuse what they can't honour; returns the engines."""
        engines: dict[int, PostCompletion] = {}
        for key in selected:
            member = self._members[key]
            engine, own = member.stream.post_completion, member.sampling_params
            if member.engine in engines and not own:
                continue
            engines[member.engine] = engine
            check = getattr(engine, "check_sampling_params", None)
            if check is not None:
                check({**params, **(own or {}), **forced})
        return list(engines.values())

    def _modify(
        self,
        fn: Callable[..., Any],
        selected: list[str],
        timeout: float,
        poll_interval: float,
        max_concurrency: int | None,
    ) -> PhaseResult:
        if not callable(fn):
            raise UsageError(f"an edit must be a function of (kv, tokens), not {fn!r}")
        wait = check_seconds(timeout, "timeout")
        poll = check_seconds(poll_interval, "poll_interval", positive=True)
        limit = None if max_concurrency is None else check_count(max_concurrency, "max_concurrency")
        pool = self._ensure_pool()
        number = self._objects.add(fn, "edit function")
        try:
            plan = self._plan(selected, limit, _EDITS_A_WORKER, in_order=True)
            work = Modify(number, wait, poll)
            return self._run_phase("modify", work, plan, (number,), selected)
        finally:
            pool.forget(number)
            self._objects.forget(number)

    def _plan(
        self, selected: list[str], limit: int | None, per_worker: int | None, in_order: bool = False
    ) -> Plan:
        members = [self._members[key] for key in selected]
        work = [(m.index, len(m.stream.state.tokens) + len(m.stream.state.suffix)) for m in members]
        return Plan(work, limit, per_worker, in_order, self._retries, self._max_restarts)

    def _run_phase(
        self,
        phase: str,
        work: Generate | Modify,
        plan: Plan,
        objects: tuple[int, ...],
        selected: list[str],
    ) -> PhaseResult:
        results: dict[str, PassResult] = {}
        on_end = partial(self._on_end, phase, results)
        begin = started = time.perf_counter()
        if selected:
            try:
                self._start()
            except WorkerDied as error:
                for stream, _ in plan.work:
                    on_end(Lost(stream, -1, 0, error.pid, error))
                plan = replace(plan, work=())
            started = time.perf_counter()
        if plan.work:
            self._ensure_pool().run(
                plan, work, objects, self._adopted, on_end, phase, self._timeout
            )
        self._setup_s = started - begin
        duration = time.perf_counter() - started if selected else 0.0
        ordered = {key: results[key] for key in selected}
        wall = records.wall_clock(started)
        self._rounds += 1
        return PhaseResult(phase, ordered, duration, self._setup_s, wall, self._rounds - 1)

    def _on_end(self, phase: str, results: dict[str, PassResult], end: Done | Lost) -> None:
        stream_id = self._order[end.stream]
        if isinstance(end, Done):
            if end.warning:
                warnings.warn(f"stream {stream_id}: {end.warning}", RuntimeWarning, stacklevel=2)
            if end.change is not None:
                self._members[stream_id].stream.commit(end.change)
        results[stream_id] = result_of(end, stream_id, phase)

    def _report(self, result: PhaseResult, fmt: str = "terminal", width: int = 80) -> Metrics:
        """The Metrics of a phase; raises if streams failed and the batch is to raise."""
        custom_ids = [self._members[key].custom_id for key in result.results]
        metrics = Metrics.from_phase(result.data(custom_ids, self._name), fmt, width)
        failures = result.failures
        if failures and self._raise:
            first = next(iter(failures.values()))
            raise LMCacheBatchedStreamError(
                f"{result.phase}: {len(failures)} of {len(result.results)} streams failed; "
                f"the first, {first.stream_id}: {first.error_type}: {first.error_message}",
                failures=failures,
                metrics=metrics,
            ) from first.exception
        return metrics

    # --- workers ----------------------------------------------------------------------------------

    def _ensure_pool(self) -> Pool:
        if self._pool is None:
            contexts = [c for m in self._members.values() for c in m.stream.contexts]
            devices = {getattr(context, "device", "cpu") for context in contexts}
            settings = WorkerSettings(
                self._start_method, self._compute_threads, self._env, devices <= {"cpu"}, self._seed
            )
            self._pool = Pool(
                settings, self._objects, self._max_restarts, self._order, self._labels
            )
            self._finalizer = weakref.finalize(self, self._pool.close)
        return self._pool

    def _start(self) -> list[Failure]:
        """Have the workers up; returns what did not open in them."""
        cores = usable_cores() if self._workers is None else self._workers
        bounds = [
            getattr(c, "max_workers", cores)
            for m in self._members.values()
            for c in m.stream.contexts
        ]
        size = min([cores, max(1, len(self._members)), *(bounds if self._workers is None else [])])
        return self._ensure_pool().start(size, self._timeout)

    def _adopted(self, index: int) -> Adopted:
        stream_id = self._order[index]
        member = self._members[stream_id]
        return Adopted(
            index,
            stream_id,
            member.key,
            self._nonce,
            member.stream.state,
            member.engine,
            member.contexts,
            member.sampling_params,
        )
