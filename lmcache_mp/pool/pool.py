"""The parent's loop around state.py: processes, pipes and the clock."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from multiprocess import util

from lmcache_mp import records
from lmcache_mp.errors import LMCacheMPError, UsageError, WorkerDied
from lmcache_mp.pool import state as core
from lmcache_mp.pool.launch import Lifeline, WorkerProcess, WorkerSettings, end_all
from lmcache_mp.pool.messages import (
    Adopt,
    Adopted,
    Cancel,
    Cancelled,
    Close,
    Command,
    Done,
    Failure,
    Load,
    Open,
    Opened,
    Ready,
    Run,
    Unload,
    Work,
    dump,
    load_result,
)
from lmcache_mp.pool.objects import UserObjects

#: Seconds that a worker has to stop the passes of a cancelled phase, and to close.
CANCEL_GRACE = 2.0
CLOSE_GRACE = 2.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A pass that ended with its worker instead of with a result."""

    stream: int
    worker: int
    attempt: int
    error: WorkerDied


@dataclass(slots=True)
class _Slot:
    """A place for a worker: the process in it now, and what that process has been told."""

    index: int
    process: WorkerProcess | None = None
    opened: bool = False
    adopted: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    writing: bool = False


class Pool:
    """Workers that own streams, driven by whichever thread runs a phase.

    Users' objects are sent to a worker when it first needs them. The pool knows streams by number
    only.
    """

    def __init__(self, settings: WorkerSettings, objects: UserObjects, max_restarts: int) -> None:
        self._settings = settings
        self._objects = objects
        self._max_restarts = max_restarts
        self._lifeline = Lifeline()
        self._selector = selectors.DefaultSelector()
        self._slots: list[_Slot] = []
        self._state = core.PoolState()
        self._generation = 0
        self._open_failures: list[Failure] = []
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._waker, wake_end = socket.socketpair()
        self._selector.register(wake_end, selectors.EVENT_READ, (None, "wake"))
        self._wake_end = wake_end
        self._owner_pid = os.getpid()
        # multiprocess joins its children at exit: they must have been told to end before.
        self._at_exit = util.Finalize(None, self._close_now, exitpriority=100)

    # --- starting ---------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def start(self, size: int) -> list[Failure]:
        """Have at least ``size`` workers up with everything opened; returns what failed to open."""
        self._check_open()
        while len(self._slots) < size:
            self._slots.append(_Slot(len(self._slots)))
            self._state.add_worker()
        self._open_failures.clear()
        restarts = 0
        self._state.step(self._poll(0.0))
        while True:
            for slot in self._slots:
                if slot.process is None:
                    self._launch(slot)
                elif slot.opened and not slot.loaded.issuperset(self._objects.permanent):
                    self._open(slot)
            if all(slot.opened for slot in self._slots):
                return list(self._open_failures)
            events = self._poll(None)
            self._state.step(events)
            restarts += sum(isinstance(event, core.WorkerLost) for event in events)
            if restarts > self._max_restarts:
                raise WorkerDied(
                    f"{restarts} workers died while starting; the last one: "
                    f"{self._last_death or 'no reason known'}"
                )

    def _launch(self, slot: _Slot) -> None:
        process = WorkerProcess(self._settings, self._lifeline, slot.index)
        slot.process, slot.opened, slot.writing = process, False, False
        slot.adopted.clear()
        slot.loaded.clear()
        self._selector.register(process.queues, selectors.EVENT_READ, (slot, "queue"))
        self._selector.register(process.exit_fd, selectors.EVENT_READ, (slot, "exit"))
        self._open(slot)

    def _open(self, slot: _Slot) -> None:
        """Let a worker open what it has not opened yet."""
        missing = [number for number in self._objects.permanent if number not in slot.loaded]
        slot.opened = False
        self._load(slot, missing)
        self._send(slot, Open(tuple(missing)))

    # --- a phase ----------------------------------------------------------------------------------

    def run(
        self,
        plan: core.Plan,
        work: Work,
        objects: Sequence[int],
        adopted: Callable[[int], Adopted],
        on_end: Callable[[Done | Lost], None],
        phase: str,
    ) -> None:
        """Run a phase to its end: ``on_end`` hears of every stream exactly once.

        ``objects`` are the numbers of users' objects that the work needs; ``adopted`` gives a
        stream's present state. An interrupt cancels the phase; what had ended by then was reported.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("another phase of this batch is running, in another thread")
        try:
            self._check_open()
            self._generation += 1
            phase_run = _Phase(work, objects, adopted, on_end, phase, self._generation)
            try:
                self._follow(self._state.begin(plan), phase_run)
                while not self._state.settled:
                    self._follow(self._state.step(self._poll(None, phase_run)), phase_run)
            except BaseException:
                self._cancel()
                raise
        finally:
            self._busy.release()

    def _follow(self, instructions: Iterable[core.Instruction], phase: _Phase) -> None:
        for instruction in instructions:
            if isinstance(instruction, core.Assign):
                self._assign(instruction, phase)
            elif isinstance(instruction, core.FailPass):
                self._lose(instruction.stream, instruction.worker, instruction.attempt, phase)
            elif isinstance(instruction, core.StartWorker):
                self._launch(self._slots[instruction.worker])
            else:
                unfinished = self._state.unfinished
                self._cancel()
                for stream in unfinished:
                    self._lose(stream, self._state.owner.get(stream, -1), 0, phase)

    def _assign(self, assign: core.Assign, phase: _Phase) -> None:
        slot = self._slots[assign.worker]
        self._load(slot, phase.objects)
        new = [stream for stream in assign.streams if stream not in slot.adopted]
        if new:
            self._send(slot, Adopt(tuple(phase.adopted(stream) for stream in new)))
            slot.adopted.update(new)
        self._send(slot, Run(phase.generation, phase.work, assign.streams, assign.attempt))

    def _lose(self, stream: int, worker: int, attempt: int, phase: _Phase) -> None:
        error = WorkerDied(
            f"{self._last_death}, during {phase.name}",
            pid=self._last_pid,
            exit_code=self._last_exit_code,
            phase=phase.name,
        )
        phase.on_end(Lost(stream, worker, attempt, error))

    def _cancel(self) -> None:
        """Stop what still runs of the phase; a worker that does not stop in time is killed."""
        generation = self._generation
        busy = [slot for slot in self._slots if self._state.in_flight(slot.index)]
        for slot in busy:
            # What it does from here on is not heard: it must be told its streams' state again.
            slot.adopted.difference_update(self._state.in_flight(slot.index))
            self._send(slot, Cancel(generation))
        self._state.abandon()
        waiting = {slot.index for slot in busy if slot.process is not None}
        deadline = time.monotonic() + CANCEL_GRACE
        try:
            while waiting and (left := deadline - time.monotonic()) > 0:
                self._state.step(self._poll(left, None, waiting))
        finally:
            for slot in busy:
                if slot.index in waiting and slot.process is not None:
                    slot.process.kill()
                    slot.process.has_ended(1.0)
                    self._state.step([self._bury(slot)])

    # --- events -----------------------------------------------------------------------------------

    def _poll(
        self,
        timeout: float | None,
        phase: _Phase | None = None,
        cancelling: set[int] | None = None,
    ) -> list[core.Event]:
        """Wait for workers; report results, and return what the state machine has to know."""
        events: list[core.Event] = []
        for key, mask in self._selector.select(timeout):
            slot, what = key.data
            if what == "wake":
                self._check_open()
            elif slot.process is None or (what == "queue" and slot.process.queues != key.fileobj):
                continue  # the process was buried earlier in this round
            elif what == "exit":
                events += self._read(slot, phase, cancelling)
                events.append(self._bury(slot))
                if cancelling is not None:
                    cancelling.discard(slot.index)
            else:
                if mask & selectors.EVENT_WRITE:
                    slot.process.queues.flush()
                    self._watch_writes(slot)
                if mask & selectors.EVENT_READ:
                    events += self._read(slot, phase, cancelling)
        return events

    def _read(
        self, slot: _Slot, phase: _Phase | None, cancelling: set[int] | None
    ) -> list[core.Event]:
        if slot.process is None:
            return []
        events: list[core.Event] = []
        frames, closed = slot.process.queues.receive()
        for frame in frames:
            result = load_result(frame)
            if isinstance(result, Done):
                if phase is not None and result.generation == phase.generation:
                    phase.on_end(result)
                    events.append(core.PassEnded(slot.index, result.stream))
            elif isinstance(result, Opened):
                self._open_failures += result.failures
                slot.opened = True
                events.append(core.WorkerReady(slot.index))
            elif isinstance(result, Cancelled):
                if cancelling is not None and result.generation == self._generation:
                    cancelling.discard(slot.index)
            elif isinstance(result, Ready) and result.version != records.VERSION:
                raise LMCacheMPError(
                    f"worker {slot.index} speaks version {result.version} of the records, and this "
                    f"process {records.VERSION}: install the same lmcache_mp everywhere"
                )
        if closed:  # its end is near; only the exit says that it is there
            self._selector.unregister(slot.process.queues)
            slot.process.kill()
        return events

    def _bury(self, slot: _Slot) -> core.WorkerLost:
        process = slot.process
        if process is None:
            raise LMCacheMPError(f"worker {slot.index} has no process")
        code = process.exit_code()
        self._last_exit_code, self._last_pid = code, process.pid
        self._last_death = f"worker {slot.index} (pid {process.pid}) {_manner_of_death(code)}"
        self._selector.unregister(process.exit_fd)
        if process.queues in self._selector.get_map():
            self._selector.unregister(process.queues)
        process.dispose()
        slot.process, slot.opened = None, False
        return core.WorkerLost(slot.index)

    _last_death = ""
    _last_pid: int | None = None
    _last_exit_code: int | None = None

    # --- sending ----------------------------------------------------------------------------------

    def _load(self, slot: _Slot, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in slot.loaded:
                slot.loaded.add(number)
                self._send(slot, Load(number, self._objects.payload(number)))

    def forget(self, number: int) -> None:
        """Have the workers drop a user's object that was registered for a phase."""
        for slot in self._slots:
            if number in slot.loaded:
                slot.loaded.discard(number)
                self._send(slot, Unload(number))

    def _send(self, slot: _Slot, command: Command) -> None:
        if slot.process is not None:
            slot.process.queues.send(dump(command))
            self._watch_writes(slot)

    def _watch_writes(self, slot: _Slot) -> None:
        if slot.process is not None and slot.process.queues.waiting != slot.writing:
            slot.writing = slot.process.queues.waiting
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.writing else 0)
            self._selector.modify(slot.process.queues, mask, (slot, "queue"))

    # --- closing ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UsageError("the batch is closed")

    def close(self) -> None:
        """End the workers; idempotent. A phase that runs in another thread is cancelled first."""
        self._at_exit()

    def _close_now(self) -> None:
        if self._closed.is_set() or os.getpid() != self._owner_pid:
            return
        self._closed.set()
        self._waker.send(b"x")
        idle = self._busy.acquire(timeout=2 * CANCEL_GRACE)
        try:
            processes = [slot.process for slot in self._slots if slot.process is not None]
            for process in processes:
                process.queues.send(dump(Close()))
            end_all(processes, CLOSE_GRACE)
            for slot in self._slots:
                slot.process = None
            self._lifeline.close()
            self._selector.close()
            self._waker.close()
            self._wake_end.close()
        finally:
            if idle:
                self._busy.release()


@dataclass(frozen=True, slots=True)
class _Phase:
    """What is the same for every pass of the phase that runs."""

    work: Work
    objects: Sequence[int]
    adopted: Callable[[int], Adopted]
    on_end: Callable[[Done | Lost], None]
    name: str
    generation: int


def _manner_of_death(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (killed, possibly out of memory)" if code == -9 else "")
