"""Continuous batching without a thread of its own.

Passes are iterated by threads of their own, and share one decoder. Whoever needs a token while
nobody is working does the next unit of work for all: the prefill of one waiting pass, or one
decoding step of every pass that has begun. Between two prefills there is a step, so a queue of new
prompts never stops those that are decoding.

A pass goes on whether or not its consumer asks for tokens; what it made waits for the consumer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from lmcache_mp.engines.completion import Completion
from lmcache_mp.engines.engine import TokenEvent
from lmcache_mp.engines.llama import KVCache, Llama
from lmcache_mp.engines.reuse import load, save
from lmcache_mp.errors import EngineError, LMCacheMPError
from lmcache_mp.kv.local import ChunkStore


class _Pass:
    """One pass: ``events`` not yet consumed, or the ``error`` that ended it."""

    def __init__(self, prompt: Sequence[int], salt: str, completion: Completion) -> None:
        self.prompt = list(prompt)
        self.salt = salt
        self.completion = completion
        self.edited = False
        self.cache: KVCache | None = None
        self.events: deque[TokenEvent] = deque()
        self.error: BaseException | None = None


class Batcher:
    """Runs up to ``slots`` passes at once over one model; further ones wait their turn."""

    def __init__(self, model: Llama, store: ChunkStore, slots: int) -> None:
        self._model = model
        self._store = store
        self._slots = slots
        self._changed = threading.Condition()
        # Replaced, never changed in place: a pass may leave while another thread goes through them.
        self._waiting: tuple[_Pass, ...] = ()
        self._active: tuple[_Pass, ...] = ()
        self._working = False
        self._prefilled_last = False

    def submit(
        self, prompt: Sequence[int], salt: str, completion: Completion, owner: object = None
    ) -> Tokens:
        """Queue a pass; its tokens are made when some pass is iterated. ``owner`` lives as long."""
        new = _Pass(prompt, salt, completion)
        with self._changed:
            self._waiting += (new,)
        return Tokens(self, new, owner)

    def next_event(self, own: _Pass) -> TokenEvent:
        """The next event of ``own``; works for all while it is not there."""
        while True:
            with self._changed:
                while self._working and not own.events and own.error is None:
                    self._changed.wait()
                if own.events:
                    return own.events.popleft()
                if own.error is not None:
                    raise own.error
                self._working = True
            try:
                self._work()
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def leave(self, own: _Pass, error: BaseException | None = None) -> None:
        """Free what a pass holds; a consumer that still waits for it gets ``error``."""
        with self._changed:
            self._waiting = tuple(one for one in self._waiting if one is not own)
            self._active = tuple(one for one in self._active if one is not own)
            own.cache = None
            if error is not None and own.error is None:
                own.error = error
                self._changed.notify_all()

    def _work(self) -> None:
        """One unit of work for all, done by the thread that set ``_working``."""
        with self._changed:
            admitted = self._admit()
            batch = [(one, one.cache) for one in self._active if one.cache is not None]
        if admitted:
            self._prefill(admitted)
        elif batch:
            self._step(batch)

    def _admit(self) -> _Pass | None:
        """The waiting pass whose turn it is, if any: it is active from now on."""
        free = len(self._active) < self._slots
        turn = not self._active or not self._prefilled_last
        self._prefilled_last = bool(self._waiting) and free and turn
        if not self._prefilled_last:
            return None
        admitted, *waiting = self._waiting
        self._waiting = tuple(waiting)
        self._active += (admitted,)
        return admitted

    def _prefill(self, new: _Pass) -> None:
        try:
            new.edited = self._store.pinned(new.salt)
            new.cache = cache = self._model.new_cache(edited=new.edited)
            reused = load(self._store, new.prompt, new.salt, cache, new.edited)
            logits = self._model.prefill(new.prompt[reused:], cache)
            if not new.edited:
                save(self._store, new.prompt, new.salt, cache)
            self._deliver(new, cache, new.completion.accept(logits, reused))
        except BaseException as error:
            self._fail([new], error)

    def _step(self, batch: Sequence[tuple[_Pass, KVCache]]) -> None:
        last = [one.completion.token_ids[-1] for one, _ in batch]
        try:
            logits = self._model.decode(last, [cache for _, cache in batch])
        except BaseException as error:
            self._fail([one for one, _ in batch], error)
            return
        for (one, cache), row in zip(batch, logits, strict=True):
            try:
                self._deliver(one, cache, one.completion.accept(row))
            except BaseException as error:
                self._fail([one], error)

    def _deliver(self, own: _Pass, cache: KVCache, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            if own.edited and own.error is None:
                tokens = own.prompt + own.completion.token_ids[:-1]  # the last one has no KV
                save(self._store, tokens, own.salt, cache)
            self.leave(own)
        with self._changed:
            own.events.append(event)
            self._changed.notify_all()

    def _fail(self, passes: Sequence[_Pass], error: BaseException) -> None:
        """End passes. What is not an ordinary error (an interrupt) goes on to this thread, too."""
        for own in passes:
            told = error
            if not isinstance(error, LMCacheMPError):
                told = EngineError(f"the embedded model failed: {type(error).__name__}: {error}")
                told.__cause__ = error
            self.leave(own, told)
        if not isinstance(error, Exception):
            raise error


class Tokens(Iterator[TokenEvent]):
    """The events of one pass. Dropping or closing it frees the pass' slot."""

    def __init__(self, batcher: Batcher, own: _Pass, owner: object) -> None:
        self._batcher = batcher
        self._owner = owner
        self._own = own
        self._ended = False

    def __next__(self) -> TokenEvent:
        if self._ended:
            raise StopIteration
        try:
            event = self._batcher.next_event(self._own)
        except BaseException:
            self.close()
            raise
        self._ended = event.finish_reason is not None
        return event

    def cancel(self) -> None:
        """End the pass from another thread: who waits for its next token gets an EngineError."""
        self._batcher.leave(self._own, EngineError("the pass was cancelled"))

    def close(self) -> None:
        """Give the pass up. Idempotent."""
        if not self._ended:
            self._ended = True
            self._batcher.leave(self._own, EngineError("the pass was closed"))

    __del__ = close
