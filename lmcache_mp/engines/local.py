"""The embedded engine: a Llama in numpy over a store of KV that its worker processes share.

:func:`connect_local` returns a small picklable recipe. What it stands for (weights, tokenizer,
store) is opened on first use, once per process, whether it was asked for through the context or
through its ``post_completion``.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_mp.edits.rope import Rope
from lmcache_mp.engines.batching import Batcher, Tokens
from lmcache_mp.engines.completion import Completion
from lmcache_mp.engines.config import LlamaConfig
from lmcache_mp.engines.llama import MOST_ROWS, Llama
from lmcache_mp.engines.sampling import Sampling
from lmcache_mp.engines.tokenizer import Tokenizer
from lmcache_mp.engines.weights import open_config
from lmcache_mp.errors import KVError, UsageError
from lmcache_mp.kv.context import check_salt
from lmcache_mp.kv.local import ChunkStore, default_capacity
from lmcache_mp.kv.tempdir import Hold

T = TypeVar("T")


def connect_local(
    model: str | os.PathLike[str] | None = None,
    *,
    chunk_size: int = 16,
    store_dir: str | os.PathLike[str] | None = None,
    capacity_bytes: float | None = None,
) -> LocalContext:
    """A context and an engine that need no server: a Llama on the CPU.

    ``model``: None is the packaged SmolLM2-135M, a path any Llama-family GGUF, ``"random:SEED"`` a
    tiny seeded random Llama. ``chunk_size`` is the store's granularity in tokens. ``store_dir``
    keeps the KV; without it there is a temporary directory that goes with the context.
    ``capacity_bytes`` bounds the store over all processes (default: half of the free space there).

    Raises UsageError for a missing model or a wrong argument, and MissingExtraError where a package
    is missing.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral) or chunk_size < 1:
        raise UsageError(f"chunk_size must be at least 1 token, not {chunk_size!r}")
    if capacity_bytes is not None and not capacity_bytes >= 1:
        raise UsageError(f"capacity_bytes must be positive, not {capacity_bytes!r}")
    name = None if model is None else os.fspath(model)
    if name is not None and os.path.exists(name):
        name = os.path.abspath(name)  # workers may have another working directory
    config = open_config(name)
    hold = Hold.make() if store_dir is None else None
    directory = hold.path if hold else Path(os.fspath(store_dir or "")).expanduser().absolute()
    recipe = _Recipe(
        uuid.uuid4().hex,
        name,
        int(chunk_size),
        directory,
        hold is not None,
        int(capacity_bytes or default_capacity(directory)),
    )
    return LocalContext(_Opened(recipe, hold, config))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What travels to other processes."""

    uid: str
    model: str | None
    chunk_size: int
    directory: Path
    temporary: bool
    capacity_bytes: int


class _Once(Generic[T]):
    """A value that is made on first use, once, whatever threads ask for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []

    def __call__(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


class _Opened:
    """What this process has opened of a recipe; there is one for each recipe in a process."""

    config: _Once[LlamaConfig]
    tokenizer: _Once[Tokenizer]
    store: _Once[ChunkStore]
    batcher: _Once[Batcher]

    def __init__(
        self, recipe: _Recipe, hold: Hold | None = None, config: LlamaConfig | None = None
    ) -> None:
        self.recipe = recipe
        self.config = _Once(lambda: config or open_config(recipe.model))
        self._hold: Hold | None = None
        if hold:
            self._keep(hold)
        self.forget()
        _OPENED[recipe.uid] = self

    def forget(self) -> None:
        """Back to the recipe: things are opened anew on their next use."""
        me = weakref.proxy(self)  # a cycle would keep the store until a garbage collection
        self.tokenizer = _Once(lambda: Tokenizer.open(me.recipe.model))
        self.store = _Once(lambda: me._open_store())
        self.batcher = _Once(lambda: Batcher(Llama.open(me.recipe.model), me.store(), MOST_ROWS))

    def close(self) -> None:
        """Free everything. A temporary store goes when no other process holds it."""
        self.forget()
        hold, self._hold = self._hold, None
        if hold:
            hold.release()

    def _open_store(self) -> ChunkStore:
        recipe, config = self.recipe, self.config()
        if recipe.temporary and self._hold is None:
            try:
                self._keep(Hold.join(recipe.directory))
            except OSError as error:
                raise KVError(
                    f"the temporary store {recipe.directory} is gone: its context was closed, or "
                    "the process that made it has ended (store_dir=... names one that stays)"
                ) from error
        return ChunkStore(
            recipe.directory,
            layers=config.layers,
            width=config.kv_heads * config.head_dim,
            chunk_size=recipe.chunk_size,
            model=config.name,
            capacity_bytes=recipe.capacity_bytes,
        )

    def _keep(self, hold: Hold) -> None:
        self._hold = hold
        weakref.finalize(self, hold.release)  # on collection, and at exit

    def __reduce__(self) -> tuple[Callable[[_Recipe], _Opened], tuple[_Recipe]]:
        return _opened, (self.recipe,)


_OPENED: weakref.WeakValueDictionary[str, _Opened] = weakref.WeakValueDictionary()
_OPENED_LOCK = threading.Lock()


def _opened(recipe: _Recipe) -> _Opened:
    """This process' :class:`_Opened` of a recipe that came by pickle."""
    with _OPENED_LOCK:
        return _OPENED.get(recipe.uid) or _Opened(recipe)


def _forget_in_child() -> None:
    """A forked child opens everything anew: another thread of the parent may have held a lock."""
    global _OPENED_LOCK
    _OPENED_LOCK = threading.Lock()
    for opened in list(_OPENED.values()):
        opened._hold = None  # kv.tempdir has let go of it
        opened.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class LocalEngine:
    """The embedded engine, ``LocalContext.post_completion``.

    Called with (prompt_token_ids, sampling_params, cache_salt) it returns an iterator of
    :class:`~lmcache_mp.engines.engine.TokenEvent`; the first one tells ``cached_tokens``. For the
    parameters see :class:`~lmcache_mp.engines.sampling.Sampling`. Passes that are open at once in
    one process are decoded in one batch, at most ``max_in_flight`` of them; further ones wait.
    A pass' tokens depend on its prompt, parameters and KV alone, bit for bit.
    """

    max_in_flight = MOST_ROWS

    def __init__(self, opened: _Opened) -> None:
        self._opened = opened

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> Tokens:
        """Queue a pass. UsageError: a wrong prompt, parameter or salt, found at once."""
        self.check_prompt(prompt_token_ids)
        sampling = Sampling.parse(sampling_params or {})
        prompt = [int(token) for token in prompt_token_ids]
        config = self._opened.config()
        completion = Completion(
            prompt,
            sampling,
            self._opened.tokenizer(),
            eos_ids=config.eos_ids,
            room=config.context_length - len(prompt),
        )
        salt = check_salt(cache_salt)
        return self._opened.batcher().submit(prompt, salt, completion, owner=self._opened)

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """UsageError: no tokens, one that is no id of the vocabulary, or more than the context."""
        config, count = self._opened.config(), len(prompt_token_ids)
        if count == 0:
            raise UsageError("the prompt is empty: at least one token is needed")
        for position, token in enumerate(prompt_token_ids):
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise UsageError(f"token {position} of the prompt is {token!r}, not an integer")
            if not 0 <= token < config.vocab:
                raise UsageError(
                    f"token {position} of the prompt is {token}, but the vocabulary of "
                    f"{config.name} has {config.vocab} ids"
                )
        if count >= config.context_length:
            raise UsageError(
                f"the prompt has {count} tokens; the context of {config.name} takes at most "
                f"{config.context_length - 1} and a new one"
            )

    def check_sampling_params(self, sampling_params: Mapping[str, Any]) -> None:
        """UsageError: a parameter that does not exist, or a value that it can't have."""
        Sampling.parse(sampling_params)

    def open(self) -> None:
        """Open weights, tokenizer and store now."""
        self._opened.tokenizer()
        self._opened.batcher()

    def close(self) -> None:
        """Free everything that this process opened for the engine and its context. Idempotent."""
        self._opened.close()

    def __repr__(self) -> str:
        return f"LocalEngine({self._opened.recipe.model!r})"


class LocalContext:
    """KV of the embedded engine (a :class:`~lmcache_mp.kv.context.KVContext`); see connect_local.

    KV is a private, writable float32 array ``[2, L, T, D]``. ``post_completion`` is the engine that
    goes with it.
    """

    kind = "kv"

    def __init__(self, opened: _Opened) -> None:
        self._opened = opened
        self.post_completion = LocalEngine(opened)

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        return self._opened.recipe.chunk_size

    @property
    def store_dir(self) -> Path:
        """The directory that holds the KV."""
        return self._opened.recipe.directory

    @property
    def config(self) -> LlamaConfig:
        """The model's shape, vocabulary and context length."""
        return self._opened.config()

    @property
    def rope(self) -> Rope:
        """The model's rotary embedding, for edits that move tokens."""
        return self.config.rope

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._opened.tokenizer().encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._opened.tokenizer().decode(ids)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ``[{"role": ..., "content": ...}, ...]``, to be answered."""
        return self._opened.tokenizer().chat(messages)

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest stored prefix, a multiple of ``chunk_size``."""
        return self._opened.store().lookup(tokens, cache_salt)

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> NDArray[np.float32] | None:
        """KV ``[2, L, T, D]`` of the longest stored prefix, or None when there is none."""
        return self._opened.store().retrieve(tokens, cache_salt)

    def store(self, kv: ArrayLike, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Store the whole chunks of ``kv``. False: every chunk was there. KVError: a failure."""
        return self._opened.store().store(kv, tokens, cache_salt)

    def pin(self, cache_salt: str) -> None:
        """Keep what is stored under ``cache_salt`` until it is released.

        The engine takes KV under a pinned salt as edited: it can't be computed again.
        """
        self._opened.store().pin(cache_salt)

    def release(self, cache_salt: str) -> None:
        """Drop what is stored under ``cache_salt``."""
        self._opened.store().release(cache_salt)

    def clear(self) -> None:
        """Empty the store, for every process that uses it."""
        self._opened.store().clear()

    def open(self) -> None:
        """Open the store now."""
        self._opened.store()

    def close(self) -> None:
        """Free what this process has opened; a temporary store goes with its last process."""
        self._opened.close()

    def __enter__(self) -> LocalContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalContext({self._opened.recipe.model!r}, store_dir={str(self.store_dir)!r})"
