"""A connection to a running LMCache server: prefix lookups, and whole chunks in and out.

It stands one level below LMCache's SDK, on the requests that the SDK itself makes, as the SDK can
only read layouts that the server publishes. Imports LMCache and torch: a second or two, so it is
itself imported on use, in the process that needs it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import zmq
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContextMetadata,
    create_engine_driven_context,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from lmcache_mp.errors import KVError
from lmcache_mp.kv.lmcache_layout import Layout, layout_of_kv, layout_of_object, published_layout
from lmcache_mp.kv.lmcache_server import OWN_SUFFIX, Registration, ServerFacts

if TYPE_CHECKING:
    from torch import Tensor

#: The server forgets a registration that it has not heard of for an hour.
_REFRESH_S = 1200.0


class Link:
    """An open connection, for any number of threads. Every failure is a KVError."""

    def __init__(
        self, url: str, facts: ServerFacts, registration: Registration, timeout: float
    ) -> None:
        self.url, self.timeout, self.chunk_size = url, timeout, facts.chunk_size
        self._registration = registration
        self._layout = published_layout(registration)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # closing must not wait for a server that is gone
        self.client = RequestClientFactory.create(url, context=self._context)
        self._lock = threading.Lock()
        self._reader: _Instance | None = None
        self._writer: _Instance | None = None
        try:
            self._reader = self._register(None)
        except BaseException:
            self.close()
            raise

    @property
    def shares_memory(self) -> bool:
        """Whether chunks go through shared memory (else they are pickled)."""
        return self._reader is not None and self._reader.shares_memory

    def lookup(self, tokens: Sequence[int], cache_salt: str) -> int:
        """Tokens of the longest stored prefix, in whole chunks."""
        whole = len(tokens) - len(tokens) % self.chunk_size
        if not whole:
            return 0
        with self._session(tokens[:whole], cache_salt) as session:
            found = session.lookup()
            session.unlock()
        return found

    def read(self, tokens: Sequence[int], cache_salt: str) -> Tensor | None:
        """KV [planes, layers, T, width] of the longest stored prefix; None when there is none."""
        whole = len(tokens) - len(tokens) % self.chunk_size
        if not whole or self._reader is None:
            return None
        with self._session(tokens[:whole], cache_salt) as session:
            found = session.lookup()
            if not found:
                return None
            instance = self._reader.refreshed()
            key = session.key(found)
            objects = instance.context.prepare_retrieve(key, instance.number)
            if not objects:
                session.unlock()
                raise KVError(
                    f"the LMCache server at {self.url} found KV of {found} tokens and did not "
                    f"hand it over within {self.timeout:g} s: see its log"
                )
            try:
                if self._layout is None:
                    self._layout = layout_of_object(self._registration, objects[0])
                return self._layout.unpack(objects)
            finally:
                instance.context.commit_retrieve(key, instance.number)

    def write(self, kv: Tensor, tokens: Sequence[int], cache_salt: str) -> bool:
        """Store KV [planes, layers, T, width], T in whole chunks. False: all of it was there."""
        if self.lookup(tokens, cache_salt) == len(tokens):
            return False
        if self._layout is None:
            self._layout = layout_of_kv(self._registration, kv)
        layout = self._layout
        wanted = (layout.planes, layout.layers, len(tokens), layout.width)
        if tuple(kv.shape) != wanted or kv.dtype != layout.dtype:
            raise KVError(
                f"KV of {list(kv.shape)} {kv.dtype} does not fit the server's {list(wanted)} "
                f"{layout.dtype} of {self._registration.model_name!r}"
            )
        with self._lock:
            if self._writer is None:
                self._writer = self._register(layout)
        with self._session(tokens, cache_salt) as session:
            self._write_chunks(layout, kv, session.key(len(tokens)), self._writer.refreshed())
        stored = self.lookup(tokens, cache_salt)
        if stored < len(tokens):
            raise KVError(
                f"the LMCache server at {self.url} stored {stored} of {len(tokens)} tokens: its "
                "memory is probably full (give it more by --l1-size-gb, or edit fewer streams "
                "at once)"
            )
        return True

    def _write_chunks(
        self, layout: Layout, kv: Tensor, key: IPCCacheServerKey, instance: _Instance
    ) -> None:
        size = self.chunk_size
        reserved = instance.context.prepare_store(key, instance.number)
        chunks: list[Tensor] = []
        if reserved is None:  # no shared memory: the chunks travel with the commit
            for start in range(0, kv.shape[2], size):
                chunks.append(layout.new_object(size))
                layout.pack(kv[:, :, start : start + size], chunks[-1])
        else:
            for into, index in zip(*reserved, strict=True):
                layout.pack(kv[:, :, index * size : (index + 1) * size], into)
        instance.context.commit_store(key, instance.number, chunks)

    def clear(self) -> None:
        """Empty the server, for everybody."""
        self.ask(self.client.clear)

    def close(self) -> None:
        """Take back what was registered, and disconnect. Idempotent."""
        with self._lock:
            instances = [it for it in (self._reader, self._writer) if it is not None]
            self._reader = self._writer = None
        for instance in instances:
            with contextlib.suppress(Exception):  # a server that is gone has forgotten it anyway
                self.client.unregister_kv_cache_engine_driven_context(instance.number).result(2.0)
            instance.context.close()
        with contextlib.suppress(Exception):
            self.client.close()
        self._context.destroy(linger=0)

    def ask(self, request: Callable[..., Any], *arguments: object) -> Any:  # LMCache is untyped
        """The answer to a request; KVError when there is none in time."""
        try:
            return request(*arguments).result(self.timeout)
        except TimeoutError as error:
            raise KVError(
                f"the LMCache server at {self.url} did not answer within {self.timeout:g} s: is "
                "it running, and is this its --host and --port?"
            ) from error

    def _register(self, layout: Layout | None) -> _Instance:
        """Register as a reader (no layout: objects say what they are) or a writer."""
        shaped = layout or Layout(1, 1, 1, torch.uint8, None)
        payload = RegisterEngineDrivenContextPayload(
            instance_id=uuid.uuid4().int & ((1 << 63) - 1),
            # Under its own name it would replace the engine's layout.
            model_name=self._registration.model_name + OWN_SUFFIX,
            world_size=self._registration.world_size,
            block_size=self._registration.block_size or self.chunk_size,
            num_layers=shaped.layers,
            hidden_dim_size=shaped.object_width,
            dtype_str=str(shaped.dtype).removeprefix("torch."),
            use_mla=shaped.object_planes == 1,
            num_physical_slots=self.chunk_size,
        )
        return _Instance(self, payload)

    def register(self, payload: RegisterEngineDrivenContextPayload) -> tuple[str, int]:
        """Send a registration, or say that it is still alive; returns the shared memory."""
        answer = self.ask(self.client.register_kv_cache_engine_driven_context, payload)
        return answer.shm_name, answer.pool_size

    def transport(self, payload: RegisterEngineDrivenContextPayload) -> EngineDrivenContextShm:
        """What moves chunks for a registration: over shared memory, or pickled."""
        shm_name, pool_size = self.register(payload)
        shape = [payload.num_layers, self.chunk_size, payload.hidden_dim_size]
        if not payload.use_mla:
            shape = [2, *shape]
        described = MemoryLayoutDesc(
            shapes=[torch.Size(shape)], dtypes=[getattr(torch, payload.dtype_str)]
        )
        metadata = EngineDrivenContextMetadata(described, payload.block_size, payload.use_mla)
        return create_engine_driven_context(
            metadata, self.client, self.timeout, shm_name=shm_name, pool_size=pool_size
        )

    def _session(self, tokens: Sequence[int], cache_salt: str) -> _Session:
        return _Session(self, self._registration, list(tokens), cache_salt)


class _Instance:
    """A registration of ours on the server."""

    def __init__(self, link: Link, payload: RegisterEngineDrivenContextPayload) -> None:
        self._link, self._payload = link, payload
        self._seen = time.monotonic()
        self.number = payload.instance_id
        self.context = link.transport(payload)

    @property
    def shares_memory(self) -> bool:
        return isinstance(self.context, EngineDrivenContextShm)

    def refreshed(self) -> _Instance:
        """Itself, registered again after a long time without a transfer."""
        now = time.monotonic()
        if now - self._seen > _REFRESH_S:
            self._link.register(self._payload)
        self._seen = now
        return self


class _Session:
    """One lookup or store: the server keeps its hashes and locks until the session ends."""

    def __init__(
        self, link: Link, registration: Registration, tokens: list[int], cache_salt: str
    ) -> None:
        self._link, self._registration = link, registration
        self._tokens, self._salt = tokens, cache_salt
        self._id = f"lmcache_mp-{uuid.uuid4().hex}"
        self._found = 0

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(KVError):  # whoever failed has said so
            self._link.ask(self._link.client.end_session, self._id)

    def key(self, length: int, worker: int | None = 0) -> IPCCacheServerKey:
        """Names the first ``length`` tokens; a lookup's key has no worker."""
        return IPCCacheServerKey(
            model_name=self._registration.model_name,
            world_size=self._registration.world_size,
            num_kv_readers=self._registration.kv_readers,
            worker_id=worker,
            token_ids=tuple(self._tokens[:length]),
            start=0,
            end=length,
            request_id=self._id,
            cache_salt=self._salt,
            request_configs=None,
        )

    def lookup(self) -> int:
        """Tokens of the longest stored prefix, which is locked until it is read or unlocked."""
        link, client = self._link, self._link.client
        key = self.key(len(self._tokens), None)
        link.ask(client.lookup, key, self._registration.world_size)
        chunks = link.ask(client.wait_prefetch_status, self._id, link.timeout / 2)
        if chunks is None:
            raise KVError(
                f"the LMCache server at {link.url} did not finish a lookup within "
                f"{link.timeout / 2:g} s"
            )
        self._found = chunks * link.chunk_size
        return self._found

    def unlock(self) -> None:
        """Give up the locks of a lookup that is not followed by a read."""
        if self._found:
            key = self.key(self._found, None)
            self._link.ask(self._link.client.free_lookup_locks, key, self._registration.world_size)
