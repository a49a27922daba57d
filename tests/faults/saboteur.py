"""An engine, a context and an edit that do one harmful thing, once, at a given stage."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_mp.stream import TokenEvent
from tests.helpers import TokenKV

#: The first token of the stream that the harm is done to.
VICTIM = 3


class TwoArguments(Exception):
    """Pickles, and can't be rebuilt: the second argument is lost."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsLock(Exception):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BadReduce(Exception):
    """Its pickling does what ``harm`` says."""

    def __init__(self, harm: str) -> None:
        super().__init__(harm)
        self.harm = harm

    def __reduce__(self) -> Any:
        if self.harm == "loop":
            _loop()
        if self.harm == "raise":
            raise ValueError("no pickle of this")
        return threading.Lock()


def _loop() -> None:
    while True:
        pass


def _die(fault: str) -> None:
    pid = os.getpid()
    if fault == "sigkill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "sigterm":
        os.kill(pid, signal.SIGTERM)
    elif fault == "sigsegv":
        ctypes.string_at(0)
    elif fault == "exit3":
        os._exit(3)
    elif fault == "sigstop":
        os.kill(pid, signal.SIGSTOP)
    time.sleep(60)  # the signal is on its way


DEADLY = ("sigkill", "sigsegv", "sigterm", "exit3", "sigstop")


@dataclass(frozen=True)
class Saboteur:
    """``fault`` at ``stage``; a file in ``folder`` remembers that it has been done."""

    fault: str
    stage: str
    folder: str

    def first_time(self) -> bool:
        """Whether nobody, in any process, has done the harm yet."""
        try:
            (Path(self.folder) / "harm-done").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def strike(self, stage: str, first_token: int = VICTIM) -> Any:
        """Do the harm if this is the place; returns what the pass must then return as well."""
        if first_token != VICTIM or self.stage not in (stage, "sending"):
            return None
        if self.stage == "sending" and stage != "modify":
            return None
        if not self.first_time():
            return None
        if self.stage == "sending":
            return self._harm_while_sending()
        if self.fault in DEADLY:
            _die(self.fault)
        elif self.fault == "loop":
            _loop()
        elif self.fault == "raise":
            raise ValueError("raised on purpose")
        elif self.fault == "bad_exception":
            raise HoldsLock
        elif self.fault == "two_args":
            raise TwoArguments("one", "two")
        return threading.Lock()  # bad_result

    def _harm_while_sending(self) -> str:
        if self.fault == "two_args":
            raise TwoArguments("one", "two")
        if self.fault not in DEADLY:
            raise BadReduce(self.fault)
        threading.Thread(target=_die_inside, args=(self.fault, "send"), daemon=True).start()
        return "x" * 80_000_000  # takes a while to send


def _die_inside(fault: str, function: str) -> None:
    """Wait until another thread is inside the function that sends a result, then do the harm."""
    while True:
        for frame in list(sys._current_frames().values()):
            code = frame.f_code
            if code.co_name == function and code.co_filename.endswith("queues.py"):
                _die(fault)


@dataclass(frozen=True)
class HarmedEngine:
    """Counts on from the sum of the prompt, unless harm is due."""

    saboteur: Saboteur

    def open(self) -> None:
        """The stage "start"."""
        self.saboteur.strike("start")

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        limit = sampling_params["max_tokens"]
        harm = self.saboteur.strike("prefill" if limit == 1 else "decode", prompt_token_ids[0])
        first = sum(prompt_token_ids) % 1000
        for i in range(limit):
            yield TokenEvent(first + i, f"{first + i} " if harm is None else harm)


def make_edit(saboteur: Saboteur) -> Callable[..., Any]:
    """Keeps every other token, unless harm is due."""

    def edit(kv: Any, tokens: list[int]) -> Any:
        harm = saboteur.strike("modify", tokens[0])
        info = {} if harm is None else {"harm": harm}
        return kv[:, :, ::2], tokens[::2], info

    return edit


def context(folder: Path) -> TokenKV:
    """KV whose edits outlive a worker."""
    return TokenKV(str(folder))
