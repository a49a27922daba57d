"""A user's object on its way: a small one in a message, a large one in a file that workers map."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from lmcache_mp.kv.tempdir import Hold

#: Bytes from which an object goes through a file.
LARGE = 1 << 20
#: Of buffers in the file: what any dtype's items may need.
_ALIGNMENT = 64

#: Is given a buffer in place of the pickle.
TakeBuffer = Callable[[pickle.PickleBuffer], object]


@dataclass(frozen=True, slots=True)
class Payload:
    """A pickle, or where it is.

    With a ``path``, the file has the pickle and the buffers that belong to it (PEP 574) at
    ``spans``, (offset, size) in bytes each.
    """

    pickled: bytes
    path: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    def digest(self) -> bytes:
        """Equal for equal contents."""
        if not self.path:
            return hashlib.sha256(self.pickled).digest()
        with open(self.path, "rb") as file:
            found = hashlib.sha256()
            while block := file.read(1 << 20):
                found.update(block)
            return found.digest()

    def load(self) -> Any:
        """The object. A large one's arrays are views of the file, writable and private."""
        if not self.path:
            return cloudpickle.loads(self.pickled)
        fd = os.open(self.path, os.O_RDONLY)
        try:
            view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
        first, *others = (view[offset : offset + size] for offset, size in self.spans)
        return cloudpickle.loads(first, buffers=others)


class SharedFiles:
    """The files of a batch's large objects, in a temporary directory that is made when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hold: Hold | None = None
        self._numbers = itertools.count()
        self._finalizer: weakref.finalize[[], SharedFiles] | None = None

    def payload(self, dump: Callable[[TakeBuffer | None], bytes]) -> Payload:
        """What ``dump`` pickles; it is given what takes buffers out of the pickle, or None."""
        buffers: list[memoryview] = []
        pickled = dump(lambda buffer: buffers.append(buffer.raw()))
        parts = [memoryview(pickled), *buffers]
        if sum(part.nbytes for part in parts) >= LARGE:
            with contextlib.suppress(OSError):  # a full disk: it goes in messages, for more
                return self._written(parts)
        return Payload(dump(None) if buffers else pickled)

    def remove(self, payload: Payload) -> None:
        """Remove its file, if it has one. Who has loaded it is not disturbed."""
        if payload.path:
            with contextlib.suppress(OSError):
                os.unlink(payload.path)

    def close(self) -> None:
        """Remove all files. Idempotent; also done at exit."""
        if self._finalizer is not None:
            self._finalizer()

    def _written(self, parts: Sequence[memoryview]) -> Payload:
        path = self._folder() / f"object-{next(self._numbers)}"
        spans = []
        try:
            with path.open("xb", buffering=0) as file:
                for part in parts:
                    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                    file.seek(offset)
                    spans.append((offset, part.nbytes))
                    while part.nbytes:
                        part = part[file.write(part) :]
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Payload(b"", str(path), tuple(spans))

    def _folder(self) -> Path:
        with self._lock:
            if self._hold is None:
                self._hold = Hold.make()
                self._finalizer = weakref.finalize(self, self._hold.release)
            return self._hold.path
