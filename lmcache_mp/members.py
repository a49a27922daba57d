"""The streams of a batch, with what ``add`` was told about each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_mp.arguments import check_sampling_params
from lmcache_mp.engines.engine import SamplingParams
from lmcache_mp.errors import StreamIdError, UsageError
from lmcache_mp.pool.messages import Adopted
from lmcache_mp.pool.objects import UserObjects, dump_object
from lmcache_mp.stream import LMCacheStream


@dataclass(frozen=True, slots=True)
class Member:
    """A stream of the batch; ``engine`` and ``contexts`` are numbers of users' objects."""

    index: int
    stream: LMCacheStream
    custom_id: str | None
    sampling_params: dict[str, Any] | None
    pickled_params: bytes | None
    group: str | None
    engine: int
    contexts: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the stream in salts and seeds: stable between runs of the same program."""
        return f"id:{self.custom_id}" if self.custom_id is not None else f"position:{self.index}"

    @property
    def tokens(self) -> int:
        """How many tokens its next prompt has."""
        return len(self.stream.state.tokens) + len(self.stream.state.suffix)


class Members(Mapping[str, Member]):
    """Members by stream id, in the order of ``add``; ``names`` and ``labels`` by position."""

    def __init__(self) -> None:
        self.objects = UserObjects()
        self.names: list[str] = []
        self.labels: list[str] = []
        self._members: dict[str, Member] = {}
        self._custom_ids: set[str] = set()
        self._nonce = uuid.uuid4().hex

    def __getitem__(self, stream_id: str) -> Member:
        return self._members[stream_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(
        self,
        stream: LMCacheStream,
        custom_id: str | None,
        sampling_params: SamplingParams | None,
        group: str | None,
    ) -> str:
        """Take a stream in; returns its id. UsageError, and nothing changes, if it can't be."""
        if not isinstance(stream, LMCacheStream):
            raise UsageError(f"add() takes what create_request returns, not {stream!r}")
        stream_id = stream.stream_id()
        if stream_id in self._members:
            raise StreamIdError(f"stream {stream_id!r} is in the batch already")
        for name, value in (("custom_id", custom_id), ("group", group)):
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{name} must be a string, not {value!r}")
        if custom_id is not None and custom_id in self._custom_ids:
            raise UsageError(f"custom_id {custom_id!r} is taken by another stream of the batch")
        own = pickled = None
        if sampling_params is not None:
            own = check_sampling_params(sampling_params, "the stream's sampling_params")
            pickled = dump_object(own, "sampling parameters")
        engine = self.objects.add_permanent(stream.post_completion, "engine")
        contexts = tuple(self.objects.add_permanent(c, "context") for c in stream.contexts)
        stream.join_batch()
        self._members[stream_id] = Member(
            len(self.names), stream, custom_id, own, pickled, group, engine, contexts
        )
        self.names.append(stream_id)
        self.labels.append(custom_id if custom_id is not None else stream_id)
        if custom_id is not None:
            self._custom_ids.add(custom_id)
        return stream_id

    def adopted(self, index: int) -> Adopted:
        """The stream at a position, as a worker needs it."""
        stream_id = self.names[index]
        member = self._members[stream_id]
        return Adopted(
            index,
            stream_id,
            member.key,
            self._nonce,
            member.stream.state,
            member.engine,
            member.contexts,
            member.pickled_params,
            member.custom_id,
        )
