"""The child process: it owns its streams, runs commands on them and sends results.

The main thread runs edits, one at a time, and passes of engines that never wait; passes of other
engines each have a thread of a kept pool. A reader thread takes commands, so that a cancel is heard
whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from lmcache_mp import records
from lmcache_mp.kv.context import PinningContext
from lmcache_mp.passes.edit import edit_pass, retrieve_whole
from lmcache_mp.passes.generate import PassGuard, generate_pass
from lmcache_mp.passes.outcome import Outcome, PassLabel
from lmcache_mp.passes.state import Edited, Generated, StreamState
from lmcache_mp.passes.view import kv_context
from lmcache_mp.pool.failures import pack
from lmcache_mp.pool.messages import (
    Adopt,
    Adopted,
    Began,
    Cancel,
    Cancelled,
    Close,
    Command,
    Done,
    Enter,
    Generate,
    Load,
    Modify,
    Open,
    Opened,
    Ping,
    Pong,
    Ready,
    Result,
    Run,
    Unload,
    dump,
    load_command,
)
from lmcache_mp.pool.objects import LoadedObjects
from lmcache_mp.pool.output import labelled, redirect, restore
from lmcache_mp.pool.process import enter, fatal_errors
from lmcache_mp.pool.queues import WorkerEnd

#: More threads than any machine runs streams: the pool must never be what limits concurrency.
_MOST_THREADS = 100_000


@dataclass(slots=True)
class _Owned:
    """A stream of this worker, and the salt of KV that an edit has replaced."""

    spec: Adopted
    state: StreamState
    replaced_salt: str | None = None


@dataclass(slots=True)
class _Edit:
    """An edit that waits for its turn; ``fetch`` is its KV on the way."""

    run: Run
    work: Modify
    owned: _Owned
    fetch: Future[Any] | None = None


class Worker:
    """Runs until it is told to close or its parent is gone."""

    def __init__(self, sock: socket.socket, index: int, log_level: int) -> None:
        self._pid = os.getpid()
        self._log_level = log_level
        self._queues = WorkerEnd(sock)
        self._index = index
        self._objects = LoadedObjects()
        self._streams: dict[int, _Owned] = {}
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._edits: deque[_Edit] = deque()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="pass")
        self._lock = threading.Lock()
        self._running: dict[int, tuple[int, PassGuard]] = {}
        self._cancelled = -1
        self._last_params: tuple[bytes, dict[str, Any]] = b"", {}

    def run(self) -> None:
        """The worker's life."""
        redirect(self._send, self._log_level)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._become_a_bystander)
        self._send(Ready(self._pid, records.VERSION))
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        while True:
            command = self._next_command()
            if isinstance(command, Close):
                break
            if command is None:
                self._run_edit(self._edits.popleft())
            else:
                self._execute(command)
        with labelled(None):
            self._close()
        with self._lock:
            busy = bool(self._running)
        if busy:  # a pass that still runs would keep the process alive
            os._exit(0)

    def _read(self) -> None:
        with fatal_errors():
            while True:
                try:
                    command = load_command(self._queues.receive())
                except (EOFError, OSError):
                    command = Close()
                if isinstance(command, Ping):
                    self._send(Pong())
                    continue
                if isinstance(command, Cancel):
                    self._stop_passes(command.generation)
                self._inbox.put(command)
                if isinstance(command, Close):
                    return

    def _become_a_bystander(self) -> None:
        """In a process that a user's function forks: what is the worker's is none of its own."""
        self._queues.close()
        restore()

    def _next_command(self) -> Command | None:
        """The next command; None when there is none and an edit waits."""
        if not self._edits:
            return self._inbox.get()
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _execute(self, command: Command) -> None:
        if isinstance(command, Run):
            self._begin(command)
        elif isinstance(command, Adopt):
            for spec in command.streams:
                self._streams[spec.stream] = _Owned(spec, spec.state)
        elif isinstance(command, Load):
            self._objects.keep(command.number, command.payload)
        elif isinstance(command, Unload):
            self._objects.forget(command.number)
        elif isinstance(command, Enter):
            enter(command.folder, command.path)
        elif isinstance(command, Open):
            self._open(command.numbers)
        elif isinstance(command, Cancel):
            self._drop_edits(command.generation)

    # --- opening and closing ----------------------------------------------------------------------

    def _open(self, numbers: Sequence[int]) -> None:
        failures = []
        with labelled(None):
            for number in numbers:
                try:
                    _call_if_there(self._objects.get(number), "open")
                except BaseException as error:  # a user's object may raise anything
                    failures.append(pack(error))
        self._send(Opened(tuple(failures)))

    def _close(self) -> None:
        for owned in self._streams.values():
            if owned.state.edits:
                self._release(owned, owned.state.kv_salt)
            self._release_replaced(owned)
        for thing in self._objects.all_loaded():
            with contextlib.suppress(Exception):
                _call_if_there(thing, "close")

    # --- passes -----------------------------------------------------------------------------------

    def _begin(self, run: Run) -> None:
        for stream in run.streams:
            owned = self._streams[stream]
            self._release_replaced(owned)
            if isinstance(run.work, Modify):
                self._edits.append(_Edit(run, run.work, owned))
            elif self._may_block(owned):
                self._threads.submit(self._generate_in_thread, run, run.work, owned)
            else:
                self._generate(run, run.work, owned)
        if isinstance(run.work, Modify):
            self._fetch_ahead()

    def _may_block(self, owned: _Owned) -> bool:
        try:
            return bool(getattr(self._objects.get(owned.spec.engine), "blocking", True))
        except BaseException:  # the pass itself will report that loading fails
            return False

    def _generate_in_thread(self, run: Run, work: Generate, owned: _Owned) -> None:
        with fatal_errors():  # an executor would keep it to itself
            self._generate(run, work, owned)

    def _generate(self, run: Run, work: Generate, owned: _Owned) -> None:
        guard = PassGuard()
        with self._lock:
            if run.generation <= self._cancelled:
                return
            self._running[owned.spec.stream] = run.generation, guard
        self._announce(run, owned)
        with labelled(owned.spec.stream):
            outcome = self._outcome_of_generate(run, work, owned, guard)
        with self._lock:
            del self._running[owned.spec.stream]
        self._finish(run, owned, outcome)
        if run.generation <= self._cancelled:
            self._confirm_cancel(run.generation)

    def _announce(self, run: Run, owned: _Owned) -> None:
        if run.announce:
            self._send(Began(run.generation, owned.spec.stream))

    def _outcome_of_generate(
        self, run: Run, work: Generate, owned: _Owned, guard: PassGuard
    ) -> Outcome:
        label = self._label(owned, run.attempt)
        try:
            engine = self._objects.get(owned.spec.engine)
            contexts = [self._objects.get(number) for number in owned.spec.contexts]
            own = owned.spec.sampling_params
            params = dict(self._params(work.sampling_params))
            params |= {**(cloudpickle.loads(own) if own else {}), **work.forced}
        except BaseException as error:  # loading a user's object may raise anything
            return Outcome(label.failed_row(records.GENERATE, self._pid), None, error)
        return generate_pass(
            owned.state,
            engine,
            contexts,
            params,
            label,
            warn_unused_kv=work.warn_unused_kv,
            guard=guard,
        )

    def _params(self, pickled: bytes) -> dict[str, Any]:
        """A phase's sampling parameters, loaded once for all of its passes that follow."""
        last, params = self._last_params
        if last != pickled:
            params = cloudpickle.loads(pickled)
            self._last_params = pickled, params
        return params

    def _run_edit(self, edit: _Edit) -> None:
        if edit.run.generation <= self._cancelled:
            return
        self._fetch_ahead()
        self._announce(edit.run, edit.owned)
        with labelled(edit.owned.spec.stream):
            outcome = self._outcome_of_edit(edit)
        self._finish(edit.run, edit.owned, outcome)

    def _outcome_of_edit(self, edit: _Edit) -> Outcome:
        owned = edit.owned
        label = self._label(owned, edit.run.attempt)
        label = replace(label, seed=edit.work.seed, round=edit.work.round)
        try:
            fn = self._objects.get(edit.work.fn)
            contexts = [self._objects.get(number) for number in owned.spec.contexts]
        except BaseException as error:  # loading a user's object may raise anything
            return Outcome(label.failed_row(records.MODIFY, self._pid), None, error)
        return edit_pass(
            owned.state,
            fn,
            contexts,
            label,
            timeout=edit.work.timeout,
            poll_interval=edit.work.poll_interval,
            fetch=edit.fetch.result if edit.fetch else None,
        )

    def _fetch_ahead(self) -> None:
        """Let the next edit's KV come while this one runs: at most one, to bound the memory."""
        if self._edits and self._edits[0].fetch is None:
            edit = self._edits[0]
            edit.fetch = self._threads.submit(self._fetch, edit.work, edit.owned)

    def _fetch(self, work: Modify, owned: _Owned) -> Any:
        context = kv_context([self._objects.get(number) for number in owned.spec.contexts])
        return retrieve_whole(
            owned.state, context, timeout=work.timeout, poll_interval=work.poll_interval
        )

    def _label(self, owned: _Owned, attempt: int) -> PassLabel:
        spec = owned.spec
        return PassLabel(
            spec.stream_id,
            spec.stream,
            attempt,
            self._index,
            nonce=spec.nonce,
            key=spec.key,
            custom_id=spec.custom_id,
        )

    def _finish(self, run: Run, owned: _Owned, outcome: Outcome) -> None:
        change = outcome.change
        try:
            data = dump(_done(run, owned, outcome))
        except Exception as error:  # a part of it is an object of the user's that does not pickle
            change = None
            data = dump(_done(run, owned, replace(outcome, change=None, error=error)))
        if isinstance(change, Generated):
            owned.state = owned.state.after_generate(change)
        elif isinstance(change, Edited):
            owned.replaced_salt = owned.state.kv_salt if owned.state.edits else None
            owned.state = owned.state.after_edit(change)
        self._send_bytes(data)

    def _release_replaced(self, owned: _Owned) -> None:
        """Give up KV that an edit replaced: a new command says that the parent knows the edit."""
        if owned.replaced_salt is not None:
            self._release(owned, owned.replaced_salt)
            owned.replaced_salt = None

    def _release(self, owned: _Owned, salt: str) -> None:
        with contextlib.suppress(Exception):  # what can't be released is only evicted later
            context = kv_context([self._objects.get(number) for number in owned.spec.contexts])
            if isinstance(context, PinningContext):
                context.release(salt)

    # --- cancelling -------------------------------------------------------------------------------

    def _stop_passes(self, generation: int) -> None:
        with self._lock:
            self._cancelled = max(self._cancelled, generation)
            guards = [guard for passed, guard in self._running.values() if passed <= generation]
        for guard in guards:
            with contextlib.suppress(Exception):
                guard.stop()

    def _drop_edits(self, generation: int) -> None:
        self._edits = deque(edit for edit in self._edits if edit.run.generation > generation)
        self._confirm_cancel(generation)

    def _confirm_cancel(self, generation: int) -> None:
        with self._lock:
            running = any(passed <= generation for passed, _ in self._running.values())
            confirm = generation <= self._cancelled and not running
        if confirm:
            self._send(Cancelled(generation))

    def _send(self, result: Result) -> None:
        self._send_bytes(dump(result))

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._queues.send(data)
        except OSError:  # the parent is gone, and with it whoever wanted the result
            os._exit(1)


def _done(run: Run, owned: _Owned, outcome: Outcome) -> Done:
    failure = None if outcome.error is None else pack(outcome.error)
    return Done(
        run.generation,
        owned.spec.stream,
        outcome.row,
        outcome.times,
        outcome.counts,
        outcome.change,
        failure,
        outcome.warning,
    )


def _call_if_there(thing: Any, name: str) -> None:
    method: Callable[[], object] | None = getattr(thing, name, None)
    if callable(method):
        method()
