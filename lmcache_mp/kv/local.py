"""A store of KV in chunk files, shared by all processes that open its directory.

A file holds one chunk, raw float32 ``[2, L, chunk_size, D]``, named by the chunk's key and its
position; what is stored under one salt is in a folder of its own. Files appear by rename and are
never changed, so readers need no lock; one is taken only around the account of bytes in use. Room
is made by removing the least recently used chunks (the modification time says when a chunk was
last used), a sequence's tail before its prefix. Folders with a ``pinned`` file are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_mp.errors import KVError
from lmcache_mp.kv.context import check_salt, chunk_keys
from lmcache_mp.kv.tempdir import exclusive

_USAGE = "usage"
_PINNED = "pinned"
_TEMPORARY = "."
_FOLDER = re.compile(r"[0-9a-f]{32}")
_CHUNK = re.compile(r"[0-9a-f]{32}\.(\d+)")
#: Eviction goes on to this share of the capacity, so that it is not needed again at once.
_AFTER_EVICTION = 0.9
#: A temporary file that nobody has written to for so long was left by a killed process.
_ABANDONED_S = 600.0


def default_capacity(directory: Path) -> int:
    """Half of the free bytes of the file system that ``directory`` is (or will be) on."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free // 2


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    used_ns: int
    index: int  # position of the chunk in its sequence; -1 for a file being written
    pinned: bool


@dataclass(slots=True)
class _Account:
    used: int


class ChunkStore:
    """KV of one model in ``directory`` (made with mode 0700 if it is not there).

    ``layers`` is L and ``width`` D of the KV ``[2, L, T, D]``; ``model`` names the weights, so
    that KV of another model is never found. ``capacity_bytes`` is kept over all processes; the
    default is half of the free space.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        layers: int,
        width: int,
        chunk_size: int,
        model: str,
        capacity_bytes: int | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.chunk_size = chunk_size
        self._shape = (2, layers, chunk_size, width)
        self._chunk_bytes = 4 * 2 * layers * chunk_size * width
        self._model = model
        if capacity_bytes is None:
            capacity_bytes = default_capacity(self.directory)
        self.capacity_bytes = capacity_bytes
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise KVError(
                f"can't use {self.directory} as a KV store: {error}; name another with store_dir"
            ) from error

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest stored prefix, a multiple of ``chunk_size``."""
        return self._stored(self._paths(tokens, cache_salt)) * self.chunk_size

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> NDArray[np.float32] | None:
        """KV ``[2, L, T, D]`` of the longest stored prefix, private and writable, or None.

        A chunk that another process evicts meanwhile ends the prefix: T is what could be read.
        """
        paths = self._paths(tokens, cache_salt)
        paths = paths[: self._stored(paths)]
        _, layers, size, width = self._shape
        kv = np.empty((2, layers, len(paths) * size, width), np.float32)
        now = time.time_ns()
        read = 0
        while read < len(paths) and self._copy(
            paths[read], kv[:, :, read * size : (read + 1) * size], now
        ):
            read += 1
        if read == 0:
            return None
        return kv if read == len(paths) else kv[:, :, : read * size].copy()

    def store(
        self, kv: ArrayLike, tokens: Sequence[int], cache_salt: str = "", *, start: int = 0
    ) -> bool:
        """Store the whole chunks of ``kv``, float32 ``[2, L, T, D]``, T = ``len(tokens) - start``.

        ``kv`` may leave out the first ``start`` tokens (whole chunks, stored before). Returns False
        if every chunk was there. Raises KVError for a wrong shape or type, a store too full of
        pinned KV, and a full disk.
        """
        array = self._checked(kv, tokens, start)
        paths = self._paths(tokens, cache_salt)
        now = time.time_ns()
        missing = [i for i, path in enumerate(paths) if not self._touch(path, now)]
        missing = [i for i in missing if i * self.chunk_size >= start]
        if not missing:
            return False
        temporary = self._reserve(self._folder(cache_salt), len(missing), keep=set(paths))
        try:
            for i, name in zip(missing, temporary, strict=True):
                begin = i * self.chunk_size - start
                with open(name, "r+b") as file:
                    chunk = array[:, :, begin : begin + self.chunk_size]
                    file.write(np.ascontiguousarray(chunk).data)
                os.utime(name, ns=(now, now))  # else a prefix would be older than its tail
            self._publish(temporary, [paths[i] for i in missing])
        except OSError as error:
            raise KVError(
                f"could not store KV in {self.directory}: {error}; free some space on its file "
                "system, or name a directory on another with store_dir"
            ) from error
        finally:
            self._give_back(temporary)
        return True

    def pin(self, cache_salt: str) -> None:
        """Never evict what is and will be stored under ``cache_salt``, until it is released."""
        folder = self._folder(cache_salt)
        with self._account():  # an eviction removes empty folders
            os.makedirs(folder, 0o700, exist_ok=True)
            open(os.path.join(folder, _PINNED), "wb").close()

    def pinned(self, cache_salt: str) -> bool:
        """Whether ``cache_salt`` is pinned, by whatever process."""
        return os.path.exists(os.path.join(self._folder(cache_salt), _PINNED))

    def release(self, cache_salt: str) -> None:
        """Drop what is stored under ``cache_salt``, and its pin."""
        folder = self._folder(cache_salt)
        with self._account() as account:
            account.used -= sum(file.size for file in _files(folder))
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove every chunk, of all salts. Pins stay: they are for what is stored later, too."""
        with self._account() as account:
            for file in self._all_files():
                if file.index >= 0:
                    _unlink(file.path)
            account.used = sum(file.size for file in self._all_files())

    def close(self) -> None:
        """Nothing to give up: the store keeps no file open."""

    def _checked(self, kv: ArrayLike, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        if len(tokens) and np.asarray(tokens).dtype.kind not in "iu":
            raise KVError("tokens must be a sequence of integer token ids")
        if start % self.chunk_size or not 0 <= start <= len(tokens):
            raise KVError(f"start={start} is not the beginning of a chunk of {len(tokens)} tokens")
        array = np.asarray(kv)
        _, layers, _, width = self._shape
        expected = (2, layers, len(tokens) - start, width)
        if array.shape != expected:
            raise KVError(
                f"KV has the shape {list(array.shape)}, but {list(expected)} is needed: "
                "key and value, layers, one row a token, kv_heads * head_dim"
            )
        if array.dtype != np.float32:
            raise KVError(f"KV is {array.dtype}, but float32 is needed: kv.astype(numpy.float32)")
        return array

    def _folder(self, cache_salt: str) -> str:
        name = f"{len(self._model)}:{self._model}{check_salt(cache_salt)}"
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16)
        return os.path.join(self.directory, digest.hexdigest())

    def _paths(self, tokens: Sequence[int], cache_salt: str) -> list[str]:
        """The files of the whole chunks of ``tokens``."""
        folder = self._folder(cache_salt)
        keys = chunk_keys(tokens, self.chunk_size, model=self._model, cache_salt=cache_salt)
        return [os.path.join(folder, f"{key}.{index}") for index, key in enumerate(keys)]

    def _stored(self, paths: Sequence[str]) -> int:
        """How many of ``paths`` are there, up to the first that is not."""
        for count, path in enumerate(paths):
            try:
                if os.stat(path).st_size != self._chunk_bytes:
                    return count
            except OSError:
                return count
        return len(paths)

    def _touch(self, path: str, now_ns: int) -> bool:
        """Whether a chunk is there; it counts as used now."""
        try:
            if os.stat(path).st_size != self._chunk_bytes:
                return False
            os.utime(path, ns=(now_ns, now_ns))
        except OSError:
            return False
        return True

    def _copy(self, path: str, out: NDArray[np.float32], now_ns: int) -> bool:
        """Copy a chunk to ``out``; False if it is not there (any more) or torn."""
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != self._chunk_bytes:
                    return False
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise KVError(f"could not read KV from {path}: {error}") from error
        out[...] = np.frombuffer(mapped, np.float32).reshape(self._shape)
        with contextlib.suppress(OSError):  # evicted since it was opened
            os.utime(path, ns=(now_ns, now_ns))
        return True

    def _publish(self, temporary: Sequence[str], paths: Sequence[str]) -> None:
        """Give written chunks their names; a file that has one is torn, or the same chunk."""
        with self._account() as account:  # so that a count misses no file between two names
            for name, path in zip(temporary, paths, strict=True):
                replaced = os.stat(path).st_size if os.path.exists(path) else 0
                os.replace(name, path)
                account.used -= replaced

    def _reserve(self, folder: str, chunks: int, keep: Collection[str]) -> list[str]:
        """Make room and temporary files for ``chunks`` chunks; the files' sizes are the claim."""
        needed = chunks * self._chunk_bytes
        names: list[str] = []
        try:
            with self._account() as account:
                if account.used + needed > self.capacity_bytes:
                    account.used = self._evict(needed, keep)
                os.makedirs(folder, 0o700, exist_ok=True)
                for _ in range(chunks):
                    fd, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
                    names.append(name)
                    os.ftruncate(fd, self._chunk_bytes)
                    os.close(fd)
                    account.used += self._chunk_bytes
        except OSError as error:
            self._give_back(names)
            raise KVError(f"could not store KV in {self.directory}: {error}") from error
        return names

    def _give_back(self, temporary: Sequence[str]) -> None:
        """Remove the files of a reservation that were not published."""
        left = [name for name in temporary if os.path.exists(name)]
        if left:
            with self._account() as account:
                account.used -= sum(_unlink(name) * self._chunk_bytes for name in left)

    def _evict(self, needed: int, keep: Collection[str]) -> int:
        """Remove chunks until there is room for ``needed`` bytes; returns the bytes in use."""
        abandoned_ns = time.time_ns() - int(_ABANDONED_S * 1e9)
        files = list(self._all_files())
        removable = [
            file
            for file in files
            if (not file.pinned and file.path not in keep and file.index >= 0)
            or (file.index < 0 and file.used_ns < abandoned_ns)
        ]
        used = sum(file.size for file in files)
        staying = used - sum(file.size for file in removable)
        if staying + needed > self.capacity_bytes:
            pinned = sum(file.size for file in files if file.pinned)
            raise KVError(
                f"{needed} bytes of KV do not fit into the store {self.directory}: its capacity is "
                f"{self.capacity_bytes} bytes, of which {staying} can't be evicted ({pinned} are "
                "edited KV of open streams); raise it with capacity_bytes, or close streams"
            )
        goal = int(self.capacity_bytes * _AFTER_EVICTION) - needed
        for file in sorted(removable, key=lambda file: (file.used_ns, -file.index)):
            if used <= goal:
                break
            used -= _unlink(file.path) * file.size
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.dirname(file.path))
        return used

    def _all_files(self) -> Iterator[_File]:
        """The files of all salts' folders; nothing else in the directory is ours to touch."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.is_dir() and _FOLDER.fullmatch(entry.name):
                    yield from _files(entry.path)

    @contextlib.contextmanager
    def _account(self) -> Iterator[_Account]:
        """The bytes in use, with every other process and thread kept out; written on leaving."""
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(exclusive(self.directory / _USAGE))
            except OSError as error:
                raise KVError(
                    f"the KV store {self.directory} can't be used: {error}; was its context closed?"
                ) from error
            text = os.read(fd, 32)
            counted = text.isdigit()  # else new, or its last writer was killed
            used = int(text) if counted else sum(file.size for file in self._all_files())
            account = _Account(used)
            try:
                yield account
            finally:
                if account.used != used or not counted:
                    os.ftruncate(fd, 0)
                    os.lseek(fd, 0, os.SEEK_SET)
                    os.write(fd, str(max(0, account.used)).encode())


def _files(folder: str) -> list[_File]:
    """The chunks in a salt's folder, and what is being written there."""
    found = []
    pinned = os.path.exists(os.path.join(folder, _PINNED))
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    for entry in entries:
        chunk = _CHUNK.fullmatch(entry.name)
        if not chunk and not entry.name.startswith(_TEMPORARY):
            continue
        with contextlib.suppress(FileNotFoundError):  # renamed or given up since
            info = entry.stat()
            index = int(chunk[1]) if chunk else -1
            found.append(_File(entry.path, info.st_size, info.st_mtime_ns, index, pinned))
    return found


def _unlink(path: str) -> bool:
    """Remove a file; False if it was gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
