"""The parent's loop around state.py: what workers say goes in, what is to be done goes out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lmcache_mp import records
from lmcache_mp.errors import LMCacheMPError, StreamTimeout, WorkerDied
from lmcache_mp.pool import state as core
from lmcache_mp.pool.deadlines import GRACE, Deadlines
from lmcache_mp.pool.fleet import CANCEL_GRACE, Fleet, Heard
from lmcache_mp.pool.launch import WorkerSettings
from lmcache_mp.pool.messages import (
    Adopt,
    Adopted,
    Began,
    Cancel,
    Cancelled,
    Done,
    Failure,
    Opened,
    Ping,
    Ready,
    Result,
    Run,
    Unload,
    Work,
)
from lmcache_mp.pool.objects import UserObjects
from lmcache_mp.pool.slot import Death, Lost, PassError, Slot


class Passes(Protocol):
    """What a phase has each of its streams go through: one pass, or one after the other."""

    def work(self, stream: int) -> Work:
        """What the stream's present pass is."""
        ...

    def phase(self, stream: int) -> str:
        """The name of that, for messages."""
        ...

    def adopted(self, stream: int) -> Adopted:
        """The stream as its worker needs it, as it is now."""
        ...

    def end(self, end: Done | Lost) -> bool:
        """Hear of the end of the stream's present pass; whether another one follows."""
        ...


@dataclass(frozen=True, slots=True)
class _Phase:
    """What is the same for every pass of the phase that runs."""

    passes: Passes
    objects: Sequence[int]
    generation: int
    timeout: float | None
    announced: bool
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
        self._fleet = Fleet(settings, objects, labels)
        self._objects = objects
        self._max_restarts = max_restarts
        self._names = names
        self._state = core.PoolState()
        self._generation = 0
        self._open_failures: list[Failure] = []
        self._last_death = Death()
        self._cancelling: set[int] = set()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return self._fleet.pids

    def close(self) -> None:
        """End the workers: see :meth:`Fleet.close`."""
        self._fleet.close()

    # --- starting ---------------------------------------------------------------------------------

    def start(self, size: int, timeout: float | None = None) -> list[Failure]:
        """Have at least ``size`` workers up with everything opened; returns what failed to open.

        Opening may take ``timeout`` seconds in a worker. WorkerDied when workers die more often
        than ``max_restarts`` while they start.
        """
        with self._fleet.exclusively():
            for _ in range(self._fleet.grow(size)):
                self._state.add_worker()
            self._open_failures.clear()
            self._state.step(self._poll(0.0))
            restarts = 0
            while not self._all_opened():
                events = self._launch_missing()
                events += self._poll(None if timeout is None and not events else 0.2)
                self._state.step(events)
                restarts += sum(isinstance(event, core.WorkerLost) for event in events)
                if restarts > self._max_restarts:
                    raise self._last_death.error(f"while starting, death {restarts}", "start")
                self._kill_slow_starters(timeout)
            return list(self._open_failures)

    def _all_opened(self) -> bool:
        for slot in self._fleet.slots:
            if slot.opened and not slot.loaded.issuperset(self._objects.permanent):
                slot.open(self._objects)
        return all(slot.opened for slot in self._fleet.slots)

    def _launch_missing(self) -> list[core.Event]:
        missing = [slot for slot in self._fleet.slots if slot.process is None]
        return [event for slot in missing for event in self._launch(slot)]

    def _launch(self, slot: Slot) -> list[core.Event]:
        """Start a worker; one that can't be started counts as one that died."""
        if self._fleet.launch(slot):
            return []
        self._last_death = slot.death
        return [core.WorkerLost(slot.index)]

    def _kill_slow_starters(self, timeout: float | None) -> None:
        if timeout is None:
            return
        for slot in self._fleet.slots:
            late = time.monotonic() - slot.launched_at > timeout + GRACE
            if slot.process is not None and not slot.opened and late:
                slot.kill(f"had not opened its contexts and engines after {timeout:g} s")

    # --- a phase ----------------------------------------------------------------------------------

    def run(
        self,
        plan: core.Plan,
        passes: Passes,
        objects: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Run a phase to its end: ``passes`` hears of every stream's passes, each exactly once.

        ``objects`` are the numbers of users' objects that only this phase needs; ``timeout`` is in
        seconds a pass. An interrupt cancels the phase; what had ended by then was reported.
        """
        with self._fleet.exclusively():
            self._generation += 1
            plan = replace(plan, announced=plan.announced or timeout is not None)
            phase = _Phase(passes, objects, self._generation, timeout, plan.announced)
            try:
                self._follow(self._state.begin(plan), phase)
                while not self._state.settled:
                    now = time.monotonic()
                    events = self._poll(phase.deadlines.wait(now), phase)
                    self._follow(self._state.step(events + self._check_clocks(phase)), phase)
            except BaseException:
                self._cancel()
                raise
            finally:
                self._unload(objects)

    def _follow(self, instructions: Iterable[core.Instruction], phase: _Phase) -> None:
        todo = list(instructions)
        while todo:
            events = [event for step in todo for event in self._obey(step, phase)]
            todo = self._state.step(events) if events else []

    def _obey(self, instruction: core.Instruction, phase: _Phase) -> list[core.Event]:
        """Do what the state machine says; returns what came of it at once."""
        slots = self._fleet.slots
        if isinstance(instruction, core.Assign):
            self._assign(instruction, phase)
        elif isinstance(instruction, core.FailPass):
            name = phase.passes.phase(instruction.stream)
            death = slots[instruction.worker].death.during(name)
            error = self._timed_out(name, phase) if instruction.overdue else death
            self._lose(instruction.stream, instruction.worker, instruction.attempt, error, phase)
        elif isinstance(instruction, core.KillWorker):
            slots[instruction.worker].kill("did not answer in time")
        elif isinstance(instruction, core.StartWorker):
            return self._launch(slots[instruction.worker])
        else:
            unfinished = self._state.unfinished
            self._cancel()
            for stream in unfinished:
                owner = self._state.owner.get(stream, -1)
                death = self._last_death.during(phase.passes.phase(stream))
                self._lose(stream, owner, 0, death, phase)
        return []

    def _assign(self, assign: core.Assign, phase: _Phase) -> None:
        slot = self._fleet.slots[assign.worker]
        slot.load(phase.objects, self._objects)
        new = [stream for stream in assign.streams if stream not in slot.adopted]
        if new:
            slot.send(Adopt(tuple(phase.passes.adopted(stream) for stream in new)))
            slot.adopted.update(new)
        for work, streams in _by_work(assign.streams, phase.passes):
            slot.send(Run(phase.generation, work, streams, assign.attempt, phase.announced))

    def _check_clocks(self, phase: _Phase) -> list[core.Event]:
        if not phase.deadlines.active:
            return []
        now = time.monotonic()
        busy = [slot.index for slot in self._fleet.slots if self._state.in_flight(slot.index)]
        for worker in phase.deadlines.to_ping(busy, now):
            self._fleet.slots[worker].send(Ping())
        return phase.deadlines.due(busy, now)

    def _timed_out(self, name: str, phase: _Phase) -> StreamTimeout:
        return StreamTimeout(f"{name} took longer than the timeout of {phase.timeout:g} s")

    def _lose(
        self, stream: int, worker: int, attempt: int, error: PassError, phase: _Phase
    ) -> None:
        name = self._names[stream] if stream < len(self._names) else str(stream)
        error.args = (f"{error.args[0]}, in stream {name}",)
        if isinstance(error, WorkerDied):
            error.stream_ids = (name,)
            pid = error.pid
        else:
            process = self._fleet.slots[worker].process
            pid = process.pid if process is not None else None
        phase.deadlines.end(stream)
        # A late result would leave the worker with a state that the parent does not have.
        if worker >= 0:
            self._fleet.slots[worker].adopted.discard(stream)
        phase.passes.end(Lost(stream, worker, attempt, pid, error))

    def _cancel(self) -> None:
        """Stop what still runs of the phase; a worker that does not stop in time is killed."""
        busy = [slot for slot in self._fleet.slots if self._state.in_flight(slot.index)]
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
                    slot.bury()
                    self._state.step(self._hear(Heard(slot, ended=True), None))
            self._cancelling = set()

    # --- events -----------------------------------------------------------------------------------

    def _poll(self, timeout: float | None, phase: _Phase | None = None) -> list[core.Event]:
        """Wait for workers; report results, and return what the state machine has to know."""
        events: list[core.Event] = []
        for heard in self._fleet.listen(timeout, closing=bool(self._cancelling)):
            events += self._hear(heard, phase)
        return events

    def _hear(self, heard: Heard, phase: _Phase | None) -> list[core.Event]:
        slot = heard.slot
        if phase is not None:
            if heard.ended:
                phase.deadlines.forget(slot.index)
            else:
                phase.deadlines.heard(slot.index)
        if heard.ended:
            self._last_death = slot.death
            self._cancelling.discard(slot.index)
            return [core.WorkerLost(slot.index)]
        return [event for result in heard.results for event in self._take(slot, result, phase)]

    def _take(self, slot: Slot, result: Result, phase: _Phase | None) -> list[core.Event]:
        if isinstance(result, Done):
            wanted = phase is not None and result.generation == phase.generation
            if phase is not None and wanted and self._state.is_in_flight(slot.index, result.stream):
                phase.deadlines.end(result.stream)
                continues = phase.passes.end(result)
                return [core.PassEnded(slot.index, result.stream, continues)]
        elif isinstance(result, Began):
            if phase is not None and result.generation == phase.generation:
                phase.deadlines.begin(slot.index, result.stream, time.monotonic())
                return [core.PassBegan(slot.index, result.stream)]
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

    def _unload(self, numbers: Sequence[int]) -> None:
        for slot in self._fleet.slots:
            for number in slot.loaded.intersection(numbers):
                slot.loaded.discard(number)
                slot.send(Unload(number))


def _by_work(streams: Iterable[int], passes: Passes) -> list[tuple[Work, tuple[int, ...]]]:
    """The streams by what they are to do, in their order."""
    groups: dict[int, tuple[Work, list[int]]] = {}
    for stream in streams:
        work = passes.work(stream)
        groups.setdefault(id(work), (work, []))[1].append(stream)
    return [(work, tuple(members)) for work, members in groups.values()]
