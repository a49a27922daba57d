"""Streams that go through rounds at their own pace, and the run that comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp import rounds
from lmcache_mp.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_mp.errors import UsageError
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CountingEngine, Script, TokenKV

LIMIT = 60.0


@pytest.fixture(params=[1, 2], ids=["one_worker", "two_workers"])
def batch(request: pytest.FixtureRequest) -> Iterator[LMCacheBatchedStream]:
    with LMCacheBatchedStream(request.param, name="mine", on_error="collect") as made:
        yield made


def fill(batch: LMCacheBatchedStream, folder: Path, count: int, engine: Any = None) -> list[str]:
    """Streams of 9 tokens: two chunks and one token."""
    context = TokenKV(str(folder))
    return [
        batch.add(
            create_request(context, engine or CountingEngine(), [i + 1] * 9), custom_id=f"row-{i}"
        )
        for i in range(count)
    ]


def halve(kv: Any, tokens: list[int]) -> Any:
    return kv[:, :, ::2], tokens[::2], {"kept": len(tokens[::2])}


def course() -> list[rounds.Round]:
    return [
        rounds.prefill({"temperature": 0}),
        rounds.modify(halve),
        rounds.decode({"max_tokens": 3}),
    ]


def outputs(batch: LMCacheBatchedStream) -> list[list[int]]:
    return [stream.output_tokens() for stream in batch.streams.values()]


def test_rounds_give_what_phases_give(batch: LMCacheBatchedStream, tmp_path: Path) -> None:
    with LMCacheBatchedStream(1) as phases:
        fill(phases, tmp_path, 6)
        reports = [
            phases.prefill({"temperature": 0}),
            phases.modify(halve),
            phases.decode({"max_tokens": 3}),
        ]
        expected = outputs(phases)
    fill(batch, tmp_path, 6)
    run = batch.run(course())
    assert outputs(batch) == expected
    for ours, theirs in zip(run.metrics, reports, strict=True):
        for column in ("custom_id", "status", "phase", "round"):
            assert ours.to_frame()[column].tolist() == theirs.to_frame()[column].tolist()
    decode = run.metrics[2].to_frame()
    assert decode["input_tokens"].tolist() == reports[2].to_frame()["input_tokens"].tolist()
    assert run.metrics[1].to_frame()["kept"].tolist() == [4] * 6


def test_the_table_of_a_run(batch: LMCacheBatchedStream, tmp_path: Path) -> None:
    ids = fill(batch, tmp_path, 3)
    run = batch.run([*course(), rounds.decode({"max_tokens": 3})], max_concurrency=2)
    assert run.names == ["prefill", "modify", "decode1", "decode2"]
    rows = run.rows
    assert rows.index.tolist() == ids and rows.index.name == "stream_id"
    assert rows["custom_id"].tolist() == ["row-0", "row-1", "row-2"]
    assert rows["status"].tolist() == ["completed"] * 3
    assert rows["decode2.output_tokens"].tolist() == [3] * 3
    assert rows["modify.kept"].tolist() == [4] * 3
    assert rows["output_text"].tolist() == [s.output_text() for s in batch.streams.values()]
    assert run.config["rounds"][0] == "prefill({'temperature': 0})"
    assert run.config["rounds"][1].startswith("modify(halve")
    assert (run.config["max_concurrency"], run.config["name"]) == (2, "mine")
    assert len(run) == 4 and "4 rounds" in repr(run)


def test_reports_of_a_run(
    batch: LMCacheBatchedStream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(batch, tmp_path, 2)
    run = batch.run(course())
    run.emit()
    out = capsys.readouterr().out
    assert [out.count(f"({phase})") for phase in ("prefill", "decode")] == [1, 1]
    for metrics in run:
        duration = metrics.to_dict()["metrics"]["results"]["duration"]
        assert 0 < duration < LIMIT


def test_no_stream_waits_for_another(tmp_path: Path) -> None:
    """The first stream is through all of its rounds while the second is still in its first."""
    folder = str(tmp_path)

    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        mine = Path(folder, f"{params['max_tokens']}-of-{prompt[0]}")
        mine.touch()
        deadline = time.monotonic() + 60.0
        while prompt[0] == 2 and not Path(folder, "7-of-1").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other stream waits for this one")
            time.sleep(0.01)
        for i in range(params["max_tokens"]):
            yield TokenEvent(prompt[0] + i, "x")

    with LMCacheBatchedStream(1) as batch:
        fill(batch, tmp_path, 2, engine)
        run = batch.run([rounds.prefill({}), rounds.decode({"max_tokens": 7})])
        assert run.rows["status"].tolist() == ["completed"] * 2


def test_at_most_so_many_streams_are_under_way(tmp_path: Path) -> None:
    """With one, each goes through all of its rounds before the next begins."""
    log = tmp_path / "log"

    def note(kv: Any, tokens: list[int]) -> Any:
        with log.open("a") as file:
            file.write(f"m{tokens[0]} ")
        return kv, tokens

    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        with log.open("a") as file:
            file.write(f"g{prompt[0]} ")
        yield TokenEvent(prompt[0], "x")

    with LMCacheBatchedStream(2) as batch:
        fill(batch, tmp_path, 4, engine)
        batch.run([rounds.prefill({}), rounds.modify(note), rounds.decode({})], max_concurrency=1)
    steps = log.read_text().split()
    for at in range(0, 12, 3):
        stream = steps[at][1:]
        assert steps[at : at + 3] == [f"g{stream}", f"m{stream}", f"g{stream}"]


def test_a_stream_that_has_ended_goes_no_further(
    batch: LMCacheBatchedStream, tmp_path: Path
) -> None:
    context = TokenKV(str(tmp_path))
    ends = Script(TokenEvent(5, "a", finish_reason="stop"))
    ended = batch.add(create_request(context, ends, [1] * 9))
    other = batch.add(create_request(context, CountingEngine(), [2] * 9))
    run = batch.run(course())
    assert run.metrics[0].to_frame().index.tolist() == [ended, other]
    assert run.metrics[1].to_frame().index.tolist() == [other]
    assert run.rows.loc[ended, "status"] == "completed"
    assert run.rows.loc[ended, "finish_reason"] == "stop"
    assert run.rows["decode.output_tokens"].isna().tolist() == [True, False]


def test_a_stream_that_failed_goes_no_further_and_the_others_do(
    batch: LMCacheBatchedStream, tmp_path: Path
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        if tokens[0] == 2:
            raise LookupError("not this one")
        return kv, tokens

    ids = fill(batch, tmp_path, 3)
    run = batch.run([rounds.prefill({}), rounds.modify(edit), rounds.decode({"max_tokens": 2})])
    assert run.rows["status"].tolist() == ["completed", "failed", "completed"]
    assert run.rows.loc[ids[1], "error_type"] == "LookupError"
    assert run.rows.loc[ids[1], "output_text"] == batch.streams[ids[1]].output_text()
    assert run.failures.index.tolist() == [ids[1]]
    assert run.failures["phase"].tolist() == ["modify"]
    assert len(run.metrics[2].to_frame()) == 2


def test_the_error_of_a_run_has_all_of_it(tmp_path: Path) -> None:
    def fail(kv: Any, tokens: list[int]) -> Any:
        raise LookupError("no")

    with LMCacheBatchedStream(1) as batch:
        ids = fill(batch, tmp_path, 2)
        with pytest.raises(LMCacheBatchedStreamError, match="run: 2 of 2 streams failed") as caught:
            batch.run([rounds.prefill({}), rounds.modify(fail), rounds.decode({})])
    assert list(caught.value.failures) == ids
    assert caught.value.run is not None
    assert caught.value.run.metrics[0].to_frame()["status"].tolist() == ["completed"] * 2
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("phase", ["prefill", "modify", "decode"])
def test_a_death_costs_the_passes_that_had_begun(phase: str, tmp_path: Path) -> None:
    """The others go on where they were, in a new worker."""
    once = tmp_path / "once"

    def die(where: str, first: int) -> None:
        if where == phase and first == 3 and not once.exists():
            once.touch()
            os._exit(3)

    def edit(kv: Any, tokens: list[int]) -> Any:
        die("modify", tokens[0])
        return kv, tokens

    def engine(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        die("prefill" if params["max_tokens"] == 1 else "decode", prompt[0])
        for i in range(params["max_tokens"]):
            yield TokenEvent(prompt[0] + i, f"{i} ")

    class Direct:
        """Runs one pass after the other."""

        blocking = False

        def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Any:
            return engine(prompt, params, salt)

    with LMCacheBatchedStream(1, on_error="collect") as batch:
        ids = fill(batch, tmp_path, 5, Direct())
        run = batch.run([rounds.prefill({}), rounds.modify(edit), rounds.decode({"max_tokens": 4})])
        assert once.exists()
        rows = run.rows
        assert rows["status"].tolist() == ["failed" if i == 2 else "completed" for i in range(5)]
        assert rows.loc[ids[2], "error_type"] == "WorkerDied"
        assert [len(stream.output_tokens()) for stream in batch.streams.values()] == [
            {"prefill": 0}.get(phase, 1) if i == 2 else 5 for i in range(5)
        ]


def test_a_death_is_repeated_where_retries_are_asked_for(tmp_path: Path) -> None:
    once = tmp_path / "once"

    def edit(kv: Any, tokens: list[int]) -> Any:
        if tokens[0] == 2 and not once.exists():
            once.touch()
            os._exit(3)
        return kv[:, :, ::2], tokens[::2]

    with LMCacheBatchedStream(1, retries=1) as batch:
        fill(batch, tmp_path, 4)
        run = batch.run([rounds.prefill({}), rounds.modify(edit), rounds.decode({"max_tokens": 4})])
        assert run.rows["status"].tolist() == ["completed"] * 4
        assert run.rows["modify.attempt"].tolist() == [1, 2, 1, 1]
        assert run.rows["decode.attempt"].tolist() == [1] * 4


def test_an_edit_over_time_fails_alone(tmp_path: Path) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        while tokens[0] == 2:
            pass
        return kv, tokens

    with LMCacheBatchedStream(1, on_error="collect", timeout=1.0) as batch:
        ids = fill(batch, tmp_path, 4)
        run = batch.run([rounds.prefill({}), rounds.modify(edit), rounds.decode({"max_tokens": 2})])
        assert run.rows["status"].tolist() == ["completed", "failed", "completed", "completed"]
        assert run.rows.loc[ids[1], "error_type"] == "StreamTimeout"


def test_a_run_after_phases_and_phases_after_a_run(
    batch: LMCacheBatchedStream, tmp_path: Path
) -> None:
    fill(batch, tmp_path, 3)
    batch.prefill({})
    run = batch.run(course()[1:])
    assert [it.to_frame()["round"].iloc[0] for it in run.metrics] == [1, 2]
    assert batch.decode({"max_tokens": 2}).to_frame()["round"].tolist() == [3] * 3


def test_no_streams(batch: LMCacheBatchedStream, tmp_path: Path) -> None:
    fill(batch, tmp_path, 2)
    run = batch.run(course(), stream_ids=[])
    assert len(run.rows) == 0
    assert batch.worker_pids == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one round"),
        ("prefill", "rounds must be a list"),
        (7, "rounds must be a list"),
        ([{"max_tokens": 1}], "is no round"),
    ],
)
def test_what_are_no_rounds(wrong: Any, message: str, batch: LMCacheBatchedStream) -> None:
    with pytest.raises(UsageError, match=message):
        batch.run(wrong)
    assert batch.worker_pids == []


def test_rounds_are_checked_when_they_are_made() -> None:
    with pytest.raises(UsageError, match="must be a function"):
        rounds.modify("drop")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(UsageError, match="timeout"):
        rounds.modify(halve, timeout=-1)
    with pytest.raises(UsageError, match="sampling_params"):
        rounds.decode(None)  # type: ignore[arg-type]  # likewise
