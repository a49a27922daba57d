"""Ctrl-C at a place of our choosing, and not between two lines that belong together."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType


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
def held_interrupts(wake: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold SIGINT back inside; the function that is given lets one that has come through.

    ``wake`` is called when one comes. One that was not let through is so at the end. A second one
    does not wait, so nothing can be stuck for good. Python handles signals in the main thread:
    in others, and where SIGINT has no Python handler, there is nothing to hold.
    """
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main else None
    if not callable(handler):
        yield lambda: None
        return
    usual: Callable[[int, FrameType | None], object] = handler
    waiting: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if waiting:
            usual(signum, frame)
        else:
            waiting.append((signum, frame))
            wake()

    def let_through() -> None:
        if waiting:
            usual(*waiting.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, usual)
        let_through()
