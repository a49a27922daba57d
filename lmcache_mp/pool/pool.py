"""The parent's loop around state.py: processes, pipes and the clock."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from multiprocess import util

from lmcache_mp import records
from lmcache_mp.errors import LMCacheMPError, StreamTimeout, UsageError, WorkerDied
from lmcache_mp.pool import state as core
from lmcache_mp.pool.deadlines import GRACE, Deadlines
from lmcache_mp.pool.files import make_room
from lmcache_mp.pool.interrupts import Waker, held_interrupts
from lmcache_mp.pool.launch import WorkerSettings, end_all
from lmcache_mp.pool.messages import (
    Adopt,
    Adopted,
    Began,
    Cancel,
    Cancelled,
    Close,
    Done,
    Failure,
    Logged,
    Opened,
    Ping,
    Printed,
    Ready,
    Result,
    Run,
    Unload,
    Work,
    load_result,
)
from lmcache_mp.pool.objects import UserObjects
from lmcache_mp.pool.output import show
from lmcache_mp.pool.slot import Death, Lost, PassError, Slot

#: Seconds that a worker has to stop the passes of a cancelled phase, and to close.
CANCEL_GRACE = 2.0
CLOSE_GRACE = 2.0


@dataclass(frozen=True, slots=True)
class _Phase:
    """What is the same for every pass of the phase that runs."""

    work: Work
    objects: Sequence[int]
    adopted: Callable[[int], Adopted]
    on_end: Callable[[Done | Lost], None]
    name: str
    generation: int
    timeout: float | None
    deadlines: Deadlines = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadlines", Deadlines(self.timeout))


class Pool:
    """Workers that own streams, driven by whichever thread runs a phase.

    Users' objects are sent to a worker when it first needs them. The pool knows streams by number;
    ``names`` are their ids, and ``labels`` what stands before the lines that they print.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        objects: UserObjects,
        max_restarts: int,
        names: Sequence[str] = (),
        labels: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._max_restarts = max_restarts
        self._names = names
        self._labels = labels
        self._selector = selectors.DefaultSelector()
        self._slots: list[Slot] = []
        self._state = core.PoolState()
        self._generation = 0
        self._open_failures: list[Failure] = []
        self._last_death = Death()
        self._cancelling: set[int] = set()
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._let_interrupts_through: Callable[[], None] = lambda: None
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, (None, "wake"))
        self._owner_pid = os.getpid()
        # multiprocess joins its children at exit: they must have been told to end before.
        self._at_exit = util.Finalize(None, self._close_now, exitpriority=100)

    # --- starting ---------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def start(self, size: int, timeout: float | None = None) -> list[Failure]:
        """Have at least ``size`` workers up with everything opened; returns what failed to open.

        Opening may take ``timeout`` seconds in a worker. WorkerDied when workers die more often
        than ``max_restarts`` while they start.
        """
        with self._exclusively():
            while len(self._slots) < size:
                self._slots.append(Slot(len(self._slots), self._selector))
                self._state.add_worker()
            make_room(sum(slot.process is None for slot in self._slots))
            self._open_failures.clear()
            self._state.step(self._poll(0.0))
            restarts = 0
            while not self._all_opened():
                if restarts > self._max_restarts:
                    raise self._last_death.error(f"while starting, death {restarts}", "start")
                events = self._poll(None if timeout is None else 0.2)
                self._state.step(events)
                restarts += sum(isinstance(event, core.WorkerLost) for event in events)
                self._kill_slow_starters(timeout)
            return list(self._open_failures)

    def _all_opened(self) -> bool:
        for slot in self._slots:
            if slot.process is None:
                self._launch(slot)
            elif slot.opened and not slot.loaded.issuperset(self._objects.permanent):
                slot.open(self._objects)
        return all(slot.opened for slot in self._slots)

    def _launch(self, slot: Slot) -> None:
        self._let_interrupts_through()
        slot.launch(self._settings, self._objects, time.monotonic())

    def _kill_slow_starters(self, timeout: float | None) -> None:
        if timeout is None:
            return
        for slot in self._slots:
            late = time.monotonic() - slot.launched_at > timeout + GRACE
            if slot.process is not None and not slot.opened and late:
                slot.kill(f"had not opened its contexts and engines after {timeout:g} s")

    # --- a phase ----------------------------------------------------------------------------------

    def run(
        self,
        plan: core.Plan,
        work: Work,
        objects: Sequence[int],
        adopted: Callable[[int], Adopted],
        on_end: Callable[[Done | Lost], None],
        name: str,
        timeout: float | None = None,
    ) -> None:
        """Run a phase to its end: ``on_end`` hears of every stream exactly once.

        ``objects`` are the numbers of users' objects that the work needs; ``adopted`` gives a
        stream's present state; ``timeout`` is in seconds a pass. An interrupt cancels the phase;
        what had ended by then was reported.
        """
        with self._exclusively():
            self._generation += 1
            phase = _Phase(work, objects, adopted, on_end, name, self._generation, timeout)
            try:
                self._follow(self._state.begin(plan), phase)
                while not self._state.settled:
                    now = time.monotonic()
                    events = self._poll(phase.deadlines.wait(now), phase)
                    self._follow(self._state.step(events + self._check_clocks(phase)), phase)
            except BaseException:
                self._cancel()
                raise

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """For one thread at a time; Ctrl-C waits for the next poll."""
        self._check_open()
        with held_interrupts(self._waker.wake) as let_through:
            if not self._busy.acquire(blocking=False):
                raise UsageError("another phase of this batch is running, in another thread")
            self._let_interrupts_through = let_through
            try:
                yield
            finally:
                self._busy.release()

    def _follow(self, instructions: Iterable[core.Instruction], phase: _Phase) -> None:
        for instruction in instructions:
            if isinstance(instruction, core.Assign):
                self._assign(instruction, phase)
            elif isinstance(instruction, core.FailPass):
                death = self._slots[instruction.worker].death.during(phase.name)
                error = self._timed_out(phase) if instruction.overdue else death
                self._lose(
                    instruction.stream, instruction.worker, instruction.attempt, error, phase
                )
            elif isinstance(instruction, core.KillWorker):
                self._slots[instruction.worker].kill("did not answer in time")
            elif isinstance(instruction, core.StartWorker):
                self._launch(self._slots[instruction.worker])
            else:
                unfinished = self._state.unfinished
                self._cancel()
                for stream in unfinished:
                    owner = self._state.owner.get(stream, -1)
                    self._lose(stream, owner, 0, self._last_death.during(phase.name), phase)

    def _assign(self, assign: core.Assign, phase: _Phase) -> None:
        slot = self._slots[assign.worker]
        slot.load(phase.objects, self._objects)
        new = [stream for stream in assign.streams if stream not in slot.adopted]
        if new:
            slot.send(Adopt(tuple(phase.adopted(stream) for stream in new)))
            slot.adopted.update(new)
        announce = phase.deadlines.active
        slot.send(Run(phase.generation, phase.work, assign.streams, assign.attempt, announce))

    def _check_clocks(self, phase: _Phase) -> list[core.Event]:
        if not phase.deadlines.active:
            return []
        now = time.monotonic()
        busy = [slot.index for slot in self._slots if self._state.in_flight(slot.index)]
        for worker in phase.deadlines.to_ping(busy, now):
            self._slots[worker].send(Ping())
        return phase.deadlines.due(busy, now)

    def _timed_out(self, phase: _Phase) -> StreamTimeout:
        return StreamTimeout(f"{phase.name} took longer than the timeout of {phase.timeout:g} s")

    def _lose(
        self, stream: int, worker: int, attempt: int, error: PassError, phase: _Phase
    ) -> None:
        name = self._names[stream] if stream < len(self._names) else str(stream)
        error.args = (f"{error.args[0]}, in stream {name}",)
        if isinstance(error, WorkerDied):
            error.stream_ids = (name,)
            pid = error.pid
        else:
            process = self._slots[worker].process
            pid = process.pid if process is not None else None
        phase.deadlines.end(stream)
        # A late result would leave the worker with a state that the parent does not have.
        if worker >= 0:
            self._slots[worker].adopted.discard(stream)
        phase.on_end(Lost(stream, worker, attempt, pid, error))

    def _cancel(self) -> None:
        """Stop what still runs of the phase; a worker that does not stop in time is killed."""
        busy = [slot for slot in self._slots if self._state.in_flight(slot.index)]
        for slot in busy:
            # What it does from here on is not heard: it must be told its streams' state again.
            slot.adopted.difference_update(self._state.in_flight(slot.index))
            slot.send(Cancel(self._generation))
        self._state.abandon()
        self._cancelling = {slot.index for slot in busy if slot.process is not None}
        deadline = time.monotonic() + CANCEL_GRACE
        try:
            while self._cancelling and (left := deadline - time.monotonic()) > 0:
                self._state.step(self._poll(left))
        finally:
            for slot in busy:
                if slot.index in self._cancelling and slot.process is not None:
                    slot.kill("did not stop when it was cancelled")
                    slot.process.has_ended(1.0)
                    self._state.step([self._bury(slot)])
            self._cancelling = set()

    # --- events -----------------------------------------------------------------------------------

    def _poll(self, timeout: float | None, phase: _Phase | None = None) -> list[core.Event]:
        """Wait for workers; report results, and return what the state machine has to know."""
        self._let_interrupts_through()
        if not self._cancelling:
            self._check_open()
        events: list[core.Event] = []
        for key, mask in self._selector.select(timeout):
            slot, what = key.data
            if what == "wake":
                self._waker.drain()
            elif slot.process is None or (what == "queue" and slot.process.queues != key.fileobj):
                continue  # the process was buried earlier in this round
            elif what == "exit":
                events += self._read(slot, phase)
                events.append(self._bury(slot))
                if phase is not None:
                    phase.deadlines.forget(slot.index)
            else:
                if mask & selectors.EVENT_WRITE:
                    slot.flush()
                if mask & selectors.EVENT_READ:
                    events += self._read(slot, phase)
        return events

    def _read(self, slot: Slot, phase: _Phase | None) -> list[core.Event]:
        if slot.process is None:
            return []
        frames, closed = slot.process.queues.receive()
        events: list[core.Event] = []
        for frame in frames:
            events += self._take(slot, load_result(frame), phase)
        if phase is not None and frames:
            phase.deadlines.heard(slot.index)
        if closed:  # only the exit says that the end is there
            slot.hang_up()
        return events

    def _take(self, slot: Slot, result: Result, phase: _Phase | None) -> list[core.Event]:
        if isinstance(result, Done):
            wanted = phase is not None and result.generation == phase.generation
            if phase is not None and wanted and self._state.is_in_flight(slot.index, result.stream):
                phase.deadlines.end(result.stream)
                phase.on_end(result)
                return [core.PassEnded(slot.index, result.stream)]
        elif isinstance(result, Began):
            if phase is not None and result.generation == phase.generation:
                phase.deadlines.begin(slot.index, result.stream, time.monotonic())
                return [core.PassBegan(slot.index, result.stream)]
        elif isinstance(result, Printed | Logged):
            show(result, self._labels)
        elif isinstance(result, Opened):
            self._open_failures += result.failures
            slot.opened = True
            return [core.WorkerReady(slot.index)]
        elif isinstance(result, Cancelled):
            if result.generation == self._generation:
                self._cancelling.discard(slot.index)
        elif isinstance(result, Ready) and result.version != records.VERSION:
            raise LMCacheMPError(
                f"worker {slot.index} speaks version {result.version} of the records, and this "
                f"process {records.VERSION}: install the same lmcache_mp everywhere"
            )
        return []

    def _bury(self, slot: Slot) -> core.WorkerLost:
        self._last_death = slot.death = slot.bury()
        self._cancelling.discard(slot.index)
        return core.WorkerLost(slot.index)

    def forget(self, number: int) -> None:
        """Have the workers drop a user's object that was sent for a phase."""
        for slot in self._slots:
            if number in slot.loaded:
                slot.loaded.discard(number)
                slot.send(Unload(number))

    # --- closing ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._owner_pid:
            raise UsageError(
                f"the batch belongs to process {self._owner_pid}, which this one was forked from: "
                "make another here"
            )
        if self._closed.is_set():
            raise UsageError("the batch is closed")

    def close(self) -> None:
        """End the workers; idempotent. A phase that runs in another thread is cancelled first."""
        self._at_exit()

    def _close_now(self) -> None:
        if self._closed.is_set() or os.getpid() != self._owner_pid:
            return
        self._closed.set()
        self._waker.wake()
        with held_interrupts(self._waker.wake):
            idle = self._busy.acquire(timeout=2 * CANCEL_GRACE)
            try:
                self._end_workers()
            finally:
                if idle:
                    self._busy.release()

    def _end_workers(self) -> None:
        for slot in self._slots:
            slot.send(Close())
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for frame in end_all(processes, CLOSE_GRACE):
            result = load_result(frame)
            if isinstance(result, Printed | Logged):
                show(result, self._labels)
        for slot in self._slots:
            slot.process = None
        self._selector.close()
        self._waker.close()
