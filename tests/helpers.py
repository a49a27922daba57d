"""Engines and contexts of the tests: real objects of a user's kind, importable in workers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.kv.context import chunk_keys
from lmcache_mp.stream import TokenEvent

CHUNK = 4


@dataclass(frozen=True)
class CountingEngine:
    """Yields ``max_tokens`` tokens that follow from the prompt: sum, sum + 1, ..."""

    blocking: bool = True

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        first = sum(prompt_token_ids) % 1000
        for i in range(sampling_params.get("max_tokens") or 16):
            yield TokenEvent(first + i, f"{first + i} ")


@dataclass(frozen=True)
class TokenKV:
    """A context whose KV is a function of the tokens: [2, 1, T, 1] of the ids, stored in files."""

    folder: str
    chunk_size: int = CHUNK

    def _path(self, tokens: Sequence[int], salt: str) -> Path:
        return Path(self.folder) / f"{salt or 'plain'}-{'-'.join(map(str, tokens))}.npy"

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        whole = len(tokens) - len(tokens) % self.chunk_size
        if len(cache_salt) == 32:  # an edit's: only what was stored is there
            stored = list(Path(self.folder).glob(f"{cache_salt}-*.npy"))
            return len(np.load(stored[0])[0, 0]) if stored else 0
        return whole

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any:
        covered = self.lookup(tokens, cache_salt)
        if not covered:
            return None
        if len(cache_salt) == 32:
            return np.load(next(Path(self.folder).glob(f"{cache_salt}-*.npy")))
        ids = np.asarray(tokens[:covered], np.float32)
        return np.stack([ids, -ids])[:, None, :, None].copy()

    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        np.save(Path(self.folder) / f"{cache_salt}-{len(tokens)}.npy", kv)
        return True

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Rendezvous:
    """An engine whose passes wait until ``count`` of them are open at once, in any process."""

    folder: str
    count: int
    limit: float = 60.0

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        name = Path(self.folder) / "-".join(map(str, prompt_token_ids))
        name.touch()
        deadline = time.monotonic() + self.limit
        while len(os.listdir(self.folder)) < self.count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(os.listdir(self.folder))} passes were open at once")
            time.sleep(0.01)
        yield TokenEvent(1, "x")


class Script:
    """An engine that yields given events, raising those that are exceptions; notes its calls."""

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.calls: list[tuple[list[int], dict[str, Any], str]] = []

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[Any]:
        self.calls.append((prompt_token_ids, sampling_params, cache_salt))
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event


def kv_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """[2, 3, T, 5], where every number of a token is its id, negative in the values."""
    ids = np.asarray(list(tokens), np.float32)[None, None, :, None]
    return np.concatenate([ids, -ids]) * np.ones((2, 3, 1, 5), np.float32)


class MemoryKV:
    """A context that keeps chunks by salt and tokens, in this process; notes pins and releases."""

    def __init__(self, chunk_size: int = CHUNK) -> None:
        self.chunk_size = chunk_size
        self.chunks: dict[tuple[str, str], NDArray[np.float32]] = {}
        self.pinned: list[str] = []
        self.released: list[str] = []

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        return len(self._prefix(tokens, cache_salt)) * self.chunk_size

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Any:
        chunks = self._prefix(tokens, cache_salt)
        return np.concatenate(chunks, axis=2) if chunks else None

    def store(self, kv: Any, tokens: Sequence[int], cache_salt: str = "") -> bool:
        assert kv.shape[2] == len(tokens)
        new = False
        for index, key in enumerate(chunk_keys(tokens, self.chunk_size, model="")):
            start = index * self.chunk_size
            new |= (cache_salt, key) not in self.chunks
            self.chunks[cache_salt, key] = kv[:, :, start : start + self.chunk_size].copy()
        return new

    def pin(self, cache_salt: str) -> None:
        self.pinned.append(cache_salt)

    def release(self, cache_salt: str) -> None:
        self.released.append(cache_salt)
        self.chunks = {key: kv for key, kv in self.chunks.items() if key[0] != cache_salt}

    def close(self) -> None:
        pass

    def _prefix(self, tokens: Sequence[int], salt: str) -> list[NDArray[np.float32]]:
        keys = [(salt, key) for key in chunk_keys(tokens, self.chunk_size, model="")]
        stored = itertools.takewhile(self.chunks.__contains__, keys)
        return [self.chunks[key] for key in stored]


def pid_is_alive(pid: int) -> bool:
    """Whether a process of that id runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
