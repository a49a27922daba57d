"""Exceptions on their way between processes.

An exception is packed together with a proof that it can be rebuilt: it is unpickled once in the
worker. What can't be (required arguments, locks, a failing ``__reduce__``) arrives as a
RemoteError.
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import cloudpickle

import lmcache_mp
from lmcache_mp.errors import RemoteError
from lmcache_mp.pool.messages import Failure

_OWN_CODE = os.path.join(os.path.dirname(os.path.abspath(lmcache_mp.__file__)), "")


class RemoteTraceback(Exception):
    """Shows a worker's traceback as the cause of the exception that it raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


def pack(error: BaseException) -> Failure:
    """``error`` as a message. Never raises."""
    name, message = str.__str__(type(error).__name__), str.__str__(_message(error))
    return Failure(name, message, str.__str__(_traceback(error)), _pickled(error))


def unpack(failure: Failure) -> BaseException:
    """The exception that a worker packed, or a RemoteError in its place; its cause shows where."""
    error: BaseException | None = None
    if failure.pickled is not None:
        try:
            loaded = cloudpickle.loads(failure.pickled)
        except BaseException:  # a user's class may raise anything on being rebuilt
            loaded = None
        if isinstance(loaded, BaseException):
            error = loaded
    if error is None:
        error = RemoteError(
            f"{failure.type_name}: {failure.message}",
            type_name=failure.type_name,
            remote_traceback=failure.traceback,
        )
    # Past the class' own __setattr__: an exception may be a frozen dataclass.
    BaseException.__setattr__(error, "__cause__", RemoteTraceback(failure.traceback))
    return error


def _message(error: BaseException) -> str:
    """Its text: plain ones by the caller, as ``str()`` gives back a subclass that it is given."""
    try:
        return str(error)
    except BaseException:  # a user's __str__ may raise anything
        return "(its message could not be made)"


def _traceback(error: BaseException) -> str:
    try:
        frames = _users_frames(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except BaseException:  # formatting calls the user's __str__ and __cause__
        return type(error).__name__


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Without this package's own frames at the top, unless there are no others."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        rest = rest.tb_next
    return rest or frames


def _pickled(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error, protocol=5)
        return data if type(cloudpickle.loads(data)) is type(error) else None
    except BaseException:  # a user's __reduce__ or __init__ may raise anything
        return None
