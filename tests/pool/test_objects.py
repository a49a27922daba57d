"""Users' objects on their way to workers: who is to blame, and what is kept."""

from __future__ import annotations

import functools
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_mp.errors import UsageError
from lmcache_mp.pool.objects import LoadedObjects, UserObjects, dump_object
from lmcache_mp.pool.payloads import Payload
from tests.helpers import CountingEngine

GLOBAL_LOCK = threading.Lock()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("opened here, and not to be sent")


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __call__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Slotted:
    lock: Any

    def __call__(self) -> None:
        pass


def refusal(thing: object) -> str:
    with pytest.raises(UsageError) as caught:
        dump_object(thing, "edit function")
    assert caught.value.__cause__ is not None
    return str(caught.value)


# --- who is to blame ------------------------------------------------------------------------------


def test_a_captured_lock_is_named_and_max_concurrency_is_advised() -> None:
    lock = threading.Lock()

    def edit(kv: Any, tokens: Any) -> Any:
        with lock:
            return kv, tokens

    message = refusal(edit)
    assert "edit function" in message and "variable lock (a lock)" in message
    assert "max_concurrency" in message
    assert f"{__file__}:{edit.__code__.co_firstlineno}" in message


def test_what_is_no_lock_is_advised_to_be_opened_in_the_worker() -> None:
    handle = Unpicklable()
    message = refusal(lambda: handle)
    assert "variable handle (a Unpicklable)" in message
    assert "max_concurrency" not in message and "in the worker" in message


def test_the_path_to_a_part_of_an_object() -> None:
    config = Holder(name="fine", inner=Holder(lock=threading.RLock()))
    message = refusal(lambda: config)
    assert "variable config.inner.lock (a RLock)" in message
    assert "max_concurrency" in message


def test_the_path_through_containers() -> None:
    settings = {"fine": 1, "parts": [1, Unpicklable()]}
    assert "variable settings.parts.[1] (a Unpicklable)" in refusal(lambda: settings)


def test_a_global_variable() -> None:
    def edit(kv: Any, tokens: Any) -> Any:
        with GLOBAL_LOCK:
            return kv, tokens

    message = refusal(edit)
    assert "variable GLOBAL_LOCK (a lock)" in message and "max_concurrency" in message


def test_a_default_argument() -> None:
    def edit(kv: Any, tokens: Any, handle: Any = Unpicklable()) -> Any:  # noqa: B008  # the case
        return kv, tokens

    assert "variable handle (a Unpicklable)" in refusal(edit)


def test_an_argument_of_a_partial() -> None:
    def edit(kv: Any, tokens: Any, *, lock: Any) -> Any:
        return kv, tokens

    assert "variable lock (a lock)" in refusal(functools.partial(edit, lock=threading.Lock()))
    assert "variable args[0] (a lock)" in refusal(functools.partial(edit, threading.Lock()))


@pytest.mark.parametrize("kind", [Holder, Slotted])
def test_an_attribute_of_an_engine(kind: Any) -> None:
    message = refusal(kind(lock=threading.Lock()))
    assert f"{kind.__name__} can't be sent" in message
    assert "variable lock (a lock)" in message


def test_the_object_behind_a_method() -> None:
    assert "variable self.lock" in refusal(Holder(lock=threading.Lock()).__call__)


def test_the_object_itself() -> None:
    assert "opened here, and not to be sent" in refusal(Unpicklable())


def test_a_variable_that_has_no_value_yet_is_not_in_the_way() -> None:
    lock = threading.Lock()

    def edit() -> Any:
        return later, lock

    message = refusal(edit)
    later = 1
    assert "variable lock" in message
    assert later == 1


# --- what is loaded -------------------------------------------------------------------------------


def load(payload: Payload | bytes) -> Any:
    objects = LoadedObjects()
    objects.keep(0, payload if isinstance(payload, Payload) else Payload(payload))
    return objects.get(0)


def test_an_object_is_loaded_once() -> None:
    count = 0

    def edit() -> int:
        nonlocal count
        count += 1
        return count

    objects = LoadedObjects()
    objects.keep(3, Payload(dump_object(edit, "edit function")))
    assert [objects.get(3)() for _ in range(3)] == [1, 2, 3]
    assert count == 0
    assert objects.all_loaded() == [objects.get(3)]


def test_a_new_payload_starts_anew_and_a_forgotten_one_is_gone() -> None:
    objects = LoadedObjects()
    objects.keep(0, Payload(pickle.dumps([1])))
    assert objects.all_loaded() == []
    objects.get(0).append(2)
    assert objects.get(0) == [1, 2]
    objects.forget(0)
    assert objects.all_loaded() == []
    with pytest.raises(KeyError):
        objects.get(0)
    objects.keep(0, Payload(pickle.dumps([1])))
    assert objects.get(0) == [1]


class OnlyHere:
    loads = 0

    def __reduce__(self) -> Any:
        return _fail_to_load, ()


def _fail_to_load() -> Any:
    OnlyHere.loads += 1
    raise FileNotFoundError("the weights are not on this machine")


def test_whatever_loading_raises_comes_out_each_time() -> None:
    objects = LoadedObjects()
    objects.keep(0, Payload(dump_object(OnlyHere(), "engine")))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="weights"):
            objects.get(0)


def test_a_traceback_names_the_users_file_and_line() -> None:
    def edit() -> None:
        def inner() -> None:
            raise ValueError("here")

        inner()

    with pytest.raises(ValueError, match="here") as caught:
        load(dump_object(edit, "edit function"))()
    first = edit.__code__.co_firstlineno
    frames = traceback.extract_tb(caught.value.__traceback__)[-2:]
    assert [(frame.filename, frame.lineno) for frame in frames] == [
        (__file__, first + 4),
        (__file__, first + 2),
    ]
    assert frames[-1].line == 'raise ValueError("here")'


# --- large objects --------------------------------------------------------------------------------


def test_a_large_closure_goes_through_a_file_and_is_private_and_writable() -> None:
    table = np.arange(1 << 18, dtype=np.float64)

    def edit(index: int, value: float) -> tuple[float, float]:
        before = float(table[index])
        table[index] = value
        return before, float(table[index])

    objects = UserObjects()
    payload = objects.payload(objects.add(edit, "edit function"))
    assert payload.path and len(pickle.dumps(payload)) < 1000
    first, second = load(payload), load(payload)
    assert first(7, -1.0) == (7.0, -1.0)
    assert second(7, -2.0) == (7.0, -2.0)
    assert table[7] == 7.0


def test_a_large_pickle_without_arrays_goes_through_a_file_too() -> None:
    text = "x" * (2 << 20)
    objects = UserObjects()
    payload = objects.payload(objects.add(lambda: text, "edit function"))
    assert payload.path
    assert load(payload)() == text


def test_a_small_array_stays_in_the_message_and_is_writable() -> None:
    small = np.zeros(3)
    objects = UserObjects()
    payload = objects.payload(objects.add(lambda: small, "edit function"))
    assert not payload.path
    load(payload)()[0] = 1.0


def test_an_array_that_may_not_be_written_stays_so() -> None:
    table = np.zeros(1 << 18)
    table.flags.writeable = False
    objects = UserObjects()
    payload = objects.payload(objects.add(lambda: table, "edit function"))
    assert payload.path and not load(payload)().flags.writeable


def test_files_go_with_their_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    big = np.zeros(1 << 18)
    objects = UserObjects()
    number = objects.add(lambda: big, "edit function")
    again = objects.add_permanent(big, "context"), objects.add_permanent(big.copy(), "context")
    assert again[0] == again[1]
    files = [Path(objects.payload(n).path) for n in (number, again[0])]
    edit = load(objects.payload(number))
    assert all(file.exists() for file in files)
    assert len(list(files[0].parent.glob("object-*"))) == 2
    objects.forget(number)
    assert not files[0].exists() and edit().sum() == 0, "who has loaded it keeps it"
    objects.close()
    objects.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    big = np.ones(1 << 18)
    objects = UserObjects()
    payload = objects.payload(objects.add(lambda: big, "edit function"))
    assert not payload.path
    assert load(payload)().sum() == 1 << 18


# --- numbers --------------------------------------------------------------------------------------


def test_equal_recipes_share_a_number() -> None:
    objects = UserObjects()
    first = objects.add_permanent(CountingEngine(), "engine")
    assert objects.add_permanent(CountingEngine(), "engine") == first
    other = objects.add_permanent(CountingEngine(blocking=False), "engine")
    assert other != first
    assert objects.permanent == (first, other)
    assert load(objects.payload(other)) == CountingEngine(blocking=False)


def test_an_object_that_was_added_is_not_pickled_again() -> None:
    class Counted:
        pickles = 0

        def __getstate__(self) -> dict[str, Any]:
            Counted.pickles += 1
            return {}

    objects, thing = UserObjects(), Counted()
    numbers = {objects.add_permanent(thing, "engine") for _ in range(5)}
    assert len(numbers) == 1 and Counted.pickles == 1


def test_an_object_of_a_phase_has_a_number_of_its_own_and_is_forgotten() -> None:
    objects = UserObjects()
    permanent = objects.add_permanent(len, "engine")
    first, second = objects.add(len, "edit function"), objects.add(len, "edit function")
    assert len({permanent, first, second}) == 3
    objects.forget(first)
    with pytest.raises(KeyError):
        objects.payload(first)
    assert load(objects.payload(second)) is len
    assert objects.permanent == (permanent,)
    assert objects.add(len, "edit function") not in {permanent, first, second}


def test_a_refused_object_gets_no_number() -> None:
    objects = UserObjects()
    with pytest.raises(UsageError, match="the engine a Unpicklable"):
        objects.add_permanent(Unpicklable(), "engine")
    assert objects.permanent == ()


def test_a_function_of_a_module_goes_by_name() -> None:
    sized: Callable[..., Any] = sys.getsizeof
    assert len(dump_object(sized, "edit function")) < 60
