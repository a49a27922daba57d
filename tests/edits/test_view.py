"""The third parameter of an edit function, and what edits say they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lmcache_mp.stream as lmc_stream
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.edits.rope import Rope
from lmcache_mp.edits.view import StreamView, stream_rng
from lmcache_mp.errors import KVError, UsageError
from tests.helpers import CHUNK, CountingEngine, MemoryKV, TokenKV


def look(kv: Any, tokens: list[int], stream: StreamView) -> tuple[Any, list[int], dict[str, Any]]:
    info = {
        "id": stream.stream_id,
        "custom": stream.custom_id,
        "in_round": stream.round,
        "chunk": stream.chunk_size,
        "draw": float(stream.rng.random()),
    }
    return kv, tokens, info


def frames(folder: str, workers: int, seed: int = 0, names: bool = True) -> Any:
    with LMCacheBatchedStream(workers, seed=seed) as batch:
        for i in range(4):
            stream = lmc_stream.create_request(TokenKV(folder), CountingEngine(), [i] * 9)
            batch.add(stream, custom_id=f"s{i}" if names else None)
        batch.prefill({})
        return [batch.modify(look).to_frame() for _ in range(2)]


def test_what_a_stream_looks_like_in_a_batch(tmp_path: Any) -> None:
    for round, frame in enumerate(frames(str(tmp_path), 2), start=1):
        assert list(frame["id"]) == list(frame.index)
        assert list(frame["custom"]) == list(frame["custom_id"]) == ["s0", "s1", "s2", "s3"]
        assert set(frame["in_round"]) == {round} == set(frame["round"])
        assert set(frame["chunk"]) == {CHUNK}


def test_random_numbers_depend_on_seed_stream_and_round_only(tmp_path: Any) -> None:
    def draws(workers: int, **options: Any) -> list[list[float]]:
        return [list(frame["draw"]) for frame in frames(str(tmp_path), workers, **options)]

    first = draws(1)
    assert first == draws(2)
    assert len({draw for row in first for draw in row}) == 8
    assert not {*first[0]} & {*draws(1, seed=1)[0]}
    assert draws(1, names=False) == draws(2, names=False)
    assert first[0][2] == stream_rng(0, "id:s2", 1).random()


def alone(fn: Any, context: Any) -> Any:
    stream = lmc_stream.create_request(context, CountingEngine(), list(range(1, 10)))
    tokens = list(range(1, 9))
    context.store(np.ones((2, 3, 8, 5), np.float32), tokens)
    stream.modify_kv(fn)
    return stream


def test_a_stream_alone_has_a_view_too() -> None:
    seen: list[StreamView] = []

    def fn(kv: Any, tokens: list[int], stream: StreamView) -> tuple[Any, list[int]]:
        seen.append(stream)
        return kv, tokens

    stream = alone(fn, MemoryKV())
    stream.modify_kv(fn)
    assert [view.round for view in seen] == [0, 1]
    assert seen[0].stream_id == stream.stream_id() and seen[0].custom_id is None
    with pytest.raises(AttributeError):
        seen[0].round = 3  # type: ignore[misc]
    with pytest.raises(KVError, match=r"rope=Rope.from_config.*rerotate=False"):
        seen[0].rope  # noqa: B018  # reading it is the test
    with pytest.raises(KVError, match="capture_queries"):
        seen[0].queries  # noqa: B018
    with pytest.raises(KVError, match="edited since"):
        seen[1].queries  # noqa: B018


def test_a_parameter_of_another_name_is_the_functions_own() -> None:
    def fn(kv: Any, tokens: list[int], share: float = 0.5) -> tuple[Any, list[int]]:
        assert share == 0.5
        return kv, tokens

    alone(fn, MemoryKV())


class Needy:
    """An edit that says what it needs."""

    def __init__(self, *needs: str) -> None:
        self.needs = needs

    def __call__(self, kv: Any, tokens: list[int], stream: StreamView) -> tuple[Any, list[int]]:
        for need in self.needs:
            assert getattr(stream, need) is not None
        return kv, tokens


class Knowing(MemoryKV):
    rope = Rope(4, 1e4)
    capture_queries = 2

    def queries(self, tokens: Any, cache_salt: str = "") -> Any:
        return np.full((3, 2, 8), len(tokens), np.float32)


class QueryKV(MemoryKV):
    kind = "query"


@pytest.mark.parametrize(
    ("need", "says"),
    [
        ("queries", "capture_queries=64"),
        ("rope", r"rope=Rope.from_config.*rerotate=False"),
        ("head_dim", "head_dim="),
    ],
)
def test_what_no_context_has_is_said_before_anything_runs(
    need: str, says: str, tmp_path: Any
) -> None:
    context = TokenKV(str(tmp_path))
    with pytest.raises(UsageError, match=says):
        alone(Needy(need), MemoryKV())
    with LMCacheBatchedStream(1) as batch:
        batch.add(lmc_stream.create_request(context, CountingEngine(), [1] * 9))
        with pytest.raises(UsageError, match=says):
            batch.modify(Needy(need))
        assert batch.worker_pids == []


def test_a_context_that_knows_gives_rope_and_queries() -> None:
    seen: list[Any] = []

    def fn(kv: Any, tokens: list[int], stream: StreamView) -> tuple[Any, list[int]]:
        seen.extend([stream.rope, stream.queries, stream.query_positions.tolist()])
        return kv, tokens

    alone(fn, Knowing())
    assert seen[0] == Knowing.rope
    assert seen[1].shape == (3, 2, 8) and (seen[1] == 9).all(), "of the whole prompt"
    assert seen[2] == [7, 8]
    alone(Needy("rope", "queries"), Knowing())


def test_a_query_context_is_asked_for_what_the_kv_covers() -> None:
    tokens, queries = list(range(1, 9)), QueryKV()
    queries.store(np.arange(24.0, dtype=np.float32).reshape(1, 3, 8, 1), tokens)
    kv = MemoryKV()
    kv.store(np.ones((2, 3, 8, 5), np.float32), tokens)
    stream = lmc_stream.create_request([kv, queries], CountingEngine(), [*tokens, 9])
    seen: list[Any] = []

    def fn(kv: Any, tokens: list[int], stream: StreamView) -> tuple[Any, list[int]]:
        seen.extend([stream.queries, stream.query_positions.tolist()])
        return kv, tokens

    stream.modify_kv(fn)
    np.testing.assert_array_equal(seen[0], np.arange(24.0).reshape(3, 8, 1))
    assert seen[1] == list(range(8))
