"""When passes become overdue and workers count as silent. The clock is the caller's."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_mp.pool.state import Event, PassOverdue, WorkerSilent

#: Seconds beyond the timeout that a worker has to answer a ping.
GRACE = 2.0

#: Seconds between two pings of a worker.
_PING_EVERY = 1.0


class Deadlines:
    """The clocks of one phase; ``timeout`` seconds a pass, or None for no limit on anything."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._passes: dict[int, tuple[int, float]] = {}
        self._pinged: dict[int, float] = {}
        self._unanswered: dict[int, float] = {}

    @property
    def active(self) -> bool:
        """Whether anything can become overdue."""
        return self._timeout is not None

    def begin(self, worker: int, stream: int, now: float) -> None:
        """A pass has begun."""
        if self._timeout is not None:
            self._passes[stream] = worker, now + self._timeout

    def end(self, stream: int) -> None:
        """A pass has ended, or is no longer waited for."""
        self._passes.pop(stream, None)

    def heard(self, worker: int) -> None:
        """A worker has said something."""
        self._unanswered.pop(worker, None)

    def forget(self, worker: int) -> None:
        """A worker's process has ended."""
        self._unanswered.pop(worker, None)
        self._pinged.pop(worker, None)
        self._passes = {s: pass_ for s, pass_ in self._passes.items() if pass_[0] != worker}

    def wait(self, now: float) -> float | None:
        """Seconds until something may be due; None when nothing ever is."""
        if self._timeout is None:
            return None
        nearest = min(
            (deadline for _, deadline in self._passes.values()), default=now + _PING_EVERY
        )
        return max(0.0, min(nearest - now, _PING_EVERY))

    def to_ping(self, busy: Iterable[int], now: float) -> list[int]:
        """Busy workers whose turn it is to be asked whether they are there."""
        if self._timeout is None:
            return []
        due = [w for w in busy if now - self._pinged.get(w, -_PING_EVERY) >= _PING_EVERY]
        self._pinged.update(dict.fromkeys(due, now))
        for worker in due:
            self._unanswered.setdefault(worker, now)
        return due

    def due(self, busy: Iterable[int], now: float) -> list[Event]:
        """What has become overdue or silent by now; each is told once."""
        if self._timeout is None:
            return []
        events: list[Event] = []
        for worker in busy:
            # Counted from the question, not the last answer: this process may have been stopped.
            if now - self._unanswered.get(worker, now) > self._timeout + GRACE:
                overdue = tuple(
                    s for s, (w, end) in self._passes.items() if w == worker and end <= now
                )
                events.append(WorkerSilent(worker, overdue))
                self.forget(worker)
        late = [(s, worker) for s, (worker, end) in self._passes.items() if end <= now]
        for stream, worker in late:
            del self._passes[stream]
            events.append(PassOverdue(worker, stream))
        return events
