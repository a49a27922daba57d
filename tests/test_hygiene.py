"""What workers must not do: import pandas, use dill, load a function twice, get KV sent."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmcache_mp.stream as lmc_stream
from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.pool import messages
from tests.helpers import CountingEngine, TokenKV

STREAMS = 6


def batch_of(folder: Path, workers: int = 2) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream(workers)
    for i in range(STREAMS):
        batch.add(lmc_stream.create_request(TokenKV(str(folder)), CountingEngine(), [i] * 9))
    batch.prefill({})
    return batch


def test_a_worker_imports_no_pandas_and_uses_no_dill_for_messages(tmp_path: Path) -> None:
    """Dill's pickler and unpickler are counted from the first edit of a worker to its second."""

    def look(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
        import sys

        import dill

        calls = getattr(dill, "calls_seen", None)
        if calls is None:
            calls = dill.calls_seen = []
            for name in ("dump", "dumps", "load", "loads"):
                original = getattr(dill, name)

                def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
                    calls.append(_name)
                    return _original(*args)

                setattr(dill, name, counted)
            for cls, name in ((dill.Pickler, "dump"), (dill.Unpickler, "load")):
                original = getattr(cls, name)

                def counted_method(
                    self: Any, *args: Any, _name: str = name, _original: Any = original
                ) -> Any:
                    calls.append(_name)
                    return _original(self, *args)

                setattr(cls, name, counted_method)
        own = sorted(m for m in sys.modules if m.startswith("lmcache_mp."))
        rooms = {name.split(".")[1] for name in own}
        return (
            kv,
            tokens,
            {
                "pandas": "pandas" in sys.modules,
                "above": ",".join(sorted(rooms & {"metrics", "batch", "phases", "cli"})),
                "dill_calls": len(calls),
            },
        )

    with batch_of(tmp_path) as batch:
        first = batch.modify(look).to_frame()
        batch.decode({"max_tokens": 2})
        second = batch.modify(look).to_frame()
    for frame in (first, second):
        assert not frame["pandas"].any()
        assert set(frame["above"].fillna("")) == {""}
        assert set(frame["dill_calls"]) == {0}


class CountsPickles:
    """An edit that notes in files when it is pickled and loaded."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        with (Path(self.folder) / "pickled").open("a") as file:
            file.write("x")
        return _load, (self.folder,)

    def __call__(self, kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        return kv, tokens


def _load(folder: str) -> CountsPickles:
    with (Path(folder) / "loaded").open("a") as file:
        file.write("x")
    return CountsPickles(folder)


def test_a_function_is_pickled_once_a_phase_and_loaded_once_a_worker(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with batch_of(tmp_path) as batch:
        for phase in (1, 2):
            frame = batch.modify(CountsPickles(str(notes))).to_frame()
            assert frame["worker_pid"].nunique() == 2
            assert len((notes / "pickled").read_text()) == phase
            assert len((notes / "loaded").read_text()) == 2 * phase


def test_a_functions_captured_state_goes_on_within_a_phase(tmp_path: Path) -> None:
    counter = [0]

    def count(kv: Any, tokens: list[int]) -> tuple[Any, list[int], dict[str, Any]]:
        counter[0] += 1
        return kv, tokens, {"count": counter[0]}

    with batch_of(tmp_path, workers=1) as batch:
        frame = batch.modify(count).to_frame()
    assert sorted(frame["count"]) == list(range(1, STREAMS + 1))
    assert counter == [0]


def test_no_kv_is_pickled(tmp_path: Path) -> None:
    """An array that refuses to be pickled goes through an edit as KV."""

    class Private(np.ndarray):
        def __reduce__(self) -> Any:
            raise pickle.PicklingError("KV must not leave its process")

        __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731 - one line says it

    with pytest.raises(pickle.PicklingError):
        pickle.dumps(np.zeros(2).view(Private))

    def edit(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        return kv.view(Private), tokens

    with batch_of(tmp_path) as batch:
        assert batch.modify(edit).to_frame()["status"].eq("completed").all()


def test_messages_are_plain_stdlib_pickles() -> None:
    code = (
        "import sys, pickle; sys.modules['dill'] = None\n"
        "from lmcache_mp.pool import messages\n"
        "run = messages.Run(1, messages.Modify(3, 1.0, 0.1), (1, 2), 1)\n"
        "assert messages.load_command(messages.dump(run)) == run\n"
        "assert pickle.loads(messages.dump(run)) == run\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert messages.load_command(messages.dump(messages.Cancel(4))) == messages.Cancel(4)
