"""Engines and contexts of the tests: real objects of a user's kind, importable in workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def pid_is_alive(pid: int) -> bool:
    """Whether a process of that id runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
