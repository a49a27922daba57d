"""What the soak's workers run: a cheap engine, context and edit in which faults are planned.

A stream is recognised by its first token, which edits keep. A fault that strikes leaves a note with
the worker's pid first, so that the parent knows which did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.stream import TokenEvent

CHUNK = 4
_EDIT_SALT = 32


@dataclass(frozen=True)
class Fault:
    """What happens in a stream's pass: at its beginning or ``late``, each time unless ``once``."""

    kind: str
    late: bool = False
    once: bool = False

    def strike(self, notes: str, stream: int) -> None:
        """Do it; what returns is only a fault that has struck once already."""
        path = Path(notes) / f"{stream}-{self.kind}"
        if self.once and path.exists():
            return
        with path.open("a") as note:
            note.write(f"{os.getpid()}\n")
        (DEATHS | HANGS | ERRORS)[self.kind]()


class TwoArguments(Exception):
    """Pickles, and can't be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class HoldsLock(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("planned")
        self.lock = threading.Lock()


def _raise(error: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def raise_it() -> NoReturn:
        raise error()

    return raise_it


def _recurse() -> None:
    _recurse()


def _loop() -> None:
    while True:
        pass


def _wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _signal_oneself(number: int) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60.0)  # a signal to the process may reach another of its threads first

    return send


DEATHS: dict[str, Callable[[], None]] = {
    "SIGKILL": _signal_oneself(signal.SIGKILL),
    "SIGSEGV": _signal_oneself(signal.SIGSEGV),
    "SIGTERM": _signal_oneself(signal.SIGTERM),
    "exit": lambda: os._exit(3),
}
EXIT_CODES = {"SIGKILL": -9, "SIGSEGV": -11, "SIGTERM": -15, "exit": 3}
HANGS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(3600.0),
    "loop": _loop,
    "lock": _wait_for_lock,
    "SIGSTOP": _signal_oneself(signal.SIGSTOP),
}
#: By the name of the exception's type.
ERRORS: dict[str, Callable[[], None]] = {
    "ValueError": _raise(lambda: ValueError("planned")),
    "TwoArguments": _raise(lambda: TwoArguments("planned", "twice")),
    "HoldsLock": _raise(HoldsLock),
    "SystemExit": _raise(lambda: SystemExit(1)),
    "KeyboardInterrupt": _raise(KeyboardInterrupt),
    "RecursionError": _recurse,
}


@dataclass(frozen=True)
class ChaoticEngine:
    """Yields the tokens that follow from the prompt's sum; faults by ``sampling_params``.

    ``faults`` maps streams to faults, ``notes`` is the folder for their notes.
    """

    blocking: bool = True

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: Mapping[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        stream = prompt_token_ids[0]
        fault: Fault | None = sampling_params["faults"].get(stream)
        if fault and not fault.late:
            fault.strike(sampling_params["notes"], stream)
        for token in answer(prompt_token_ids, sampling_params["max_tokens"]):
            yield TokenEvent(token, f"{token} ")
        if fault and fault.late:
            fault.strike(sampling_params["notes"], stream)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the engine says to a prompt."""
    first = sum(prompt) % 1000
    return [first + i for i in range(count)]


@dataclass(frozen=True)
class ChaoticEdit:
    """Adds one to the KV and keeps half the tokens of a long stream."""

    faults: Mapping[int, Fault]
    notes: str

    def __call__(
        self, kv: NDArray[np.float64], tokens: list[int]
    ) -> tuple[NDArray[np.float64], list[int], dict[str, float]]:
        fault = self.faults.get(tokens[0])
        if fault and not fault.late:
            fault.strike(self.notes, tokens[0])
        total = float(kv.sum())
        new_kv, new_tokens = edited(kv, tokens)
        if fault and fault.late:
            fault.strike(self.notes, tokens[0])
        return new_kv, new_tokens, {"total": total}


def edited(kv: NDArray[np.float64], tokens: list[int]) -> tuple[NDArray[np.float64], list[int]]:
    """What the edit makes of ``kv`` [2, L, T, D], in place, and its tokens."""
    kv += 1.0
    if len(tokens) < 4 * CHUNK:
        return kv, tokens
    return kv[:, :, ::2], tokens[::2]


def plain_kv(tokens: Sequence[int]) -> NDArray[np.float64]:
    """KV [2, 1, T, 1] as the engine would compute it: ids, and their negatives as values."""
    ids = np.asarray(tokens, np.float64)
    return np.stack([ids, -ids])[:, None, :, None]


@dataclass(frozen=True)
class FileKV:
    """Edited KV in a file for each salt, so it outlives workers; all other KV follows from tokens.

    Opening it ends the worker when the file ``die`` is there, once.
    """

    folder: str
    chunk_size: int = CHUNK

    def _path(self, salt: str) -> Path:
        return Path(self.folder) / f"{salt}.npy"

    def open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(Path(self.folder) / "die", Path(self.folder) / f"died-{os.getpid()}")
            os._exit(3)

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        if len(cache_salt) == _EDIT_SALT and not self._path(cache_salt).exists():
            return 0
        return len(tokens) - len(tokens) % self.chunk_size

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> NDArray[np.float64] | None:
        covered = self.lookup(tokens, cache_salt)
        kv = plain_kv(tokens[:covered])
        if covered and len(cache_salt) == _EDIT_SALT:
            stored = np.load(self._path(cache_salt))
            kv[:, :, : stored.shape[2]] = stored
        return kv if covered else None

    def store(self, kv: NDArray[np.float64], tokens: Sequence[int], cache_salt: str = "") -> bool:
        np.save(self._path(cache_salt), kv)
        return True

    def pin(self, cache_salt: str) -> None:
        pass

    def release(self, cache_salt: str) -> None:
        self._path(cache_salt).unlink(missing_ok=True)

    def close(self) -> None:
        pass
