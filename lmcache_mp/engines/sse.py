"""Server-sent events: bytes in, the data of whole events out.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation. Lines
end with LF, CRLF or CR and nothing else (U+2028 in a text ends none), so they are split as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Cuts a body into events, wherever the network has cut it; keeps what is not yet whole.

    Only the field ``data`` is used: engines send no others. A comment (``: ping``) is dropped.
    """

    __slots__ = ("_data", "_rest", "_skip_newline", "_started")

    def __init__(self) -> None:
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []  # data lines of an event that has not ended
        self._skip_newline = False  # the last line ended with a CR, whose LF may still come
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that ``chunk`` completes, in order."""
        events = []
        for line in self._lines(chunk):
            if line:
                if line.startswith(b"data:"):
                    self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                elif line == b"data":
                    self._data.append(b"")
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        if not chunk:
            return
        if self._skip_newline and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._skip_newline = False
        buffer = self._rest + chunk
        if not self._started:
            if _BOM.startswith(buffer[:3]) and len(buffer) < len(_BOM):
                self._rest = buffer
                return
            self._started = True
            buffer = buffer.removeprefix(_BOM)
        if b"\r" in buffer:
            self._skip_newline = buffer.endswith(b"\r")
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = buffer.split(b"\n")
        yield from lines
