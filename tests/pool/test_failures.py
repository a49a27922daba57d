"""Exceptions on their way between processes: themselves where possible, never a second failure."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import lmcache_mp
from lmcache_mp.errors import EngineError, RemoteError, WorkerDied
from lmcache_mp.kv.context import check_salt
from lmcache_mp.pool.failures import pack, unpack
from lmcache_mp.pool.messages import Failure


def raised(error: BaseException) -> BaseException:
    """The exception as it is caught, with a traceback of this file."""
    try:
        raise error
    except BaseException as caught:
        return caught


def sent(error: BaseException) -> tuple[Failure, BaseException]:
    failure = pickle.loads(pickle.dumps(pack(raised(error))))  # stdlib pickle, as messages are
    return failure, unpack(failure)


class TwoArguments(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


class HoldsALock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class ReducesToAnother(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class StrRaises(Exception):
    def __str__(self) -> str:
        raise SystemExit("from str")


class NotesRaise(Exception):
    @property
    def __notes__(self) -> Any:
        raise SystemExit("from notes")


class WithState(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.hint = ""


# --- exceptions that arrive as themselves ---------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        EngineError("x"),
        KeyboardInterrupt(),
        SystemExit(3),
        OSError(2, "No such file", "weights.gguf"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(5),
    ],
)
def test_an_exception_arrives_with_its_type_and_arguments(error: BaseException) -> None:
    failure, arrived = sent(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args and str(arrived) == str(error)
    assert failure.type_name == type(error).__name__ and failure.message == str(error)


def test_attributes_arrive_too() -> None:
    error = WithState("x")
    error.hint = "more room"
    arrived = sent(error)[1]
    assert isinstance(arrived, WithState) and arrived.hint == "more room"
    died = sent(WorkerDied("x", pid=5, exit_code=-9, phase="decode", stream_ids=("a",)))[1]
    assert isinstance(died, WorkerDied)
    assert (died.pid, died.exit_code, died.phase, died.stream_ids) == (5, -9, "decode", ("a",))


def test_the_cause_shows_the_workers_traceback() -> None:
    failure, arrived = sent(ValueError("x"))
    assert f'File "{__file__}"' in failure.traceback and "in raised" in failure.traceback
    assert failure.traceback.endswith("ValueError: x")
    assert failure.traceback in str(arrived.__cause__)


def test_the_exceptions_own_cause_is_in_the_traceback() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        failure = pack(error)
    assert "KeyError: 'inner'" in failure.traceback
    assert "direct cause" in failure.traceback


def test_a_class_defined_in_a_function_keeps_its_identity_here() -> None:
    class Local(Exception):
        pass

    assert type(sent(Local("x"))[1]) is Local


def test_a_deep_recursion() -> None:
    def recurse() -> None:
        recurse()

    try:
        recurse()
    except RecursionError as error:
        failure = pack(error)
    assert isinstance(unpack(failure), RecursionError)
    assert "repeated" in failure.traceback


def test_an_exception_that_was_never_raised() -> None:
    failure = pack(ValueError("x"))
    assert failure.traceback == "ValueError: x"
    assert isinstance(unpack(failure), ValueError)


# --- exceptions that can't be rebuilt -------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TwoArguments(503, "busy"), "503: busy"),
        (HoldsALock("x"), "x"),
        (ReduceRaises("x"), "x"),
        (ReducesToAnother("x"), "x"),
        (StrRaises("x"), None),
    ],
)
def test_a_remote_error_stands_for_what_can_not_be_rebuilt(
    error: Exception, message: str | None
) -> None:
    failure, arrived = sent(error)
    name = type(error).__name__
    assert failure.type_name == name
    assert f'File "{__file__}"' in failure.traceback or message is None
    if isinstance(error, StrRaises):  # it can be rebuilt, and only its text is lost
        assert type(arrived) is StrRaises
        assert failure.message == "(its message could not be made)"
        return
    assert isinstance(arrived, RemoteError)
    assert arrived.type_name == name
    assert arrived.remote_traceback == failure.traceback
    assert str(arrived) == f"{name}: {message}"
    assert failure.traceback in str(arrived.__cause__)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int

    def __reduce__(self) -> Any:  # the usual one sets attributes
        return Frozen, (self.code,)


def test_a_frozen_dataclass_is_an_exception_like_any_other() -> None:
    _, error = sent(Frozen(3))
    assert isinstance(error, Frozen) and error.code == 3
    assert "Frozen" in str(error.__cause__)


class Text(str):
    """A string whose class no other process need know."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")

    def __str__(self) -> str:
        return self


def test_names_and_messages_of_odd_string_classes() -> None:
    odd = type(Text("Odd"), (Exception,), {"__str__": lambda self: Text("its message")})
    failure, error = sent(odd())
    assert (failure.type_name, failure.message) == ("Odd", "its message")
    assert isinstance(error, RemoteError)


def test_even_a_traceback_that_can_not_be_formatted() -> None:
    failure, arrived = sent(NotesRaise("x"))
    assert failure.type_name == "NotesRaise"
    assert "NotesRaise" in failure.traceback
    assert isinstance(arrived, NotesRaise | RemoteError)


def test_a_class_that_only_the_worker_has() -> None:
    """The module is imported in a process of its own, and is not there in this one."""
    program = (
        "import sys, types, pickle\n"
        "from lmcache_mp.pool.failures import pack\n"
        "module = sys.modules['only_there'] = types.ModuleType('only_there')\n"
        "exec('class Theirs(Exception): pass', module.__dict__)\n"
        "sys.stdout.buffer.write(pickle.dumps(pack(module.Theirs('x'))))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    arrived = unpack(pickle.loads(output))
    assert isinstance(arrived, RemoteError)
    assert arrived.type_name == "Theirs" and str(arrived) == "Theirs: x"


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps("no exception")])
def test_bytes_that_hold_no_exception(data: bytes) -> None:
    arrived = unpack(Failure("Theirs", "x", "Traceback ...", data))
    assert isinstance(arrived, RemoteError) and arrived.type_name == "Theirs"


# --- whose frames are shown -----------------------------------------------------------------------

PACKAGE = os.path.dirname(os.path.abspath(lmcache_mp.__file__))


def call_from(file: str, fn: Callable[[], None]) -> None:
    """Call ``fn`` from code that is said to be in ``file``."""
    namespace: dict[str, Any] = {}
    exec(compile("def call(fn): fn()", file, "exec"), namespace)
    namespace["call"](fn)


def fail() -> None:
    raise ValueError("x")


def packed_from(file: str) -> Failure:
    try:
        call_from(file, fail)
    except ValueError as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != file:
            frames = frames.tb_next
        return pack(error.with_traceback(frames))
    raise AssertionError


def test_frames_of_this_package_are_not_shown_above_the_users() -> None:
    own = os.path.join(PACKAGE, "pool", "worker.py")
    failure = packed_from(own)
    assert own not in failure.traceback and "in fail" in failure.traceback


def test_a_neighbour_whose_name_begins_alike_is_a_user() -> None:
    theirs = f"{PACKAGE}_experiments/edits.py"
    failure = packed_from(theirs)
    assert theirs in failure.traceback and "in fail" in failure.traceback


def test_frames_of_this_package_are_shown_when_there_are_no_others() -> None:
    with pytest.raises(ValueError, match="not allowed") as caught:
        check_salt("a@b")
    assert caught.tb is not None
    failure = pack(caught.value.with_traceback(caught.tb.tb_next))
    assert "in check_salt" in failure.traceback
