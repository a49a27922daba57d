"""Signals at a place of our choosing, and not between two lines that belong together."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]


class Waker:
    """Wakes a selector that it is registered with, from a signal handler or another thread."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        """For the selector."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Wake the selector. Never waits."""
        with contextlib.suppress(OSError):  # full, so it is being woken; or closed
            self._sender.send(b"x")

    def drain(self) -> None:
        """Have the selector sleep again."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(1024)

    def close(self) -> None:
        """Close both ends."""
        self._sender.close()
        self._receiver.close()


@contextlib.contextmanager
def held_signals(wake: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold signals back inside; the function that is given lets those that have come through.

    ``wake`` is called when one comes. What was not let through is so at the end. The second of a
    kind does not wait, so nothing can be stuck for good. Python handles signals in the main thread:
    in others, and for signals that have no Python handler, there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    usual = _handlers()
    waiting: dict[int, FrameType | None] = {}
    holding = True

    def hold(number: int, frame: FrameType | None) -> None:
        if holding and number not in waiting:
            waiting[number] = frame
            wake()
        else:
            usual[number](number, frame)

    def let_through() -> None:
        if waiting:
            number, frame = waiting.popitem()
            try:
                usual[number](number, frame)
            finally:
                let_through()

    try:
        for number in usual:
            signal.signal(number, hold)
        yield let_through
    finally:
        holding = False  # a handler that raises in what follows leaves none behind that holds
        try:
            for number, handler in usual.items():
                if signal.getsignal(number) is hold:  # and not what a handler has set meanwhile
                    signal.signal(number, handler)
        finally:
            let_through()


def _handlers() -> dict[int, _Handler]:
    """Python's handlers by signal number."""
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
