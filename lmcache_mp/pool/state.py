"""The pool as a pure state machine: which stream runs on which worker, and when.

Events go in, instructions come out; there is no I/O and no clock here, so every crash and race is a
unit test without a process. Streams are ints (their position in the batch), workers too.

A stream is given its owner when it first begins: the largest first, to the worker with the fewest
pending tokens. From then on it runs there. ``limit`` is one count over all workers; ``per_worker``
bounds what one worker has at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has started and takes commands."""

    worker: int


@dataclass(frozen=True, slots=True)
class PassBegan:
    """A worker has begun a stream's pass; see ``Plan.announced``."""

    worker: int
    stream: int


@dataclass(frozen=True, slots=True)
class PassEnded:
    """A worker has sent the result of a stream's pass, good or bad.

    With ``continues`` the stream has another pass to go through, for which it keeps its place.
    """

    worker: int
    stream: int
    continues: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process has ended."""

    worker: int


@dataclass(frozen=True, slots=True)
class PassOverdue:
    """A pass has taken longer than the phase's timeout."""

    worker: int
    stream: int


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker no longer answers; these passes on it are overdue."""

    worker: int
    overdue: tuple[int, ...]


Event = WorkerReady | PassBegan | PassEnded | WorkerLost | PassOverdue | WorkerSilent

# --- instructions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Send these streams to the worker."""

    worker: int
    streams: tuple[int, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class FailPass:
    """The stream's pass is lost with its worker, or overdue, and is not repeated."""

    worker: int
    stream: int
    attempt: int
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End the worker: a pass that is overdue still runs in it, or it does not answer."""

    worker: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start the worker again."""

    worker: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Workers died more often than is allowed: fail what is unfinished, and abandon the phase."""


Instruction = Assign | FailPass | KillWorker | StartWorker | GiveUp

#: Streams to send, by worker and attempt.
_Batches = dict[tuple[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """A phase: (stream, tokens) of each pass, and the limits that hold.

    ``announced``: workers tell when a pass begins, so that of those that they were given only these
    are lost with them. ``retries``: how often a lost pass is repeated.
    """

    work: Sequence[tuple[int, int]]
    limit: int | None = None
    per_worker: int | None = None
    announced: bool = False
    retries: int = 0
    max_restarts: int = 3


class PoolState:
    """The workers of a batch and the passes they run, over its phases."""

    def __init__(self, workers: int = 0) -> None:
        self.owner: dict[int, int] = {}
        self._ready: set[int] = set()
        self._in_flight: list[dict[int, int]] = []
        self._queues: list[deque[int]] = []
        self._load: list[int] = []
        self._unowned: deque[int] = deque()
        self._weights: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._begun: set[int] = set()
        self._continuing: list[tuple[int, int]] = []
        self._plan = Plan(())
        self._running = 0
        self._restarts = 0
        self._given_up = False
        self._retiring: set[int] = set()  # to be replaced once nothing needs them
        self._killed: set[int] = set()  # told to end by us, and not by themselves
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> None:
        """One more worker, which is not ready yet."""
        self._in_flight.append({})
        self._queues.append(deque())
        self._load.append(0)

    @property
    def settled(self) -> bool:
        """Whether every pass of the phase has ended or failed."""
        return not self._weights

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The streams of the phase that have neither ended nor failed, in their order."""
        return tuple(self._weights)

    def is_in_flight(self, worker: int, stream: int) -> bool:
        """Whether a result of that stream from that worker is still wanted."""
        return stream in self._in_flight[worker]

    def in_flight(self, worker: int) -> tuple[int, ...]:
        """The streams that the worker was given and has not returned."""
        return tuple(self._in_flight[worker])

    def begin(self, plan: Plan) -> list[Instruction]:
        """Start a phase; the one before must be settled."""
        if not self.settled:
            raise ValueError("the phase before has not settled")
        self._plan = plan
        self._restarts = 0
        self._given_up = False
        self._attempts.clear()
        self._weights = dict(plan.work)
        self._load = [0] * len(self._load)
        for stream, weight in sorted(plan.work, key=lambda item: -item[1]):
            owner = self.owner.get(stream)
            if owner is None:
                self._unowned.append(stream)
            else:
                self._queues[owner].append(stream)
                self._load[owner] += weight
        return self._hand_out()

    def step(self, events: Iterable[Event]) -> list[Instruction]:
        """Take what has happened; say what is to be done."""
        instructions: list[Instruction] = []
        for event in events:
            if isinstance(event, PassEnded):
                instructions += self._end_pass(event)
            elif isinstance(event, PassBegan):
                if self.is_in_flight(event.worker, event.stream):
                    self._begun.add(event.stream)
            elif isinstance(event, WorkerReady):
                self._ready.add(event.worker)
            elif isinstance(event, PassOverdue):
                instructions += self._fail_overdue(event.worker, [event.stream])
            elif isinstance(event, WorkerSilent):
                instructions += self._silence(event.worker, event.overdue)
            else:
                instructions += self._lose_worker(event.worker)
        return instructions if self._given_up else instructions + self._hand_out()

    def abandon(self) -> None:
        """End the phase at once, whatever is unfinished; its passes are being stopped."""
        # What a worker was to be replaced for is stopped with the rest, if it is not ended already.
        waiting = {worker for worker in self._retiring if self._in_flight[worker]}
        self._retiring -= waiting
        self._ready |= waiting
        for flight in self._in_flight:
            flight.clear()
        for queue in self._queues:
            queue.clear()
        self._unowned.clear()
        self._weights.clear()
        self._begun.clear()
        self._continuing.clear()
        self._running = 0

    def _end_pass(self, end: PassEnded) -> list[Instruction]:
        worker, stream = end.worker, end.stream
        if self._in_flight[worker].pop(stream, None) is None:
            return []
        self._running -= 1
        self._begun.discard(stream)
        if end.continues:
            self._attempts.pop(stream, None)
            self._continuing.append((stream, worker))
        else:
            self._load[worker] -= self._weights.pop(stream)
        return self._kill_if_retired(worker)

    def _fail_overdue(self, worker: int, streams: Iterable[int]) -> list[Instruction]:
        """Fail these passes now; the worker is replaced as soon as no other pass needs it."""
        flight = self._in_flight[worker]
        failed: list[Instruction] = []
        for stream in streams:
            attempt = flight.pop(stream, None)
            if attempt is not None:
                self._running -= 1
                self._begun.discard(stream)
                self._load[worker] -= self._weights.pop(stream)
                failed.append(FailPass(worker, stream, attempt, overdue=True))
        if not failed:
            return []
        self._ready.discard(worker)
        self._retiring.add(worker)
        return [*failed, *self._kill_if_retired(worker)]

    def _kill_if_retired(self, worker: int) -> list[Instruction]:
        """End a worker that is to be replaced, unless a pass that has begun still needs it.

        Edits, and passes of engines that never wait, run one after the other: behind one that hangs
        the others would wait for ever. They are repeated.
        """
        if worker not in self._retiring or self._begun.intersection(self._in_flight[worker]):
            return []
        return [self._kill(worker)]

    def _kill(self, worker: int) -> KillWorker:
        self._killed.add(worker)
        return KillWorker(worker)

    def _silence(self, worker: int, overdue: Iterable[int]) -> list[Instruction]:
        """A worker that does not answer is ended; what is not overdue on it will be repeated."""
        failed = self._fail_overdue(worker, overdue)
        if not failed:  # no pass is to blame and to fail: this counts, so that it can't go on
            self._restarts += 1
        self._ready.discard(worker)
        self._retiring.add(worker)
        kill = self._kill(worker)
        return failed if kill in failed else [*failed, kill]

    def _lose_worker(self, worker: int) -> list[Instruction]:
        self._ready.discard(worker)
        replaced = worker in self._killed
        self._killed.discard(worker)
        self._retiring.discard(worker)
        flight = dict(self._in_flight[worker])
        lost = self._begun.intersection(flight) if self._plan.announced else set(flight)
        self._begun.difference_update(flight)
        self._in_flight[worker].clear()
        self._running -= len(flight)
        if self.settled or self._given_up:
            return []
        instructions: list[Instruction] = []
        again: list[int] = []
        for stream, attempt in flight.items():
            if stream not in lost:
                again.append(stream)
            elif replaced or attempt <= self._plan.retries:
                self._attempts[stream] = attempt + 1
                again.append(stream)
            else:
                self._load[worker] -= self._weights.pop(stream)
                instructions.append(FailPass(worker, stream, attempt))
        self._queues[worker].extendleft(reversed(again))
        self._restarts += not replaced
        if self._restarts > self._plan.max_restarts:
            self._given_up = True
            return [*instructions, GiveUp()]
        return [*instructions, StartWorker(worker)]

    def _hand_out(self) -> list[Instruction]:
        batches: _Batches = {}
        limit = len(self._weights) if self._plan.limit is None else self._plan.limit
        for stream, worker in self._continuing:
            if worker in self._ready:
                self._give(stream, worker, batches)
            else:
                self._queues[worker].appendleft(stream)
        self._continuing.clear()
        free = limit - self._running
        if free > 0:
            free = self._hand_out_owned(free, batches)
        if free > 0 and self._unowned:
            self._hand_out_unowned(free, batches)
        return [
            Assign(worker, tuple(streams), attempt)
            for (worker, attempt), streams in batches.items()
        ]

    def _hand_out_owned(self, free: int, batches: _Batches) -> int:
        """Streams that have an owner: the worker with the fewest passes takes the next one."""
        heap = [
            (len(self._in_flight[worker]), worker)
            for worker in self._ready
            if self._queues[worker] and self._room(worker)
        ]
        heapq.heapify(heap)
        while heap and free:
            _, worker = heap[0]
            self._give(self._queues[worker].popleft(), worker, batches)
            free -= 1
            if self._queues[worker] and self._room(worker):
                heapq.heapreplace(heap, (len(self._in_flight[worker]), worker))
            else:
                heapq.heappop(heap)
        return free

    def _hand_out_unowned(self, free: int, batches: _Batches) -> None:
        """Streams that begin: the worker with the fewest pending tokens becomes the owner."""
        heap = [(self._load[worker], worker) for worker in self._ready if self._room(worker)]
        heapq.heapify(heap)
        while heap and free and self._unowned:
            _, worker = heap[0]
            stream = self._unowned.popleft()
            self.owner[stream] = worker
            self._load[worker] += self._weights[stream]
            self._give(stream, worker, batches)
            free -= 1
            if self._room(worker):
                heapq.heapreplace(heap, (self._load[worker], worker))
            else:
                heapq.heappop(heap)

    def _room(self, worker: int) -> int:
        flying = len(self._in_flight[worker])
        most = len(self._weights) if self._plan.per_worker is None else self._plan.per_worker
        return max(0, most - flying)

    def _give(self, stream: int, worker: int, batches: _Batches) -> None:
        attempt = self._attempts.get(stream, 1)
        self._in_flight[worker][stream] = attempt
        self._running += 1
        batches.setdefault((worker, attempt), []).append(stream)
