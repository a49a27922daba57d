"""A place for a worker: the process in it now, and what that process has been told."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_mp.errors import LMCacheMPError, StreamTimeout, UsageError, WorkerDied
from lmcache_mp.pool.launch import WorkerProcess, WorkerSettings
from lmcache_mp.pool.messages import Close, Command, Enter, Load, Open, dump
from lmcache_mp.pool.objects import UserObjects

#: Seconds between a dying process closing its files and its exit being seen.
_EXIT_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker's process ended; ``crash_report`` is faulthandler's, for a crash in C."""

    pid: int | None = None
    exit_code: int | None = None
    text: str = "no worker could be started"
    crash_report: str = ""

    def error(self, when: str, phase: str) -> WorkerDied:
        """The death as an exception."""
        return WorkerDied(
            f"{self.text} {when}",
            pid=self.pid,
            exit_code=self.exit_code,
            phase=phase,
            crash_report=self.crash_report,
        )

    def during(self, phase: str) -> WorkerDied:
        """The death as the error of a pass in ``phase``."""
        return self.error(f"during {phase}", phase)


#: What ends a pass without a result.
PassError = WorkerDied | StreamTimeout


@dataclass(frozen=True, slots=True)
class Lost:
    """A pass that ended with its worker, or by its timeout, instead of with a result."""

    stream: int
    worker: int
    attempt: int
    pid: int | None
    error: PassError


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process works and finds modules: its workers are to do so in the same place.

    ``folder`` is None where the working directory was removed.
    """

    folder: str | None
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Place:
        """The place of this moment."""
        try:
            folder = os.getcwd()
        except OSError:
            folder = None
        return cls(folder, tuple(entry for entry in sys.path if isinstance(entry, str)))

    def check(self) -> None:
        """UsageError where no process can be started."""
        if self.folder is None:
            raise UsageError(
                "the working directory of this process was removed, and workers can't be started "
                "without one: change to another (os.chdir)"
            )


class Slot:
    """One worker of the pool, over the processes that follow each other in it."""

    def __init__(self, index: int, selector: selectors.BaseSelector) -> None:
        self.index = index
        self.process: WorkerProcess | None = None
        self.death = Death()
        self.opened = False
        self.launched_at = 0.0
        self.adopted: set[int] = set()
        self.loaded: set[int] = set()
        self._selector = selector
        self._place: Place | None = None
        self._fault = ""
        self._writing = False

    def launch(
        self, settings: WorkerSettings, objects: UserObjects, place: Place, now: float
    ) -> bool:
        """Start a process, which knows of nothing yet, and have it open what is to be opened.

        False if the system does not let it start: ``death`` says why.
        """
        try:
            self.process = process = WorkerProcess(settings, self.index)
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
            self.death = Death(text=f"worker {self.index} could not be started ({reason})")
            return False
        self.launched_at = now
        self._place = None
        self._fault = ""
        self._writing = False
        self.adopted.clear()
        self.loaded.clear()
        self._selector.register(process.queues, selectors.EVENT_READ, (self, "queue"))
        self._selector.register(process.exit_fd, selectors.EVENT_READ, (self, "exit"))
        self.move(place)
        self.open(objects)
        return True

    def move(self, place: Place) -> None:
        """Have the worker work in ``place``, if it does not yet."""
        if self._place != place:
            self._place = place
            self.send(Enter(place.folder, place.path))

    def open(self, objects: UserObjects) -> None:
        """Have the worker open the contexts and engines that it has not opened yet."""
        missing = [number for number in objects.permanent if number not in self.loaded]
        self.opened = False
        self.load(missing, objects)
        self.send(Open(tuple(missing)))

    def load(self, numbers: Iterable[int], objects: UserObjects) -> None:
        """Send users' objects that the worker does not have."""
        for number in numbers:
            if number not in self.loaded:
                self.loaded.add(number)
                self.send(Load(number, objects.payload(number)))

    def send(self, command: Command) -> None:
        """Send without waiting; to no process, nothing."""
        if self.process is not None:
            self.process.queues.send(dump(command))
            self.watch_writes()

    def watch_writes(self) -> None:
        """Have the selector tell when the socket takes what waits, if anything does."""
        if self.process is not None and self.process.queues.waiting != self._writing:
            self._writing = self.process.queues.waiting
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self.process.queues, mask, (self, "queue"))

    def flush(self) -> None:
        """Write what the socket takes."""
        if self.process is not None:
            self.process.queues.flush()
            self.watch_writes()

    def stop_reading(self) -> None:
        """The worker's end is closed: only its exit is of interest now."""
        if self.process is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self.process.queues)

    def hang_up(self) -> None:
        """The worker has closed its end: it is ending, or is to be ended."""
        self.stop_reading()
        # A dying process closes its files before its exit can be seen.
        if self.process is not None and not self.process.has_ended(_EXIT_GRACE):
            self.kill("closed its connection")

    def kill(self, fault: str) -> None:
        """End the process for its ``fault``; its exit will be seen."""
        if self.process is not None and not self.process.has_ended():
            self._fault = self._fault or fault
            self.process.kill()

    def dismiss(self) -> None:
        """Tell the worker to end."""
        self.send(Close())

    def bury(self) -> None:
        """Take an ended process out of the slot; ``death`` says how it died."""
        process = self.process
        if process is None:
            raise LMCacheMPError(f"worker {self.index} has no process")
        code = process.exit_code()
        report = process.crash_report()
        how = f"{self._fault} and was killed" if self._fault else manner_of_death(code)
        text = f"worker {self.index} (pid {process.pid}) {how}"
        self.stop_reading()
        self._selector.unregister(process.exit_fd)
        process.dispose()
        self.process, self.opened = None, False
        self.death = Death(process.pid, code, text, report)


def manner_of_death(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (killed, possibly out of memory)" if code == -9 else "")
