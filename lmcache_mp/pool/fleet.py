"""The worker processes of a pool: started, spoken with, and ended. What they do is pool.py's."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from multiprocess import util

from lmcache_mp.errors import UsageError
from lmcache_mp.pool.files import make_room
from lmcache_mp.pool.interrupts import Waker, held_signals
from lmcache_mp.pool.launch import WorkerSettings, end_all
from lmcache_mp.pool.messages import Logged, Printed, Result, load_result
from lmcache_mp.pool.objects import UserObjects
from lmcache_mp.pool.output import show
from lmcache_mp.pool.slot import Place, Slot

#: Seconds that a worker has to stop the passes of a cancelled phase, and to close.
CANCEL_GRACE = 2.0
CLOSE_GRACE = 2.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What came from a worker, and whether that was its end."""

    slot: Slot
    results: Sequence[Result] = field(default=())
    ended: bool = False


class Fleet:
    """Workers in slots, for one thread at a time; what they print is passed on as it comes.

    ``labels`` are those of streams, by number.
    """

    def __init__(
        self, settings: WorkerSettings, objects: UserObjects, labels: Sequence[str] = ()
    ) -> None:
        self.slots: list[Slot] = []
        self._settings = settings
        self._objects = objects
        self._labels = labels
        self._place = Place.here()
        self._selector = selectors.DefaultSelector()
        self._busy = threading.Lock()
        self._busy_thread: int | None = None
        self._closed = threading.Event()
        self._ended = False
        self._let_signals_through: Callable[[], None] = lambda: None
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, (None, "wake"))
        self._owner_pid = os.getpid()
        # multiprocess joins its children at exit: they must have been told to end before.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [slot.process.pid for slot in self.slots if slot.process is not None]

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """For one thread at a time; signals wait for the next :meth:`listen`."""
        self.check_open()
        with held_signals(self._waker.wake) as let_through:
            if not self._busy.acquire(blocking=False):
                raise UsageError("another phase of this batch is running, in another thread")
            self._busy_thread = threading.get_ident()
            self._let_signals_through = let_through
            try:
                self._place = Place.here()
                for slot in self.slots:
                    slot.move(self._place)
                yield
            finally:
                if self._closed.is_set():  # whoever closed could not wait for this thread
                    self._end_workers()
                self._busy_thread = None
                self._busy.release()

    # --- starting ---------------------------------------------------------------------------------

    def grow(self, size: int) -> int:
        """Have at least ``size`` slots; returns how many are new."""
        before = len(self.slots)
        missing = max(0, size - before) + sum(slot.process is None for slot in self.slots)
        if missing:
            make_room(missing)
            self._place.check()
        self.slots += [Slot(index, self._selector) for index in range(before, size)]
        return len(self.slots) - before

    def launch(self, slot: Slot) -> bool:
        """Start a process in an empty slot; False, and the slot's death says why, if it can't."""
        self._let_signals_through()
        return slot.launch(self._settings, self._objects, self._place, time.monotonic())

    # --- listening --------------------------------------------------------------------------------

    def listen(self, timeout: float | None, *, closing: bool = False) -> list[Heard]:
        """Wait for workers. UsageError if the batch was closed, unless that is what is going on."""
        self._let_signals_through()
        if not closing:
            self.check_open()
        heard: list[Heard] = []
        for key, mask in self._selector.select(timeout):
            slot, what = key.data
            if what == "wake":
                self._waker.drain()
            elif slot.process is None or (what == "queue" and slot.process.queues != key.fileobj):
                continue  # the process was buried earlier in this round
            elif what == "exit":
                heard.append(Heard(slot, self._read(slot)))
                slot.bury()
                heard.append(Heard(slot, ended=True))
            else:
                if mask & selectors.EVENT_WRITE:
                    slot.flush()
                if mask & selectors.EVENT_READ:
                    heard.append(Heard(slot, self._read(slot)))
        return heard

    def _read(self, slot: Slot) -> list[Result]:
        if slot.process is None:
            return []
        frames, closed = slot.process.queues.receive()
        results = self._without_output(frames)
        if closed:  # only the exit says that the end is there
            slot.hang_up()
        return results

    def _without_output(self, frames: Sequence[bytes]) -> list[Result]:
        results: list[Result] = []
        for frame in frames:
            result = load_result(frame)
            if isinstance(result, Printed | Logged):
                show(result, self._labels)
            else:
                results.append(result)
        return results

    # --- closing ----------------------------------------------------------------------------------

    def check_open(self) -> None:
        """UsageError if the workers are another process', or have been ended."""
        if os.getpid() != self._owner_pid:
            raise UsageError(
                f"the batch belongs to process {self._owner_pid}, which this one was forked from: "
                "make another here"
            )
        if self._closed.is_set():
            raise UsageError("the batch is closed")

    def close(self) -> None:
        """End the workers; idempotent. A phase that runs in another thread is cancelled first.

        From inside a phase, such as in a handler of what it logs, the phase is cancelled and the
        workers end with it.
        """
        if os.getpid() != self._owner_pid:
            return
        with held_signals(self._waker.wake):
            self._closed.set()
            self._waker.wake()
            if self._busy_thread == threading.get_ident():
                return
            if self._busy.acquire(timeout=2 * CANCEL_GRACE):
                try:
                    self._end_workers()
                finally:
                    self._busy.release()
            else:  # a thread that is stuck in the user's code, and will not need them any more
                for slot in self.slots:
                    slot.kill("was running when its batch was closed")

    def _end_workers(self) -> None:
        if self._ended:
            return
        self._ended = True
        processes = [slot.process for slot in self.slots if slot.process is not None]
        try:
            for slot in self.slots:
                slot.dismiss()
            self._without_output(end_all(processes, CLOSE_GRACE))
        except BaseException:  # a second Ctrl-C: at once, then
            for process in processes:
                process.kill()
            raise
        finally:
            for slot in self.slots:
                slot.process = None
            self._selector.close()
            self._waker.close()
            self._at_exit.cancel()
