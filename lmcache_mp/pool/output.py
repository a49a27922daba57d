"""What Python code prints and logs in a worker, on its way to the parent: a line at a time.

What C code and subprocesses write goes to standard error as it is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from lmcache_mp.pool.messages import Logged, Printed

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_current = threading.local()


class labelled:
    """What this thread prints and logs inside is that stream's; in the end its line is sent."""

    __slots__ = ("_stream",)

    def __init__(self, stream: int | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _current.stream = self._stream

    def __exit__(self, *_: object) -> None:
        if hasattr(_current, "lines"):  # it has written something
            _flush_thread()
        _current.stream = None


def current_stream() -> int | None:
    """The stream whose pass this thread runs."""
    stream: int | None = getattr(_current, "stream", None)
    return stream


class _UnfinishedLine:
    """What was written since the last newline. A carriage return begins the line anew."""

    __slots__ = ("_parts", "_rewound")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._rewound = False

    def add(self, text: str) -> None:
        """Text without a newline; what a later text covers on a terminal is dropped at once."""
        shown = text.rstrip("\r")
        if shown:
            if self._rewound or "\r" in shown:
                self._parts.clear()
            self._parts.append(shown.rpartition("\r")[2])
        self._rewound = (self._rewound and not shown) or len(shown) < len(text)

    def take(self) -> str:
        """The line; from here on it is empty."""
        line = "".join(self._parts)
        self._parts.clear()
        self._rewound = False
        return line


class _Lines(io.TextIOBase):
    """A text stream whose whole lines are sent; each thread has its own unfinished line."""

    def __init__(self, name: str, send: Callable[[Printed], None]) -> None:
        self._name = name
        self._send = send

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a constant here, an attribute there
        """Text of any kind goes through."""
        return "utf-8"

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Send the lines that ``text`` completes."""
        first, *others = str(text).split("\n")
        line = self._unfinished()
        line.add(first)
        for other in others:
            self._send(Printed(self._name, current_stream(), line.take()))
            line.add(other)
        return len(text)

    @property
    def buffer(self) -> _Bytes:
        """For what writes bytes."""
        return _Bytes(self)

    def fileno(self) -> int:
        """Standard error's, for what writes past Python."""
        return 2

    def flush_line(self) -> None:
        """Send an unfinished line as it is."""
        line = self._unfinished().take()
        if line:
            self._send(Printed(self._name, current_stream(), line))

    def _unfinished(self) -> _UnfinishedLine:
        """This thread's."""
        lines: dict[str, _UnfinishedLine] = _current.__dict__.setdefault("lines", {})
        return lines.setdefault(self._name, _UnfinishedLine())


class _Bytes(io.RawIOBase):
    """UTF-8 for a text stream; what is none is escaped."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Buffer) -> int:
        """Send the lines that ``data`` completes."""
        content = bytes(data)
        self._lines.write(content.decode("utf-8", "backslashreplace"))
        return len(content)


def _flush_thread() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Lines):
            stream.flush_line()


class _LogSender(logging.Handler):
    """Sends records to the parent, whose own handlers decide what becomes of them."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send the fields that pickle without the user's classes."""
        try:
            fields = {
                "name": record.name,
                "levelno": record.levelno,
                "levelname": record.levelname,
                "msg": record.getMessage(),
                "pathname": record.pathname,
                "filename": record.filename,
                "module": record.module,
                "lineno": record.lineno,
                "funcName": record.funcName,
                "created": record.created,
                "process": record.process,
                "processName": record.processName,
                "threadName": record.threadName,
                "exc_text": logging.Formatter().formatException(record.exc_info)
                if record.exc_info
                else None,
            }
            self._send(Logged(current_stream(), pickle.dumps(fields)))
        except Exception:
            self.handleError(record)


def redirect(send: Callable[[Printed | Logged], None], log_level: int) -> None:
    """From now on lines and log records of this process go through ``send``."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # nothing but the parent writes to the parent's standard output
    sys.stdout, sys.stderr = _Lines("stdout", send), _Lines("stderr", send)
    root = logging.getLogger()
    root.handlers[:] = [_LogSender(send)]
    root.setLevel(log_level)


def restore() -> None:
    """Write past the parent from now on: to this process' own standard error."""
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for good
    logging.getLogger().handlers[:] = [logging.StreamHandler()]


def show(output: Printed | Logged, labels: Sequence[str]) -> None:
    """In the parent: pass on what a worker printed or logged; ``labels`` are those of streams.

    Nothing that is wrong with the streams and handlers there comes out of here.
    """
    label = None if output.stream is None else labels[output.stream]
    if isinstance(output, Printed):
        _show_printed(output, label)
    else:
        _show_logged(output, label)


def _show_printed(printed: Printed, label: str | None) -> None:
    """Write a line to the stream of that name as it is now, or else to standard error."""
    target = sys.stdout if printed.name == "stdout" else sys.stderr
    text = f"[{label}] {printed.line}\n" if label else f"{printed.line}\n"
    try:
        _write(text, target)
    except (ValueError, OSError):
        pass  # closed by now: there is nobody to tell
    except Exception as error:  # a stream of the user's may raise anything
        with contextlib.suppress(Exception):
            kind = type(error).__name__
            _write(f"(a worker's line, as sys.{printed.name} raises {kind}) {text}", sys.__stderr__)


def _write(text: str, target: TextIO | None) -> None:
    if target is None:  # a program without a console
        return
    try:
        target.write(text)
    except UnicodeEncodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
    target.flush()


def _show_logged(logged: Logged, label: str | None) -> None:
    """Hand a record to the logger of its name."""
    record = logging.makeLogRecord(pickle.loads(logged.record))
    if label:
        record.msg = f"[{label}] {record.msg}"
    logger = logging.getLogger(record.name)
    try:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:  # a handler or filter of the user's: logging has a way to say so
        logging.Handler().handleError(record)
