"""Users' objects (functions, engines, contexts): cloudpickled once, loaded once in a worker."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from lmcache_mp.errors import UsageError
from lmcache_mp.passes.checks import describe
from lmcache_mp.pool.payloads import Payload, SharedFiles, TakeBuffer

_HIDDEN_FILE = "<dynamic-code>"
_reduce_code: Callable[[CodeType], tuple[Any, ...]] = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code_with_file(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_code(code)
    named = (code.co_filename if part == _HIDDEN_FILE else part for part in arguments)
    return make, tuple(named)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Keeps a function's file name, which cloudpickle hides: tracebacks must say where."""

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
    )


def dump_object(thing: object, role: str, take: TakeBuffer | None = None) -> bytes:
    """``thing`` as bytes, or a UsageError that names the variable inside that is at fault.

    ``take`` is given the large parts that need not be copied into the bytes (PEP 574).
    """
    try:
        with io.BytesIO() as buffer:
            _Pickler(buffer, protocol=5, buffer_callback=take).dump(thing)
            return buffer.getvalue()
    except Exception as error:
        raise UsageError(_explain(thing, role, error)) from error


def _explain(thing: object, role: str, error: Exception) -> str:
    what = describe(thing) if callable(thing) else f"a {type(thing).__name__}"
    path, culprit = _culprit(thing)
    message = f"the {role} {what} can't be sent to workers"
    if path:
        message += f": its variable {path} (a {type(culprit).__name__}) does not pickle"
    else:
        message += f": {error}"
    if _is_lock(culprit):
        return f"{message}. Workers share no locks: use max_concurrency to limit what runs at once"
    return f"{message}. Make it from plain values inside, or open it on first use in the worker"


def _culprit(thing: object, depth: int = 3) -> tuple[str, object]:
    """The path to the innermost named part of ``thing`` that does not pickle, and that part."""
    for name, part in _parts(thing):
        try:
            cloudpickle.dumps(part, protocol=5)
        except Exception:  # whatever a user's __reduce__ raises
            deeper, culprit = _culprit(part, depth - 1) if depth else ("", part)
            return (f"{name}.{deeper}" if deeper else name), culprit
    return "", thing


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if inspect.ismethod(thing):
        yield "self", thing.__self__
        return
    if isinstance(thing, functools.partial):
        yield "func", thing.func
        yield from ((f"args[{index}]", value) for index, value in enumerate(thing.args))
        yield from thing.keywords.items()
        return
    if inspect.isfunction(thing):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable without a value yet
                yield name, cell.cell_contents
        names = [name for name in thing.__code__.co_names if name in thing.__globals__]
        yield from ((name, thing.__globals__[name]) for name in names)
        defaults = inspect.signature(thing).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)
        return
    if isinstance(thing, dict):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    else:
        yield from getattr(thing, "__dict__", {}).items()
        slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
        yield from ((name, getattr(thing, name)) for name in slots if hasattr(thing, name))


def _is_lock(thing: object) -> bool:
    return callable(getattr(thing, "acquire", None)) and callable(getattr(thing, "release", None))


class UserObjects:
    """The parent's side: payloads by number.

    Permanent ones (engines, contexts) are opened when a worker starts, and equal ones share a
    number; the others (edit functions) live for a phase.
    """

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._permanent: dict[bytes, int] = {}
        self._files = SharedFiles()
        self._numbers: dict[int, tuple[object, int]] = {}
        self._next = 0

    def add_permanent(self, thing: object, role: str) -> int:
        """The number of ``thing`` for the life of the batch; UsageError if it does not pickle."""
        known = self._numbers.get(id(thing))
        if known is not None:
            return known[1]
        payload = self._files.payload(functools.partial(dump_object, thing, role))
        key = payload.digest()
        number = self._permanent.get(key)
        if number is None:
            number = self._permanent[key] = self._keep(payload)
        else:
            self._files.remove(payload)
        self._numbers[id(thing)] = thing, number  # holding it keeps its id() from being used again
        return number

    def add(self, thing: object, role: str) -> int:
        """A number of its own for ``thing``; UsageError if it does not pickle."""
        return self._keep(self._files.payload(functools.partial(dump_object, thing, role)))

    def forget(self, number: int) -> None:
        """Drop an object that was added."""
        self._files.remove(self._payloads.pop(number))

    def payload(self, number: int) -> Payload:
        """The pickled object."""
        return self._payloads[number]

    def close(self) -> None:
        """Remove the files of large objects. Idempotent."""
        self._files.close()

    @property
    def permanent(self) -> tuple[int, ...]:
        """Numbers of the permanent objects."""
        return tuple(self._permanent.values())

    def _keep(self, payload: Payload) -> int:
        number, self._next = self._next, self._next + 1
        self._payloads[number] = payload
        return number


class LoadedObjects:
    """A worker's side: payloads by number, each loaded at its first use and kept."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._loaded: dict[int, Any] = {}
        self._lock = threading.RLock()

    def keep(self, number: int, payload: Payload) -> None:
        """Note a payload."""
        with self._lock:
            self._payloads[number] = payload

    def forget(self, number: int) -> None:
        """Drop an object."""
        with self._lock:
            self._payloads.pop(number, None)
            self._loaded.pop(number, None)

    def get(self, number: int) -> Any:
        """The object; whatever loading it raises is raised here."""
        with self._lock:
            if number not in self._loaded:
                self._loaded[number] = self._payloads[number].load()
                del self._payloads[number]  # loading again would reset what it has captured
            return self._loaded[number]

    def all_loaded(self) -> list[Any]:
        """Every object that was loaded."""
        with self._lock:
            return list(self._loaded.values())
