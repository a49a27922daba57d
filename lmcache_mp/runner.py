"""Running a phase of a batch over a pool of workers, and keeping streams up to date."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lmcache_mp import records
from lmcache_mp.arguments import check_count
from lmcache_mp.engines.engine import PostCompletion
from lmcache_mp.errors import WorkerDied
from lmcache_mp.members import Member, Members
from lmcache_mp.passes.view import check_needs
from lmcache_mp.phases import PassResult, PhaseResult, result_of
from lmcache_mp.pool.cores import usable_cores
from lmcache_mp.pool.launch import WorkerSettings
from lmcache_mp.pool.messages import Done, Failure, Generate, Modify
from lmcache_mp.pool.objects import dump_object
from lmcache_mp.pool.pool import Pool
from lmcache_mp.pool.slot import Lost
from lmcache_mp.pool.state import Plan

#: Edits that a worker has at once: one that runs, and one whose KV is being fetched.
_EDITS_A_WORKER = 2


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What holds for all phases; the names are those of the batch's constructor."""

    workers: int | None
    start_method: str
    compute_threads: int
    env: Mapping[str, str]
    seed: int
    timeout: float | None
    retries: int
    max_restarts: int
    warn_unused_kv: bool


class Runner:
    """Starts the pool when it is first needed, and runs phases over the members of a batch.

    ``latest`` has the result of each stream's latest generate, by id.
    """

    def __init__(self, members: Members, settings: RunnerSettings) -> None:
        self.latest: dict[str, PassResult] = {}
        self.setup_s = 0.0
        self.rounds = 0
        self._members = members
        self._settings = settings
        self._pool: Pool | None = None
        self._hinted = False
        self._finalizer: weakref.finalize[[], Runner] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.pids if self._pool is not None else []

    def start(self) -> list[Failure]:
        """Have the workers up; returns what did not open in them."""
        members, workers = self._members.values(), self._settings.workers
        if workers is None:
            contexts = [context for member in members for context in member.stream.contexts]
            workers = min([usable_cores(), *_bounds(contexts, "max_workers")])
        size = min(workers, max(1, len(members)))
        return self._ensure_pool().start(size, self._settings.timeout)

    def close(self) -> None:
        """End the workers. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def generate(
        self,
        phase: str,
        params: dict[str, Any],
        forced: dict[str, Any],
        selected: list[str],
        limit: int | None,
    ) -> PhaseResult:
        """One generate of each selected stream; ``forced`` parameters win over a stream's own."""
        engines = self._check_with_engines(selected, params, forced)
        per_worker = min(_bounds(engines, "max_in_flight"), default=None)
        pickled = dump_object(params, "sampling parameters")
        plan = self._plan(selected, limit, per_worker)
        work = Generate(pickled, forced, self._settings.warn_unused_kv)
        result = self._run(phase, work, plan, (), selected)
        self._hint(result)
        return result

    def modify(
        self,
        fn: Callable[..., Any],
        selected: list[str],
        timeout: float,
        poll_interval: float,
        limit: int | None,
    ) -> PhaseResult:
        """One edit of each selected stream, one at a time in a worker."""
        numbers = {self._members[key].contexts: key for key in selected}
        for key in numbers.values():  # streams of equal contexts are alike
            check_needs(fn, self._members[key].stream.contexts)
        objects = self._members.objects
        number = objects.add(fn, "edit function")
        try:
            plan = self._plan(selected, limit, _EDITS_A_WORKER, in_order=True)
            work = Modify(number, timeout, poll_interval, self._settings.seed, self.rounds)
            return self._run("modify", work, plan, (number,), selected)
        finally:
            objects.forget(number)

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

    def _plan(
        self, selected: list[str], limit: int | None, per_worker: int | None, in_order: bool = False
    ) -> Plan:
        members: list[Member] = [self._members[key] for key in selected]
        return Plan(
            [(member.index, member.tokens) for member in members],
            limit,
            per_worker,
            in_order,
            self._settings.retries,
            self._settings.max_restarts,
        )

    def _run(
        self,
        phase: str,
        work: Generate | Modify,
        plan: Plan,
        objects: tuple[int, ...],
        selected: list[str],
    ) -> PhaseResult:
        results: dict[str, PassResult] = {}
        doubts: list[str] = []
        on_end = partial(self._on_end, phase, results, doubts)
        begin = started = time.perf_counter()
        if selected:
            try:
                self.start()
            except WorkerDied as error:
                for stream, _ in plan.work:
                    on_end(Lost(stream, -1, 0, error.pid, error))
                plan = replace(plan, work=())
            started = time.perf_counter()
        self.setup_s = started - begin
        if plan.work:
            adopted, timeout = self._members.adopted, self._settings.timeout
            self._ensure_pool().run(plan, work, objects, adopted, on_end, phase, timeout)
        duration = time.perf_counter() - started if selected else 0.0
        self.rounds += 1
        _warn(doubts)
        return PhaseResult(
            phase,
            {key: results[key] for key in selected},
            duration,
            self.setup_s,
            records.wall_clock(started),
            self.rounds - 1,
        )

    def _hint(self, result: PhaseResult) -> None:
        """Say once how to make an engine tell whether it used edited KV, if one does not."""
        for key, end in result.results.items():
            stream = self._members[key].stream
            hint = getattr(stream.post_completion, "cached_tokens_hint", None)
            if self._hinted or hint is None or not stream.state.stored_tokens:
                continue
            row = np.frombuffer(end.row, records.GENERATE)[0]
            if row["status"] == records.COMPLETED and row["kv_used"] == records.UNKNOWN:
                self._hinted = True
                warnings.warn(
                    "the engine does not report cached tokens, so whether it used the edited KV "
                    f"is not known (column kv_used): {hint}",
                    RuntimeWarning,
                    stacklevel=5,
                )

    def _on_end(
        self, phase: str, results: dict[str, PassResult], doubts: list[str], end: Done | Lost
    ) -> None:
        stream_id = self._members.names[end.stream]
        stream = self._members[stream_id].stream
        if isinstance(end, Done):
            if end.warning:
                doubts.append(f"{stream_id}: {end.warning}")
            if end.change is not None:
                stream.commit(end.change)
        result = result_of(end, stream_id, phase, stream.output_text())
        results[stream_id] = result
        if phase != "modify":  # at once: an interrupt must not lose what has ended
            self.latest[stream_id] = result

    def _ensure_pool(self) -> Pool:
        if self._pool is None:
            members, settings = self._members, self._settings
            contexts = [c for member in members.values() for c in member.stream.contexts]
            devices = {getattr(context, "device", "cpu") for context in contexts}
            worker = WorkerSettings(
                settings.start_method,
                settings.compute_threads,
                settings.env,
                devices <= {"cpu"},
                settings.seed,
            )
            self._pool = Pool(
                worker, members.objects, settings.max_restarts, members.names, members.labels
            )
            self._finalizer = weakref.finalize(self, self._pool.close)
        return self._pool


def _bounds(things: Iterable[object], name: str) -> list[int]:
    """What those of ``things`` that have a bound of that name say; UsageError for nonsense."""
    return [
        check_count(bound, f"{name} of a {type(thing).__name__}")
        for thing in things
        if (bound := getattr(thing, name, None)) is not None
    ]


def _warn(doubts: list[str]) -> None:
    """One warning for what passes that succeeded had to say."""
    if doubts:
        several = f"{len(doubts)} streams, the first " if len(doubts) > 1 else "stream "
        warnings.warn(several + doubts[0], RuntimeWarning, stacklevel=6)
