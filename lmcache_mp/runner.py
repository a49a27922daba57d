"""Running a phase of a batch over a pool of workers, and keeping streams up to date."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmcache_mp import records
from lmcache_mp.arguments import check_count
from lmcache_mp.course import Course, Leg
from lmcache_mp.engines.engine import PostCompletion
from lmcache_mp.errors import WorkerDied
from lmcache_mp.members import Member, Members
from lmcache_mp.passes.view import check_needs
from lmcache_mp.phases import PassResult, PhaseResult
from lmcache_mp.pool import messages
from lmcache_mp.pool.cores import usable_cores
from lmcache_mp.pool.launch import WorkerSettings
from lmcache_mp.pool.messages import Failure, Work
from lmcache_mp.pool.objects import dump_object
from lmcache_mp.pool.pool import Pool
from lmcache_mp.pool.slot import Lost
from lmcache_mp.pool.state import Plan
from lmcache_mp.rounds import Decode, Modify, Prefill, Round

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
        self._members.objects.close()

    def run(
        self, rounds: Sequence[Round], selected: list[str], limit: int | None
    ) -> list[PhaseResult]:
        """Take the selected streams through ``rounds``, each at its own pace."""
        generates = [it for it in rounds if not isinstance(it, Modify)]
        engines = self._check_with_engines(selected, generates)
        self._check_needs(selected, rounds)
        functions = self._functions(rounds)
        numbers = tuple(number for _, number in functions.values())
        try:
            legs = [
                Leg(it.phase, self._work(it, functions, self.rounds + index))
                for index, it in enumerate(rounds)
            ]
            edits = _EDITS_A_WORKER if len(legs) == 1 and numbers else None
            bounds = _bounds(engines, "max_in_flight")
            plan = self._plan(selected, limit, min(bounds, default=edits), bool(numbers))
            results = self._run(legs, plan, numbers, selected)
        finally:
            for number in numbers:
                self._members.objects.forget(number)
        for result in results:
            if result.phase != "modify":
                self._hint(result)
        return results

    def _functions(self, rounds: Sequence[Round]) -> dict[int, tuple[Callable[..., Any], int]]:
        """The number of each edit function, by its id(); one that is used again has one number."""
        objects = self._members.objects
        functions: dict[int, tuple[Callable[..., Any], int]] = {}
        try:
            for it in rounds:
                if isinstance(it, Modify) and id(it.fn) not in functions:
                    functions[id(it.fn)] = it.fn, objects.add(it.fn, "edit function")
        except BaseException:  # nothing stays of a call that is refused
            for _, number in functions.values():
                objects.forget(number)
            raise
        return functions

    def _work(
        self, it: Round, functions: Mapping[int, tuple[Callable[..., Any], int]], number: int
    ) -> Work:
        if isinstance(it, Modify):
            fn = functions[id(it.fn)][1]
            seed = self._settings.seed
            return messages.Modify(fn, it.timeout, it.poll_interval, seed, number)
        pickled = dump_object(dict(it.sampling_params), "sampling parameters")
        return messages.Generate(pickled, it.forced, self._settings.warn_unused_kv)

    def _check_needs(self, selected: list[str], rounds: Sequence[Round]) -> None:
        """UsageError for an edit that needs what the selected streams' contexts do not have."""
        alike = {self._members[key].contexts: key for key in selected}
        for it in rounds:
            if isinstance(it, Modify):
                for key in alike.values():
                    check_needs(it.fn, self._members[key].stream.contexts)

    def _check_with_engines(
        self, selected: list[str], generates: Sequence[Prefill | Decode]
    ) -> list[PostCompletion]:
        """Let the selected streams' engines refuse what they can't honour; returns the engines."""
        engines: dict[int, PostCompletion] = {}
        for key in selected if generates else []:
            member = self._members[key]
            engine, own = member.stream.post_completion, member.sampling_params
            if member.engine in engines and not own:
                continue
            engines[member.engine] = engine
            check = getattr(engine, "check_sampling_params", None)
            if check is not None:
                for it in generates:
                    check({**it.sampling_params, **(own or {}), **it.forced})
        return list(engines.values())

    def _plan(
        self, selected: list[str], limit: int | None, per_worker: int | None, announced: bool
    ) -> Plan:
        members: list[Member] = [self._members[key] for key in selected]
        return Plan(
            [(member.index, member.tokens) for member in members],
            limit,
            per_worker,
            announced,
            self._settings.retries,
            self._settings.max_restarts,
        )

    def _run(
        self, legs: Sequence[Leg], plan: Plan, objects: tuple[int, ...], selected: list[str]
    ) -> list[PhaseResult]:
        course = Course(legs, self._members, self.latest)
        begin = started = time.perf_counter()
        if selected:
            try:
                self.start()
            except WorkerDied as error:
                for stream, _ in plan.work:
                    course.end(Lost(stream, -1, 0, error.pid, error))
                plan = replace(plan, work=())
            started = time.perf_counter()
        self.setup_s = started - begin
        if plan.work:
            self._ensure_pool().run(plan, course, objects, self._settings.timeout)
        results = course.results(selected, self.setup_s, started, self.rounds)
        self.rounds += len(legs)
        _warn(course.doubts)
        return results

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
