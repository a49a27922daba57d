"""What parent and worker say to each other: frozen dataclasses, pickled by the stdlib.

Users' objects (functions, engines, contexts) appear only as cloudpickled bytes, named by a number.
Streams are named by their position in the batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_mp.passes.state import Edited, Generated, StreamState
from lmcache_mp.pool.payloads import Payload

_PROTOCOL = 5


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Keep a user's object: it is loaded once, at its first use, and then named by ``number``."""

    number: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Unload:
    """Forget a user's object."""

    number: int


@dataclass(frozen=True, slots=True)
class Enter:
    """Work in ``folder``, and find modules on ``path``; without a folder stay where you are."""

    folder: str | None
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Open these contexts and engines now, so that no phase has to wait for it."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A stream as its worker needs it; engine and contexts are numbers of user objects.

    ``sampling_params`` are its own, pickled: they may hold objects of the user's, and are loaded
    where an error is the stream's alone.
    """

    stream: int
    stream_id: str
    key: str
    nonce: str
    state: StreamState
    engine: int
    contexts: tuple[int, ...]
    sampling_params: bytes | None = None
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """Own these streams from now on."""

    streams: tuple[Adopted, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """One generate pass for each stream; ``forced`` is laid over the stream's own parameters.

    ``sampling_params`` are pickled: see Adopted.
    """

    sampling_params: bytes
    forced: Mapping[str, Any]
    warn_unused_kv: bool = False


@dataclass(frozen=True, slots=True)
class Modify:
    """Run one edit for each stream, one at a time; ``fn`` is the number of a user object.

    ``seed`` and ``round`` are what, with the stream's key, seeds the edit's random numbers.
    """

    fn: int
    timeout: float
    poll_interval: float
    seed: int = 0
    round: int = 0


Work = Generate | Modify


@dataclass(frozen=True, slots=True)
class Run:
    """Do ``work`` for these streams; ``generation`` is the phase, ``attempt`` counts from 1.

    With ``announce`` the worker says of each pass that it begins: a timeout counts from there.
    """

    generation: int
    work: Work
    streams: tuple[int, ...]
    attempt: int = 1
    announce: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the passes of a generation, and say so when none is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Say that you are there."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close what is open and end."""


Command = Load | Unload | Enter | Open | Adopt | Run | Cancel | Ping | Close


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the parent.

    ``pickled`` is the exception itself, or None where it can't be rebuilt; the texts always are.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is up; ``version`` is that of its records."""

    pid: int
    version: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything asked for was opened, or why not."""

    failures: tuple[Failure, ...]


# The two that come once a pass are tuples, which pickle several times as fast as dataclasses.


class Done(NamedTuple):
    """One pass has ended: its record, and its change or its failure (see passes/outcome.py)."""

    generation: int
    stream: int
    row: bytes
    times: bytes
    counts: bytes
    change: Generated | Edited | None
    failure: Failure | None
    warning: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """No pass of the generation is left."""

    generation: int


class Began(NamedTuple):
    """A pass begins now."""

    generation: int
    stream: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a ping."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A line for ``name`` ("stdout" or "stderr"), and the stream whose pass wrote it."""

    name: str
    stream: int | None
    line: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A record that was logged in a stream's pass, or None; ``record`` are its pickled fields."""

    stream: int | None
    record: bytes


Result = Ready | Opened | Done | Cancelled | Began | Pong | Printed | Logged


def dump(message: Command | Result) -> bytes:
    """A message as the bytes that go over a pipe."""
    return pickle.dumps(message, _PROTOCOL)


def load_result(data: bytes) -> Result:
    """What a worker sent."""
    message: Result = pickle.loads(data)
    return message


def load_command(data: bytes) -> Command:
    """What the parent sent."""
    message: Command = pickle.loads(data)
    return message
